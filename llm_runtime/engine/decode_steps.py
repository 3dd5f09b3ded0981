"""Decoding steps whose inputs are on the device already: a step leaves its tokens where the next one reads them.

So the host needs to know nothing of a step's tokens to launch the next one, and on a GPU a whole step, from the last
token to the next one and its log-prob, is one graph. Only plain draws can be made so (`sampler.draws_plainly`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Items
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from llm_runtime.engine.graphs import ForwardInputs, size_for, table_width
from llm_runtime.engine.kv_cache import KVCache
from llm_runtime.engine.sampler import seed_keys
from llm_runtime.models.base import CausalLM
from rl_kernels.decode_rows import advance_rows, place_rows
from rl_kernels.draw_tokens import draw_tokens
from rl_kernels.graph_pool import GraphPool
from rl_kernels.paged_attention import PagedPlan
from rl_kernels.staging import to_device

RESULTS = 2  # a token, and its log-prob


class Computes(Protocol):
    """What steps need of a `ModelRunner`."""

    model: CausalLM
    cache: KVCache
    device: torch.device

    @property
    def reads_on_device(self) -> bool: ...

    def exact(self) -> AbstractContextManager[None]: ...

    def hidden_states(self, inputs: ForwardInputs) -> torch.Tensor: ...


@dataclass(eq=False)
class DecodeRow:
    """A sequence in the middle of decoding: its last token, which is the next to compute, that token's position, and
    the pages up to there (the sequence's own list, which may grow, and in which no page is exchanged meanwhile).
    temperature: of a greedy row 1."""

    token: int
    position: int
    pages: Items[int]
    seed: int
    temperature: float
    greedy: bool


class DecodeState:
    """What steps of up to `size` rows read and write on the device. A row whose context is 0 computes nothing."""

    def __init__(self, size: int, width: int, page_size: int, device: torch.device) -> None:
        def zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(shape or (size,), dtype=dtype, device=device)

        self.size, self.width, self.page_size = size, width, page_size
        self.input_ids, self.positions, self.seed_keys = (zeros(torch.int64) for _ in range(3))
        self.temperatures, self.greedy = torch.ones_like(zeros(torch.float32)), zeros(torch.bool)
        self.plan = PagedPlan.of([[]] * size, [1] * size, [0] * size, page_size=page_size, device=device, width=width)
        self.results = zeros(torch.float64, RESULTS, size)  # holds every token and every fp32 number

    def load(self, rows: Items[DecodeRow]) -> None:
        """Begins with these rows; the others are blank."""
        blank = [DecodeRow(0, 0, (), 0, 1.0, False)] * (self.size - len(rows))
        every = [*rows, *blank]
        self.input_ids.copy_(torch.tensor([r.token for r in every]))
        self.positions.copy_(torch.tensor([r.position for r in every]))
        self.seed_keys.copy_(seed_keys([r.seed for r in every]))
        self.temperatures.copy_(torch.tensor([r.temperature for r in every], dtype=torch.float32))
        self.greedy.copy_(torch.tensor([r.greedy for r in every]))
        contexts = [*(r.position + 1 for r in rows), *(0 for _ in blank)]
        plan = PagedPlan.of(
            [r.pages for r in every], [1] * self.size, contexts, page_size=self.page_size, width=self.width
        )
        self.plan.page_table.copy_(plan.page_table)
        self.plan.context_lengths.copy_(plan.context_lengths)

    def add_pages(self, added: Mapping[tuple[int, int], int]) -> None:
        """(row, place in its table) -> page."""
        places = [row * self.width + place for row, place in added]
        where, pages = _staged([places, list(added.values())], self.seed_keys.device)
        self.plan.page_table.view(-1).index_copy_(0, where, pages.to(torch.int32))

    def stop(self, rows: Items[int]) -> None:
        """They compute nothing from now on, at a position that every table has."""
        (where,) = _staged([list(rows)], self.seed_keys.device)
        self.plan.context_lengths.index_fill_(0, where, 0)
        self.positions.index_fill_(0, where, 0)


class DecodeSteps:
    """Makes steps for one runner: by graphs if it has a pool for them. One run at a time."""

    def __init__(self, runner: Computes, pool: GraphPool | None) -> None:
        self._runner = runner
        self._pool = pool
        self._states: dict[tuple[int, int], DecodeState] = {}
        self._graphs: dict[tuple[int, int], Any] = {}

    @property
    def captured(self) -> list[tuple[int, int]]:
        """(rows, tokens of a page table) of each graph."""
        return sorted((size, width * self._runner.cache.page_size) for size, width in self._graphs)

    def begin(self, rows: Items[DecodeRow]) -> DecodeRun:
        """A run of steps with these rows. The one before is over."""
        page_size = self._runner.cache.page_size
        size, width = size_for(len(rows)), table_width(max(r.position for r in rows) + 1, page_size)
        if (size, width) not in self._states:
            state = DecodeState(size, width, page_size, self._runner.device)
            if self._pool is not None:  # rows are blank: no key or value is written
                self._graphs[size, width], _ = self._pool.capture(lambda: self._step(state, state.plan))
            self._states[size, width] = state
        state = self._states[size, width]
        self._runner.cache.define()
        state.load(rows)
        return DecodeRun(self, state, rows)

    def clear(self) -> None:
        """Forgets every graph and what it reads."""
        self._graphs.clear()
        self._states.clear()

    @torch.inference_mode()
    def compute(self, run: DecodeRun) -> None:
        """One step of a run."""
        state = run.state
        graph = self._graphs.get((state.size, state.width))
        if graph is not None:
            graph.replay()
        else:
            self._step(state, state.plan if self._runner.reads_on_device else state.plan.read())

    @torch.inference_mode()
    def _step(self, state: DecodeState, plan: PagedPlan) -> None:
        """From each row's last token to the next one, which takes its place."""
        slots, keys = place_rows(state.plan, state.positions, state.seed_keys)
        runner = self._runner
        with runner.exact(), torch.autocast(runner.device.type, enabled=False):
            hidden = runner.hidden_states(ForwardInputs(state.input_ids, state.positions, slots, plan))
            logits = runner.model.compute_logits(hidden)
        drawn, log_probs = draw_tokens(logits, state.temperatures, keys, state.greedy)
        advance_rows(state.plan, state.positions, drawn, log_probs, tokens=state.input_ids, results=state.results)


class DecodeRun:
    """Some rows, step after step. Steps are launched and collected in order; a few may be in flight."""

    def __init__(self, steps: DecodeSteps, state: DecodeState, rows: Items[DecodeRow]) -> None:
        self.state = state
        self._steps = steps
        self._rows = list(rows)
        self._known = [len(row.pages) for row in rows]
        self._stopped: set[int] = set()
        self._in_flight: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def longest(self) -> int:
        """Tokens of a context that its page tables have room for."""
        return self.state.width * self.state.page_size

    def stop(self, rows: Items[int]) -> None:
        """They compute nothing from the next launch on."""
        self._stopped.update(rows)
        self.state.stop(rows)

    def launch(self) -> None:
        """One more step. Each row's pages reach up to the token that it computes."""
        added = {
            (row, place): self._rows[row].pages[place]
            for row, known in enumerate(self._known)
            if row not in self._stopped
            for place in range(known, len(self._rows[row].pages))
        }
        if added:
            self.state.add_pages(added)
            for row, place in added:
                self._known[row] = place + 1
        self._steps.compute(self)
        results = self.state.results
        if not results.is_cuda:
            self._in_flight.append((results.clone(), None))
            return
        with torch.cuda.device(results.device):
            copy = torch.empty(results.shape, dtype=results.dtype, pin_memory=True)
            copy.copy_(results, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        self._in_flight.append((copy, done))

    def collect(self) -> tuple[list[int], list[float]]:
        """The tokens and log-probs of the earliest step in flight, row by row; a stopped row's mean nothing."""
        results, done = self._in_flight.popleft()
        if done is not None:
            done.synchronize()
        tokens, log_probs = results.tolist()
        return [int(token) for token in tokens[: len(self._rows)]], log_probs[: len(self._rows)]


def _staged(numbers: list[list[int]], device: torch.device) -> torch.Tensor:
    """Rows of int64 on the device, without waiting for what it computes."""
    return to_device(torch.tensor(numbers, dtype=torch.int64), device)
