"""The activation of a gated feed-forward layer.

Rounding rule, that of transformers' `act_fn(gate) * up`: silu in fp32, rounded to the input's dtype, times up, rounded
again.
"""

from __future__ import annotations

import torch

from rl_kernels.fused import (
    UNIT,
    block_of,
    check_dtypes,
    differentiable,
    empty_rows,
    launch,
    readable,
    runs_on_triton,
    seen_by_modes,
    units,
)

LARGEST_EXPONENT = 88.0  # exp of it is a finite fp32 number
BLOCK = 1024  # elements of a program


@seen_by_modes
def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`: gate_up `[N, 2 * F]`, gate before up, result `[N, F]`.

    Raises:
        ValueError: not a matrix with an even number of columns, or a dtype other than bf16, fp16 and fp32.
    """
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"silu_mul takes gate_up of shape [N, 2 * F], got {tuple(gate_up.shape)}")
    check_dtypes("silu_mul", gate_up=gate_up)
    width = gate_up.shape[1] // 2
    if not gate_up.numel() or width % UNIT or not runs_on_triton(gate_up, UNIT):
        return _twin(gate_up)[0]
    return differentiable(_launch, _twin, (gate_up,))[0]


def _twin(gate_up: torch.Tensor) -> tuple[torch.Tensor]:
    """From exp, for the library's silu gives the last few elements of a tensor other bits on a CPU."""
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.float().contiguous()
    silu = wide / (1 + torch.exp((-wide).clamp_max(LARGEST_EXPONENT)))
    return (silu.to(gate.dtype) * up,)


def _launch(gate_up: torch.Tensor) -> tuple[torch.Tensor]:
    from rl_kernels.jit.silu_mul import silu_mul as kernel

    x = readable(gate_up)
    count, width = x.shape[0], x.shape[1] // 2
    out = empty_rows(x, count, width)
    block = min(block_of(width), BLOCK)
    launch(
        kernel,
        (count, -(-width // block)),
        *(x, out, units(x, 0)),
        WIDTH=width,
        BLOCK=block,
        LARGEST_EXPONENT=LARGEST_EXPONENT,
        block=block,
    )
    return (out,)
