"""Causal attention over keys and values that lie in pages, for any mix of prompts, chunks of prompts and single tokens.

The bits of a query row depend on its own query, its position, and its sequence's keys and values up to there; not on
the batch, on how many queries of the sequence are computed in the same call, on where the pages lie, or on how wide the
page table is. So a sequence's keys are always cut into the same tiles, `TILE` keys each from position 0 on, and what
tiles give is added up in their order. Tiles behind a row's position add zeros. On a CPU every product has the same
shape. On a GPU every sum over a tile's keys is a matrix product, whose rows are the same in blocks of any size; where a
device's instructions for large and for small blocks add up differently, certification finds out, and prompts are
computed in the blocks of single tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
import torch

from rl_kernels.fused import check_dtypes, check_shape, readable, runs_on_triton, seen_by_modes
from rl_kernels.paged_launch import TILE, Launch, attend_on_gpu

ROWS = 8  # CPU: query rows of a product, tokens x heads that share a kv head, as many whole tokens as fit
SMALLEST_EXPONENT = -80.0  # CPU: exp of it is 2e-35, far from what fp32 can't hold
GROUP_BYTES = 8 * 2**20  # CPU: of gathered tiles and scores, what stays in its cache


@dataclass(frozen=True, eq=False)
class PagedPlan:
    """Which rows of a flat batch belong to which sequence, and where its keys and values are.

    page_table: `[S, P]` int32, the pages of each sequence in order, padded with 0. query_starts: `[S + 1]` int32, rows
    query_starts[s] .. query_starts[s + 1] - 1 are queries of sequence s, at least one. context_lengths: `[S]` int32,
    keys of a sequence, the new ones included; its queries are the last ones of it. A context of 0 marks a row of
    padding (of a CUDA graph): its result is zeros. starts and lengths are the same numbers on the host; a graph's
    replay reads the tensors alone.
    """

    page_table: torch.Tensor
    query_starts: torch.Tensor
    context_lengths: torch.Tensor
    page_size: int
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    _layouts: dict[tuple[int, int, int], _Layout] = field(default_factory=dict, compare=False, repr=False)
    _launches: dict[tuple[int, ...], tuple[Launch, ...]] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        pages: Sequence[Sequence[int]],
        query_lengths: Sequence[int],
        context_lengths: Sequence[int],
        *,
        page_size: int,
        device: torch.device | str = "cpu",
        width: int = 0,
    ) -> PagedPlan:
        """From lists with an entry a sequence. width: columns of the page table, at least; more change nothing.

        Raises:
            ValueError: a sequence without queries, with more queries than keys, or with too few pages for its keys.
        """
        for s, (own, queries, keys) in enumerate(zip(pages, query_lengths, context_lengths, strict=True)):
            if queries < 1 or (keys and queries > keys):
                raise ValueError(f"sequence {s} has {queries} queries and {keys} keys; give 1 .. keys queries")
            if len(own) * page_size < keys:
                raise ValueError(f"sequence {s} has {keys} keys, {len(own)} pages of {page_size}; give it more pages")
        width = max(width, 1, *(len(own) for own in pages)) if pages else max(width, 1)
        table = np.zeros((len(pages), width), dtype=np.int32)
        for row, own in zip(table, pages, strict=True):
            row[: len(own)] = own
        starts = tuple(accumulate(query_lengths, initial=0))
        return cls(
            torch.from_numpy(table).to(device),
            torch.tensor(starts, dtype=torch.int32).to(device),
            torch.tensor(tuple(context_lengths), dtype=torch.int32).to(device),
            page_size,
            starts,
            tuple(context_lengths),
        )

    def read(self) -> PagedPlan:
        """The same tensors, beside the numbers that are in them now. Waits for the device."""
        starts, lengths = self.query_starts.tolist(), self.context_lengths.tolist()
        tensors = (self.page_table, self.query_starts, self.context_lengths)
        return PagedPlan(*tensors, self.page_size, tuple(starts), tuple(lengths))

    @property
    def longest_query(self) -> int:
        """Of any sequence; 0 without one."""
        return max((b - a for a, b in pairwise(self.starts)), default=0)


@dataclass(frozen=True)
class _Group:
    """Work items that are computed at once. `[I]` items of tokens of one sequence each, over `T` tiles.

    rows: `[I, tokens]`, rows of the flat batch; at the end of a sequence the last one stands repeatedly. keys: a flat
    index into a cache of vectors, for `[T, I, kv_heads, TILE]`. unseen and
    seen: `[T, I, 1, rows, TILE]` fp32, -inf and 0 for what a row can't see, else 0 and 1.
    """

    rows: torch.Tensor
    keys: torch.Tensor
    unseen: torch.Tensor
    seen: torch.Tensor
    tiles: int


@dataclass(frozen=True)
class _Layout:
    """groups, and for each row of the flat batch its place among all items' tokens; `blank` rows are padding."""

    groups: tuple[_Group, ...]
    places: torch.Tensor
    blank: torch.Tensor | None


