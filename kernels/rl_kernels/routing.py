"""Rows that go to a few experts each: to which, in which order, and the sum of what those make of them.

A row's choice, weights and sum depend on that row alone; of equal probabilities the lower expert's comes first. Nothing
here waits for the device, so a CUDA graph can hold it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from rl_kernels.fused import UNIT, block_of, check_dtypes, check_shape, empty_rows, launch, runs_on_triton

MOST_EXPERTS = 1024  # that a kernel chooses from
BLOCK = 1024  # places, or elements, that a program reads at once


def choose_experts(scores: torch.Tensor, each: int, *, normalised: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The router's scores `[N, E]` -> the experts of each row, `[N, each]` int32 in ascending order, and their weights,
    of the scores' dtype: softmax over all experts in fp32, divided by the sum of the chosen ones (from the greatest on)
    if normalised.

    Raises:
        ValueError: not a matrix, a dtype other than bf16, fp16 and fp32, or `each` is not from 1 to E.
    """
    check_dtypes("choose_experts", scores=scores)
    if scores.dim() != 2 or not 1 <= each <= scores.shape[1]:
        raise ValueError(f"choose_experts takes scores [N, E] and 1 to E experts, got {tuple(scores.shape)}, {each}")
    rows, count = scores.shape
    if not rows or count % UNIT or count > MOST_EXPERTS or not runs_on_triton(scores, count):
        return _chosen(scores, each, normalised)
    from rl_kernels.jit.routing import choose_experts as kernel

    experts = torch.empty(rows, each, dtype=torch.int32, device=scores.device)
    weights = scores.new_empty(rows, each)
    shape = {"EXPERTS": count, "EACH": each, "NORMALISED": normalised, "BLOCK": block_of(count)}
    launch(kernel, (rows,), _aligned(scores), experts, weights, **shape, block=block_of(count))
    return experts, weights


def _chosen(scores: torch.Tensor, each: int, normalised: bool) -> tuple[torch.Tensor, torch.Tensor]:
    probabilities = F.softmax(scores, dim=-1, dtype=torch.float32)
    ranked, ids = probabilities.sort(dim=-1, descending=True, stable=True)  # topk promises no order of equals
    weights, experts = ranked[:, :each], ids[:, :each]
    if normalised:
        weights = weights / _in_order(weights.unbind(-1)).unsqueeze(-1)
    experts, order = experts.sort(dim=-1)
    return experts.to(torch.int32), weights.gather(-1, order).to(scores.dtype)


@dataclass(frozen=True)
class Places:
    """Each row has `each` places, its own one behind the other, and an expert for each place.

    order `[rows * each]` int32: the places, those of expert 0 first, then those of 1 and so on, in ascending order for
    each. counts `[E]` int32: how many each expert has.
    """

    order: torch.Tensor
    counts: torch.Tensor
    each: int

    @classmethod
    def of(cls, experts: torch.Tensor, count: int) -> Places:
        """experts `[rows, each]` int32, each below `count`.

        Raises:
            ValueError: they are not a contiguous int32 matrix.
        """
        if experts.dim() != 2 or experts.dtype != torch.int32 or not experts.is_contiguous():
            raise ValueError(f"Places takes contiguous int32 experts [rows, each], got {experts.dtype}")
        if not experts.numel() or not runs_on_triton(experts, UNIT):
            flat = experts.flatten()
            counts = flat.bincount(minlength=count).to(torch.int32)
            return cls(flat.argsort(stable=True).to(torch.int32), counts, experts.shape[1])
        from rl_kernels.jit.routing import sort_places as kernel

        order = torch.empty(experts.numel(), dtype=torch.int32, device=experts.device)
        counts = torch.empty(count, dtype=torch.int32, device=experts.device)
        launch(kernel, (count,), experts, order, counts, experts.numel(), BLOCK=BLOCK, block=BLOCK)
        return cls(order, counts, experts.shape[1])


def add_experts(computed: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The sum `[N, D]` of each row's `computed` `[N * each, D]`, times its `weights` `[N, each]`, from the first to the
    last; each product and each sum is rounded to the dtype.

    Raises:
        ValueError: shapes that don't fit, or a dtype other than bf16, fp16 and fp32.
    """
    check_dtypes("add_experts", computed=computed, weights=weights)
    rows, each = weights.shape
    width = computed.shape[-1]
    check_shape("add_experts", "computed", computed, (rows * each, width))
    if not rows or not runs_on_triton(computed, width):
        return _in_order((computed.view(rows, each, width) * weights.unsqueeze(-1)).unbind(1))
    from rl_kernels.jit.routing import add_experts as kernel

    out = empty_rows(computed, rows, width)
    block = min(block_of(width), BLOCK)
    shape = {"EACH": each, "WIDTH": width, "BLOCK": block}
    launch(kernel, (rows, -(-width // block)), _aligned(computed), weights.contiguous(), out, **shape, block=block)
    return out


def _in_order(summands: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The sum, from the first to the last, each result rounded to the dtype."""
    first, *others = summands
    for other in others:
        first = first + other
    return first


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x itself where it is contiguous and begins as memory of its own would, else a copy that does."""
    return x if x.is_contiguous() and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)
