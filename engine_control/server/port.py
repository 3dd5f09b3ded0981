"""What the control routes need of the service that mounts them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from engine_control.errors import EngineError

logger = logging.getLogger(__name__)


class ControlPort(Protocol):
    """The service, as the control routes see it."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Has the engine run a command between two steps, and returns its result. If the awaiting task is cancelled,
        the command runs nevertheless.

        Raises:
            EngineError: what the engine answered, or that it is not there.
        """

    async def control_state(self, wait_s: float) -> Mapping[str, Any] | None:
        """What the command `control_state` returns; what it returned last, if the engine doesn't answer in time.

        Raises:
            EngineUnavailableError: the engine is starting, restarting or gone.
        """


class KnownState:
    """What an engine says of its state, asked one question at a time; and what it said last."""

    def __init__(self, ask: Callable[[], Awaitable[Mapping[str, Any]]], life: Callable[[], object]) -> None:
        """`ask` asks the engine; `life` names the engine process: what an earlier one said is worth nothing."""
        self._ask = ask
        self._life = life
        self._question: asyncio.Task[None] | None = None
        self._known: tuple[object, Mapping[str, Any]] | None = None

    async def current(self, wait_s: float) -> Mapping[str, Any] | None:
        """The state: fresh if the engine answers within that time, else the last known one, None if there is none."""
        await asyncio.wait({self.refresh()}, timeout=wait_s)
        if self._known is None or self._known[0] != self._life():
            return None
        return self._known[1]

    def refresh(self) -> asyncio.Task[None]:
        """Asks again, unless a question is on its way. Returns at once."""
        if self._question is None or self._question.done():
            self._question = asyncio.create_task(self._learn(), name="control-state")
        return self._question

    async def _learn(self) -> None:
        life = self._life()
        try:
            self._known = (life, await self._ask())
        except EngineError as error:
            logger.debug("the engine's state is not fresh: %s", error)
