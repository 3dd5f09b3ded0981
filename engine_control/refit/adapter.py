"""What a LoRA adapter is beside its tensors: peft's configuration, the folder that peft saves, and who keeps it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from engine_control.errors import InvalidRequestError, RefitRefusedError
from engine_control.refit.lora import LoraPair

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"  # of a folder that peft's save_pretrained writes
MAX_CONFIG_BYTES = 1 << 20
PATTERN = re.compile(r"[\w.-]+")
# Fields of peft's configuration that change what an adapter computes, and the values that mean that they don't.
PLAIN: Mapping[str, tuple[object, ...]] = {
    "peft_type": (None, "LORA"),
    "bias": (None, "none"),
    "use_dora": (None, False),
    "lora_bias": (None, False),
    "fan_in_fan_out": (None, False),
    "use_qalora": (None, False),
    "modules_to_save": (None, [], ()),
    "layer_replication": (None, [], ()),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, [], ()),
    "target_parameters": (None, [], ()),
}


class AdapterStore(Protocol):
    """The adapters of one rank. `prepare` may refuse; what follows it, on all ranks, may not."""

    def prepare(self, name: str, config: AdapterConfig, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Any]:
        """Reads and checks an adapter and keeps it aside. Returns what must be the same on every rank.

        Raises:
            EngineError: naming the tensor or the field. Nothing has changed.
        """

    def commit(self, version: str, source: str | None) -> None:
        """What was prepared is the adapter of its name now, in place of one that had the name before."""

    def discard(self) -> None:
        """Drops what was prepared, if anything was."""

    def unload(self, name: str) -> None:
        """Forgets the adapter, if there is one of that name."""

    def describe(self) -> dict[str, dict[str, Any]]:
        """By name: `version`, `source`, `layers`, `rank` (the largest), `bytes`."""


@dataclass(frozen=True)
class AdapterConfig:
    """What of peft's configuration decides what an adapter computes. Patterns are ends of layer names."""

    alpha: float
    rank: int | None = None
    rslora: bool = False
    alphas: Mapping[str, float] = field(default_factory=dict)
    ranks: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, plain: object) -> AdapterConfig:
        """Raises `RefitRefusedError`, naming the field, for a configuration that is none or asks for more than LoRA."""
        if not isinstance(plain, Mapping):
            raise _refused("the adapter's configuration is no object", "config_dict", hint="Send peft's.")
        for name, harmless in PLAIN.items():
            if plain.get(name) not in harmless:
                raise _refused(
                    f"adapters with {name} = {plain[name]!r} can't be served",
                    name,
                    hint="Train a plain LoRA of linear layers.",
                )
        rank, alpha = plain.get("r"), plain.get("lora_alpha")
        if rank is not None and not _positive(rank, int):
            raise _refused(f"r is {rank!r}, not a whole number above 0", "r", hint="Send peft's configuration.")
        if not _positive(alpha, (int, float)):
            raise _refused(
                f"lora_alpha is {alpha!r}, not a number above 0", "lora_alpha", hint="Send peft's configuration."
            )
        alphas = _patterns("alpha_pattern", plain, (int, float))
        return cls(
            float(alpha),  # type: ignore[arg-type]
            rank,
            bool(plain.get("use_rslora")),
            alphas,
            _patterns("rank_pattern", plain, int),
        )

    def scale(self, pair: LoraPair) -> float:
        """What `B (A x)` is multiplied by, as peft computes it.

        Raises:
            RefitRefusedError: the pair is of another rank than the configuration says.
        """
        expected = _matching(self.ranks, pair.layer, self.rank)
        if expected is not None and pair.rank != expected:
            raise _refused(
                f"{pair.name!r} is of rank {pair.rank}, and the configuration says {expected}",
                pair.name,
                hint="Send the configuration that was saved with these tensors.",
            )
        alpha = _matching(self.alphas, pair.layer, self.alpha)
        return float(alpha) / (math.sqrt(pair.rank) if self.rslora else pair.rank)


def read_folder(path: str) -> tuple[dict[str, Any], Path]:
    """The configuration in a folder that peft has saved, and the file of its tensors.

    Raises:
        RefitRefusedError: there is no such folder, or something is missing in it.
    """
    folder = Path(path)
    file = folder / CONFIG
    if "\0" in path or not file.is_file() or not (folder / TENSORS).is_file():
        raise _refused(
            f"it is no folder with {CONFIG} and {TENSORS}",
            "lora_path",
            value=path,
            hint="Save the adapter with peft's save_pretrained(safe_serialization=True), where the server can read it.",
        )
    with file.open("rb") as opened:
        data = opened.read(MAX_CONFIG_BYTES + 1)
    try:
        config = json.loads(data) if len(data) <= MAX_CONFIG_BYTES else None
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise _refused(f"{CONFIG} is no JSON object", "lora_path", value=path, hint="Save the adapter again.")
    return config, folder / TENSORS


def unknown_adapter(name: str, loaded: Iterable[str]) -> InvalidRequestError:
    known = ", ".join(sorted(loaded)) or "none"
    return InvalidRequestError(
        f"there is no adapter {name!r}",
        code="unknown_adapter",
        field="lora_name",
        value=name,
        hint=f"Loaded: {known}. Load it, or leave the field out for the base.",
    )


def _positive(value: object, kinds: type | tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value) and value > 0  # type: ignore[arg-type,operator]


def _patterns(name: str, plain: Mapping[str, Any], kinds: type | tuple[type, ...]) -> dict[str, Any]:
    found = plain.get(name) or {}
    for pattern, value in found.items() if isinstance(found, Mapping) else [(found, None)]:
        if not isinstance(pattern, str) or not PATTERN.fullmatch(pattern) or not _positive(value, kinds):
            raise _refused(
                f"{name} has {pattern!r}: {value!r}",
                name,
                hint="A pattern is the end of a layer's name.",
            )
    return dict(found)


def _matching(patterns: Mapping[str, Any], layer: str, otherwise: Any) -> Any:
    """The value of the first pattern that the layer's name ends with, at a dot."""
    return next((v for p, v in patterns.items() if layer == p or layer.endswith(f".{p}")), otherwise)


def _refused(message: str, field: str, *, hint: str, value: object = None) -> RefitRefusedError:
    return RefitRefusedError(message, code="invalid_adapter", field=field, value=value, hint=hint)
