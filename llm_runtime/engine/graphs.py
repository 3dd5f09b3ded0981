"""CUDA graphs for decoding: work on one token a sequence, captured once for each size and replayed.

A batch is padded to the next size. Padding rows write no key, attend to nothing, and are cut off; rows don't see each
other, so the others' bits are those of an eager forward. Weights and KV cache are read where they lie: what writes them
in place leaves a graph valid; whoever moves them calls `clear`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from llm_runtime.engine.batches import ForwardBatch
from rl_kernels.graph_pool import GraphPool
from rl_kernels.paged_attention import PagedPlan

logger = logging.getLogger(__name__)

STEP = 16  # between sizes; fewer rows would be padded to as many at every linear layer
SHORTEST_TABLE = 1024  # tokens that a graph's page tables have room for, or this times a power of 4


@dataclass(frozen=True)
class ForwardInputs:
    """What a forward reads: input_ids, positions, slots `[N]`, and a plan. Of a graph, one query a sequence."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    plan: PagedPlan

    def copy_(self, other: ForwardInputs) -> None:
        """Takes the other's numbers, which has the same shapes."""
        for mine, theirs in zip(self._tensors(), other._tensors(), strict=True):
            mine.copy_(theirs, non_blocking=True)

    def _tensors(self) -> tuple[torch.Tensor, ...]:
        return self.input_ids, self.positions, self.slots, self.plan.page_table, self.plan.context_lengths


Forward = Callable[[ForwardInputs], torch.Tensor]
"""The hidden states `[N, hidden_size]` of inputs."""


@dataclass(frozen=True)
class _Captured:
    graph: Any
    inputs: ForwardInputs
    hidden: torch.Tensor


class DecodeGraphs:
    """Captures a size when it is first asked for."""

    def __init__(
        self, forward: Forward, *, page_size: int, max_batch_size: int, device: torch.device, pool: GraphPool
    ) -> None:
        """max_batch_size: larger batches are not for it."""
        self._forward = forward
        self._page_size = page_size
        self._max_batch_size = max_batch_size
        self._device = device
        self._graphs: dict[tuple[int, int], _Captured] = {}
        self._pool = pool

    @property
    def captured(self) -> list[tuple[int, int]]:
        """(batch size, tokens of a page table) of each graph."""
        return sorted((size, width * self._page_size) for size, width in self._graphs)

    def takes(self, batch: ForwardBatch) -> bool:
        """Whether it is a batch of single tokens after each of which one is drawn, and not too large."""
        rows = len(batch.input_ids)
        decodes = rows == len(batch.query_lengths) == len(batch.draw_rows) and not batch.score_rows
        return decodes and rows <= self._max_batch_size

    def replay(self, batch: ForwardBatch) -> torch.Tensor:
        """The hidden states of the batch's rows, in memory of their own."""
        size, width = size_for(len(batch.input_ids)), table_width(max(batch.context_lengths), self._page_size)
        inputs = padded(batch, size, width, page_size=self._page_size, device=self._device)
        if (size, width) not in self._graphs:  # a capture writes the same keys and values to the same slots
            self._graphs[size, width] = _Captured(*self._capture(inputs))
        captured = self._graphs[size, width]
        captured.inputs.copy_(inputs)
        captured.graph.replay()
        return captured.hidden[: len(batch.input_ids)].clone()

    def clear(self) -> None:
        """Forgets every graph."""
        self._graphs.clear()

    def _capture(self, inputs: ForwardInputs) -> tuple[Any, ForwardInputs, torch.Tensor]:
        graph, hidden = self._pool.capture(lambda: self._forward(inputs))
        logger.info("captured a forward of %d sequences", len(inputs.input_ids))
        return graph, inputs, hidden


def table_width(context: int, page_size: int) -> int:
    """Pages of a table that has room for so many tokens."""
    tokens = SHORTEST_TABLE
    while tokens < context:
        tokens *= 4
    return -(-tokens // page_size)


def size_for(rows: int) -> int:
    """The size that a batch of so many rows is padded to."""
    return -(-rows // STEP) * STEP


def padded(batch: ForwardBatch, size: int, width: int, *, page_size: int, device: torch.device) -> ForwardInputs:
    """A decode batch as inputs of `size` rows, with page tables of `width` pages."""
    missing = size - len(batch.input_ids)
    numbers = ((batch.input_ids, 0), (batch.positions, 0), (batch.slots, -1))
    input_ids, positions, slots = (
        torch.tensor([*values, *[filler] * missing], dtype=torch.int64).to(device, non_blocking=True)
        for values, filler in numbers
    )
    plan = PagedPlan.of(
        [*batch.page_tables, *[[]] * missing],
        [1] * size,
        [*batch.context_lengths, *[0] * missing],
        page_size=page_size,
        device=device,
        width=width,
    )
    return ForwardInputs(input_ids, positions, slots, plan)
