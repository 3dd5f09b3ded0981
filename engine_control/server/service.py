"""One engine process and what every service asks of it, whichever engine it is."""

from __future__ import annotations

import asyncio
import logging
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from engine_control.errors import EngineUnavailableError
from engine_control.process import EngineState, EngineSupervisor
from engine_control.server.port import KnownState

logger = logging.getLogger(__name__)

STATS_TIMEOUT_S = 2.0  # a step in progress may take longer; then the last known numbers are shown


class EngineService(ABC):
    """What the routes of an app share. Belongs to one app; nothing is shared between two of them. It is a
    `ControlPort`."""

    model_name: str

    def __init__(self, supervisor: EngineSupervisor, *, health_generate_timeout_s: float) -> None:
        self.supervisor = supervisor
        self.health_generate_timeout_s = health_generate_timeout_s
        self._state = KnownState(lambda: supervisor.call("control_state"), lambda: supervisor.process_id)
        self._stats: dict[str, float] = {}
        self._health_check: asyncio.Task[Any] | None = None

    @abstractmethod
    def smallest_request(self) -> object:
        """The least that the engine can compute: what `/health_generate` asks of it."""

    def check_ready(self) -> None:
        """Raises `EngineUnavailableError` unless the engine takes requests."""
        if self.supervisor.state is EngineState.READY:
            return
        error = self.supervisor.last_error
        raise EngineUnavailableError(
            f"the engine is {self.supervisor.state.value}" + (f": {error.message}" if error else ""),
            hint="Retry when /health answers 200.",
        )

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """As `ControlPort`. Afterwards the engine's state is asked anew."""
        try:
            return await self.supervisor.call(name, arguments)
        finally:
            self._state.refresh()

    async def control_state(self, wait_s: float) -> Mapping[str, Any] | None:
        """As `ControlPort`."""
        self.check_ready()
        return await self._state.current(wait_s)

    async def stats(self) -> dict[str, float]:
        """The engine's counters; the last known ones if it doesn't answer at once."""
        try:
            self._stats = await asyncio.wait_for(self.supervisor.call("stats"), STATS_TIMEOUT_S)
        except (EngineUnavailableError, TimeoutError) as error:
            logger.debug("the engine's statistics are not fresh: %s", error)
        return self._stats

    async def description(self) -> dict[str, Any]:
        """What the engine says of itself; what it said last if it doesn't answer at once."""
        try:
            return dict(await asyncio.wait_for(self.supervisor.call("describe"), STATS_TIMEOUT_S))
        except (EngineUnavailableError, TimeoutError) as error:
            logger.debug("the engine's description is not fresh: %s", error)
            return self.supervisor.description

    async def health_generate(self) -> None:
        """Has the engine compute its smallest request, once for all who ask at the same time.

        Raises:
            EngineError: it failed.
            TimeoutError: it took too long.
        """
        self.check_ready()
        if self._health_check is None or self._health_check.done():
            check = self.supervisor.submit(f"health-{uuid.uuid4().hex}", self.smallest_request())
            timed = asyncio.wait_for(check, self.health_generate_timeout_s)
            self._health_check = asyncio.create_task(timed, name="health-generate")
        await asyncio.shield(self._health_check)

    def engine_process(self) -> dict[str, Any]:
        """The engine process, in the words of `/server_info`."""
        return {
            "state": self.supervisor.state.value,
            "restarts": self.supervisor.restarts,
            "process_id": self.supervisor.process_id,
        }
