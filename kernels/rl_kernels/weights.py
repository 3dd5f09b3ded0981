"""What a refit does with the bytes of many tensors, one launch for all of them.

A library's call for each of two thousand tensors costs the host more than the device takes. Here the host makes a table
of addresses, and a program for each block of `BLOCK` bytes finds its work there. The sums are integers and the copies
are bytes, so there is nothing to certify: results are those of `engine_control`'s own torch code, bit for bit.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from rl_kernels.fused import ALIGNMENT, triton_is_installed
from rl_kernels.staging import to_device

logger = logging.getLogger(__name__)

BLOCK = 128 << 10  # bytes of a program's work
PART = 16 << 10  # bytes that a program has in registers
ROW, COLUMNS = 1024, 8  # of the digest
PADDED = 16  # columns, the fewest that tensor cores multiply
SLICE = 128  # bytes of a row that are multiplied at once
NEVER = (0, 1)
NON_FINITE: dict[torch.dtype, tuple[int, int]] = {
    torch.bfloat16: (0x7F80, 0x7F80),
    torch.float16: (0x7C00, 0x7C00),
    torch.float32: (0x7F800000, 0x7F800000),
    torch.float64: (0x7FF << 52, 0x7FF << 52),
    torch.float8_e4m3fn: (0x7F, 0x7F),
    torch.float8_e5m2: (0x7C, 0x7C),
    torch.float8_e4m3fnuz: (0xFF, 0x80),
    torch.float8_e5m2fnuz: (0xFF, 0x80),
    torch.float8_e8m0fnu: (0xFF, 0xFF),
}
"""NaN and infinity of each dtype: the bits that tell, and what they are then."""


class TritonWeights:
    """An `engine_control.weight_kernels.WeightKernels` for one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def reads(self, tensor: torch.Tensor) -> bool:
        """Whether the kernels can work on it where it lies: on this device, contiguous, of a whole vector's address.
        What only stands for other tensors, such as a DTensor, lies nowhere."""
        if tensor.device != self.device or tensor.layout != torch.strided or tensor.element_size() > 8:
            return False
        address = tensor.data_ptr()
        return address % ALIGNMENT == 0 and tensor.is_contiguous() and (address != 0 or tensor.numel() == 0)

    def row_sums(
        self, parts: Sequence[torch.Tensor], first_rows: Sequence[int], factors: torch.Tensor, sums: torch.Tensor
    ) -> None:
        """Writes the products of each part's rows of `ROW` bytes, the last one filled with zeros, and the factors.

        Of the parts `reads` says yes. first_rows: where the rows of each begin in sums. factors `[ROW, COLUMNS]` int8,
        whose columns are contiguous; sums `[rows, COLUMNS]` int32, contiguous.

        Raises:
            ValueError: factors or sums are laid out otherwise.
        """
        if factors.shape != (ROW, COLUMNS) or not factors.t().is_contiguous() or not sums.is_contiguous():
            raise ValueError(f"row_sums takes factors of {ROW} x {COLUMNS} by columns and contiguous sums")
        from rl_kernels.jit.weights import row_sums as kernel

        sizes = np.array([part.nbytes for part in parts], dtype=np.int64)
        owner, offset = _blocks(sizes)
        if not len(owner):
            return
        table = np.stack(
            [
                np.array([part.data_ptr() for part in parts], dtype=np.int64)[owner] + offset,
                np.minimum(sizes[owner] - offset, BLOCK),
                np.array(first_rows, dtype=np.int64)[owner] + offset // ROW,
            ]
        )
        shape = {"ROWS": BLOCK // ROW, "ROW": ROW, "COLUMNS": COLUMNS, "PADDED": PADDED, "SLICE": SLICE}
        with self._current():
            kernel[(len(owner),)](
                to_device(torch.from_numpy(table), self.device),
                factors,
                sums,
                len(owner),
                **shape,
                num_warps=4,
                num_stages=4,
            )

    def replace(
        self, lives: Sequence[torch.Tensor], news: Sequence[torch.Tensor], olds: Sequence[int] | None
    ) -> torch.Tensor:
        """Copies each live tensor to the address in `olds` (None: nowhere), and each new one over the live one.

        Of all of them `reads` says yes, and their elements have one size; new is of live's shape and dtype, and the
        addresses are multiples of `ALIGNMENT`. Returns int8 `[tensors]`, 1 where the new one holds NaN or infinity,
        without waiting for the device. An error means that nothing was written.
        """
        from rl_kernels.jit.weights import replace as kernel

        bad = torch.zeros(len(lives), dtype=torch.int8, device=self.device)
        size = lives[0].element_size()
        owner, offset = _blocks(np.array([live.nbytes for live in lives], dtype=np.int64))
        if not len(owner):
            return bad
        rows = [
            (live.data_ptr(), new.data_ptr(), old, live.numel(), index, *NON_FINITE.get(live.dtype, NEVER))
            for index, (live, new, old) in enumerate(zip(lives, news, olds or [0] * len(lives), strict=True))
        ]
        table = np.array(rows, dtype=np.int64)[owner].T.copy()
        table[:3] += offset
        table[3] = np.minimum(table[3] - offset // size, BLOCK // size)
        shape = {"ITEM": _integer(size), "ITEMS": BLOCK // size, "PART": PART // size, "KEEP": olds is not None}
        with self._current():
            kernel[(len(owner),)](
                to_device(torch.from_numpy(table), self.device), bad, len(owner), **shape, num_warps=8
            )
        return bad

    def _current(self) -> Any:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()


def weight_kernels(device: torch.device) -> TritonWeights | None:
    """The kernels for that device, compiled for the dtypes of most models; None where there is no Triton for it, or one
    that can't compile (it needs a C compiler)."""
    if device.type != "cuda" or not triton_is_installed():
        return None
    made = TritonWeights(torch.device("cuda", torch.cuda.current_device()) if device.index is None else device)
    try:
        _compile(made)
    except torch.AcceleratorError:
        raise  # nothing works on this device any more
    except Exception as error:
        logger.warning("torch writes and digests weights, since Triton can't compile here: %s", error)
        return None
    return made


def _compile(kernels: TritonWeights) -> None:
    """Runs each kernel once, or the first refit would wait for the compiler while the engine stands still."""
    for dtype in (torch.bfloat16, torch.float32):
        live, new, old = (torch.zeros(1, dtype=dtype, device=kernels.device) for _ in range(3))
        kernels.replace([live], [new], [old.data_ptr()])
        kernels.replace([live], [new], None)
    factors = torch.zeros(COLUMNS, ROW, dtype=torch.int8, device=kernels.device).t()
    kernels.row_sums([live], [0], factors, torch.zeros(1, COLUMNS, dtype=torch.int32, device=kernels.device))


def _blocks(sizes: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """For each block the index of its tensor, and the bytes before it in that tensor."""
    counts = -(-sizes // BLOCK)
    owner = np.repeat(np.arange(len(sizes)), counts)
    before = np.repeat(np.cumsum(counts) - counts, counts)
    return owner, (np.arange(len(owner)) - before) * BLOCK


def _integer(size: int) -> Any:
    """Triton's integer of that many bytes."""
    import triton.language as tl

    return {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}[size]
