"""Finds out, on the actual device, whether paged attention keeps its promise, and is attention.

The probe writes random sequences into shuffled pages and computes each by itself, in one prefill. Then it wants the
same bits from a batch of all, from chunks of every size, and from single tokens, alone and together, with contexts
split over programs and whole; and it compares the prefill with the definition. A GPU computes prompts in larger blocks
than single tokens; if that gives other bits there, prompts in the blocks of single tokens are tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from rl_kernels.fused import runs_on_triton
from rl_kernels.paged_attention import PagedPlan, paged_attention
from rl_kernels.paged_launch import SPLIT, TILE
from rl_kernels.settings import exact_library_settings
from rl_kernels.verdict_cache import Question, Verdict, VerdictCache, find_verdict

# Tokens of a sequence: at, before and behind where a tile and a split end.
LENGTHS = (1, TILE - 1, TILE + 1, SPLIT, 2 * SPLIT + TILE + 13)
# Tokens of a sequence in one call, in blocks of every kind; a sequence's last one is what is left.
CHUNKS = (1, 2, 3, 7, 12, 20, TILE, SPLIT + 44)
SHORT = 4  # chunks up to so many tokens are tried at the first positions only
DECODED = (1, 2, TILE, TILE + 1, SPLIT, SPLIT + 1, 2 * SPLIT + 1)  # contexts of single tokens
SPARE_COLUMNS = 33  # of a page table wider than its longest sequence
# The distance from the definition: of one rounding, and in half precision of the probabilities' too.
TOLERANCE = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}

UNIFORM = "triton, prompts in the blocks of single tokens"

Call = tuple[int, int, int]  # sequence, first position, end: what one call computes of a sequence


def certify_paged_attention(
    device: torch.device,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    page_size: int,
    cache: VerdictCache | None = None,
) -> Verdict:
    """Whether a row's bits depend on its own sequence alone. implementation: `triton`; `UNIFORM` where it holds only if
    `paged_attention` is told `uniform`; `twin` where no kernel serves such heads; None where it doesn't hold. failed_at
    says why it isn't the first."""
    device = torch.device(device)
    candidates = ("triton", UNIFORM) if runs_on_triton(torch.empty(0, device=device), head_dim) else ("twin",)
    name = f"paged_attention {heads}x{kv_heads}x{head_dim} {str(dtype).removeprefix('torch.')}"
    question = Question(name, candidates, f"pages of {page_size}")
    with torch.no_grad(), exact_library_settings():
        sequences = partial(_Sequences.random, device, (heads, kv_heads, head_dim), dtype=dtype, page_size=page_size)

        def probe() -> Verdict:
            return _verdict(name, candidates, sequences())

        return find_verdict(question, device, probe, cache=cache)


def _verdict(name: str, candidates: tuple[str, ...], sequences: _Sequences) -> Verdict:
    """The first candidate that keeps the promise."""
    wrong: list[str] = []
    for candidate in candidates:
        found = _first_failure(replace(sequences, uniform=candidate == UNIFORM))
        if found is None:
            return Verdict(name, candidate, candidates, "; ".join(wrong) or None)
        wrong.append(f"{candidate}: {found}")
    return Verdict(name, None, candidates, "; ".join(wrong))


