"""The loop that every engine runs, in one thread.

Commands (a new request, an abort, a call by name) wait in a mailbox and run between two steps, never inside one, in the
order in which they were posted. Each answers through a future, so that the caller may be another thread of this
process, or the socket's reader in an engine process, or nobody's thread at all:

    loop = StepLoop(engine)
    answers = [loop.submit(f"request-{i}", request) for i, request in enumerate(requests)]
    loop.run_until_idle()
    results = [answer.result() for answer in answers]
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from engine_control.engine import Finished, StepEngine
from engine_control.errors import (
    EngineDiedError,
    EngineError,
    EngineFaultError,
    EngineUnavailableError,
    InvalidRequestError,
    RequestAbortedError,
)

logger = logging.getLogger(__name__)

Request = TypeVar("Request")
Result = TypeVar("Result")
Handler = Callable[[Mapping[str, Any]], object]


@dataclass(frozen=True)
class Pending:
    """What a command's handler returns that can't finish yet. Steps go on meanwhile; the command is answered, by what
    `finish` returns or raises, as soon as `ready`. At `deadline` (in `time.monotonic`'s seconds; None: never) `expired`
    answers."""

    ready: Callable[[], bool]
    finish: Callable[[], object]
    deadline: Callable[[], float | None] = lambda: None
    expired: Callable[[], object] = lambda: None


class Gate(Protocol):
    """Whether the engine may step and take requests now. It changes by commands alone, so never inside a step."""

    def may_step(self) -> bool:
        """While not, everything in the engine stays as it is."""

    def refusal(self) -> EngineError | None:
        """Why a new request is refused now; None if it is taken, perhaps to wait."""


class OpenGate:
    """The gate of a loop that nobody controls."""

    def may_step(self) -> bool:
        return True

    def refusal(self) -> EngineError | None:
        return None


class StepLoop(Generic[Request, Result]):
    """Steps one engine. `submit`, `abort`, `call` and `stop` may be called from any thread; the rest from one only."""

    def __init__(self, engine: StepEngine[Request, Result]) -> None:
        self._engine = engine
        self._mailbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: dict[str, Future[Result]] = {}
        self._listeners: dict[str, Callable[[Result], None]] = {}
        self._handlers: dict[str, Handler] = {"stats": lambda arguments: engine.stats()}
        self._pending: list[tuple[Pending, Future[Any]]] = []
        self._stopping = False
        self.gate: Gate = OpenGate()

    def register(self, name: str, handler: Handler) -> None:
        """Adds a command. Afterwards `call(name, ...)` runs the handler between two steps. Call it before `run`.

        A handler that can't finish yet returns a `Pending`.
        """
        self._handlers[name] = handler

    def watch(self, pending: Pending) -> None:
        """Has the loop finish something later that nobody waits for. For handlers, in the loop's thread."""
        self._pending.append((pending, _running_future()))

    def abort_requests(self, request_ids: Iterable[str]) -> int:
        """Aborts them at once, each with its partial result if it has one, and says how many there were. For handlers,
        in the loop's thread."""
        return sum([self._abort(request_id) for request_id in request_ids])

    def submit(
        self, request_id: str, request: Request, on_progress: Callable[[Result], None] | None = None
    ) -> Future[Result]:
        """Posts a request. The future gets its result, or the `EngineError` that ended it; it can't be cancelled.

        `on_progress` is called in the loop's thread with what the engine hands out of the request before its end.
        """
        future = _running_future()
        self._mailbox.put(lambda: self._add(request_id, request, future, on_progress))
        return future

    def abort(self, request_id: str, *, discard: bool = False, of: Future[Any] | None = None) -> Future[bool]:
        """Posts an abort. Afterwards the request's own future holds what the engine gives out of it as a partial
        result, or a `RequestAbortedError`, and no step computes anything for it. `discard` asks for no partial result:
        nobody would read it. `of` is what the request's `submit` returned: another one with the same id is left alone.
        The answer says whether there was such a request."""
        future = _running_future()

        def abort() -> bool:
            mine = of is None or self._waiting.get(request_id) is of
            return mine and self._abort(request_id, discard=discard)

        self._mailbox.put(lambda: self._answer(future, abort))
        return future

    def call(self, name: str, arguments: Mapping[str, Any] | None = None) -> Future[object]:
        """Posts a named command. The future gets what its handler returns, or an `EngineError`."""
        future = _running_future()
        self._mailbox.put(lambda: self._answer(future, lambda: self._call(name, arguments or {})))
        return future

    def stop(self) -> None:
        """Posts the end. `run` returns after the commands before it; unfinished requests get an error."""
        self._mailbox.put(self._stop)

    def run(self) -> None:
        """Runs until `stop`. Without work it sleeps on the mailbox.

        A step that raises fails the requests in the engine, and the loop goes on; only an error of the device itself,
        or of another rank, which no later step would survive either, leaves this method too.
        """
        while not self._stopping:
            self._run_commands(wait=not self._can_step())
            self._settle()
            self._step()
            self._settle()
        ending = EngineUnavailableError("the engine is shutting down", hint="Send the request again later.")
        self._fail_all(ending)
        while self._pending:
            self._pending.pop()[1].set_exception(ending)

    def run_until_idle(self, after_step: Callable[[], None] | None = None) -> None:
        """Runs until the mailbox is empty and the engine has nothing to do, or may do nothing. For use without a thread
        of its own.

        `after_step` is called after every step, between steps like a command.
        """
        self._run_commands(wait=False)
        self._settle()
        while self._can_step() and not self._stopping:
            self._step()
            self._settle()
            if after_step is not None:
                after_step()
            self._run_commands(wait=False)
            self._settle()

    def _can_step(self) -> bool:
        return self.gate.may_step() and self._engine.has_unfinished_requests()

    def _run_commands(self, *, wait: bool) -> None:
        try:
            while not self._stopping:
                command = self._mailbox.get(block=wait, timeout=self._next_deadline() if wait else None)
                self._settle()  # what was due before this command is done before it
                command()
                wait = False
        except queue.Empty:
            return

    def _next_deadline(self) -> float | None:
        """Seconds until the first pending command expires."""
        deadlines = [at for pending, _ in self._pending if (at := pending.deadline()) is not None]
        return max(min(deadlines) - time.monotonic(), 0.0) if deadlines else None

    def _settle(self) -> None:
        """Answers the commands that waited for something that is so now, or waited too long."""
        for item in list(self._pending):
            pending, future = item
            deadline = pending.deadline()
            late = deadline is not None and time.monotonic() >= deadline
            if pending.ready() or late:
                self._pending.remove(item)
                self._answer(future, pending.finish if pending.ready() else pending.expired)

    def _step(self) -> None:
        if self._stopping or not self._can_step():
            return
        try:
            finished = self._engine.step()
        except Exception as error:
            logger.exception("a step failed; its requests are answered with an error")
            self._fail_all(_as_engine_error(error))
            if isinstance(error, torch.AcceleratorError | EngineDiedError):
                raise  # a broken device, or a rank that is gone: every later step would fail too
            return
        for item in finished:
            if isinstance(item, Finished):
                self._finish(item)
            elif item.request_id in self._listeners:
                self._listeners[item.request_id](item.result)

    def _finish(self, item: Finished[Result]) -> None:
        self._listeners.pop(item.request_id, None)
        future = self._waiting.pop(item.request_id, None)
        if future is None:
            logger.error("the engine finished %r, which nobody waits for", item.request_id)
        elif item.error is not None:
            future.set_exception(item.error)
        else:
            future.set_result(item.result)  # type: ignore[arg-type]

    def _fail_all(self, error: EngineError) -> None:
        """Afterwards the engine is empty and nobody waits, whatever the engine handed out."""
        for item in self._engine.fail_unfinished(error):
            self._finish(item)
        self._listeners.clear()
        while self._waiting:
            self._waiting.popitem()[1].set_exception(error)

    def _add(
        self,
        request_id: str,
        request: Request,
        future: Future[Result],
        on_progress: Callable[[Result], None] | None = None,
    ) -> None:
        if request_id in self._waiting:
            future.set_exception(
                InvalidRequestError(
                    "a request with this id is already being computed",
                    code="duplicate_request_id",
                    field="rid",
                    value=request_id,
                    hint="Choose an id that is not in use, or none.",
                )
            )
            return
        try:
            if (refusal := self.gate.refusal()) is not None:
                raise refusal
            self._engine.add_request(request_id, request)
        except Exception as error:
            if not isinstance(error, EngineError):
                logger.exception("a request could not be admitted")
                self._engine.abort_request(request_id)
            future.set_exception(_as_engine_error(error))
            return
        self._waiting[request_id] = future
        if on_progress is not None:
            self._listeners[request_id] = on_progress

    def _abort(self, request_id: str, *, discard: bool = False) -> bool:
        if request_id not in self._waiting:
            return self._engine.abort_request(request_id)
        error: Exception = RequestAbortedError("the request was aborted", field="rid", value=request_id)
        partial = None
        try:
            partial = None if discard else self._engine.partial_result(request_id)
        except Exception as failure:
            if not isinstance(failure, EngineError):
                logger.exception("the partial result of %r could not be made", request_id)
            error = failure
        self._engine.abort_request(request_id)
        if partial is not None:
            self._finish(Finished(request_id, result=partial))
        else:
            self._finish(Finished(request_id, error=_as_engine_error(error)))
        if isinstance(error, torch.AcceleratorError | EngineDiedError):
            raise error  # as in a step
        return True

    def _call(self, name: str, arguments: Mapping[str, Any]) -> object:
        if name not in self._handlers:
            known = ", ".join(sorted(self._handlers))
            raise InvalidRequestError(f"unknown command {name!r}", code="unknown_command", hint=f"Known: {known}.")
        return self._handlers[name](arguments)

    def _stop(self) -> None:
        self._stopping = True

    def _answer(self, future: Future[Any], compute: Callable[[], object]) -> None:
        """Answers with what `compute` returns or raises; later, if that is pending."""
        try:
            value = compute()
        except Exception as error:
            if not isinstance(error, EngineError):
                logger.exception("a command failed")
            future.set_exception(_as_engine_error(error))
            if isinstance(error, torch.AcceleratorError | EngineDiedError):
                raise  # as in a step
            return
        if isinstance(value, Pending):
            self._pending.append((value, future))
        else:
            future.set_result(value)


def _running_future() -> Future[Any]:
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()  # from here on cancel() does nothing, so that an answer always fits
    return future


def _as_engine_error(error: Exception) -> EngineError:
    if isinstance(error, EngineError):
        return error
    fault = EngineFaultError(f"{type(error).__name__}: {error}", hint="The engine's log has the traceback.")
    fault.__cause__ = error
    return fault
