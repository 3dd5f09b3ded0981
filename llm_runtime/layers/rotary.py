"""Rotary position embedding: tables made once, in fp32 on the CPU, so that every device has the same bits.

Halves are rotated, not neighbours: dimension i goes with dimension i + D/2 (the Hugging Face layout).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from engine_control.errors import InvalidRequestError
from rl_kernels.paged_qkv import Rotation


class RotaryEmbedding(torch.nn.Module):
    """cos and sin of every position below `context_length`: `cos_sin` `[context_length, D]`, cosines in front."""

    cos_sin: torch.Tensor

    def __init__(self, head_dim: int, theta: float, scaling: Mapping[str, Any] | None, *, context_length: int) -> None:
        """scaling: of `config.json`; None is none.

        Raises:
            InvalidRequestError: its kind is not known here, or a number of it is missing.
        """
        super().__init__()
        device = torch.get_default_device()
        with torch.device("cpu"):
            frequencies, factor = inverse_frequencies(head_dim, theta, scaling)
            angles = torch.outer(torch.arange(context_length).float(), frequencies)
            cos, sin = angles.cos() * factor, angles.sin() * factor
        self.register_buffer("cos_sin", torch.cat([cos, sin], dim=-1).to(device), persistent=False)

    def forward(self, positions: torch.Tensor) -> Rotation:
        """positions `[N]` -> how they turn queries and keys, the same for all layers."""
        return Rotation(self.cos_sin, positions)


def inverse_frequencies(head_dim: int, theta: float, scaling: Mapping[str, Any] | None) -> tuple[torch.Tensor, float]:
    """Radians a position of each pair of dimensions, `[D/2]` fp32, and the factor on cos and sin."""
    powers = theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    kind = rope_type(scaling)
    if scaling is None or kind == "default":
        return 1.0 / powers, 1.0
    if kind not in _SCALINGS:
        raise InvalidRequestError(
            f"rope scaling {kind!r} is not supported",
            code="unsupported_model",
            field="rope_scaling",
            value=kind,
            hint=f"Supported: default, {', '.join(sorted(_SCALINGS))}.",
        )
    try:
        return _SCALINGS[kind](powers, theta, scaling)
    except KeyError as error:
        raise InvalidRequestError(
            f"rope scaling {kind!r} needs {error.args[0]!r}, which config.json lacks",
            code="bad_model_config",
            field="rope_scaling",
            value=error.args[0],
        ) from error


def rope_type(scaling: Mapping[str, Any] | None) -> str:
    """Its kind; older files call it `type`."""
    given = scaling or {}
    return str(given.get("rope_type") or given.get("type") or "default")


def _linear(powers: torch.Tensor, theta: float, scaling: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    """All positions closer together by `factor`."""
    return (1.0 / powers) / scaling["factor"], 1.0


def _llama3(powers: torch.Tensor, theta: float, scaling: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    """Llama 3.1's: waves longer than the original context are slowed by `factor`, short ones kept, between them a
    mixture that is linear in waves per context."""
    frequencies = 1.0 / powers
    context = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    lengths = 2 * math.pi / frequencies
    kept = (context / lengths - low) / (high - low)
    mixed = (1 - kept) * frequencies / scaling["factor"] + kept * frequencies
    slowed = torch.where(lengths > context / low, frequencies / scaling["factor"], mixed)
    return torch.where(lengths < context / high, frequencies, slowed), 1.0


def _yarn(powers: torch.Tensor, theta: float, scaling: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    """YaRN (arXiv 2309.00071, equations 13 to 23): a ramp over dimensions between kept and slowed frequencies, and a
    factor on cos and sin in place of a temperature of attention."""
    factor, context = scaling["factor"], scaling["original_max_position_embeddings"]
    pairs = len(powers)

    def dimension(rotations: float) -> float:
        """The pair that turns so often within the original context."""
        return pairs * math.log(context / (rotations * 2 * math.pi)) / math.log(theta)

    low, high = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    ramp = ((torch.arange(pairs).float() - low) / ((high - low) or 0.001)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept, _yarn_attention_factor(factor, scaling)


def _yarn_attention_factor(factor: float, scaling: Mapping[str, Any]) -> float:
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)

    def grown(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    mscale, all_dims = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return grown(mscale) / grown(all_dims) if mscale and all_dims else grown(1.0)


_SCALINGS: dict[str, Callable[[torch.Tensor, float, Mapping[str, Any]], tuple[torch.Tensor, float]]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
