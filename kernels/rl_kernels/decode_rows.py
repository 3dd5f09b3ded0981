"""The rows of a decoding step between two forwards: where a row's token goes, and what the drawn one changes.

As torch's operations that is some thirty launches of nothing but latency; here it is two.
"""

from __future__ import annotations

import torch

from rl_kernels.fused import UNIT, check_shape, launch, runs_on_triton
from rl_kernels.gumbel_argmax import mixed
from rl_kernels.paged_attention import PagedPlan

BLOCK = 128  # rows of a program


def place_rows(plan: PagedPlan, positions: torch.Tensor, seed_keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots `[N]` of each row's token, page * page_size + offset, and the keys `[N]` of the noise of the next one:
    seed_keys and its position, mixed by splitmix64. All int64, as positions and seed_keys `[N]` are.

    Row n is at positions[n] of the plan's sequence n; its page table reaches there. A row whose context is 0 has the
    slot -1, and no next position but its own.

    Raises:
        ValueError: not as many positions or keys as the plan has sequences, or others than int64.
    """
    rows = (len(plan.context_lengths),)
    for name, x in (("positions", positions), ("seed_keys", seed_keys)):
        _check("place_rows", name, x, rows, torch.int64)
    if not runs_on_triton(positions, UNIT):
        return _placed(plan, positions, seed_keys)
    from rl_kernels.jit.decode_rows import place_rows as kernel

    slots, keys = torch.empty_like(positions), torch.empty_like(seed_keys)
    launch(
        kernel,
        (-(-rows[0] // BLOCK),),
        *(positions, plan.context_lengths, plan.page_table, seed_keys, slots, keys),
        *(plan.page_table.stride(0), rows[0]),
        PAGE=plan.page_size,
        BLOCK=BLOCK,
        block=BLOCK,
    )
    return slots, keys


def _placed(plan: PagedPlan, positions: torch.Tensor, seed_keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    live = plan.context_lengths > 0
    place = torch.where(live, positions // plan.page_size, 0)
    page = plan.page_table.gather(1, place[:, None])[:, 0].to(torch.int64)
    slots = torch.where(live, page * plan.page_size + positions % plan.page_size, -1)
    return slots, mixed(seed_keys ^ (positions + live))


def advance_rows(
    plan: PagedPlan,
    positions: torch.Tensor,
    drawn: torch.Tensor,
    log_probs: torch.Tensor,
    *,
    tokens: torch.Tensor,
    results: torch.Tensor,
) -> None:
    """Every row, but those whose context is 0, goes on by one: its position, the plan's context, and its token `[N]`,
    which is the drawn one (0 where the context is 0). results `[2, N]` fp64 are the drawn tokens and their log-probs.

    drawn `[N]` int64, log_probs `[N]` fp32.

    Raises:
        ValueError: shapes that don't fit the plan, or other dtypes.
    """
    rows = (len(plan.context_lengths),)
    for name, x in (("positions", positions), ("drawn", drawn), ("tokens", tokens)):
        _check("advance_rows", name, x, rows, torch.int64)
    _check("advance_rows", "log_probs", log_probs, rows, torch.float32)
    _check("advance_rows", "results", results, (2, *rows), torch.float64)
    if not runs_on_triton(positions, UNIT):
        live = plan.context_lengths > 0
        tokens.copy_(torch.where(live, drawn, 0))
        positions.add_(live)
        plan.context_lengths.add_(live)
        results[0].copy_(drawn)
        results[1].copy_(log_probs)
        return
    from rl_kernels.jit.decode_rows import advance_rows as kernel

    written = tokens, drawn, positions, plan.context_lengths, results, log_probs
    launch(kernel, (-(-rows[0] // BLOCK),), *written, rows[0], BLOCK=BLOCK, block=BLOCK)


def _check(operation: str, name: str, x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_shape(operation, name, x, shape)
    if x.dtype != dtype or not x.is_contiguous():
        raise ValueError(f"{operation} takes a contiguous {name} in {dtype}, got {x.dtype} with strides {x.stride()}")
