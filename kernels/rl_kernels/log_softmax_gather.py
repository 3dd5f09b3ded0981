"""Log-probabilities over a vocabulary, each row by itself and in one order of addition."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from rl_kernels.fused import (
    ALIGNMENT,
    UNIT,
    block_of,
    check_dtypes,
    differentiable,
    launch,
    runs_on_triton,
    seen_by_modes,
)

BLOCK = 4096  # numbers of a row that a program looks at together
BLOCK_IDS = 64


@seen_by_modes
def row_log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """`x - log(sum(exp(x)))` of each row: logits fp32 `[N, V]`, result fp32 `[N, V]`.

    Raises:
        ValueError: logits that aren't a matrix in fp32.
    """
    _check("row_log_softmax", logits)
    if not logits.numel() or not runs_on_triton(logits, UNIT):
        return _twin(logits)[0]
    return differentiable(_launch, _twin, (logits,))[0]


@seen_by_modes
def gather_log_probs(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """`row_log_softmax(logits)` at ids, bit for bit: logits fp32 `[N, V]`, ids `[N, k]` int64, result fp32 `[N, k]`.

    On a GPU the other log-probabilities are never written, and an id outside of the vocabulary gets NaN.

    Raises:
        ValueError: logits that aren't a matrix in fp32, or ids with another number of rows.
        IndexError: on a CPU, an id outside of the vocabulary.
    """
    _check("gather_log_probs", logits)
    if ids.dim() != 2 or len(ids) != len(logits):
        raise ValueError(f"gather_log_probs takes ids of shape [{len(logits)}, k], got {tuple(ids.shape)}")
    twin = partial(_gathered_twin, ids=ids)
    if not ids.numel() or not runs_on_triton(logits, UNIT):
        return twin(logits)[0]
    return differentiable(partial(_launch_gather, ids=ids), twin, (logits,))[0]


def _check(operation: str, logits: torch.Tensor) -> None:
    check_dtypes(operation, logits=logits)
    if logits.dim() != 2 or logits.dtype != torch.float32:
        raise ValueError(f"{operation} takes logits [N, V] in fp32, got {tuple(logits.shape)} in {logits.dtype}")


def _twin(logits: torch.Tensor) -> tuple[torch.Tensor]:
    return (F.log_softmax(logits.contiguous(), dim=-1),)


def _gathered_twin(logits: torch.Tensor, *, ids: torch.Tensor) -> tuple[torch.Tensor]:
    return (_twin(logits)[0].gather(1, ids),)


def _whole(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy, contiguous and with an aligned address. (Rows of an odd width can't all be aligned.)"""
    if x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _launch(logits: torch.Tensor) -> tuple[torch.Tensor]:
    from rl_kernels.jit.log_softmax_gather import log_softmax as kernel

    x = _whole(logits)
    out = torch.empty_like(x)
    block = min(block_of(x.shape[1]), BLOCK)
    launch(kernel, (len(x),), x, out, WIDTH=x.shape[1], BLOCK=block, block=block)
    return (out,)


def _launch_gather(logits: torch.Tensor, *, ids: torch.Tensor) -> tuple[torch.Tensor]:
    from rl_kernels.jit.log_softmax_gather import gather_log_probs as kernel

    x, ids = _whole(logits), ids.contiguous()
    out = x.new_empty(ids.shape)
    width = x.shape[1]
    block = min(block_of(width), BLOCK)
    arguments = (x, ids, out, ids.shape[1])
    launch(kernel, (len(x),), *arguments, WIDTH=width, BLOCK=block, BLOCK_IDS=BLOCK_IDS, block=block)
    return (out,)
