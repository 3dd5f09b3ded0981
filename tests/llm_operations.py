"""Inputs for the language model's operations: whole sequences, caches of pages, and rows."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from rl_kernels.draw_tokens import draw_tokens
from rl_kernels.log_softmax_gather import gather_log_probs, row_log_softmax
from rl_kernels.paged_attention import PagedPlan, paged_attention
from rl_kernels.paged_qkv import HeadNorms, Rotation, paged_qkv
from rl_kernels.rms_norm import add_rms_norm, rms_norm
from rl_kernels.silu_mul import silu_mul

ROWS = 70


@dataclass(frozen=True)
class Conversations:
    """Queries, keys and values of whole sequences, `[length, heads, D]` each."""

    queries: list[torch.Tensor]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @classmethod
    def of(
        cls, lengths: list[int], shape: tuple[int, int, int], dtype: torch.dtype, device: str = "cpu"
    ) -> Conversations:
        heads, kv_heads, head_dim = shape

        def rows(count: int) -> list[torch.Tensor]:
            return [torch.randn(n, count, head_dim).to(device, dtype) for n in lengths]

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
        self.keys, self.values = (talks.keys[0].new_full((slots, kv_heads, head_dim), torch.nan) for _ in range(2))
        for own, key, value in zip(self.pages, talks.keys, talks.values, strict=True):
            at = torch.arange(len(key))
            where = (torch.tensor(own)[at // page_size] * page_size + at % page_size).to(key.device)
            self.keys[where], self.values[where] = key, value

    def attend(
        self, talks: Conversations, calls: list[tuple[int, int, int]], *, width: int = 0, split: bool | None = None
    ) -> list[torch.Tensor]:
        """Each call (sequence, first, end) is the part of the batch that computes those positions of the sequence."""
        plan = PagedPlan.of(
            [self.pages[s] for s, _, _ in calls],
            [end - first for _, first, end in calls],
            [end for _, _, end in calls],
            page_size=self.page_size,
            device=talks.queries[0].device,
            width=width,
        )
        query = torch.cat([talks.queries[s][first:end] for s, first, end in calls])
        out = paged_attention(query, self.keys, self.values, plan, scale=talks.scale, split=split)
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
            torch.ones(len(query), len(query), device=query.device).triu(1).bool(), -torch.inf
        )
        found.append((scores.softmax(-1) @ v).transpose(0, 1))
    return found


def cuts(length: int, chance: random.Random) -> list[tuple[int, int]]:
    """A sequence in pieces: a prompt in chunks, then tokens one by one, as a server computes it."""
    at, pieces = 0, []
    while at < length:
        size = chance.choice([1, 1, 1, 2, 7, 8, 9, 33, 64, 200])
        pieces.append((at, min(at + size, length)))
        at += size
    return pieces


def rotary_table(positions: int, head_dim: int) -> torch.Tensor:
    angles = torch.arange(positions)[:, None] * 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


@dataclass(frozen=True)
class Projections:
    """What a layer's projection leaves of rows, out of which heads are normed, turned and stored."""

    qkv: torch.Tensor
    kv_heads: int
    rotation: Rotation
    norms: HeadNorms | None

    @classmethod
    def of(
        cls, rows: int, shape: tuple[int, int, int], dtype: torch.dtype, *, norms: bool, device: str = "cpu"
    ) -> Projections:
        heads, kv_heads, head_dim = shape
        qkv = torch.randn(rows, (heads + 2 * kv_heads) * head_dim).to(device, dtype)
        rotation = Rotation(rotary_table(300, head_dim).to(device), torch.randint(0, 300, (rows,)).to(device))
        weights = [(1 + torch.randn(head_dim)).to(device, dtype) for _ in range(2)]
        return cls(qkv, kv_heads, rotation, HeadNorms(weights[0], weights[1], 1e-6) if norms else None)

    def paged(self, rows: slice, slots: list[int] | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, and caches with a slot for each of the rows and zeros at first; by default rows stand in order."""
        qkv, table, positions = self.qkv[rows], self.rotation.cos_sin, self.rotation.positions[rows]
        keys, values = qkv.new_zeros(2, len(qkv), self.kv_heads, table.shape[1])
        where = torch.tensor(range(len(qkv)) if slots is None else slots, device=qkv.device)
        query = paged_qkv(qkv, keys, values, where, rotation=Rotation(table, positions), norms=self.norms)
        return query, keys, values


def rowwise(
    width: int, dtype: torch.dtype, device: str = "cpu"
) -> dict[str, Callable[[slice], tuple[torch.Tensor, ...]]]:
    """Every operation on inputs that a seed fixes, as a function of the rows that it gets."""
    head_dim = max(width // 4, 4) // 4 * 4
    x, y, gate_up = (torch.randn(ROWS, n).to(device, dtype) for n in (width, width, 2 * width))
    weight = 1 + torch.randn(width).to(device, dtype)
    projections = Projections.of(ROWS, (3, 1, head_dim), dtype, norms=True, device=device)
    vocabulary = 5000 + 17 * width
    logits = (torch.randn(ROWS, vocabulary) * 5).to(device)
    ids = torch.randint(0, vocabulary, (ROWS, 3)).to(device)
    temperatures = torch.rand(ROWS).add(0.3).to(device)
    noise, greedy = torch.randint(-(2**63), 2**63 - 1, (ROWS,)).to(device), (torch.arange(ROWS) % 3 == 0).to(device)
    return {
        "rms_norm": lambda r: (rms_norm(x[r], weight, 1e-6),),
        "add_rms_norm": lambda r: add_rms_norm(x[r], y[r], weight, 1e-6),
        "paged_qkv": lambda r: projections.paged(r),
        "silu_mul": lambda r: (silu_mul(gate_up[r]),),
        "row_log_softmax": lambda r: (row_log_softmax(logits[r]),),
        "gather_log_probs": lambda r: (gather_log_probs(logits[r], ids[r]),),
        "draw_tokens": lambda r: draw_tokens(logits[r], temperatures[r], noise[r], greedy[r]),
    }
