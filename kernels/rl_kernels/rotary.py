"""Rotary position embedding of the half-split kind: element i of a head turns with element i + D / 2."""

from __future__ import annotations

import torch

from rl_kernels.fused import (
    MAX_BLOCK,
    block_of,
    check_dtypes,
    check_shape,
    differentiable,
    launch,
    readable,
    runs_on_triton,
    seen_by_modes,
    units,
)


@seen_by_modes
def apply_rotary(
    query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """query `[N, heads, D]` and key `[N, kv_heads, D]`, turned: row n by row positions[n] of the table.

    cos_sin: fp32 `[max_positions, D]`, D / 2 cosines, then D / 2 sines. positions: `[N]` integers in the table, which
    isn't checked on a GPU. Rounding rule, that of transformers' `apply_rotary_pos_emb`: cosines and sines are rounded
    to query's dtype, then each product, then the sum; on a GPU the same bits as on a CPU.

    Raises:
        ValueError: shapes that don't fit, several devices, a table that isn't fp32, or mixed dtypes.
    """
    rows, _, head_dim = query.shape
    check_shape("apply_rotary", "key", key, (rows, key.shape[1], head_dim))
    check_shape("apply_rotary", "positions", positions, (rows,))
    check_shape("apply_rotary", "cos_sin", cos_sin, (len(cos_sin), head_dim))
    check_dtypes("apply_rotary", query=query, key=key)
    if cos_sin.dtype != torch.float32:
        raise ValueError(f"apply_rotary takes cos_sin in torch.float32, got {cos_sin.dtype}")
    return _turned(query, cos_sin, positions), _turned(key, cos_sin, positions)


def _turned(x: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    def twin(heads: torch.Tensor) -> tuple[torch.Tensor]:
        cos, sin = cos_sin[positions][:, None].to(heads.dtype).chunk(2, dim=-1)
        first, second = heads.chunk(2, dim=-1)
        return (torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1),)

    _, count, head_dim = x.shape
    half = block_of(head_dim // 2)
    if not x.numel() or not runs_on_triton(x, head_dim) or block_of(count) * half > MAX_BLOCK:
        return twin(x)[0]

    def run(heads: torch.Tensor) -> tuple[torch.Tensor]:
        from rl_kernels.jit.rotary import rotary as kernel

        heads = readable(heads)
        out = heads.new_empty(heads.shape)
        launch(
            kernel,
            (len(heads),),
            *(heads, readable(cos_sin), positions, out, units(heads, 0), units(heads, 1)),
            HEADS=count,
            BLOCK_HEADS=block_of(count),
            HALF=head_dim // 2,
            BLOCK=half,
            block=block_of(count) * half,
        )
        return (out,)

    return differentiable(run, twin, (x,))[0]
