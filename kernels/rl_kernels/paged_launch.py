"""Paged attention on a GPU: the blocks that its programs compute, and how a plan is dealt out to them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from rl_kernels.fused import ELEMENTS_PER_THREAD, block_of, empty_rows, launch, units

if TYPE_CHECKING:
    from rl_kernels.paged_attention import PagedPlan

TILE = 64  # keys that one product covers
SPLIT = 256  # keys that are summed up by themselves; a multiple of TILE
# Programs a processor has to be given before splitting a context gains nothing: with 128 on 132 processors it took 0.85
# times as long, with 256 as long.
BUSY = 1
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Block:
    """What one program computes, and how.

    rows: queries x heads that share a kv head. tile: keys of a product; another tile, other sums. warps, stages: of
    Triton; `stages - 1` tiles of keys and values are on their way at a time. kibibytes: of shared memory, as compiled
    for heads 128 wide.
    """

    rows: int
    tile: int
    warps: int
    stages: int
    kibibytes: int


# Of each dtype, smallest first; a sequence's queries are computed by the smallest that holds them, else by the largest.
# Out of the variants of benchmarks/tune_paged_attention.py on an NVIDIA H200, all of which had the same bits. A single
# token needs 16 rows; three such programs share a processor and reach 95 % of a copy's bandwidth, where 32 and 64 rows
# take 1.15 and 1.2 times as long. 128 rows read keys and values again least often: 8192 tokens take 0.75 ms, in 64 rows
# 0.87 and in 32 rows 1.9 ms. A stage more or less is slower in both.
_HALF = (
    Block(16, TILE, warps=4, stages=3, kibibytes=70),
    Block(32, TILE, warps=4, stages=3, kibibytes=76),
    Block(128, TILE, warps=8, stages=3, kibibytes=131),
)
# fp32 has no tensor cores without rounding; larger blocks of it don't fit into registers.
_SINGLE = (Block(16, TILE // 2, warps=8, stages=3, kibibytes=75),)
BLOCKS = {torch.bfloat16: _HALF, torch.float16: _HALF, torch.float32: _SINGLE}


@dataclass(frozen=True)
class Launch:
    """The sequences with `fewest` to `most` queries, by blocks of one kind. They are some of the `count` sequences
    from `first` on; block: which of the kinds; longest: queries of any of them."""

    block: int
    first: int
    count: int
    fewest: int
    most: int
    longest: int


def attend_on_gpu(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    plan: PagedPlan,
    *,
    scale: float,
    split: bool | None,
    uniform: bool,
) -> torch.Tensor:
    """`paged_attention`, of what it has checked and can be read where it is."""
    if plan.longest_query > 1:
        split = False
    elif split is None:
        split = _leaves_processors_idle(query.device, len(plan.lengths) * key_cache.shape[1])
    attend = _attend_splits if split else _attend_whole
    blocks = blocks_for(query, query.shape[1] // key_cache.shape[1], uniform=uniform)
    return attend(query, key_cache, value_cache, plan, scale=scale, blocks=blocks)


def _leaves_processors_idle(device: torch.device, programs: int) -> bool:
    if device.type != "cuda":
        return False
    return programs < BUSY * torch.cuda.get_device_properties(device).multi_processor_count


def blocks_for(query: torch.Tensor, shared: int, *, uniform: bool) -> tuple[Block, ...]:
    """Those that hold a token's `shared` heads and fit the device's shared memory; with fewer stages, if none does."""
    wide = block_of(query.shape[2])
    found = BLOCKS[query.dtype]
    if query.is_cuda:
        room = torch.cuda.get_device_properties(query.device).shared_memory_per_block_optin
        found = tuple(b for b in found if b.kibibytes * 1024 * wide // 128 <= room) or (replace(found[0], stages=2),)
    found = tuple(b for b in found if b.rows >= shared) or (replace(found[-1], rows=block_of(shared)),)
    return found[:1] if uniform else found


def launches(plan: PagedPlan, tokens: tuple[int, ...]) -> tuple[Launch, ...]:
    """How a plan's sequences are dealt out to blocks of so many tokens, ascending; found once for all layers."""
    known = plan._launches.get(tokens)
    if known is not None:
        return known
    queries = [b - a for a, b in pairwise(plan.starts)]
    bounds = (0, *tokens[:-1], 2**31 - 1)
    found = []
    for block, (below, most) in enumerate(pairwise(bounds)):
        own = [s for s, count in enumerate(queries) if below < count <= most]
        if own:
            longest = max(queries[s] for s in own)
            found.append(Launch(block, own[0], own[-1] + 1 - own[0], below + 1, most, longest))
    plan._launches[tokens] = tuple(found)
    return plan._launches[tokens]


