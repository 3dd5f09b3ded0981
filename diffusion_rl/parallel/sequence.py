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
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from diffusion_rl.parallel.exchange import Exchange
from diffusion_rl.parallel.shards import IMAGE, TEXT, Shards, Stream, Tokens
from engine_control.errors import EngineFaultError


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


@cache
def _parameters(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a method's arguments, in their order."""
    return tuple(inspect.signature(forward).parameters)[1:]


class SequenceParallel:
    """Makes each of `transformers`, which have one spec, compute together with the same one of the group's other ranks.

    Their forwards are ordinary ones until `sharding` is entered. Inside, every rank of the group must call the same one
    with equal inputs, and each gets the whole output.
    """

    def __init__(self, transformers: Iterable[torch.nn.Module], spec: SequenceSpec, exchange: Exchange) -> None:
        self.exchange = exchange
        self._forward: _HeadExchange | None = None
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
        self._forward = _HeadExchange(shards, self.exchange)
        try:
            with self._forward:
                yield
        finally:
            self._forward = None


@dataclass(eq=False)
class _Entrance:
    """A hook before each block of a stage: its rank's share of the arguments takes their place."""

    ranks: SequenceParallel
    stage: Stage
    first: bool

    def __call__(self, block: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        forward = self.ranks._forward
        if forward is None:
            return None
        named = {**dict(zip(_parameters(type(block).forward), args, strict=False)), **kwargs}
        if self.first:
            forward.stage = self.stage
            named |= {name: forward.share(named[name], tokens) for name, tokens in self.stage.inputs.items()}
        for name, tokens in self.stage.tables.items():
            if isinstance(tokens, tuple):
                named[name] = tuple(forward.table(x, t) for x, t in zip(named[name], tokens, strict=True))
            else:
                named[name] = forward.table(named[name], tokens)
        return (), named


@dataclass(eq=False)
class _Crossing:
    """A hook before, and one behind, an attention to a text that is whole: shapes alone don't tell it from others."""

    ranks: SequenceParallel
    crossing: bool

    def __call__(self, *_: object) -> None:
        if self.ranks._forward is not None:
            self.ranks._forward.crossing = self.crossing


@dataclass(eq=False)
class _Exit:
    """A hook behind a stage: what each rank has of its output is gathered."""

    ranks: SequenceParallel
    stage: Stage

    def __call__(self, head: torch.nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor | None:
        forward = self.ranks._forward
        if forward is None:
            return None
        forward.stage = None
        return self.ranks.exchange.gather(output, forward.shards, self.stage.output.streams)


class _HeadExchange(TorchFunctionMode):
    """Wraps every attention of this thread in the exchange of heads for tokens and back."""

    def __init__(self, shards: Shards, exchange: Exchange) -> None:
        super().__init__()
        self.shards = shards
        self.stage: Stage | None = None
        self.crossing = False
        self._exchange = exchange
        self._tables: dict[tuple[int, Tokens], tuple[torch.Tensor, torch.Tensor]] = {}

    def share(self, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        """This rank's share of x."""
        return self.shards.cut_streams(x, tokens, self._exchange.group.rank)

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
        q, *others = self._exchange.to_heads(exchanged, self.shards, streams).unbind(0)
        group = self._exchange.group
        k, v = others or (x.chunk(group.size, dim=1)[group.rank].contiguous() for x in (key, value))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, **options)
        return self._exchange.to_tokens(attended, self.shards, streams)

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
