"""Passes over many tensors in one launch, which an engine may bring for its device. Without them torch does the same,
a few calls for each tensor, with the same results bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class WeightKernels(Protocol):
    """Kernels for the tensors of one device, on its current stream."""

    device: torch.device

    def reads(self, tensor: torch.Tensor) -> bool:
        """Whether they can work on the tensor where it lies. They can on what torch allocates there, contiguous."""

    def row_sums(
        self, parts: Sequence[torch.Tensor], first_rows: Sequence[int], factors: torch.Tensor, sums: torch.Tensor
    ) -> None:
        """What `checksum` calls the sums of the first level. Each part's bytes, in rows that the last of is filled with
        zeros, times factors `[ROW, COLUMNS]` int8, go to sums `[rows, COLUMNS]` int32 from that part's first row on."""

    def replace(
        self, lives: Sequence[torch.Tensor], news: Sequence[torch.Tensor], olds: Sequence[int] | None
    ) -> torch.Tensor:
        """Copies each live tensor to the address in `olds` (None: nowhere), and each new one over the live one.

        The elements of all have one size, and each new tensor is of its live one's shape and dtype. Returns int8
        `[tensors]`, 1 where the new one is of floating point and holds NaN or infinity, without waiting for the device.
        An error means that nothing was written.
        """
