"""What the fused operations share: when the kernel runs and when its twin, what a kernel may read, and the gradient.

Every fused operation has one Triton kernel and one twin in `rl_kernels.reference`. On a GPU the kernel computes the
forward, under autograd too, so that a trainer's forward has the rollout's bits; its backward recomputes through the
twin. On a CPU, or without Triton, the twin does both.

A row's bits must not depend on where it is and how many there are. So a kernel is compiled once for a dtype and the
shape of one row, and never for a batch or a token count: the integers that depend on those aren't specialised on, and
`readable` sees to it that every pointer and every stride has the same alignment. Products and sums are rounded one by
one (no fused multiply-add), as torch's own operations round them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

P = ParamSpec("P")
R = TypeVar("R")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
UNIT = 16  # strides reach a kernel in units of so many elements, so that it may rely on their alignment
ALIGNMENT = 16  # bytes that one vector load reads
MAX_BLOCK = 16384  # elements of a row that one program holds in registers
ELEMENTS_PER_THREAD = 16
FEW_ROWS = 128  # the most that a linear layer's rows are padded to; behind fewer, `empty_rows` leaves room
COMPILED = {"enable_fp_fusion": False}

_interpreted: ContextVar[bool] = ContextVar("kernels run on CPU tensors", default=False)


@cache
def triton_is_installed() -> bool:
    """Whether there is a Triton to import; nothing is imported."""
    return importlib.util.find_spec("triton") is not None


@contextmanager
def interpreted_kernels() -> Iterator[None]:
    """Inside, kernels run on CPU tensors too: for tests, in a process started with TRITON_INTERPRET=1.

    The interpreter is right in fp32 only; bf16 is silently wrong there.
    """
    token = _interpreted.set(True)
    try:
        yield
    finally:
        _interpreted.reset(token)


def runs_on_triton(x: torch.Tensor, width: int) -> bool:
    """Whether the kernel or the twin serves rows of `width` elements that live where x does.

    It depends on the row's shape and the device only, never on the number of rows.
    """
    on_device = x.is_cuda or _interpreted.get()
    return on_device and triton_is_installed() and width % UNIT == 0 and width <= MAX_BLOCK


def readable(x: torch.Tensor) -> torch.Tensor:
    """x itself if a kernel can read it where it is, else an aligned contiguous copy.

    A kernel can read what has contiguous rows (the last dimension), strides of multiples of `UNIT` elements in front,
    and an address of a multiple of `ALIGNMENT` bytes: chunks of one wide projection, or slices of a batch, as they are.
    """
    strides = [x.stride(i) for i in range(x.dim() - 1) if x.shape[i] > 1]
    whole_rows = x.shape[-1] == 1 or x.stride(-1) == 1
    aligned = x.data_ptr() % ALIGNMENT == 0
    if whole_rows and aligned and all(s % UNIT == 0 for s in strides):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def units(x: torch.Tensor, dimension: int) -> int:
    """The stride of a dimension in units of `UNIT` elements; 0 where the dimension has one entry only."""
    return x.stride(dimension) // UNIT if x.shape[dimension] > 1 else 0


def empty_rows(like: torch.Tensor, count: int, *shape: int) -> torch.Tensor:
    """`[count, *shape]` for a kernel to write, of `like`'s dtype and device. Behind few rows the memory goes on, so
    that a linear layer that pads them reads on there instead of copying them."""
    return like.new_empty(max(count, FEW_ROWS), *shape)[:count]


def block_of(width: int) -> int:
    """The power of two that holds a row."""
    return 1 << (width - 1).bit_length()


def warps_for(block: int) -> int:
    """Warps of a program that holds `block` elements: a function of the row's shape alone."""
    return max(1, min(16, block // (32 * ELEMENTS_PER_THREAD)))


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, block: int, **constants: Any) -> None:
    """Runs a kernel whose programs hold `block` elements each, on the device of its first argument, a tensor."""
    first = arguments[0]
    elsewhere = first.is_cuda and first.device.index != torch.cuda.current_device()
    with torch.cuda.device(first.device) if elsewhere else nullcontext():
        kernel[grid](*arguments, **constants, num_warps=warps_for(block), **COMPILED)


def differentiable(
    launch: Callable[..., tuple[torch.Tensor, ...]],
    twin: Callable[..., tuple[torch.Tensor, ...]],
    inputs: Sequence[torch.Tensor | None],
) -> tuple[torch.Tensor, ...]:
    """`launch(*inputs)`, with `twin`'s gradients. Both take the same tensors and return the same tuple."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        return _Recomputed.apply(launch, twin, *inputs)
    return launch(*inputs)


class _Recomputed(torch.autograd.Function):
    """Keeps the inputs alone; backward computes the twin's forward again, and differentiates that."""

    @staticmethod
    def forward(ctx: Any, launch: Any, twin: Any, *inputs: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        ctx.twin = twin
        return launch(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        with torch.enable_grad():
            leaves = [
                x if x is None or not wanted else x.detach().requires_grad_()
                for x, wanted in zip(ctx.saved_tensors, needed, strict=True)
            ]
            outputs = ctx.twin(*leaves)
        given = [(y, g) for y, g in zip(outputs, grads, strict=True) if g is not None and y.requires_grad]
        wanted_leaves = [x for x, wanted in zip(leaves, needed, strict=True) if wanted]
        if not given:
            return (None, None, *(None for _ in leaves))
        found = iter(
            torch.autograd.grad([y for y, _ in given], wanted_leaves, [g for _, g in given], allow_unused=True)
        )
        return (None, None, *(next(found) if wanted else None for wanted in needed))


def seen_by_modes(operation: Callable[P, R]) -> Callable[P, R]:
    """Lets torch function modes see the operation as one call, as they see torch's own functions.

    So `observing` records what a forward really called, with its arguments. Inside, the mode doesn't look again.
    """

    @wraps(operation)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        relevant = args[:1] or tuple(kwargs.values())[:1]
        if has_torch_function(relevant):
            return handle_torch_function(call, relevant, *args, **kwargs)
        return operation(*args, **kwargs)

    return call


def check_dtypes(operation: str, **tensors: torch.Tensor | None) -> None:
    """Raises ValueError unless all tensors have one dtype of `DTYPES` and live on one device."""
    named = {name: x for name, x in tensors.items() if x is not None}
    dtypes = {name: x.dtype for name, x in named.items()}
    if len(set(dtypes.values())) != 1 or next(iter(dtypes.values())) not in DTYPES:
        raise ValueError(f"{operation} takes tensors of one dtype out of {DTYPES}, got {dtypes}")
    devices = {name: x.device for name, x in named.items()}
    if len(set(devices.values())) != 1:
        raise ValueError(f"{operation} takes tensors on one device, got {devices}")


def check_shape(operation: str, name: str, x: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless x has that shape."""
    if tuple(x.shape) != shape:
        raise ValueError(f"{operation} takes {name} of shape {shape}, got {tuple(x.shape)}")
