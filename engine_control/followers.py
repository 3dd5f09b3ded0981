"""Rank 0 decides and the other ranks follow: one ordered stream of decisions, from rank 0 to each follower process.

A decision is a message of the engine's own; rank 0 announces it before it carries it out itself. What a follower is
told is therefore what rank 0 did, in the same order, and no rank ever decides by its own clock or queue. A follower
that can't follow ends; so does one whose rank 0 is gone. When one ends, `on_death` hears of it at once.

Rank 0's side is `Followers`; a follower process calls `follow`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from engine_control.child import how_it_ended, start_child
from engine_control.errors import EngineDiedError
from engine_control.wire import PeerClosedError, WireError, receive_message, send_message

logger = logging.getLogger(__name__)

R = TypeVar("R")
EXIT_GRACE_S = 5.0
SETTLE_S = 1.0
COLLECTIVE_GRACE_S = 2.0  # how long a follower may take to end by itself when rank 0 is gone


class Told(msgspec.Struct, tag="told", frozen=True):
    """A decision of rank 0, and whether it waits for the answer."""

    decision: Any
    answer: bool


class Answer(msgspec.Struct, tag="answer", frozen=True):
    """A follower's answer to the decision that asked for one."""

    value: Any


class Followers:
    """The processes of ranks 1 to n. All methods but `close` belong to the thread that steps rank 0's engine."""

    def __init__(
        self,
        module: str,
        environments: Sequence[Mapping[str, str]],
        *,
        on_death: Callable[[EngineDiedError], None],
    ) -> None:
        """Starts a process that runs the module's `main()` for each environment, and waits for none of them.

        `on_death` is called once, in a thread of its own, when a follower ends that wasn't told to.
        """
        self._on_death = on_death
        self._lock = threading.Lock()  # guards `_death`, which the watching threads set
        self._death: EngineDiedError | None = None
        self._dead = threading.Event()
        self._closing = False
        self._ranks: list[_Follower] = []  # one by one, for the first may end before the last has begun
        for rank, environment in enumerate(environments, start=1):
            self._ranks.append(_Follower(rank, module, environment, self._note_end))

    def announce(self, decision: object) -> None:
        """Tells every follower, in order, and waits for none.

        Raises:
            EngineDiedError: a follower is gone.
        """
        self._tell(Told(decision, answer=False))

    def ask(self, decision: object) -> list[Any]:
        """Tells every follower, and returns their answers in the order of their ranks.

        Raises:
            EngineDiedError: a follower is gone, or ends instead of answering.
        """
        self._tell(Told(decision, answer=True))
        return self.answers()

    def answers(self) -> list[Any]:
        """One answer from each follower, in the order of their ranks, to what was said last.

        Raises:
            EngineDiedError: a follower ends instead of answering.
        """
        self.check()
        found = [rank.answers.get() for rank in self._ranks]
        self.check()
        return [answer.value for answer in found if answer is not None]

    def tell_each(self, decisions: Sequence[object]) -> None:
        """Tells each follower a decision of its own, in the order of their ranks; `answers` waits for what they say.

        Raises:
            EngineDiedError: a follower is gone.
        """
        self.check()
        for rank, decision in zip(self._ranks, decisions, strict=True):
            self._send(rank, Told(decision, answer=True))

    def settle(self) -> None:
        """Waits a moment for the news of a death: a collective may fail before the end of the process is noticed."""
        self._dead.wait(SETTLE_S)

    def check(self) -> None:
        """Raises the error of the first follower that ended, if one has."""
        if self._death is not None:
            raise type(self._death)(self._death.message, hint=self._death.hint)

    def everywhere(self, decision: object, own: Callable[[], R]) -> tuple[R, list[Any]]:
        """Has every follower carry the decision out while this process computes `own`; its value, and their answers.

        Raises:
            EngineDiedError: as `together`, or a follower ends instead of answering.
        """
        self.tell_each([decision] * len(self._ranks))
        with self.together():
            mine = own()
        return mine, self.answers()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Around work that every rank takes part in. An error in it leaves nobody knowing where the others stand, so it
        ends them."""
        try:
            yield
        except Exception as error:
            self.settle()
            self.check()
            raise self.end(
                EngineDiedError(
                    f"rank 0 failed in a step that all ranks share: {type(error).__name__}: {error}",
                    hint="The engine must be started anew.",
                )
            ) from error

    def end(self, error: EngineDiedError) -> EngineDiedError:
        """Afterwards the followers are gone, and whoever needs them gets this error, which is returned."""
        with self._lock:
            self._death = error
        self.close()
        return error

    @property
    def process_ids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks]

    def close(self) -> None:
        """Ends every follower: by closing its connection, after a grace by SIGKILL; one that has answered nothing yet
        holds nothing, and is killed amid its imports. Afterwards they are gone."""
        self._closing = True
        for rank in self._ranks:
            rank.hang_up()
            if not rank.has_answered:
                rank.process.kill()
        for rank in self._ranks:
            rank.wait(EXIT_GRACE_S)
            rank.connection.close()

    def _tell(self, told: Told) -> None:
        self.check()
        for rank in self._ranks:
            self._send(rank, told)

    def _send(self, rank: _Follower, told: Told) -> None:
        try:
            send_message(rank.connection, told)
        except OSError as error:
            raise self._died(rank, str(error)) from error

    def _note_end(self, rank: _Follower, cause: str) -> None:
        if self._closing:
            return
        error = self._died(rank, cause)
        logger.error("%s", error.message)
        for other in self._ranks:
            other.answers.put(None)  # so that nobody waits for an answer that may never come
        self._on_death(error)

    def _died(self, rank: _Follower, cause: str) -> EngineDiedError:
        how = how_it_ended(rank.wait(EXIT_GRACE_S))
        error = EngineDiedError(
            f"rank {rank.rank} of the engine {how} ({cause})", hint="The other ranks can't go on without it."
        )
        with self._lock:
            self._death = self._death or error
        self._dead.set()
        return self._death


class _Follower:
    """One follower process, its socket, and the thread that reads its answers and notices its end."""

    def __init__(
        self, rank: int, module: str, environment: Mapping[str, str], on_end: Callable[[_Follower, str], None]
    ) -> None:
        self.rank = rank
        self.answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        self.has_answered = False
        self.process, self.connection = start_child(module, environment, stdin=subprocess.DEVNULL)
        self._on_end = on_end
        threading.Thread(target=self._read, name=f"rank-{rank}", daemon=True).start()

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):  # it was faster
            self.connection.shutdown(socket.SHUT_RDWR)

    def wait(self, grace_s: float) -> int:
        """The process's return code; it is killed if it doesn't end within the grace."""
        try:
            return self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def _read(self) -> None:
        try:
            while True:
                answer = msgspec.convert(receive_message(self.connection), Answer)
                self.has_answered = True
                self.answers.put(answer)
        except (WireError, OSError, msgspec.ValidationError) as error:
            cause = str(error)
        self.hang_up()
        self._on_end(self, cause)


def follow(connection: socket.socket, handle: Callable[[Any], object]) -> None:
    """A follower's life: hands each decision to `handle`, in order, in this thread, until rank 0 closes the connection.

    Whatever `handle` raises leaves this function, and should end the process. So does the end of rank 0, even while
    `handle` waits for it in a collective.
    """
    decisions: queue.SimpleQueue[Told | None] = queue.SimpleQueue()

    def read() -> None:
        try:
            while True:
                decisions.put(msgspec.convert(receive_message(connection), Told))
        except PeerClosedError:
            logger.debug("rank 0 is gone; so is this rank")
        except (WireError, msgspec.ValidationError, OSError) as error:
            logger.error("the connection to rank 0 broke: %s", error)
        decisions.put(None)
        time.sleep(COLLECTIVE_GRACE_S)
        os._exit(1)  # reached only in a collective that outlasts the grace: nobody waits for it

    threading.Thread(target=read, name="rank-0-reader", daemon=True).start()
    while (told := decisions.get()) is not None:
        answer = handle(told.decision)
        if told.answer:
            try:
                send_message(connection, Answer(answer))
            except OSError:
                return
