"""Sequence parallelism (Ulysses): ranks share a transformer's tokens, and inside attention its heads.

One plan for all families. Before the first block each rank takes its share of the image tokens and of the text tokens;
everything in a block but attention works on single tokens. Around attention the ranks exchange heads: each gets all
tokens of some heads, puts them in the order that one device would have them in, without padding, attends, and the
tokens go back. After the last layer that works on tokens the shares are gathered. So each head's attention is the very
call that one device would make, and each row of a linear layer a row of the same layer: no bit depends on the degree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from engine_control.errors import EngineFaultError
from engine_control.groups import RankGroup
from rl_kernels import AttentionPlan

Stream = Literal["image", "text"]


@dataclass(frozen=True)
class SequenceSpec:
    """Where a transformer's tokens are: attribute names of its list of blocks and of its last layer on tokens.

    inputs: the blocks' arguments that are sequences `[B, tokens, D]`; tables: arguments that hold something for each
    token, token axis first (rotary embeddings), as a tuple with one entry a stream.
    """

    blocks: str = "transformer_blocks"
    head: str = "proj_out"
    inputs: Mapping[str, Stream] = field(
        default_factory=lambda: {"hidden_states": "image", "encoder_hidden_states": "text"}
    )
    tables: Mapping[str, tuple[Stream, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Shards:
    """How the tokens of one forward are dealt out: each stream is padded at its end to `degree` shares of one size."""

    image_tokens: int
    text_tokens: int
    text_first: bool
    degree: int

    def share(self, stream: Stream) -> int:
        """Tokens of that stream on each rank, the last ranks' padding included."""
        return -(-(self.image_tokens if stream == "image" else self.text_tokens) // self.degree)

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

    def order(self, streams: tuple[Stream, ...]) -> list[int]:
        """Where each true token, in the order of one device, stands in all ranks' shares laid end to end."""
        positions, offset, width = [], 0, sum(self.share(s) for s in streams)
        for stream in streams:
            share, tokens = self.share(stream), self.image_tokens if stream == "image" else self.text_tokens
            positions += [t // share * width + offset + t % share for t in range(tokens)]
            offset += share
        return positions


def shards_of(plan: AttentionPlan, degree: int) -> Shards:
    """How `degree` ranks share the tokens of a forward whose attention follows `plan`."""
    return Shards(plan.image_tokens, plan.padded_text, plan.text_first, degree)


@lru_cache(maxsize=64)
def _order_on(shards: Shards, streams: tuple[Stream, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(shards.order(streams), device=device)


class SequenceParallel:
    """Makes `transformer` compute together with the same transformer of the group's other ranks.

    Its forward is an ordinary one until `sharding` is entered. Inside, every rank of the group must call it with equal
    inputs, and each gets the whole output.
    """

    def __init__(self, transformer: torch.nn.Module, spec: SequenceSpec, group: RankGroup) -> None:
        self.group = group
        self._spec = spec
        self._shards: Shards | None = None
        blocks = list(transformer.get_submodule(spec.blocks).children())
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(self._enter_first if index == 0 else self._enter, with_kwargs=True)
        transformer.get_submodule(spec.head).register_forward_hook(self._gather)

    @contextmanager
    def sharding(self, shards: Shards) -> Iterator[None]:
        """For one forward of these tokens; enter it inside exact mode, which then sees heads with all their tokens."""
        self._shards = shards
        try:
            with _HeadExchange(shards, self.group):
                yield
        finally:
            self._shards = None

    def _enter_first(self, block: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._shards is None:
            return None
        cut = {
            name: self._shards.cut(kwargs[name], stream, self.group.rank, dim=1)
            for name, stream in self._spec.inputs.items()
        }
        return self._enter(block, args, {**kwargs, **cut})

    def _enter(self, block: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._shards is None:
            return None
        cut = {
            name: tuple(
                self._shards.cut(table, stream, self.group.rank, dim=0)
                for table, stream in zip(kwargs[name], streams, strict=True)
            )
            for name, streams in self._spec.tables.items()
        }
        return args, {**kwargs, **cut}

    def _gather(self, head: torch.nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor | None:
        if self._shards is None:
            return None
        whole = self.group.all_gather(output).transpose(0, 1).flatten(1, 2)
        return whole[:, : self._shards.image_tokens].contiguous()


class _HeadExchange(TorchFunctionMode):
    """Wraps every attention of this thread in the exchange of heads for tokens and back."""

    def __init__(self, shards: Shards, group: RankGroup) -> None:
        super().__init__()
        self._shards = shards
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
        streams = self._streams(query, key, attn_mask)
        order = _order_on(self._shards, streams, query.device)
        whole = _to_heads(torch.stack([query, key, value]), self._group)[..., order, :]
        attended = F.scaled_dot_product_attention(*whole.unbind(0), **options)
        shares = attended.new_zeros(*attended.shape[:2], query.shape[2] * self._group.size, attended.shape[3])
        shares[:, :, order] = attended
        return _to_tokens(shares, self._group)

    def _streams(self, query: torch.Tensor, key: torch.Tensor, attn_mask: torch.Tensor | None) -> tuple[Stream, ...]:
        """Which streams the sequence of an attention is made of, in their order."""
        image, text = self._shards.share("image"), self._shards.share("text")
        if query.shape == key.shape and attn_mask is None:
            if query.shape[2] == image + text:
                return ("text", "image") if self._shards.text_first else ("image", "text")
            if query.shape[2] == image:
                return ("image",)
        raise EngineFaultError(
            f"an attention of {query.shape[2]} x {key.shape[2]} tokens has no place in a sequence of {image} image and "
            f"{text} text tokens a rank",
            hint="Run this model with --sp-degree 1.",
        )


def _to_heads(x: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """x `[3, B, H, share, D]` of all heads and this rank's tokens -> `[3, B, H / size, size * share, D]`."""
    three, batch, heads, share, width = x.shape
    mine = heads // group.size
    parts = x.reshape(three, batch, group.size, mine, share, width).permute(2, 0, 1, 3, 4, 5)
    received = group.all_to_all(parts)
    return received.permute(1, 2, 3, 0, 4, 5).reshape(three, batch, mine, group.size * share, width)


def _to_tokens(x: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """x `[B, H / size, size * share, D]` of this rank's heads -> `[B, H, share, D]` of all heads and its tokens."""
    batch, mine, tokens, width = x.shape
    share = tokens // group.size
    parts = x.reshape(batch, mine, group.size, share, width).permute(2, 0, 1, 3, 4)
    received = group.all_to_all(parts)
    return received.permute(1, 0, 2, 3, 4).reshape(batch, group.size * mine, share, width)
