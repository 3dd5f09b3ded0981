"""The engine process's side of the socket, and the messages that both sides exchange.

The HTTP process sends operations, the engine process one reply to each, in whichever order they finish; before the
reply to a request that streams come its updates, and before any reply may come tensors that will be in it. First of
all comes one `Ready`. When the HTTP process goes away, for whatever reason, the engine process ends: no orphans.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import msgspec
import torch

from engine_control.errors import EngineError, EngineFaultError, ErrorMessage
from engine_control.step_loop import StepLoop
from engine_control.wire import PeerClosedError, WireError, receive_message, send_message

logger = logging.getLogger(__name__)

Request = TypeVar("Request")
Result = TypeVar("Result")
EXIT_GRACE_S = 2.0  # how long the step in progress may take when the HTTP process is gone


class Add(msgspec.Struct, tag="add", frozen=True):
    """Computes a request. The reply is its result; with `stream`, updates come before it."""

    id: int
    request_id: str
    request: Any
    stream: bool = False


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """Drops a request between two steps; with `discard`, without a partial result. `added` is the operation that added
    it: a request of another one that has the same id stays. The reply is whether there was one."""

    id: int
    request_id: str
    discard: bool = False
    added: int | None = None


class Call(msgspec.Struct, tag="call", frozen=True):
    """Runs a named command between two steps. The reply is what its handler returned."""

    id: int
    name: str
    arguments: dict[str, Any]


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The engine is built; what it says of itself."""

    description: dict[str, Any]


class Reply(msgspec.Struct, tag="reply", frozen=True):
    """The answer to the operation of that id: a result or an error."""

    id: int
    result: Any = None
    error: ErrorMessage | None = None


class Update(msgspec.Struct, tag="update", frozen=True):
    """What there is by now of the request that the operation of that id added."""

    id: int
    result: Any


class Ahead(msgspec.Struct, tag="ahead", frozen=True):
    """Tensors of the reply to the operation of that id, which will refer to them by numbers from `first` on."""

    id: int
    first: int
    tensors: list[Any]

    def numbered(self) -> dict[int, torch.Tensor]:
        return dict(enumerate(self.tensors, start=self.first))


Operation = Add | Abort | Call
Outgoing = tuple[Operation, Future[Any]] | Ahead | int
"""What is answered, with its answer; tensors of an answer to come; or the number of what has a newer update than was
sent."""


