"""The language model's operations: right, and the same bits for a row whatever is computed beside it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

import rl_kernels.paged_attention as paged
from rl_kernels.paged_attention import PagedPlan, paged_attention, store_kv

DTYPES = [torch.float32, torch.bfloat16]
# (heads, kv_heads, head_dim)
SHAPES = [(4, 4, 16), (4, 2, 32), (8, 2, 64), (8, 1, 128), (1, 1, 40), (6, 2, 32), (16, 1, 16)]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Conversations:
    """Queries, keys and values of whole sequences, `[length, heads, D]` each."""

    queries: list[torch.Tensor]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @classmethod
    def of(cls, lengths: list[int], shape: tuple[int, int, int], dtype: torch.dtype) -> Conversations:
        heads, kv_heads, head_dim = shape

        def rows(count: int) -> list[torch.Tensor]:
            return [torch.randn(n, count, head_dim).to(dtype) for n in lengths]

        return cls(rows(heads), rows(kv_heads), rows(kv_heads))

    @property
    def lengths(self) -> list[int]:
        return [len(q) for q in self.queries]

    @property
    def scale(self) -> float:
        return float(self.queries[0].shape[-1] ** -0.5)


class Memory:
    """Caches with pages dealt out in random order. What was never written is NaN."""

    def __init__(self, talks: Conversations, page_size: int, chance: random.Random) -> None:
        self.page_size = page_size
        counts = [-(-n // page_size) for n in talks.lengths]
        numbers = list(range(sum(counts) + 3))
        chance.shuffle(numbers)
        self.pages = [[numbers.pop() for _ in range(count)] for count in counts]
        _, kv_heads, head_dim = talks.keys[0].shape
        slots = (sum(counts) + 3) * page_size
        self.keys, self.values = (
            torch.full((slots, kv_heads, head_dim), torch.nan, dtype=talks.keys[0].dtype) for _ in range(2)
        )
        for own, key, value in zip(self.pages, talks.keys, talks.values, strict=True):
            at = torch.arange(len(key))
            where = torch.tensor(own)[at // page_size] * page_size + at % page_size
            store_kv(key, value, self.keys, self.values, where)

    def attend(self, talks: Conversations, calls: list[tuple[int, int, int]], *, width: int = 0) -> list[torch.Tensor]:
        """Each call (sequence, first, end) is the part of the batch that computes those positions of the sequence."""
        plan = PagedPlan.of(
            [self.pages[s] for s, _, _ in calls],
            [end - first for _, first, end in calls],
            [end for _, _, end in calls],
            page_size=self.page_size,
            width=width,
        )
        query = torch.cat([talks.queries[s][first:end] for s, first, end in calls])
        out = paged_attention(query, self.keys, self.values, plan, scale=talks.scale)
        return list(out.split([end - first for _, first, end in calls]))


def whole(talks: Conversations, page_size: int = 16) -> list[torch.Tensor]:
    """Each sequence prefilled at once, by itself."""
    memory = Memory(talks, page_size, random.Random(0))
    return [memory.attend(talks, [(s, 0, n)])[0] for s, n in enumerate(talks.lengths)]


def dense(talks: Conversations) -> list[torch.Tensor]:
    """The definition, in fp64."""
    found = []
    for query, key, value in zip(talks.queries, talks.keys, talks.values, strict=True):
        shared = query.shape[1] // key.shape[1]
        q, k, v = (x.double().transpose(0, 1) for x in (query, key, value))
        k, v = k.repeat_interleave(shared, 0), v.repeat_interleave(shared, 0)
        scores = (q @ k.transpose(1, 2) * talks.scale).masked_fill(
            torch.ones(len(query), len(query)).triu(1).bool(), -torch.inf
        )
        found.append((scores.softmax(-1) @ v).transpose(0, 1))
    return found


@dtypes
@shapes
def test_paged_attention_is_causal_attention(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    talks = Conversations.of([1, 63, 64, 65, 130], shape, dtype)
    tolerance = 2e-6 if dtype == torch.float32 else 2**-7
    for ours, right in zip(whole(talks), dense(talks), strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), right, atol=tolerance, rtol=tolerance)


def cuts(length: int, chance: random.Random) -> list[tuple[int, int]]:
    """A sequence in pieces: a prompt in chunks, then tokens one by one, as a server computes it."""
    at, pieces = 0, []
    while at < length:
        size = chance.choice([1, 1, 1, 2, 7, 8, 9, 33, 64, 200])
        pieces.append((at, min(at + size, length)))
        at += size
    return pieces


@pytest.mark.parametrize("count", [1, 2, 3])
@dtypes
@shapes
def test_a_row_has_the_same_bits_however_its_sequence_is_cut_and_batched(
    shape: tuple[int, int, int], dtype: torch.dtype, count: int
) -> None:
    torch.manual_seed(count)
    chance = random.Random(count)
    talks = Conversations.of([1, 5, 64, 129, chance.randint(140, 330)], shape, dtype)
    with threads(1):
        expected = whole(talks)
    memory = Memory(talks, chance.choice([1, 4, 16, 64]), chance)
    waiting = [(s, first, end) for s, n in enumerate(talks.lengths) for first, end in cuts(n, chance)]
    chance.shuffle(waiting)
    with threads(count):
        while waiting:
            batch = [waiting.pop() for _ in range(min(chance.choice([1, 1, 2, 5, 16]), len(waiting)))]
            width = chance.choice([0, 400])
            for (s, first, end), found in zip(batch, memory.attend(talks, batch, width=width), strict=True):
                assert torch.equal(found, expected[s][first:end]), (s, first, end, len(batch))


def test_every_position_decoded_alone_has_the_bits_of_the_prefill() -> None:
    torch.manual_seed(0)
    talks = Conversations.of([700], (4, 2, 32), torch.float32)
    expected = whole(talks)[0]
    memory = Memory(talks, 16, random.Random(1))
    for position in [*range(0, 70), *range(70, 700, 9)]:
        assert torch.equal(memory.attend(talks, [(0, position, position + 1)])[0], expected[position : position + 1])


@pytest.mark.parametrize("size", [0, 2**16, 2**30])
def test_the_size_of_work_groups_changes_no_bits(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    talks = Conversations.of([300, 10, 150], (4, 2, 32), torch.float32)
    expected = whole(talks)
    monkeypatch.setattr(paged, "GROUP_BYTES", size)
    memory = Memory(talks, 16, random.Random(1))
    for ours, before in zip(memory.attend(talks, [(0, 0, 300), (1, 0, 10), (2, 7, 150)]), expected, strict=True):
        assert torch.equal(ours, before[-len(ours) :])


def test_a_row_without_context_is_zeros_and_disturbs_nobody() -> None:
    torch.manual_seed(0)
    talks = Conversations.of([70], (4, 2, 32), torch.float32)
    memory = Memory(talks, 16, random.Random(0))
    plan = PagedPlan.of([[], memory.pages[0], []], [1, 70, 1], [0, 70, 0], page_size=16)
    query = torch.cat([torch.ones(1, 4, 32), talks.queries[0], torch.ones(1, 4, 32)])
    out = paged_attention(query, memory.keys, memory.values, plan, scale=talks.scale)
    assert torch.equal(out[1:71], whole(talks)[0])
    assert not out[[0, 71]].any()


def test_a_slot_of_minus_one_is_not_written() -> None:
    keys, values = torch.zeros(2, 8, 2, 16)
    rows = torch.ones(3, 2, 16)
    store_kv(rows, 2 * rows, keys, values, torch.tensor([5, -1, 0]))
    assert keys[:, 0, 0].tolist() == [1, 0, 0, 0, 0, 1, 0, 0]
    assert values[:, 0, 0].tolist() == [2, 0, 0, 0, 0, 2, 0, 0]


def test_a_plan_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="sequence 1 has 0 queries"):
        PagedPlan.of([[0], [1]], [1, 0], [1, 4], page_size=4)
    with pytest.raises(ValueError, match="5 queries and 4 keys"):
        PagedPlan.of([[0]], [5], [4], page_size=4)
    with pytest.raises(ValueError, match="1 pages of 4"):
        PagedPlan.of([[0]], [1], [5], page_size=4)
    plan = PagedPlan.of([[0]], [1], [4], page_size=4)
    cache = torch.zeros(4, 2, 16)
    with pytest.raises(ValueError, match="as many queries as the plan has, 1, got 2"):
        paged_attention(torch.zeros(2, 4, 16), cache, cache, plan, scale=1.0)
    with pytest.raises(ValueError, match="kv_heads that divide 3"):
        paged_attention(torch.zeros(1, 3, 16), cache, cache, plan, scale=1.0)
    with pytest.raises(ValueError, match="no gradient"):
        paged_attention(torch.zeros(1, 4, 16, requires_grad=True), cache, cache, plan, scale=1.0)
