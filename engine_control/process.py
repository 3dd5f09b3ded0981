"""The HTTP process's side: starts the engine process, talks to it from asyncio, and starts it again when it dies.

The two are joined by a socket pair (`engine_control.child`).
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec
import torch

from engine_control.child import how_it_ended, start_child
from engine_control.errors import EngineDiedError, EngineUnavailableError, InvalidRequestError, from_message
from engine_control.wire import WireError, receive_message, send_message
from engine_control.worker import Abort, Add, Ahead, Call, Operation, Ready, Reply, Update

logger = logging.getLogger(__name__)

STDERR_LINES = 20  # of a dead engine's last words, repeated in the error
STOP_GRACE_S = 5.0


class EngineState(StrEnum):
    """Where the engine process is in its life."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True)
class RestartPolicy:
    """max_restarts counts crashes in a row, without a finished request between; the delay doubles with each."""

    start_timeout_s: float = 600.0
    max_restarts: int = 5
    first_delay_s: float = 0.25
    longest_delay_s: float = 30.0


class EngineSupervisor:
    """Keeps one engine process alive. All methods belong to the event loop that called `start`."""

    def __init__(
        self,
        module: str,
        config: bytes,
        *,
        environment: Mapping[str, str],
        policy: RestartPolicy | None = None,
    ) -> None:
        """The process runs `module`'s `main()` (`engine_control.child`), and gets `config` on its stdin."""
        self._module = module
        self._config = config
        self._environment = dict(environment)
        self._policy = policy or RestartPolicy()
        self._life: EngineLife | None = None
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._crashes = 0
        self.state = EngineState.STOPPED
        self.restarts = 0
        self.last_error: EngineUnavailableError | None = None
        self.description: dict[str, Any] = {}

    def start(self) -> None:
        """Begins to start the engine and returns at once; `wait_ready` says how it went."""
        self._set_state(EngineState.STARTING)
        self._task = asyncio.create_task(self._supervise(), name="engine-supervisor")
        self._task.add_done_callback(self._note_supervision_end)

    async def wait_ready(self) -> None:
        """Returns once the engine takes requests.

        Raises:
            EngineUnavailableError: it failed to start (with its last lines of stderr), or died too often.
        """
        while self.state is not EngineState.READY:
            if self.state in (EngineState.FAILED, EngineState.STOPPED):
                raise self._unavailable()
            self._changed.clear()
            await self._changed.wait()

    async def stop(self) -> None:
        """Ends the engine process: by closing the connection, after a grace by SIGKILL. Afterwards it is gone."""
        self._set_state(EngineState.STOPPED)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._life is not None:
            await asyncio.to_thread(self._life.close)
            self._life = None

    @property
    def process_id(self) -> int | None:
        """The engine process's id, if there is one now."""
        return self._life.process.pid if self._life is not None else None

    async def submit(self, request_id: str, request: object) -> Any:
        """Computes a request. If the awaiting task is cancelled, so is the request, between two steps.

        Raises:
            EngineError: what the engine answered, or that it is not there.
        """
        life = self._ready_life()
        added, answer = life.add(request_id, request)
        try:
            result = await answer
        except asyncio.CancelledError:
            life.post(lambda number: Abort(number, request_id, discard=True, added=added))
            raise
        self._crashes = 0
        return result

    async def stream(self, request_id: str, request: object) -> AsyncGenerator[Any, None]:
        """Computes a request and yields what there is of it, again and again; at last its result. Whoever is slow gets
        the newest, not all that came meanwhile. If the awaiting task is cancelled, or the iterator closed, so is the
        request, between two steps.

        Raises:
            EngineError: what the engine answered, or that it is not there.
        """
        life = self._ready_life()
        updates = _Newest()
        added, final = life.add(request_id, request, updates.put)
        final.add_done_callback(lambda done: updates.wake())
        try:
            while not final.done():
                await updates.wait()
                if not final.done():
                    yield updates.take()
            result = final.result()
        finally:
            if not final.done():
                final.cancel()
                life.post(lambda number: Abort(number, request_id, discard=True, added=added))
        self._crashes = 0
        yield result

    async def abort(self, request_id: str) -> bool:
        """Drops a request; its own `submit` raises `RequestAbortedError`, or returns what there is of it if it asked
        for that. Says whether there was one."""
        return bool(await self._ready_life().perform(lambda number: Abort(number, request_id)))

    async def call(self, name: str, arguments: Mapping[str, Any] | None = None) -> Any:
        """Runs a named command between two steps and returns what it returned."""
        return await self._ready_life().perform(lambda number: Call(number, name, dict(arguments or {})))

    def _ready_life(self) -> EngineLife:
        if self.state is not EngineState.READY or self._life is None:
            raise self._unavailable()
        return self._life

    def _unavailable(self) -> EngineUnavailableError:
        if self.state is EngineState.FAILED and self.last_error is not None:
            return EngineUnavailableError(self.last_error.message, hint=self.last_error.hint)
        return EngineUnavailableError(f"the engine is {self.state.value}", hint="Retry when /health answers 200.")

    def _set_state(self, state: EngineState) -> None:
        self.state = state
        self._changed.set()

    async def _supervise(self) -> None:
        was_ready = False
        while True:
            self._life = life = EngineLife(self._module, self._config, self._environment)
            life.ended.add_done_callback(self._note_end)
            try:
                was_ready |= await self._until_ready(life)
                error = await asyncio.shield(life.ended)  # the future outlives this task
            finally:
                await asyncio.to_thread(life.close)
            logger.error("%s", error.message)
            self._crashes += 1
            if not was_ready or self._crashes > self._policy.max_restarts:
                break
            self._set_state(EngineState.RESTARTING)
            delay = self._policy.first_delay_s * 2 ** (self._crashes - 1)
            await asyncio.sleep(min(delay, self._policy.longest_delay_s))
            self.restarts += 1
        what = f"given up after {self._crashes} crashes in a row; the last" if was_ready else "the engine did not start"
        self.last_error = EngineDiedError(f"{what}: {error.message}", hint="See to the cause, then restart.")
        self._set_state(EngineState.FAILED)

    def _note_end(self, ended: asyncio.Future[EngineDiedError]) -> None:
        """Runs before any request that waited hears of the end, so that `state` never lags behind their errors."""
        self.last_error = ended.result()
        if self.state is EngineState.READY:
            self._set_state(EngineState.RESTARTING)

    def _note_supervision_end(self, task: asyncio.Task[None]) -> None:
        """Without this, a supervisor that fails (say, because no process can be started) would look like a start."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("the engine can't be supervised", exc_info=error)
            self.last_error = EngineUnavailableError(f"no engine process can be started: {error}")
            self._set_state(EngineState.FAILED)

    async def _until_ready(self, life: EngineLife) -> bool:
        """Whether the engine came up; if not, `life.ended` is about to say why."""
        first: set[asyncio.Future[Any]] = {life.ready, life.ended}
        await asyncio.wait(first, timeout=self._policy.start_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if life.ready.done():
            self.description = life.ready.result().description
            if not life.ended.done():
                self._set_state(EngineState.READY)
        elif not life.ended.done():
            life.kill(f"it was not ready after {self._policy.start_timeout_s:g} s")
        return life.ready.done()


class _Newest:
    """The newest of what was put, for one reader on the same event loop."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._value: Any = None

    def put(self, value: Any) -> None:
        self._value = value
        self._event.set()

    def wake(self) -> None:
        self._event.set()

    async def wait(self) -> None:
        await self._event.wait()

    def take(self) -> Any:
        self._event.clear()
        return self._value


