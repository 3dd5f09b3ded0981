"""Pictures and videos `[B, C, ...]` as kernels read them: C channels at S positions, in one of two memory orders."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rl_kernels.fused import ALIGNMENT, UNIT, block_of


@dataclass(frozen=True)
class Channels:
    """A dense tensor `[B, C, ...]`. last: a position's channels lie side by side, else a channel's positions do."""

    x: torch.Tensor
    last: bool

    @property
    def samples(self) -> int:
        return self.x.shape[0]

    @property
    def count(self) -> int:
        return self.x.shape[1]

    @property
    def positions(self) -> int:
        return self.x[0, 0].numel()

    @property
    def unit(self) -> int:
        """Elements in which the kernels count positions: more than one where whole vectors of them are aligned."""
        return UNIT if self.positions % UNIT == 0 else 1

    def tile(self, elements: int, *, whole: bool = False) -> tuple[int, int]:
        """Channels and positions of a tile of about so many elements that reads memory in order; all channels if
        `whole`. It depends on the shape of one sample and on the memory order alone."""
        if whole:
            elements = max(elements, block_of(self.count))
        channels, positions = block_of(self.count), block_of(self.positions)
        if whole or self.last:
            channels = min(channels, elements)
            return channels, min(elements // channels, positions)
        positions = min(positions, elements)
        return min(elements // positions, channels), positions


def laid_out(x: torch.Tensor) -> Channels:
    """x `[B, C, ...]` itself if it is dense in one of the two orders and aligned for vector loads, else a copy."""
    last = not x.is_contiguous() and x.movedim(1, -1).is_contiguous()
    if x.data_ptr() % ALIGNMENT or not (last or x.is_contiguous()):
        x = x.clone(memory_format=torch.preserve_format if last else torch.contiguous_format)
    return Channels(x, last)


def check_channels(operation: str, x: torch.Tensor) -> None:
    """Raises ValueError unless x is `[B, C, ...]`."""
    if x.dim() < 2:
        raise ValueError(f"{operation} takes x of shape [B, C, ...], got {tuple(x.shape)}")
