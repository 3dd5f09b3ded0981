"""RMS norm over the channels of each position of a picture or a video, as the VAEs of Qwen-Image and Wan have it.

Rounding rule: everything in fp32, one rounding at the end to x's dtype. (The separate operations round at each of
their five steps.) The twin is `reference.channel_norm`.
"""

from __future__ import annotations

from functools import partial

import torch

from rl_kernels import reference
from rl_kernels.channels import check_channels, laid_out
from rl_kernels.fused import (
    UNIT,
    check_dtypes,
    check_shape,
    differentiable,
    launch,
    readable,
    runs_on_triton,
    seen_by_modes,
)

TILE = 4096  # elements of a program whose channels lie side by side
WIDE_TILE = 16384  # of one whose positions do: so that each channel is read in whole sectors
MAX_CHANNELS = 2048  # that one program holds


@seen_by_modes
def channel_norm(
    x: torch.Tensor, gamma: torch.Tensor, bias: torch.Tensor | None = None, *, silu: bool = False
) -> torch.Tensor:
    """`F.normalize(x, dim=1) * sqrt(C) * gamma + bias`, and its SiLU if `silu`: x `[B, C, ...]`, gamma and bias `[C]`.

    The result has x's shape and memory order (channels in front or innermost). A position's bits depend on its own
    channels, gamma, bias, the shape of one sample, the memory order and the dtype alone.

    Raises:
        ValueError: shapes that don't fit, several dtypes or devices, or a dtype other than bf16, fp16 and fp32.
    """
    check_channels("channel_norm", x)
    check_shape("channel_norm", "gamma", gamma, (x.shape[1],))
    if bias is not None:
        check_shape("channel_norm", "bias", bias, (x.shape[1],))
    check_dtypes("channel_norm", x=x, gamma=gamma, bias=bias)
    twin = partial(_twin, silu=silu)
    if not x.numel() or not runs_on_triton(x, UNIT) or x.shape[1] > MAX_CHANNELS:
        return twin(x, gamma, bias)[0]
    return differentiable(partial(_launch, silu=silu), twin, (x, gamma, bias))[0]


def _twin(x: torch.Tensor, gamma: torch.Tensor, bias: torch.Tensor | None, *, silu: bool) -> tuple[torch.Tensor]:
    return (reference.channel_norm(x, gamma, bias, silu=silu),)


def _launch(x: torch.Tensor, gamma: torch.Tensor, bias: torch.Tensor | None, *, silu: bool) -> tuple[torch.Tensor]:
    from rl_kernels.jit.channel_norm import channel_norm as kernel

    given = laid_out(x)
    out = torch.empty_like(given.x)
    gamma = readable(gamma)
    channels, positions = given.tile(TILE if given.last else WIDE_TILE, whole=True)
    launch(
        kernel,
        (-(-given.positions // positions), given.samples),
        *(given.x, gamma, gamma if bias is None else readable(bias), out, given.positions // given.unit),
        EPS=reference.SHORTEST,
        SCALE=given.count**0.5,
        CHANNELS=given.count,
        UNIT=given.unit,
        LAST=given.last,
        BLOCK_C=channels,
        BLOCK_P=positions,
        BIAS=bias is not None,
        SILU=silu,
        block=channels * positions,
    )
    return (out,)