class _TensorsAhead:
    """Tensors that came before the replies that hold them, by number."""

    def __init__(self) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self._of_operation: dict[int, list[int]] = {}

    def add(self, ahead: Ahead) -> None:
        self.tensors |= ahead.numbered()
        self._of_operation.setdefault(ahead.id, []).extend(ahead.numbered())

    def forget(self, operation: int) -> None:
        """Its reply has come: no other message refers to these."""
        for number in self._of_operation.pop(operation, ()):
            del self.tensors[number]


class EngineLife:
    """One life of the engine process, from its start to its end.

    `ready` gets the engine's announcement; `ended`, when the process is gone, the error that says how. Operations that
    were waiting then have failed with it.
    """

    def __init__(self, module: str, config: bytes, environment: Mapping[str, str]) -> None:
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[Ready] = self._loop.create_future()
        self.ended: asyncio.Future[EngineDiedError] = self._loop.create_future()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._listeners: dict[int, Callable[[Any], None]] = {}
        self._numbers = iter(range(1, sys.maxsize))
        self._outbox: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self._last_lines: collections.deque[str] = collections.deque(maxlen=STDERR_LINES)
        self._reason: str | None = None
        self.process, self._connection = start_child(
            module, environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self._echo = self._thread(self._echo_output, "engine-output")
        self._thread(lambda: self._write(config), "engine-writer")
        self._reader = self._thread(self._read, "engine-reader")

    def perform(
        self, make: Callable[[int], Operation], on_update: Callable[[Any], None] | None = None
    ) -> asyncio.Future[Any]:
        """Sends an operation; the future gets its reply, and `on_update` what comes before it, on the event loop."""
        future: asyncio.Future[Any] = self._loop.create_future()
        if self.ended.done():
            future.set_exception(self.ended.result())
            return future
        operation = make(next(self._numbers))
        self._waiting[operation.id] = future
        if on_update is not None:
            self._listeners[operation.id] = on_update
        future.add_done_callback(lambda done: self._forget(operation.id))
        self._outbox.put(operation)
        return future

    def add(
        self, request_id: str, request: object, on_update: Callable[[Any], None] | None = None
    ) -> tuple[int, asyncio.Future[Any]]:
        """Sends a request; the operation's number, and the future of its reply."""
        numbers: list[int] = []

        def make(number: int) -> Operation:
            numbers.append(number)
            return Add(number, request_id, request, stream=on_update is not None)

        answer = self.perform(make, on_update)
        return (numbers[0] if numbers else 0), answer

    def post(self, make: Callable[[int], Operation]) -> None:
        """Sends an operation whose reply nobody waits for."""
        self._outbox.put(make(next(self._numbers)))

    def kill(self, reason: str) -> None:
        """Ends the process now; `reason` stands in the error that `ended` gets."""
        self._reason = reason
        self.process.kill()

    def close(self) -> None:
        """Blocks until the process is gone: it leaves by itself when the connection closes, else it is killed."""
        self._outbox.put(None)
        self._hang_up()
        self._wait(STOP_GRACE_S)
        self._reader.join(STOP_GRACE_S)
        self._connection.close()

    def _thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread

    def _read(self) -> None:
        cause = "the thread that reads its replies failed"
        ahead = _TensorsAhead()
        try:
            while True:
                received = receive_message(self._connection, earlier=ahead.tensors)
                message = msgspec.convert(received, Ready | Reply | Update | Ahead)
                del received
                if isinstance(message, Ahead):
                    ahead.add(message)
                else:
                    if isinstance(message, Reply):
                        ahead.forget(message.id)
                    self._on_loop(self._deliver, message)
                del message  # else this frame keeps the last reply's tensors alive until the next one
        except (WireError, OSError, msgspec.ValidationError) as error:
            cause = str(error)
        finally:
            self._hang_up()
            code = self._wait(STOP_GRACE_S)
            self._echo.join(timeout=1.0)  # a grandchild may hold the pipe open
            self._on_loop(self._end, self._epitaph(code, cause))

    def _forget(self, number: int) -> None:
        self._waiting.pop(number, None)
        self._listeners.pop(number, None)

    def _deliver(self, message: Ready | Reply | Update) -> None:
        if isinstance(message, Ready):
            if not self.ready.done():
                self.ready.set_result(message)
            return
        if isinstance(message, Update):
            if message.id in self._listeners:
                self._listeners[message.id](message.result)
            return
        future = self._waiting.get(message.id)
        if future is None or future.done():
            return
        if message.error is not None:
            future.set_exception(from_message(message.error))
        else:
            future.set_result(message.result)

    def _end(self, error: EngineDiedError) -> None:
        self.ended.set_result(error)
        for future in list(self._waiting.values()):
            if not future.done():
                future.set_exception(EngineDiedError(error.message, hint=error.hint))

    def _write(self, config: bytes) -> None:
        try:
            assert self.process.stdin is not None
            with self.process.stdin as stdin:
                stdin.write(config)
            while (operation := self._outbox.get()) is not None:
                try:
                    send_message(self._connection, operation)
                except WireError as error:
                    refusal = InvalidRequestError(f"the request can't be sent to the engine: {error}")
                    self._on_loop(self._deliver, Reply(operation.id, error=refusal.to_message()))
        except OSError as error:
            logger.info("the engine process takes no more: %s", error)  # the reader sees the end too, and says so

    def _echo_output(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, line)
                text = line.decode(errors="replace").strip()
                if text:
                    self._last_lines.append(text)

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):  # the other end was faster
            self._connection.shutdown(socket.SHUT_RDWR)

    def _wait(self, grace_s: float) -> int:
        try:
            return self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def _epitaph(self, code: int, cause: str) -> EngineDiedError:
        how = how_it_ended(code)
        reason = self._reason or cause
        lines = "\n".join(self._last_lines)
        return EngineDiedError(
            f"the engine process {how} ({reason})" + (f"; its last lines:\n{lines}" if lines else ""),
            hint="It is being restarted; send the request again.",
        )

    def _on_loop(self, callback: Callable[..., None], argument: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, argument)
        except RuntimeError:
            logger.info("the event loop is closed; the engine's message finds nobody")
