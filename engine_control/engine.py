"""The contracts that an engine owes the step loop and the control layer. Both engines fulfil them; the layer knows no
more of them than this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from engine_control.errors import EngineError
from engine_control.rank import Outcome, RankCommand

Request = TypeVar("Request", contravariant=True)
Result = TypeVar("Result")
R = TypeVar("R")


@dataclass(frozen=True)
class Finished(Generic[R]):
    """A request that is out of the engine: with its result, or with the error that ended it, never with both."""

    request_id: str
    result: R | None = None
    error: EngineError | None = None


@dataclass(frozen=True)
class Progress(Generic[R]):
    """What there is by now of a request that goes on: for whoever asked to hear of it."""

    request_id: str
    result: R


class StepEngine(Protocol[Request, Result]):
    """An engine that advances many requests by one step at a time.

    Only the loop's thread calls it, and never inside `step`. So an engine needs no lock, and whatever a method does is
    done before the next step begins.
    """

    def add_request(self, request_id: str, request: Request) -> None:
        """Admits the request, or raises `InvalidRequestError` or `QueueFullError` and has changed nothing.

        Afterwards `step` will hand it out exactly once, as a `Finished`.
        """

    def abort_request(self, request_id: str) -> bool:
        """Drops a request, its samples in flight included; unknown ids are none of the engine's business (False).

        Afterwards no step computes anything for it, and `step` will not hand it out.
        """

    def partial_result(self, request_id: str) -> Result | None:
        """What an abort of this request hands out instead of an error: what there is of its result by now. None: it
        did not ask for that, or it isn't here.

        The loop calls it right before `abort_request`, and only then. An error it raises is what the request gets.
        """

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to do."""

    def step(self) -> Sequence[Finished[Result] | Progress[Result]]:
        """Advances one batch by one step and hands out the requests that are finished by it, failed ones included, and
        how far those are that asked to hear of it."""

    def fail_unfinished(self, error: EngineError) -> Sequence[Finished[Result]]:
        """Drops all that is in the engine and hands each request out with that error. Afterwards the engine is idle."""

    def stats(self) -> dict[str, float]:
        """Counters and gauges by name, for `/metrics` and `/server_info`."""


class ControlledEngine(StepEngine[Request, Result], Protocol):
    """An engine that the control layer pauses, refits and puts to sleep. Called like a `StepEngine`, between steps."""

    weight_version: str
    """What the weights are called; a finished request says under which it was computed."""

    def hold_admission(self, held: bool) -> None:
        """While held, `step` begins no waiting request, and `has_unfinished_requests` says nothing of those."""

    def request_ids(self) -> list[str]:
        """Of all requests in the engine."""

    def running_requests(self) -> list[str]:
        """Those that have begun: a step may be in the middle of them."""

    def retract_requests(self) -> int:
        """Puts all that have begun back into the queue, to start anew. Says how many."""

    def everywhere(self, command: RankCommand) -> list[Outcome]:
        """Has every rank carry the command out, all at the same time, and returns their answers, rank 0's first.

        Raises:
            EngineDiedError: a rank is gone.
        """

    def flush_needs_idle(self) -> bool:
        """Whether what is cached across requests can't be dropped while some are in flight."""
