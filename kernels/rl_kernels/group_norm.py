"""Group norm of pictures `[B, C, ...]`, with SiLU behind it if that is wanted, spread over the whole device.

A library that gives each group of a sample to one block of threads leaves most of a GPU idle on large planes. Here the
positions are cut into pieces, whose moments are taken by programs of their own and put together in one order. How many
pieces there are, and what is in them, depends on the shape of one sample alone: its bits are the same in any batch.

Rounding rule: everything in fp32, one rounding at the end to x's dtype. (The separate operations round in between.)
The twin is `reference.group_norm`.
"""

from __future__ import annotations

from functools import partial

import torch

from rl_kernels import reference
from rl_kernels.channels import Channels, check_channels, laid_out
from rl_kernels.fused import (
    UNIT,
    block_of,
    check_dtypes,
    check_shape,
    differentiable,
    launch,
    readable,
    runs_on_triton,
    seen_by_modes,
)

MOMENTS_TILE = 8192  # elements that a program adds up at once
SCALED_TILE = 4096  # elements of a program that only reads and writes
MAX_PIECES = 512  # of a sample: enough programs for any device, few enough that their moments cost nothing
MAX_MOMENTS = 16384  # of one group, which one program puts together


@seen_by_modes
def group_norm(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    silu: bool = False,
) -> torch.Tensor:
    """`F.group_norm`, and `F.silu` of it if `silu`: x `[B, C, ...]`, weight and bias `[C]`, result like x.

    x may have its channels in front or innermost (`channels_last`); the result has the same memory order, and nothing
    is copied. A sample's bits depend on the sample, the weights, the memory order and the dtype alone.

    Raises:
        ValueError: groups that don't divide C, one of weight and bias without the other, shapes that don't fit, several
            dtypes or devices, or a dtype other than bf16, fp16 and fp32.
    """
    _check(x, groups, weight, bias)
    twin = partial(_twin, groups=groups, eps=eps, silu=silu)
    width = x.shape[1] // groups
    if not x.numel() or not runs_on_triton(x, UNIT) or block_of(width) > MAX_MOMENTS:
        return twin(x, weight, bias)[0]
    return differentiable(partial(_launch, groups=groups, eps=eps, silu=silu), twin, (x, weight, bias))[0]


def _check(x: torch.Tensor, groups: int, weight: torch.Tensor | None, bias: torch.Tensor | None) -> None:
    check_channels("group_norm", x)
    if groups < 1 or x.shape[1] % groups:
        raise ValueError(f"group_norm takes a number of groups that divides the channels, got {groups} of {x.shape[1]}")
    if (weight is None) != (bias is None):
        only = "bias" if weight is None else "weight"
        raise ValueError(f"group_norm takes weight and bias together, got only {only}; give both, or neither")
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None:
            check_shape("group_norm", name, vector, (x.shape[1],))
    check_dtypes("group_norm", x=x, weight=weight, bias=bias)


def _twin(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, *, groups: int, eps: float, silu: bool
) -> tuple[torch.Tensor]:
    return (reference.group_norm(x, groups, weight, bias, eps=eps, silu=silu),)


def _launch(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, *, groups: int, eps: float, silu: bool
) -> tuple[torch.Tensor]:
    from rl_kernels.jit.group_norm import scaled_channels as kernel

    given = laid_out(x)
    factors, offsets = _factors(given, weight, bias, groups, eps)
    out = torch.empty_like(given.x)
    channels, positions = given.tile(SCALED_TILE)
    launch(
        kernel,
        (-(-given.positions // positions), -(-given.count // channels), given.samples),
        *(given.x, factors, offsets, out, given.positions // given.unit),
        CHANNELS=given.count,
        UNIT=given.unit,
        LAST=given.last,
        BLOCK_C=channels,
        BLOCK_P=positions,
        SILU=silu,
        block=channels * positions,
    )
    return (out,)


def _factors(
    given: Channels, weight: torch.Tensor | None, bias: torch.Tensor | None, groups: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors and offsets `[B, C]` fp32, by which the norm is x * factor + offset."""
    from rl_kernels.jit.group_norm import channel_moments, group_factors

    width = given.count // groups
    channels, positions = given.tile(MOMENTS_TILE)
    most = max(1, min(MAX_PIECES, MAX_MOMENTS // block_of(width)))
    tiles = -(-given.positions // (positions * most))
    length = tiles * positions
    pieces = -(-given.positions // length)
    means, squares = given.x.new_empty(2, given.samples, pieces, given.count, dtype=torch.float32)
    launch(
        channel_moments,
        (pieces, -(-given.count // channels), given.samples),
        *(given.x, means, squares, given.positions // given.unit, tiles),
        CHANNELS=given.count,
        UNIT=given.unit,
        LAST=given.last,
        BLOCK_C=channels,
        BLOCK_P=positions,
        block=channels * positions,
    )
    factors, offsets = given.x.new_empty(2, given.samples, given.count, dtype=torch.float32)
    affine = weight is not None and bias is not None
    launch(
        group_factors,
        (groups, given.samples),
        *(means, squares, *((readable(v) if affine else means) for v in (weight, bias))),
        *(factors, offsets, given.positions, pieces, length),
        EPS=eps,
        CHANNELS=given.count,
        WIDTH=width,
        BLOCK_PIECES=block_of(pieces),
        BLOCK_D=block_of(width),
        AFFINE=affine,
        block=block_of(pieces) * block_of(width),
    )
    return factors, offsets
