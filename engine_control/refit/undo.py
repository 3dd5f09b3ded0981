"""The old bytes of weights that were written, until the commit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

Key = tuple[str, str]
"""A module's name and a tensor's."""

ALONE_BYTES = 8 << 20  # of a tensor from which on a copy of its own is the faster one
DEVICE_MARGIN_BYTES = 1 << 30  # of a GPU's free memory, left to everything else


class UndoLog:
    """Copies beside the weights, on the host of those that lie there; of weights on a GPU where there is no room for
    more, in pinned host memory."""

    def __init__(self) -> None:
        self._old: dict[Key, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self.place: Literal["device", "host"] = "device"

    def keep(self, pieces: Sequence[tuple[Key, torch.Tensor]]) -> None:
        """Copies each live tensor; call it before they are written."""
        lives = [live for _, live in pieces]
        copies = self._room_for(lives)
        copy_all(copies, lives)
        for (key, live), copy in zip(pieces, copies, strict=True):
            self._old.setdefault(key, []).append((live, copy))

    def restore(self, key: Key) -> None:
        """Afterwards that weight is as it was; what had not been written stays."""
        for live, old in reversed(self._old.pop(key, [])):
            live.copy_(old)

    def restore_all(self) -> None:
        """Afterwards everything is as it was."""
        for key in reversed(list(self._old)):
            self.restore(key)

    def _room_for(self, lives: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        on_gpu = [live for live in lives if live.device.type == "cuda"]
        if on_gpu and self.place == "device":
            device = on_gpu[0].device
            free, _ = torch.cuda.mem_get_info(device)
            unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            if free + unused < sum(live.nbytes for live in on_gpu) + DEVICE_MARGIN_BYTES:
                self.place = "host"
        if self.place == "device":
            try:
                return [torch.empty_like(live, memory_format=torch.preserve_format) for live in lives]
            except torch.OutOfMemoryError:  # what is free is in pieces
                self.place = "host"
        pinned = [live.device.type == "cuda" for live in lives]
        return [
            torch.empty(live.shape, dtype=live.dtype, pin_memory=pin) for live, pin in zip(lives, pinned, strict=True)
        ]


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies each source into its target: the small ones by common launches, which reach three quarters of the rate
    that a large copy has. Those between other devices than the rest go together."""
    small: dict[tuple[torch.device, torch.device], list[int]] = {}
    for index, (target, source) in enumerate(zip(targets, sources, strict=True)):
        if target.nbytes >= ALONE_BYTES:
            target.copy_(source)
        else:
            small.setdefault((target.device, source.device), []).append(index)
    for alike in small.values():
        torch._foreach_copy_([targets[index] for index in alike], [sources[index] for index in alike])
