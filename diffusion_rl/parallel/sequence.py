"""Sequence parallelism (Ulysses): ranks share a transformer's tokens, and inside attention its heads.

One plan for all families. Before the first block of a stage each rank takes its share of the image tokens and of the
text tokens; everything in a block but attention works on single tokens. Around attention the ranks exchange heads: each
gets all tokens of some heads, puts them in the order that one device would have them in, without the shares' padding,
attends, and the tokens go back. After the stage the shares are gathered. So each head's attention is the very call that
one device would make, and each row of a linear layer a row of the same layer: no bit depends on the degree.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import product
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from engine_control.errors import EngineFaultError
from engine_control.groups import RankGroup
from rl_kernels import AttentionPlan

Stream = Literal["image", "text"]


@dataclass(frozen=True)
class Tokens:
    """Where a tensor has its tokens: along `dim`, those of one stream after those of the other."""

    streams: tuple[Stream, ...]
    dim: int = 1


IMAGE, TEXT = Tokens(("image",)), Tokens(("text",))


@dataclass(frozen=True)
class Stage:
    """A run of blocks whose tokens are dealt out before it and gathered after it.

    blocks: attribute names of the transformer's lists of blocks, as they run. inputs: the first block's arguments that
    are sequences; tables: arguments of every block that hold something for each token (rotary embeddings), one tensor
    or a tuple of them. head: attribute name of the module whose output, a sequence like `output`, is gathered; None:
    the last block. cross_attention: attribute name, within a block, of an attention of the image to text that is no
    input here. Such a text is short beside a video, and whole on every rank, which takes its heads of it.
    """

    blocks: tuple[str, ...] = ("transformer_blocks",)
    inputs: Mapping[str, Tokens] = field(
        default_factory=lambda: {"hidden_states": IMAGE, "encoder_hidden_states": TEXT}
    )
    tables: Mapping[str, Tokens | tuple[Tokens, ...]] = field(default_factory=dict)
    head: str | None = "proj_out"
    output: Tokens = IMAGE
    cross_attention: str | None = None


@dataclass(frozen=True)
class SequenceSpec:
    """Where a transformer's tokens are: its stages, one after the other. Between them every rank has all tokens."""

    stages: tuple[Stage, ...] = (Stage(),)


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

    def order(self, streams: tuple[Stream, ...]) -> list[int]:
        """Where each true token, in the order of one device, stands in all ranks' shares laid end to end."""
        positions, offset, width = [], 0, sum(self.share(s) for s in streams)
        for stream in streams:
            share = self.share(stream)
            positions += [t // share * width + offset + t % share for t in range(self.count(stream))]
            offset += share
        return positions


def shards_of(plan: AttentionPlan, degree: int) -> Shards:
    """How `degree` ranks share the tokens of a forward whose attention follows `plan`."""
    return Shards(plan.image_tokens, plan.padded_text, plan.text_first, degree)


@cache
def _parameters(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a method's arguments, in their order."""
    return tuple(inspect.signature(forward).parameters)[1:]


@lru_cache(maxsize=64)
def _order_on(shards: Shards, streams: tuple[Stream, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(shards.order(streams), device=device)


class SequenceParallel:
    """Makes each of `transformers`, which have one spec, compute together with the same one of the group's other ranks.

    Their forwards are ordinary ones until `sharding` is entered. Inside, every rank of the group must call the same one
    with equal inputs, and each gets the whole output.
    """

    def __init__(self, transformers: Iterable[torch.nn.Module], spec: SequenceSpec, group: RankGroup) -> None:
        self.group = group
        self._exchange: _HeadExchange | None = None
        for transformer, stage in product(transformers, spec.stages):
            blocks = [b for name in stage.blocks for b in transformer.get_submodule(name).children()]
            if not blocks:
                continue
            for block in blocks:
                block.register_forward_pre_hook(_Entrance(self, stage, first=block is blocks[0]), with_kwargs=True)
                if stage.cross_attention is not None:
                    cross = block.get_submodule(stage.cross_attention)
                    cross.register_forward_pre_hook(_Crossing(self, crossing=True))
                    cross.register_forward_hook(_Crossing(self, crossing=False))
            head = blocks[-1] if stage.head is None else transformer.get_submodule(stage.head)
            head.register_forward_hook(_Exit(self, stage))

    @contextmanager
    def sharding(self, shards: Shards) -> Iterator[None]:
        """For one forward of these tokens; enter it inside exact mode, which then sees heads with all their tokens."""
        self._exchange = _HeadExchange(shards, self.group)
        try:
            with self._exchange:
                yield
        finally:
            self._exchange = None


@dataclass(eq=False)
class _Entrance:
    """A hook before each block of a stage: its rank's share of the arguments takes their place."""

    ranks: SequenceParallel
    stage: Stage
    first: bool

    def __call__(self, block: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        exchange = self.ranks._exchange
        if exchange is None:
            return None
        named = {**dict(zip(_parameters(type(block).forward), args, strict=False)), **kwargs}
        if self.first:
            exchange.stage = self.stage
            named |= {name: self._cut(named[name], tokens) for name, tokens in self.stage.inputs.items()}
        for name, tokens in self.stage.tables.items():
            if isinstance(tokens, tuple):
                named[name] = tuple(self._cut(x, t) for x, t in zip(named[name], tokens, strict=True))
            else:
                named[name] = self._cut(named[name], tokens)
        return (), named

    def _cut(self, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        assert self.ranks._exchange is not None
        return self.ranks._exchange.shards.cut_streams(x, tokens, self.ranks.group.rank)


@dataclass(eq=False)
class _Crossing:
    """A hook before, and one behind, an attention to a text that is whole: shapes alone don't tell it from others."""

    ranks: SequenceParallel
    crossing: bool

    def __call__(self, *_: object) -> None:
        if self.ranks._exchange is not None:
            self.ranks._exchange.crossing = self.crossing


@dataclass(eq=False)
class _Exit:
    """A hook behind a stage: what each rank has of its output is gathered."""

    ranks: SequenceParallel
    stage: Stage

    def __call__(self, head: torch.nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor | None:
        exchange = self.ranks._exchange
        if exchange is None:
            return None
        exchange.stage = None
        whole = self.ranks.group.all_gather(output).transpose(0, 1).flatten(1, 2)
        return whole[:, _order_on(exchange.shards, self.stage.output.streams, whole.device)]


class _HeadExchange(TorchFunctionMode):
    """Wraps every attention of this thread in the exchange of heads for tokens and back."""

    def __init__(self, shards: Shards, group: RankGroup) -> None:
        super().__init__()
        self.shards = shards
        self.stage: Stage | None = None
        self.crossing = False
        self._group = group

    def __torch_function__(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        streams = ("image",) if self.crossing else self._streams(query, key, attn_mask)
        order = _order_on(self.shards, streams, query.device)
        exchanged = (query,) if self.crossing else (query, key, value)
        q, *others = _to_heads(torch.stack(exchanged), self._group)[..., order, :]
        k, v = others or (x.chunk(self._group.size, dim=1)[self._group.rank].contiguous() for x in (key, value))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, **options)
        shares = attended.new_zeros(*attended.shape[:2], query.shape[2] * self._group.size, attended.shape[3])
        shares[:, :, order] = attended
        return _to_tokens(shares, self._group)

    def _streams(self, query: torch.Tensor, key: torch.Tensor, attn_mask: torch.Tensor | None) -> tuple[Stream, ...]:
        """Which of the stage's streams the sequence of an attention is made of, in their order."""
        shards = self.shards
        inputs = () if self.stage is None else self.stage.inputs.values()
        order: tuple[Stream, ...] = ("text", "image") if shards.text_first else ("image", "text")
        joint = tuple(stream for stream in order if any(stream in tokens.streams for tokens in inputs))
        for streams in (joint, tuple(stream for stream in joint if stream == "image")):
            tokens = sum(map(shards.count, streams))
            hides_keys = attn_mask is None or attn_mask.shape[1:] == (1, 1, tokens)
            if query.shape == key.shape and query.shape[2] == sum(map(shards.share, streams)) and hides_keys:
                return streams
        raise EngineFaultError(
            f"an attention of {query.shape[2]} x {key.shape[2]} tokens"
            f"{'' if attn_mask is None else f' under a mask {tuple(attn_mask.shape)}'} has no place in a sequence of "
            f"{' and '.join(f'{shards.share(stream)} {stream}' for stream in joint)} tokens a rank",
            hint="Run this model with --sp-degree 1.",
        )


def _to_heads(x: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """x `[n, B, H, share, D]` of all heads and this rank's tokens -> `[n, B, H / size, size * share, D]`."""
    count, batch, heads, share, width = x.shape
    mine = heads // group.size
    parts = x.reshape(count, batch, group.size, mine, share, width).permute(2, 0, 1, 3, 4, 5)
    received = group.all_to_all(parts)
    return received.permute(1, 2, 3, 0, 4, 5).reshape(count, batch, mine, group.size * share, width)


def _to_tokens(x: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """x `[B, H / size, size * share, D]` of this rank's heads -> `[B, H, share, D]` of all heads and its tokens."""
    batch, mine, tokens, width = x.shape
    share = tokens // group.size
    parts = x.reshape(batch, mine, group.size, share, width).permute(2, 0, 1, 3, 4)
    received = group.all_to_all(parts)
    return received.permute(1, 0, 2, 3, 4).reshape(batch, group.size * mine, share, width)