@seen_by_modes
def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    plan: PagedPlan,
    *,
    scale: float,
    split: bool | None = None,
    uniform: bool = False,
) -> torch.Tensor:
    """`softmax(scale * q k^T) v` over each row's sequence up to its own position: query and result `[N, heads, D]`.

    The caches `[pages * page_size, kv_heads, D]` hold the new keys and values already; head h reads kv head
    h // (heads / kv_heads). fp32 inside, rounded once; on a GPU in half precision the
    probabilities are rounded too. It has no gradient. split: on a GPU, whether single queries of a whole batch
    are spread over programs along their contexts; None lets the number of programs decide. It changes no bits.
    uniform: on a GPU, whether prompts are computed in the blocks of single tokens: slower, for a device where larger
    blocks are found to give other bits.

    Raises:
        ValueError: shapes that don't fit the plan, several dtypes or devices, a scale that isn't positive, or a query
            that requires a gradient.
    """
    _check(query, key_cache, value_cache, plan)
    if not scale > 0:
        raise ValueError(f"paged_attention takes a positive scale, got {scale}; negate the queries instead")
    if not query.numel():
        return torch.empty_like(query)
    if not runs_on_triton(query, query.shape[2]):
        return _in_torch(query, key_cache, value_cache, plan, scale=scale)
    return attend_on_gpu(readable(query), key_cache, value_cache, plan, scale=scale, split=split, uniform=uniform)


def _check(query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, plan: PagedPlan) -> None:
    check_dtypes("paged_attention", query=query, key_cache=key_cache, value_cache=value_cache)
    check_shape("paged_attention", "value_cache", value_cache, tuple(key_cache.shape))
    rows, heads, head_dim = query.shape
    if rows != plan.starts[-1]:
        raise ValueError(f"paged_attention takes as many queries as the plan has, {plan.starts[-1]}, got {rows}")
    if key_cache.shape[2] != head_dim or heads % key_cache.shape[1]:
        raise ValueError(
            f"paged_attention takes a cache [slots, kv_heads, {head_dim}] with kv_heads that divide {heads}, "
            f"got {tuple(key_cache.shape)}"
        )
    if not (key_cache.is_contiguous() and value_cache.is_contiguous()):
        raise ValueError("paged_attention takes contiguous caches; make each layer's cache a tensor of its own")
    if torch.is_grad_enabled() and query.requires_grad:
        raise ValueError("paged_attention has no gradient; call it under torch.no_grad(), or detach the query")


def _in_torch(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, plan: PagedPlan, *, scale: float
) -> torch.Tensor:
    """Group by group. Half-precision tiles are widened, which is exact: a half-precision product would round the
    probabilities, and leaves the order of its sums to the library."""
    _, heads, head_dim = query.shape
    kv_heads = key_cache.shape[1]
    layout = _layout(plan, kv_heads, heads // kv_heads, head_dim)
    keys, values = key_cache.view(-1, head_dim), value_cache.view(-1, head_dim)
    found = [_attend(query, keys, values, group, scale=scale) for group in layout.groups]
    out = (found[0] if len(found) == 1 else torch.cat(found)).index_select(0, layout.places)
    if layout.blank is not None:
        out[layout.blank] = 0
    return out


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: _Group, *, scale: float
) -> torch.Tensor:
    """One group: `[I * tokens, heads, D]`. Every product is `[tokens * heads / kv_heads, D] x [D, TILE]` or its
    counterpart; the maximum over tiles has no order, and all sums over tiles are made here, in order."""
    _, heads, head_dim = query.shape
    tiles, items, (kv_heads, tokens) = group.tiles, group.rows.shape[0], (group.keys.shape[2], group.rows.shape[1])
    rows = tokens * heads // kv_heads
    q = query[group.rows].float().mul_(scale).view(items, tokens, kv_heads, -1, head_dim).transpose(1, 2)
    q = q.reshape(1, items, kv_heads, rows, head_dim).expand(tiles, -1, -1, -1, -1).reshape(-1, rows, head_dim)
    index = group.keys.view(-1)
    k = keys.index_select(0, index).float().view(-1, TILE, head_dim)
    v = values.index_select(0, index).float().view(-1, TILE, head_dim)
    p = torch.bmm(q, k.transpose(1, 2)).view(tiles, items, kv_heads, rows, TILE)
    p.add_(group.unseen)
    # exp is ten times slower where it underflows, so nothing may: what is so small counts as much as nothing.
    p.sub_(p.amax(-1, keepdim=True).amax(0)).clamp_min_(SMALLEST_EXPONENT).exp_().mul_(group.seen)
    sums = p.sum(-1)
    parts = torch.bmm(p.view(-1, rows, TILE), v).view(tiles, items, kv_heads, rows, head_dim)
    total, weighted = sums[0], parts[0]
    for tile in range(1, tiles):
        total += sums[tile]
        weighted += parts[tile]
    weighted /= total[..., None]
    weighted = weighted.view(items, kv_heads, tokens, -1, head_dim).transpose(1, 2)
    return weighted.reshape(items * tokens, heads, head_dim).to(query.dtype)


