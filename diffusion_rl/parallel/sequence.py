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
from functools import cache
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
            _copy(here, there)
        return whole

    def dealt(self, whole: torch.Tensor, streams: tuple[Stream, ...]) -> torch.Tensor:
        """`joined` undone: zeros stand for tokens that don't exist."""
        tokens = sum(map(self.share, streams))
        shares = whole.new_zeros(self.degree, *whole.shape[:-2], tokens, whole.shape[-1])
        for here, there in self.pairs(whole, shares, streams):
            _copy(there, here)
        return shares


def shards_of(plan: AttentionPlan, degree: int) -> Shards:
    """How `degree` ranks share the tokens of a forward whose attention follows `plan`."""
    return Shards(plan.image_tokens, plan.padded_text, plan.text_first, degree)


@cache
def _parameters(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a method's arguments, in their order."""
    return tuple(inspect.signature(forward).parameters)[1:]


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
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
            named |= {name: exchange.share(named[name], tokens) for name, tokens in self.stage.inputs.items()}
        for name, tokens in self.stage.tables.items():
            if isinstance(tokens, tuple):
                named[name] = tuple(exchange.table(x, t) for x, t in zip(named[name], tokens, strict=True))
            else:
                named[name] = exchange.table(named[name], tokens)
        return (), named


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
        return exchange.shards.joined(self.ranks.group.all_gather(output), self.stage.output.streams)


class _HeadExchange(TorchFunctionMode):
    """Wraps every attention of this thread in the exchange of heads for tokens and back."""

    def __init__(self, shards: Shards, group: RankGroup) -> None:
        super().__init__()
        self.shards = shards
        self.stage: Stage | None = None
        self.crossing = False
        self._group = group
        self._tables: dict[tuple[int, Tokens], tuple[torch.Tensor, torch.Tensor]] = {}

    def share(self, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        """This rank's share of x."""
        return self.shards.cut_streams(x, tokens, self._group.rank)

    def table(self, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        """This rank's share of what every block is given: cut for the first one, and kept beside the whole, whose
        identity it is known by."""
        key = (id(x), tokens)
        if key not in self._tables:
            self._tables[key] = x, self.share(x, tokens)
        return self._tables[key][1]

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
        exchanged = (query,) if self.crossing else (query, key, value)
        q, *others = self.shards.joined(_to_heads(exchanged, self._group), streams).unbind(0)
        k, v = others or (x.chunk(self._group.size, dim=1)[self._group.rank].contiguous() for x in (key, value))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, **options)
        return _to_tokens(self.shards.dealt(attended, streams), self._group)

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


def _to_heads(tensors: tuple[torch.Tensor, ...], group: RankGroup) -> torch.Tensor:
    """n tensors `[B, H, share, D]` of all heads and this rank's tokens -> `[size, n, B, H / size, share, D]`: every
    rank's tokens of this rank's heads. One exchange, for which each element is written once."""
    batch, heads, share, width = tensors[0].shape
    mine = heads // group.size
    given = tensors[0].new_empty(group.size, len(tensors), batch, mine, share, width)
    for index, x in enumerate(tensors):
        _copy(given[:, index], x.unflatten(1, (group.size, mine)).transpose(0, 1))
    return group.all_to_all(given)


def _to_tokens(shares: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """`[size, B, H / size, share, D]`, every rank's tokens of this rank's heads -> `[B, H, share, D]` of all heads and
    this rank's tokens. It lies as `[B, share, H, D]`, which is how the layer behind an attention reads it."""
    received = group.all_to_all(shares)
    size, batch, mine, share, width = received.shape
    laid = received.new_empty(batch, share, size, mine, width)
    _copy(laid.permute(2, 0, 3, 1, 4), received)
    return laid.flatten(2, 3).transpose(1, 2)
