"""Decoding ahead of the host: the next step is launched before the tokens of the last one are read.

While a run goes on, the device computes a step and the host does the book-keeping of the one before: tokens, pages,
what is finished. A sequence that turns out to be finished by the step before has computed a token for nothing, which
nobody sees. A run is of sequences that all decode and draw plainly; whatever else is to be done ends it, and the next
step is scheduled as usual. Both ways have the same bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass

from llm_runtime.engine.decode_steps import DecodeRow, DecodeRun, DecodeSteps
from llm_runtime.engine.graphs import size_for
from llm_runtime.engine.sampler import divisor, draws_plainly
from llm_runtime.engine.scheduler import Chunk, Scheduler
from llm_runtime.engine.sequence import Sequence

DEPTH = 2  # steps in flight


def may_run(chunks: Items[Chunk]) -> bool:
    """Whether a run can begin with what is scheduled: single tokens, each followed by a plain draw."""
    return all(chunk.draws == 1 and chunk.end - chunk.start == 1 and _is_plain(chunk.sequence) for chunk in chunks)


def _is_plain(sequence: Sequence) -> bool:
    request = sequence.request
    scored = sequence.next_scored >= sequence.num_prompt
    goes_on = scored and sequence.num_output < sequence.max_new_tokens
    return draws_plainly(request.sampling) and not request.asks_for_others and goes_on


@dataclass(frozen=True)
class Drawn:
    """What a step drew: (sequence, token, log-prob), under a weight version."""

    tokens: list[tuple[Sequence, int, float]]
    version: str


class Overlap:
    """One run. Its owner hands on what `collect` returns before it launches the next step."""

    def __init__(self, steps: DecodeSteps, scheduler: Scheduler, chunks: Items[Chunk], version: str) -> None:
        """Launches the first step, whose pages are there."""
        self._scheduler = scheduler
        # The longest contexts first: a GPU begins rows in this order, and nothing long should be left for the end.
        self._sequences = [chunk.sequence for chunk in sorted(chunks, key=lambda chunk: -chunk.end)]
        self._run: DecodeRun = steps.begin([_row(sequence) for sequence in self._sequences])
        self._live = list(range(len(chunks)))  # rows that go on, as far as is known
        self._flying: deque[tuple[list[int], str]] = deque()
        self._launch(version)

    @property
    def in_flight(self) -> int:
        """Steps that are launched and not collected."""
        return len(self._flying)

    def launch(self, version: str, *, admit: bool) -> None:
        """Launches steps as far ahead as may be. Not, if a waiting sequence could begin instead (with `admit`), if
        the rows left fit a smaller size, or if somebody would have to give way for a page."""
        while self.in_flight < DEPTH and not (admit and self._scheduler.may_admit()) and self._provide():
            self._launch(version)

    def collect(self) -> Drawn:
        """Waits for the earliest step in flight."""
        rows, version = self._flying.popleft()
        tokens, log_probs = self._run.collect()
        own = [(self._sequences[row], tokens[row], log_probs[row]) for row in rows]
        return Drawn([found for found in own if found[0].running and found[0].finish_reason is None], version)

    def _launch(self, version: str) -> None:
        self._run.launch()
        self._flying.append((list(self._live), version))

    def _provide(self) -> bool:
        """Has every row that goes on hold pages for one more token, and the others stop; False if none goes on here."""
        ahead = self.in_flight
        live = [row for row in self._live if _goes_on(self._sequences[row], ahead)]
        if not live or size_for(len(live)) < self._run.state.size:
            return False
        for row in live:
            tokens = len(self._sequences[row].tokens) + ahead
            if tokens > self._run.longest or not self._scheduler.provide(self._sequences[row], tokens):
                return False
        if len(live) < len(self._live):
            self._run.stop(sorted(set(self._live) - set(live)))
            self._live = live
        return True


def _goes_on(sequence: Sequence, ahead: int) -> bool:
    """Whether it draws another token after so many that are in flight, as far as is known."""
    ended = not sequence.running or sequence.finish_reason is not None
    return not ended and sequence.num_output + ahead < sequence.max_new_tokens


def _row(sequence: Sequence) -> DecodeRow:
    params = sequence.request.sampling
    last, seed = len(sequence.tokens) - 1, sequence.request.seed
    return DecodeRow(sequence.tokens[-1], last, sequence.pages, seed, divisor(params), params.greedy)