def _layout(plan: PagedPlan, kv_heads: int, shared: int, head_dim: int) -> _Layout:
    """The plan's work items, made once for all layers. shared: heads that read one kv head."""
    known = plan._layouts.get((kv_heads, shared, head_dim))
    if known is not None:
        return known
    tokens = max(ROWS // shared, 1)
    # (tiles, sequence, first row, position of it, rows): items of as many tiles stand together.
    items = []
    for s, length in enumerate(plan.lengths):
        first, end = plan.starts[s], plan.starts[s + 1]
        for row in range(first, end, tokens):
            count = min(tokens, end - row)
            position = max(length - (end - row), 0)
            items.append((-(-(position + count) // TILE), s, row, position, count))
    items.sort()
    row_bytes = 4 * kv_heads * (2 * TILE * head_dim + tokens * shared * (2 * TILE + 2 * head_dim))
    groups: list[_Group] = []
    places = [0] * plan.starts[-1]
    first = 0
    while first < len(items):
        end = first + 1
        while end < len(items) and items[end][0] * (end + 1 - first) * row_bytes <= GROUP_BYTES:
            end += 1
        groups.append(_group(plan, items[first:end], tokens, kv_heads, shared))
        for place, (_, _, row, _, count) in enumerate(items[first:end], start=first):
            places[row : row + count] = range(place * tokens, place * tokens + count)
        first = end
    blank = [row for s, n in enumerate(plan.lengths) if n == 0 for row in range(plan.starts[s], plan.starts[s + 1])]
    device = plan.page_table.device
    rows = torch.tensor(places, dtype=torch.int64, device=device)
    layout = _Layout(tuple(groups), rows, torch.tensor(blank, device=device) if blank else None)
    plan._layouts[kv_heads, shared, head_dim] = layout
    return layout


def _group(
    plan: PagedPlan, items: list[tuple[int, int, int, int, int]], tokens: int, kv_heads: int, shared: int
) -> _Group:
    tiles = items[-1][0]
    if tiles * len(items) * kv_heads == 1:
        tiles = 2  # a single product takes another path through the library, and may be split over threads
    _, sequence, row, position, count = torch.tensor(items).T[:, :, None]
    token = torch.minimum(torch.arange(tokens), count - 1)
    # Behind the last key of a sequence its own last key is read again: a finite number that gets the weight 0.
    last = (torch.tensor(plan.lengths)[sequence] - 1).clamp_(min=0)
    place = torch.minimum(torch.arange(tiles * TILE), last)
    page = plan.page_table.cpu()[sequence, place // plan.page_size].to(torch.int64)
    slots = (page * plan.page_size + place % plan.page_size).view(len(items), tiles, 1, TILE).transpose(0, 1)
    keys = slots * kv_heads + torch.arange(kv_heads)[:, None]
    positions = (position + token).repeat_interleave(shared, dim=1)[None, :, None, :, None]
    hidden = torch.arange(tiles * TILE).view(tiles, 1, 1, 1, TILE) > positions
    device = plan.page_table.device
    seen = (~hidden).float()
    unseen = torch.zeros_like(seen).masked_fill_(hidden, -torch.inf)
    return _Group((row + token).to(device), keys.contiguous().to(device), unseen.to(device), seen.to(device), tiles)
