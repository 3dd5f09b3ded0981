"""How ranks that share a forward's tokens exchange them for heads, and gather them again: by collectives, or by writing
each other's memory (`peers`). Bytes are moved and nothing is computed, so no bit depends on the way."""

from __future__ import annotations

from typing import Protocol

import torch

from diffusion_rl.parallel.shards import Shards, Stream, copy
from engine_control.groups import RankGroup

Streams = tuple[Stream, ...]


class Exchange(Protocol):
    """All ranks of the group make the same calls in one order. What `to_heads` returns may be overwritten by the next
    such call: an attention has read it by then, in the order of the stream. All else is a tensor of its own, since a
    block may read what its first attention said of the text after its second one.
    """

    group: RankGroup

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can hold the calls."""

    def to_heads(self, tensors: tuple[torch.Tensor, ...], shards: Shards, streams: Streams) -> torch.Tensor:
        """n tensors `[B, H, share, D]` of all heads and this rank's tokens -> `[n, B, H / size, tokens, D]`: all
        tokens of this rank's heads, in the order of one device and without padding."""

    def to_tokens(self, attended: torch.Tensor, shards: Shards, streams: Streams) -> torch.Tensor:
        """`to_heads` undone, for one tensor: `[B, H / size, tokens, D]` -> `[B, H, share, D]`. It lies as
        `[B, share, H, D]`, which is how the layer behind an attention reads it; its padding is zeros."""

    def gather(self, share: torch.Tensor, shards: Shards, streams: Streams) -> torch.Tensor:
        """`[B, share, D]` of each rank -> `[B, tokens, D]` on every rank."""

    def give_back(self) -> None:
        """Drops the memory that it keeps between forwards. No graph that was captured with it may be left."""

    def check(self) -> None:
        """
        Raises:
            EngineDiedError: an exchange has ended without all ranks, so what was computed since is worthless.
        """

    def abort(self) -> None:
        """Ends an exchange that waits for a rank that is gone; callable from any thread, and again."""


class Collectives:
    """Through the group's collectives: one all-to-all each way."""

    capturable = False

    def __init__(self, group: RankGroup) -> None:
        self.group = group

    def to_heads(self, tensors: tuple[torch.Tensor, ...], shards: Shards, streams: Streams) -> torch.Tensor:
        batch, heads, share, width = tensors[0].shape
        size, mine = self.group.size, heads // self.group.size
        given = tensors[0].new_empty(size, len(tensors), batch, mine, share, width)
        for index, x in enumerate(tensors):
            copy(given[:, index], x.unflatten(1, (size, mine)).transpose(0, 1))
        return shards.joined(self.group.all_to_all(given), streams)

    def to_tokens(self, attended: torch.Tensor, shards: Shards, streams: Streams) -> torch.Tensor:
        received = self.group.all_to_all(shards.dealt(attended, streams))
        size, batch, mine, share, width = received.shape
        laid = received.new_empty(batch, share, size, mine, width)
        copy(laid.permute(2, 0, 3, 1, 4), received)
        return laid.flatten(2, 3).transpose(1, 2)

    def gather(self, share: torch.Tensor, shards: Shards, streams: Streams) -> torch.Tensor:
        return shards.joined(self.group.all_gather(share), streams)

    def give_back(self) -> None:
        """It keeps none."""

    def check(self) -> None:
        """Collectives raise by themselves."""

    def abort(self) -> None:
        """The group's own `abort` does it."""
