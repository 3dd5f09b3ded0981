"""What the routes share: the engine's supervisor, the metrics, and the path of a request through this process."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from diffusion_rl.config import EngineConfig, ServerConfig, Wire, engine_environment
from diffusion_rl.parallel.layout import layout_of
from diffusion_rl.params import RolloutParams
from diffusion_rl.server.encoding import EncodedBody, encode
from diffusion_rl.server.metrics import Metrics
from diffusion_rl.server.responses import RepliesInFlight
from diffusion_rl.server.rows import response_rows, sample_from_plain
from diffusion_rl.server.schema import ParsedRequest, load_json, parse_rollout_request
from engine_control.errors import EngineUnavailableError
from engine_control.process import EngineState, EngineSupervisor, RestartPolicy
from engine_control.server.port import KnownState

logger = logging.getLogger(__name__)

WORKER_MODULE = "diffusion_rl.server.worker"
STATS_TIMEOUT_S = 2.0  # a step in progress may take longer; then the last known numbers are shown
HEALTH_WAIT_S = 0.05  # of /health for the engine's state, of which the last known one will do
HEALTH_PRIORITY = 2**31 - 1


class RolloutService:
    """One engine and what is served from it. Belongs to one app; nothing is shared between two of them."""

    def __init__(self, engine_config: EngineConfig, server_config: ServerConfig) -> None:
        self.engine_config = engine_config
        self.config = server_config
        self.started_at = int(time.time())
        self.supervisor = EngineSupervisor(
            WORKER_MODULE,
            msgspec.json.encode(engine_config),
            environment=engine_environment(layout_of(engine_config.parallel).ranks),
            policy=RestartPolicy(server_config.engine_start_timeout_s, server_config.max_restarts),
        )
        self.metrics = Metrics(
            max_batch_size=engine_config.max_batch_size,
            restarts=lambda: self.supervisor.restarts,
            ready=lambda: self.supervisor.state is EngineState.READY,
        )
        self.replies = RepliesInFlight(
            limit=server_config.max_reply_bytes_in_flight, gauge=self.metrics.reply_bytes_in_flight
        )
        self._state = KnownState(lambda: self.supervisor.call("control_state"), lambda: self.supervisor.process_id)
        self._stats: dict[str, float] = {}
        self._health_check: asyncio.Task[Any] | None = None

    @property
    def model_name(self) -> str:
        return self.config.served_model_name or self.engine_config.model_path

    def parse(self, body: bytes) -> ParsedRequest:
        """The request that a body holds, checked as far as it can be without the model. Any thread may call this.

        Raises:
            EngineUnavailableError: no engine takes requests now, so that nobody can say which step kinds there are.
            InvalidRequestError: naming the field.
        """
        self.check_ready()
        return parse_rollout_request(
            load_json(body),
            limits=self.engine_config.limits,
            step_kinds=self.supervisor.description["step_kinds"],
            lenient=self.config.lenient_fields,
        )

    def check_ready(self) -> None:
        """Raises `EngineUnavailableError` unless the engine takes requests."""
        if self.supervisor.state is EngineState.READY:
            return
        error = self.supervisor.last_error
        raise EngineUnavailableError(
            f"the engine is {self.supervisor.state.value}" + (f": {error.message}" if error else ""),
            hint="Retry when /health answers 200.",
        )

    async def roll_out(self, request: ParsedRequest, wire: Wire) -> EncodedBody:
        """The reply to a request. Cancelling this aborts the request between two steps.

        Raises:
            EngineError: what the engine made of it.
        """
        plain = await self.supervisor.submit(request.request_id, request.params)
        return await asyncio.to_thread(self._encode, plain, request.params, wire)

    def _encode(self, plain: Sequence[Mapping[str, Any]], params: RolloutParams, wire: Wire) -> EncodedBody:
        samples = [sample_from_plain(item) for item in plain]
        return encode(response_rows(samples, params, timesteps=self.config.dit_trajectory_timesteps), wire)

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

    async def abort(self, rid: str, *, prefix: bool = False) -> bool:
        """Whether a request with this id, or any whose id begins with it, was there; it is aborted."""
        if not prefix:
            return await self.supervisor.abort(rid)
        return bool((await self.call("abort_requests", {"rid_prefix": rid}))["aborted"])

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
        """Rolls out one step of the smallest picture, once for all who ask at the same time.

        Raises:
            EngineError: it failed.
            TimeoutError: it took too long.
        """
        self.check_ready()
        if self._health_check is None or self._health_check.done():
            size = int(self.supervisor.description["size_multiple"])
            params = RolloutParams(
                prompt="health",
                seed=0,
                width=size,
                height=size,
                num_inference_steps=1,
                rollout=False,
                rollout_debug_mode=False,
                priority=HEALTH_PRIORITY,
            )
            check = self.supervisor.submit(f"health-{uuid.uuid4().hex}", params)
            timed = asyncio.wait_for(check, self.config.health_generate_timeout_s)
            self._health_check = asyncio.create_task(timed, name="health-generate")
        await asyncio.shield(self._health_check)

    async def server_info(self) -> dict[str, Any]:
        """The body of `/server_info`."""
        description, stats = await self.description(), await self.stats()
        return {
            **description,
            "served_model_name": self.model_name,
            "engine": {
                "state": self.supervisor.state.value,
                "restarts": self.supervisor.restarts,
                "process_id": self.supervisor.process_id,
            },
            "server": asdict(self.config),
            "stats": stats,
        }