def _constants(
    query: torch.Tensor, cache: torch.Tensor, plan: PagedPlan, *, scale: float, block: Block
) -> dict[str, Any]:
    _, heads, head_dim = query.shape
    shared = heads // cache.shape[1]
    return {
        "SCALE": scale * LOG2_E,
        "PAGE": plan.page_size,
        "KV_HEADS": cache.shape[1],
        "SHARED": shared,
        "BLOCK_SHARED": block_of(shared),
        "TILE": block.tile,
        "SPLIT": SPLIT,
        "ROWS": block.rows,
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_of(head_dim),
    }


def _compiled(block: Block) -> dict[str, int]:
    """What `launch` is told of warps, by the elements that it gives so many for, and of stages."""
    return {"block": block.warps * 32 * ELEMENTS_PER_THREAD, "num_stages": block.stages}


def _attend_whole(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    plan: PagedPlan,
    *,
    scale: float,
    blocks: tuple[Block, ...],
) -> torch.Tensor:
    """A program for so many rows of a sequence and a kv head. The grids depend on the plan's host numbers alone."""
    from rl_kernels.jit.paged_attention import paged_attention as kernel

    out = empty_rows(query, *query.shape)
    shared = block_of(query.shape[1] // key_cache.shape[1])
    tokens = tuple(block.rows // shared for block in blocks)
    for own in launches(plan, tokens):
        block = blocks[own.block]
        launch(
            kernel,
            (-(-own.longest // tokens[own.block]), key_cache.shape[1], own.count),
            *(query, key_cache, value_cache, plan.page_table, plan.query_starts, plan.context_lengths, out),
            *(plan.page_table.stride(0), units(query, 0), units(query, 1), own.first, own.fewest, own.most),
            **_constants(query, key_cache, plan, scale=scale, block=block),
            **_compiled(block),
        )
    return out


def _attend_splits(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    plan: PagedPlan,
    *,
    scale: float,
    blocks: tuple[Block, ...],
) -> torch.Tensor:
    """For one query a sequence: a program for each split of a context, and one that merges them. There are as many
    programs as the page table has room for; those behind a context do nothing."""
    from rl_kernels.jit.paged_attention import attend_splits, merge_splits

    constants = _constants(query, key_cache, plan, scale=scale, block=blocks[0])
    sequences, (_, heads, head_dim) = len(plan.lengths), query.shape
    splits = -(-plan.page_table.shape[1] * plan.page_size // SPLIT)
    tops, totals = query.new_empty(2, sequences, splits, heads, dtype=torch.float32)
    parts = query.new_empty(sequences, splits, heads, head_dim, dtype=torch.float32)
    launch(
        attend_splits,
        (splits, key_cache.shape[1], sequences),
        *(query, key_cache, value_cache, plan.page_table, plan.context_lengths, tops, totals, parts),
        *(plan.page_table.stride(0), units(query, 0), units(query, 1), splits),
        **constants,
        **_compiled(blocks[0]),
    )
    out = empty_rows(query, *query.shape)
    names = ("SCALE", "KV_HEADS", "SHARED", "BLOCK_SHARED", "SPLIT", "HEAD_DIM", "BLOCK_D")
    launch(
        merge_splits,
        (key_cache.shape[1], sequences),
        *(plan.context_lengths, tops, totals, parts, out, splits),
        block=constants["BLOCK_SHARED"] * constants["BLOCK_D"],
        **{name: constants[name] for name in names},
    )
    return out