@dataclass(frozen=True)
class _Sequences:
    """Queries, keys and values `[length, heads, D]` of each sequence, and the caches that hold the latter two."""

    queries: tuple[torch.Tensor, ...]
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    pages: tuple[tuple[int, ...], ...]
    page_size: int
    uniform: bool = False

    @classmethod
    def random(
        cls, device: torch.device, shape: tuple[int, int, int], *, dtype: torch.dtype, page_size: int
    ) -> _Sequences:
        """Normal numbers, from a generator of its own: nobody else's random state is touched."""
        heads, kv_heads, head_dim = shape
        generator = torch.Generator(device).manual_seed(0)

        def rows(count: int) -> tuple[torch.Tensor, ...]:
            sizes = [(n, count, head_dim) for n in LENGTHS]
            return tuple(torch.randn(size, device=device, generator=generator).to(dtype) for size in sizes)

        counts = [-(-n // page_size) for n in LENGTHS]
        numbers = torch.randperm(sum(counts) + 1, generator=torch.Generator().manual_seed(0))[: sum(counts)]
        # A page that nobody owns is full of NaN, as is the end of a last page: a row that reads there is found out.
        caches = torch.full(
            (2, (sum(counts) + 1) * page_size, kv_heads, head_dim), torch.nan, dtype=dtype, device=device
        )
        pages = tuple(tuple(own.tolist()) for own in numbers.split(counts))
        made = cls(rows(heads), rows(kv_heads), rows(kv_heads), caches[0], caches[1], pages, page_size)
        for own, key, value in zip(pages, made.keys, made.values, strict=True):
            at = torch.arange(len(key))
            slots = (torch.tensor(own)[at // page_size] * page_size + at % page_size).to(device)
            made.key_cache[slots], made.value_cache[slots] = key, value
        return made

    @property
    def scale(self) -> float:
        return float(self.queries[0].shape[-1] ** -0.5)

    def attend(self, calls: Sequence[Call], *, spare: int = 0, split: bool | None = None) -> tuple[torch.Tensor, ...]:
        """One batch with a part for each call: results `[tokens, heads, D]`. spare: columns of the page table more."""
        sizes = [end - first for _, first, end in calls]
        pages = [self.pages[s] for s, _, _ in calls]
        plan = PagedPlan.of(
            pages,
            sizes,
            [end for _, _, end in calls],
            page_size=self.page_size,
            device=self.key_cache.device,
            width=max(map(len, pages)) + spare,
        )
        query = torch.cat([self.queries[s][first:end] for s, first, end in calls])
        caches = self.key_cache, self.value_cache
        out = paged_attention(query, *caches, plan, scale=self.scale, split=split, uniform=self.uniform)
        return out.split(sizes)

    def defined(self, sequence: int) -> torch.Tensor:
        """The definition in fp64, `[length, heads, D]`."""
        query, key, value = (x[sequence].double().transpose(0, 1) for x in (self.queries, self.keys, self.values))
        shared = len(query) // len(key)
        key, value = key.repeat_interleave(shared, 0), value.repeat_interleave(shared, 0)
        later = torch.ones(query.shape[1], query.shape[1], dtype=torch.bool, device=query.device).triu(1)
        scores = (query @ key.transpose(1, 2) * self.scale).masked_fill(later, -torch.inf)
        return (scores.softmax(-1) @ value).transpose(0, 1)


def _first_failure(sequences: _Sequences) -> str | None:
    """None if the promise holds, else what was computed differently."""
    alone = [sequences.attend([(s, 0, n)])[0] for s, n in enumerate(LENGTHS)]
    tolerance = TOLERANCE[alone[0].dtype]
    for s, found in enumerate(alone):
        if not torch.allclose(found.double(), sequences.defined(s), atol=tolerance, rtol=tolerance):
            return f"a prefill of {LENGTHS[s]} tokens is not attention"
    for what, batch, split in _batches():
        found_parts = sequences.attend(batch, spare=SPARE_COLUMNS if len(batch) > 1 else 0, split=split)
        for (s, first, end), part in zip(batch, found_parts, strict=True):
            if not torch.equal(part, alone[s][first:end]):
                return f"{what}: positions {first} to {end - 1} of {LENGTHS[s]}"
    return None


def _batches() -> Iterator[tuple[str, list[Call], bool | None]]:
    """What is called, in words, the parts of the batch, and `split`."""
    yield "all prefilled in one batch", [(s, 0, n) for s, n in enumerate(LENGTHS)][::-1], None
    for size in CHUNKS:
        steps = range(0, max(LENGTHS), size)
        if size <= SHORT:
            steps = range(0, TILE + 2, size)
        for first in steps:
            chunk = [(s, first, min(first + size, n)) for s, n in enumerate(LENGTHS) if first < n]
            yield f"chunks of {size}", chunk, None
    longest = LENGTHS.index(max(LENGTHS))
    for split in (True, False):
        word = "split" if split else "whole"
        for end in DECODED:
            yield f"one token decoded, context {word}", [(longest, end - 1, end)], split
        batch = [(longest, end - 1, end) for end in DECODED] + [(s, n - 1, n) for s, n in enumerate(LENGTHS)]
        yield f"a batch of tokens decoded, contexts {word}", batch, split
    prompt_and_tokens = [(0, 0, 1), (longest, 5, TILE + 6), *((longest, end - 1, end) for end in DECODED)]
    yield "a prompt's chunk among decoded tokens", prompt_and_tokens, None
