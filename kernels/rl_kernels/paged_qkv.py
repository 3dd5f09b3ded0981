"""What lies between a layer's projection and `paged_attention`: heads normed and turned, keys and values stored.

Rotary position embedding is of the half-split kind: element i of a head turns with element i + D / 2. Rounding rule,
that of transformers' Qwen3RMSNorm and `apply_rotary_pos_emb`: x / sqrt(mean of squares + eps) in fp32, rounded, times
the weight, rounded; cosines and sines rounded, then each product, then the sum. All is rounded to the model's dtype.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from rl_kernels.fused import (
    block_of,
    check_dtypes,
    check_shape,
    launch,
    readable,
    runs_on_triton,
    seen_by_modes,
    units,
)
from rl_kernels.rms_norm import normed

# GPU: elements of a program, which then is one warp; of wider heads it has one. For programs of two warps ptxas saves
# registers by issuing weights and table behind the norm: four waits for memory in a row, where two are due.
BLOCK = 512


class Rotation(NamedTuple):
    """How rows turn. cos_sin: fp32 `[max_positions, D]`, D / 2 cosines, then D / 2 sines. positions: `[N]` integers,
    row n's row of that table; on a GPU nothing checks that it is there."""

    cos_sin: torch.Tensor
    positions: torch.Tensor


class HeadNorms(NamedTuple):
    """RMS norms of each head of queries and of keys: weights `[D]`, and the number added to mean squares."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


@seen_by_modes
def paged_qkv(
    qkv: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    rotation: Rotation,
    norms: HeadNorms | None = None,
) -> torch.Tensor:
    """The queries `[N, heads, D]`, contiguous, normed (if there are norms) and turned, out of qkv
    `[N, (heads + 2 * kv_heads) * D]`: the heads of queries, of keys, of values.

    Afterwards the keys, normed and turned likewise, and the values are in the caches
    `[pages * page_size, kv_heads, D]` at slots `[N]` (integers): page * page_size + offset; a row whose slot is -1 is
    left out. A row's bits depend on the row, its position and the weights alone. It has no gradient.

    Raises:
        ValueError: shapes that don't fit, several dtypes or devices, a table that isn't fp32, caches that aren't
            contiguous, or a qkv that requires a gradient.
    """
    heads = _checked_heads(qkv, key_cache, value_cache, slots, rotation, norms)
    if not len(qkv) or not runs_on_triton(qkv, key_cache.shape[2]):
        return _twin(qkv, key_cache, value_cache, slots, rotation=rotation, norms=norms)
    return _launch(qkv, key_cache, value_cache, slots, heads=heads, rotation=rotation, norms=norms)


def _checked_heads(
    qkv: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    rotation: Rotation,
    norms: HeadNorms | None,
) -> int:
    """How many heads queries have."""
    query_weight, key_weight = (norms.query, norms.key) if norms is not None else (None, None)
    tensors = {"qkv": qkv, "key_cache": key_cache, "value_cache": value_cache}
    check_dtypes("paged_qkv", **tensors, query_weight=query_weight, key_weight=key_weight)
    check_shape("paged_qkv", "value_cache", value_cache, tuple(key_cache.shape))
    rows, width = qkv.shape
    _, kv_heads, head_dim = key_cache.shape
    heads, rest = divmod(width, head_dim)
    heads -= 2 * kv_heads
    if heads < 1 or rest or head_dim % 2:
        raise ValueError(
            f"paged_qkv takes qkv [N, (heads + 2 * {kv_heads}) * {head_dim}] for a cache of {kv_heads} heads of "
            f"{head_dim}, an even number, got {tuple(qkv.shape)}"
        )
    if not (key_cache.is_contiguous() and value_cache.is_contiguous()):
        raise ValueError("paged_qkv takes contiguous caches; make each layer's cache a tensor of its own")
    for name, x in (("slots", slots), ("positions", rotation.positions)):
        check_shape("paged_qkv", name, x, (rows,))
    check_shape("paged_qkv", "cos_sin", rotation.cos_sin, (len(rotation.cos_sin), head_dim))
    if rotation.cos_sin.dtype != torch.float32:
        raise ValueError(f"paged_qkv takes cos_sin in torch.float32, got {rotation.cos_sin.dtype}")
    for name, weight in (("query_weight", query_weight), ("key_weight", key_weight)):
        if weight is not None:
            check_shape("paged_qkv", name, weight, (head_dim,))
    if torch.is_grad_enabled() and qkv.requires_grad:
        raise ValueError("paged_qkv has no gradient; call it under torch.no_grad(), or detach qkv")
    return heads


def _twin(
    qkv: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    rotation: Rotation,
    norms: HeadNorms | None,
) -> torch.Tensor:
    _, kv_heads, head_dim = key_cache.shape
    query, key, value = qkv.unflatten(1, (-1, head_dim)).tensor_split((-2 * kv_heads, -kv_heads), dim=1)
    if norms is not None:
        query, key = normed(query, norms.query, norms.eps), normed(key, norms.key, norms.eps)
    cos, sin = rotation.cos_sin[rotation.positions][:, None].to(qkv.dtype).chunk(2, dim=-1)
    key = _turned(key, cos, sin)
    if bool((slots < 0).any()):
        kept = slots >= 0
        key, value, slots = key[kept], value[kept], slots[kept]
    key_cache.index_copy_(0, slots, key)
    value_cache.index_copy_(0, slots, value)
    return _turned(query, cos, sin)


def _turned(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _launch(
    qkv: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    heads: int,
    rotation: Rotation,
    norms: HeadNorms | None,
) -> torch.Tensor:
    from rl_kernels.jit.paged_qkv import paged_qkv as kernel

    _, kv_heads, head_dim = key_cache.shape
    qkv, cos_sin = readable(qkv), readable(rotation.cos_sin)
    weights = (readable(norms.query), readable(norms.key)) if norms is not None else (qkv, qkv)
    query = qkv.new_empty(len(qkv), heads, head_dim)
    half = block_of(head_dim // 2)
    together = min(max(BLOCK // (2 * half), 1), block_of(heads))
    programs = -(-heads // together) + 2 * -(-kv_heads // together)
    launch(
        kernel,
        (len(qkv) * programs,),
        *(qkv, *weights, cos_sin, rotation.positions, slots, query, key_cache, value_cache, units(qkv, 0)),
        EPS=norms.eps if norms is not None else 0.0,
        HEADS=heads,
        KV_HEADS=kv_heads,
        BLOCK_HEADS=together,
        HALF=head_dim // 2,
        BLOCK=half,
        NORM=norms is not None,
        block=together * 2 * half,
    )
    return query