class EngineWorker(Generic[Request, Result]):
    """Serves one step loop over one socket.

    Three threads: a reader that posts operations to the loop's mailbox, the caller's, which steps, and a sender, so
    that a big reply doesn't hold up the next step.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        read_request: Callable[[Any], Request],
        write_result: Callable[[Result], object],
    ) -> None:
        self._connection = connection
        self._read_request = read_request
        self._write_result = write_result
        self._loop: Future[StepLoop[Request, Result]] = Future()
        self._outbox: queue.SimpleQueue[Outgoing | None] = queue.SimpleQueue()
        self._added: dict[int, Future[Any]] = {}
        self._numbers: dict[str, int] = {}
        self._sent_ahead: dict[int, dict[int, torch.Tensor]] = {}  # the sender's own, by operation
        self._tensors_ahead = 0
        self._updates: dict[int, Result] = {}
        self._updating = threading.Lock()  # guards `_updates`, which two threads change

    def run(self, build: Callable[[], tuple[StepLoop[Request, Result], Mapping[str, object]]]) -> None:
        """Builds the engine, announces it with the description that `build` returns beside the loop, and serves it
        until the other end closes the connection.

        Whatever `build` raises leaves this method; the supervisor reports the last lines of the standard error.
        """
        threading.Thread(target=self._read, name="engine-reader", daemon=True).start()
        loop, description = build()
        send_message(self._connection, Ready(dict(description)))
        self._loop.set_result(loop)
        sender = threading.Thread(target=lambda: self._send(loop), name="engine-sender", daemon=True)
        sender.start()
        loop.run()
        self._outbox.put(None)
        sender.join(EXIT_GRACE_S)

    def send_ahead(self, request_id: str, tensors: Sequence[torch.Tensor]) -> None:
        """Has tensors sent by now that the request's result will hold, as these very objects; nobody may change them.

        For the loop's thread. The result is the same without it, and comes later.
        """
        number = self._numbers.get(request_id)
        if number is not None:
            self._outbox.put(Ahead(number, self._tensors_ahead, list(tensors)))
            self._tensors_ahead += len(tensors)

    def _read(self) -> None:
        try:
            while True:
                operation = msgspec.convert(receive_message(self._connection), Operation)
                self._post(self._loop.result(), operation)
        except PeerClosedError:
            logger.info("the HTTP process is gone; so is this engine")
        except (WireError, msgspec.ValidationError, OSError) as error:
            logger.error("the connection to the HTTP process broke: %s", error)
        if self._loop.done():
            self._loop.result().stop()
            time.sleep(EXIT_GRACE_S)
        os._exit(1)  # reached only while a model loads, or in a step that outlasts the grace: nobody waits for either

    def _post(self, loop: StepLoop[Request, Result], operation: Operation) -> None:
        match operation:
            case Add():
                listener = self._listener(operation.id) if operation.stream else None
                self._numbers.setdefault(operation.request_id, operation.id)
                try:
                    request = self._read_request(operation.request)
                    answer: Future[Any] = loop.submit(operation.request_id, request, listener)
                except EngineError as error:
                    answer = Future()
                    answer.set_exception(error)
            case Abort():
                answer = self._abort(loop, operation)
            case Call():
                answer = loop.call(operation.name, operation.arguments)
        if isinstance(operation, Add):
            self._added[operation.id] = answer
            answer.add_done_callback(lambda done: self._forget(operation))
        answer.add_done_callback(lambda done: self._outbox.put((operation, done)))

    def _forget(self, operation: Add) -> None:
        self._added.pop(operation.id, None)
        if self._numbers.get(operation.request_id) == operation.id:  # not that of another one of the same request id
            del self._numbers[operation.request_id]

    def _abort(self, loop: StepLoop[Request, Result], operation: Abort) -> Future[Any]:
        if operation.added is None:
            return loop.abort(operation.request_id, discard=operation.discard)
        added = self._added.get(operation.added)
        if added is not None:
            return loop.abort(operation.request_id, discard=operation.discard, of=added)
        answered: Future[Any] = Future()  # it was answered, or refused, by now
        answered.set_result(False)
        return answered

    def _listener(self, number: int) -> Callable[[Result], None]:
        """Has what it is called with sent, or what came after it: steps may be faster than the connection."""

        def show(result: Result) -> None:
            with self._updating:
                waiting = number in self._updates
                self._updates[number] = result
            if not waiting:
                self._outbox.put(number)

        return show

    def _send(self, loop: StepLoop[Request, Result]) -> None:
        try:
            while (item := self._outbox.get()) is not None:
                self._send_item(item)
                del item  # or this frame would keep the result of the last request until the next one
        except OSError as error:
            logger.info("a reply found no reader: %s", error)
        finally:
            loop.stop()  # an engine that can't answer is of no use, whatever the reason

    def _send_item(self, item: Outgoing) -> None:
        if isinstance(item, int):
            self._send_update(item)
        elif isinstance(item, Ahead):
            self._send_tensors(item)
        else:
            operation, answer = item
            self._send_reply(operation.id, self._reply(operation, answer))

    def _send_update(self, number: int) -> None:
        with self._updating:
            result = self._updates.pop(number)
        try:
            send_message(self._connection, Update(number, self._write_result(result)))
        except WireError as error:  # the request goes on, and its reply will say the same if it is so then
            logger.warning("an update can't be sent: %s", error)

    def _send_tensors(self, ahead: Ahead) -> None:
        try:
            send_message(self._connection, ahead)
        except WireError as error:  # the reply will say the same
            logger.warning("tensors can't be sent ahead of their reply: %s", error)
            return
        self._sent_ahead.setdefault(ahead.id, {}).update(ahead.numbered())

    def _send_reply(self, number: int, reply: Reply) -> None:
        try:
            send_message(self._connection, reply, earlier=self._sent_ahead.pop(number, None))
        except WireError as error:
            fault = EngineFaultError(f"the reply can't be sent: {error}", hint="Ask for less at once.")
            send_message(self._connection, Reply(number, error=fault.to_message()))

    def _reply(self, operation: Operation, answer: Future[Any]) -> Reply:
        error = answer.exception()
        if isinstance(error, EngineError):
            return Reply(operation.id, error=error.to_message())
        if error is not None:
            raise error
        result = answer.result()
        return Reply(operation.id, self._write_result(result) if isinstance(operation, Add) else result)
