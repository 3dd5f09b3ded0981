"""Linear layers of many experts as one product: each row is multiplied by the matrix of its expert.

Rows of one expert are computed in tiles of so many, whatever there is beside them. A row's sum runs over K in one order
in fp32, in one shape of tile, and is rounded once: its bits depend on its numbers and its expert's matrix. Which
expert a tile has is found on the device, from the numbers of rows; nothing waits, and a CUDA graph can hold it.

A matrix may be kept in one byte a number (`float8_e4m3fn`) with a power of two for each of its rows. What the bytes
stand for is the same in the computed dtype but for those powers, by which the sum is multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rl_kernels import reference
from rl_kernels.fused import (
    ELEMENTS_PER_THREAD,
    block_of,
    check_dtypes,
    check_shape,
    empty_rows,
    launch,
    readable,
    runs_on_triton,
)
from rl_kernels.routing import Places

FP8 = torch.float8_e4m3fn
FP8_FROM = (8, 9)  # compute capability of GPUs that convert it


@dataclass(frozen=True)
class Tile:
    """What one program computes at a time: rows of one expert x rows of its matrix, `depth` of K in one product.

    warps, stages: of Triton; `stages - 1` parts of K are on their way at a time.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


# 64 rows are the fewest of Hopper's products. With fewer rows of an expert a product waits for its matrix, of which it
# computes more than it needs in the meantime; four stages take 96 KiB of shared memory.
_HALF = Tile(64, 128, 64, warps=4, stages=4)
TILES = {
    torch.bfloat16: _HALF,
    torch.float16: _HALF,
    torch.float32: Tile(32, 32, 32, warps=4, stages=2),  # without tensor cores
}


@dataclass(frozen=True)
class ExpertMatrices:
    """weight `[E, N, K]`, contiguous; scales `[E, N]` fp32 if it is in bytes."""

    weight: torch.Tensor
    scales: torch.Tensor | None = None


def runs_grouped(device: torch.device, k: int, *, quantised: bool) -> bool:
    """Whether there is a kernel for matrices of K columns on that device; else the twin would compute."""
    if quantised and device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_FROM:
        return False
    return runs_on_triton(torch.empty(0, device=device), k)


def gated_grouped_linear(x: torch.Tensor, matrices: ExpertMatrices, places: Places) -> torch.Tensor:
    """x `[rows, K]` and experts' `[2 * F, K]`, gate before up -> `silu(gate) * up` of each place, `[places, F]` in
    `places.order`, rounded to the dtype after each (`silu_mul`).

    Raises:
        ValueError: shapes or dtypes that don't fit, an odd number of rows of a matrix, or a gradient is wanted.
    """
    rows, width = len(places.order) // places.each, matrices.weight.shape[1]
    _check("gated_grouped_linear", x, matrices, places, rows=rows)
    if width % 2:
        raise ValueError(f"gated_grouped_linear takes matrices of 2 * F rows, got {width}")
    if not _on_triton(x, matrices):
        return reference.gated_grouped_linear(x, matrices, places)
    out = empty_rows(x, len(places.order), width // 2)
    _launch(x, matrices, places, out, gated=True)
    return out


def grouped_linear(x: torch.Tensor, matrices: ExpertMatrices, places: Places) -> torch.Tensor:
    """x `[places, K]` in `places.order` and experts' `[N, K]` -> the products `[places, N]`, each at its place.

    Raises:
        ValueError: shapes or dtypes that don't fit, or a gradient is wanted.
    """
    _check("grouped_linear", x, matrices, places, rows=len(places.order))
    if not _on_triton(x, matrices):
        return reference.grouped_linear(x, matrices, places)
    out = empty_rows(x, len(places.order), matrices.weight.shape[1])
    _launch(x, matrices, places, out, gated=False)
    return out


def _on_triton(x: torch.Tensor, matrices: ExpertMatrices) -> bool:
    return len(x) > 0 and runs_grouped(x.device, x.shape[1], quantised=matrices.scales is not None)


def _launch(x: torch.Tensor, matrices: ExpertMatrices, places: Places, out: torch.Tensor, *, gated: bool) -> None:
    """As many programs as there may be tiles: every expert's last one may be nearly empty."""
    from rl_kernels.jit.grouped_linear import grouped_linear as kernel

    tile, count = TILES[x.dtype], len(places.order)
    experts, n, k = matrices.weight.shape
    tiles = count // tile.rows + min(experts, count)
    weight = readable(matrices.weight)
    launch(
        kernel,
        (-(-n // tile.columns), tiles),
        *(readable(x), weight, weight if matrices.scales is None else matrices.scales),
        *(places.order, places.counts, out),
        **{"EACH": places.each, "N": n, "K": k, "EXPERTS": experts, "BLOCK_EXPERTS": block_of(experts)},
        **{"GATED": gated, "QUANTISED": matrices.scales is not None},
        **{"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth},
        block=tile.warps * 32 * ELEMENTS_PER_THREAD,
        num_stages=tile.stages,
    )


def _check(operation: str, x: torch.Tensor, matrices: ExpertMatrices, places: Places, *, rows: int) -> None:
    weight, scales = matrices.weight, matrices.scales
    if weight.dim() != 3 or not weight.is_contiguous():
        raise ValueError(f"{operation} takes a contiguous weight [E, N, K], got {tuple(weight.shape)}")
    check_shape(operation, "x", x, (rows, weight.shape[2]))
    check_shape(operation, "counts", places.counts, (len(weight),))
    check_dtypes(operation, x=x, weight=weight if scales is None else None)
    if scales is not None:
        check_shape(operation, "scales", scales, tuple(weight.shape[:2]))
        if weight.dtype != FP8 or scales.dtype != torch.float32:
            raise ValueError(
                f"{operation} takes bytes in {FP8} with scales in fp32, got {weight.dtype}, {scales.dtype}"
            )
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        raise ValueError(f"{operation} has no gradient: call it under torch.no_grad()")
