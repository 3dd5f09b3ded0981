"""How the tokens of a forward are dealt out to ranks, and laid together again in the order of one device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from rl_kernels import AttentionPlan

Stream = Literal["image", "text"]


@dataclass(frozen=True)
class Tokens:
    """Where a tensor has its tokens: along `dim`, those of one stream after those of the other."""

    streams: tuple[Stream, ...]
    dim: int = 1


IMAGE, TEXT = Tokens(("image",)), Tokens(("text",))


@dataclass(frozen=True)
class Shards:
    """How the tokens of one forward are dealt out: each stream is padded at its end to `degree` shares of one size."""

    image_tokens: int
    text_tokens: int
    text_first: bool
    degree: int

    def share(self, stream: Stream) -> int:
        """Tokens of that stream on each rank, the last ranks' padding included."""
        return -(-self.count(stream) // self.degree)

    def count(self, stream: Stream) -> int:
        """Tokens of that stream on all ranks together."""
        return self.image_tokens if stream == "image" else self.text_tokens

    def cut(self, x: torch.Tensor, stream: Stream, rank: int, *, dim: int) -> torch.Tensor:
        """Rank's share of x along `dim`; zeros stand for tokens that don't exist."""
        share = self.share(stream)
        start = min(rank * share, x.shape[dim])
        part = x.narrow(dim, start, min(share, x.shape[dim] - start))
        missing = share - part.shape[dim]
        if missing:
            padding = part.new_zeros(*part.shape[:dim], missing, *part.shape[dim + 1 :])
            part = torch.cat([part, padding], dim=dim)
        return part.contiguous()

    def cut_streams(self, x: torch.Tensor, tokens: Tokens, rank: int) -> torch.Tensor:
        """Rank's share of each of the streams that x is made of."""
        counts = [self.count(stream) for stream in tokens.streams]
        parts = zip(x.split(counts, dim=tokens.dim), tokens.streams, strict=True)
        shares = [self.cut(part, stream, rank, dim=tokens.dim) for part, stream in parts]
        return shares[0] if len(shares) == 1 else torch.cat(shares, dim=tokens.dim)

    def pairs(
        self, whole: torch.Tensor, shares: torch.Tensor, streams: tuple[Stream, ...]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Views of equal shape that stand for the same tokens, in all for every true one: of `whole`
        `[..., tokens, D]`, in the order of one device, and of `shares` `[degree, ..., tokens of a share, D]`."""
        start, offset = 0, 0
        for stream in streams:
            share, count = self.share(stream), self.count(stream)
            full, rest = divmod(count, share)  # ranks without padding, and the tokens of the one behind them
            here, there = whole.narrow(-2, start, count), shares.narrow(-2, offset, share)
            yield here.narrow(-2, 0, full * share).unflatten(-2, (full, share)), there[:full].movedim(0, -3)
            if rest:
                yield here.narrow(-2, full * share, rest), there[full].narrow(-2, 0, rest)
            start, offset = start + count, offset + share

    def joined(self, shares: torch.Tensor, streams: tuple[Stream, ...]) -> torch.Tensor:
        """All ranks' shares `[degree, ..., tokens of a share, D]` as `[..., tokens, D]`, without their padding."""
        tokens = sum(map(self.count, streams))
        whole = shares.new_empty(*shares.shape[1:-2], tokens, shares.shape[-1])
        for here, there in self.pairs(whole, shares, streams):
            copy(here, there)
        return whole

    def dealt(self, whole: torch.Tensor, streams: tuple[Stream, ...]) -> torch.Tensor:
        """`joined` undone: zeros stand for tokens that don't exist."""
        tokens = sum(map(self.share, streams))
        shares = whole.new_zeros(self.degree, *whole.shape[:-2], tokens, whole.shape[-1])
        for here, there in self.pairs(whole, shares, streams):
            copy(there, here)
        return shares


def shards_of(plan: AttentionPlan, degree: int) -> Shards:
    """How `degree` ranks share the tokens of a forward whose attention follows `plan`."""
    return Shards(plan.image_tokens, plan.padded_text, plan.text_first, degree)


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """`target.copy_(source)` of one dtype, in words of 8 bytes where both have such: a strided copy takes its time by
    the element."""
    wide, narrow = _words(target), _words(source)
    if wide is None or narrow is None:
        target.copy_(source)
    else:
        wide.copy_(narrow)


def _words(x: torch.Tensor) -> torch.Tensor | None:
    """x as integers of 8 bytes; None if its last dimension isn't made of such."""
    count = 8 // x.element_size()
    if x.stride(-1) != 1 or any(n % count for n in (x.shape[-1], x.storage_offset(), *x.stride()[:-1])):
        return None
    return x.view(torch.int64)
