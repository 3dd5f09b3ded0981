"""Matrices in one byte a number: `float8_e4m3fn` (four significant bits) times a power of two for each row.

Since scales are powers of two, what the bytes stand for is exact in every dtype that models are computed in, and to
quantise that again gives the same numbers: a weight that is read back and sent again doesn't change.
"""

from __future__ import annotations

import functools
import math

import torch

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of the format; beyond 464, half way to what would come next, a number is rounded to something else
HALF_WAY = 464 / 512
ROW_SCALES_FROM = (9, 0)  # compute capability of GPUs
MULTIPLE = 16  # of both sizes of a matrix that a GPU multiplies so
SMALLEST_EXPONENT = -126  # of a scale: those below aren't normal numbers in fp32


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`[N, K]` of finite numbers -> bytes `[N, K]` and scales `[N]` fp32: of each row the smallest power of two with
    which its largest number is in range. Numbers are rounded to the nearest, in a tie to the even one."""
    rows = weight.float()
    largest = rows.abs().amax(dim=1) if rows.shape[1] else rows.new_zeros(len(rows))
    mantissa, exponent = largest.clamp(max=_top(weight.dtype)).frexp()  # largest = mantissa * 2^exponent
    power = (exponent - 9 + (mantissa > HALF_WAY)).clamp(min=SMALLEST_EXPONENT)
    scale = (power.to(torch.int32) + 127 << 23).view(torch.float32)  # exactly 2^power
    limit = (_top(weight.dtype) / scale).clamp(max=LARGEST).unsqueeze(1)
    return (rows / scale.unsqueeze(1)).clamp(-limit, limit).to(FP8), scale


def dequantise(stored: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`[N, K]` bytes and `[N]` scales -> the numbers `[N, K]`, in memory of their own. Nothing is rounded."""
    wide = torch.float32 if dtype == torch.float16 else dtype  # small scales are zero in fp16
    if stored.device.type == "cpu":  # where a table is several times as fast as the conversion
        places = stored.view(torch.uint8).flatten().to(torch.int32)
        numbers = _table(wide).index_select(0, places).view(stored.shape)
    else:
        numbers = stored.to(wide)
    return (numbers * scale.to(wide).unsqueeze(1)).to(dtype)


def scaled_product(
    x: torch.Tensor, stored: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """x `[M, K]` bf16, quantised row by row, times a quantised `[N, K]` -> `[M, N]` bf16: the library's product of
    bytes. Nothing has looked whether a row's bits depend on how many there are."""
    rows, row_scale = quantise(x)
    return torch._scaled_mm(
        rows, stored.t(), scale_a=row_scale.unsqueeze(1), scale_b=scale.unsqueeze(0), bias=bias, out_dtype=x.dtype
    )


def why_no_scaled_product(device: torch.device, dtype: torch.dtype) -> str | None:
    """What keeps a device from `scaled_product`, if anything does."""
    if dtype != torch.bfloat16:
        return f"the model is computed in {str(dtype).removeprefix('torch.')}, and they give bfloat16 only"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < ROW_SCALES_FROM:
        return f"{torch.cuda.get_device_name(device)} has none with a scale for each row (compute capability 9.0)"
    return None


def _top(dtype: torch.dtype) -> float:
    """The largest number of four significant bits in a dtype."""
    mantissa, exponent = math.frexp(torch.finfo(dtype).max)
    return math.ldexp(min(mantissa, 15 / 16), exponent)


@functools.cache
def _table(dtype: torch.dtype) -> torch.Tensor:
    """What each byte stands for, `[256]`."""
    with torch.inference_mode(False):
        return torch.arange(256, dtype=torch.uint8, device="cpu").view(FP8).to(dtype)
