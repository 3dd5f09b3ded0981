"""What the routes share: the engine's supervisor, the metrics, and the path of a request through this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from diffusion_rl.condition_images import plain_picture
from diffusion_rl.config import EngineConfig, ServerConfig, Wire
from diffusion_rl.parallel.layout import layout_of
from diffusion_rl.params import RolloutParams
from diffusion_rl.server.encoding import EncodedBody, encode
from diffusion_rl.server.responses import RepliesInFlight
from diffusion_rl.server.rows import response_rows, sample_from_plain
from diffusion_rl.server.schema import ParsedRequest, load_json, parse_rollout_request
from engine_control.config import engine_environment
from engine_control.process import EngineState, EngineSupervisor, RestartPolicy
from engine_control.server.metrics import Metrics
from engine_control.server.service import EngineService

WORKER_MODULE = "diffusion_rl.server.worker"
GAUGES = ("requests_in_engine", "samples_waiting", "samples_running")
HEALTH_PRIORITY = 2**31 - 1


class RolloutService(EngineService):
    """One rollout engine and what is served from it."""

    def __init__(self, engine_config: EngineConfig, server_config: ServerConfig) -> None:
        self.engine_config = engine_config
        self.config = server_config
        self.started_at = int(time.time())
        self.model_name = server_config.served_model_name or engine_config.model_path
        supervisor = EngineSupervisor(
            WORKER_MODULE,
            msgspec.json.encode(engine_config),
            environment=engine_environment(layout_of(engine_config.parallel).ranks),
            policy=RestartPolicy(server_config.engine_start_timeout_s, server_config.max_restarts),
        )
        super().__init__(supervisor, health_generate_timeout_s=server_config.health_generate_timeout_s)
        self.metrics = Metrics(
            "diffusion_rl",
            gauges=GAUGES,
            restarts=lambda: supervisor.restarts,
            ready=lambda: supervisor.state is EngineState.READY,
            derive=lambda stats: _occupancy(stats, engine_config.max_batch_size),
        )
        self.in_flight = self.metrics.gauge("rollouts_in_flight", "Rollout requests whose reply is not sent completely")
        self.replies = RepliesInFlight(
            limit=server_config.max_reply_bytes_in_flight,
            gauge=self.metrics.gauge("reply_bytes_in_flight", "Length of the replies that are not sent completely"),
        )

    def parse(self, body: bytes) -> ParsedRequest:
        """The request that a body holds, checked as far as it can be without the model. Any thread may call this.

        Raises:
            EngineUnavailableError: no engine takes requests now, so that nobody can say which step kinds there are.
            InvalidRequestError: naming the field.
        """
        self.check_ready()
        most_pictures = self.supervisor.description["most_pictures"] or 1  # a model that takes none says so by itself
        return parse_rollout_request(
            load_json(body),
            limits=self.engine_config.limits,
            step_kinds=self.supervisor.description["step_kinds"],
            lenient=self.config.lenient_fields,
            most_pictures=most_pictures,
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

    async def abort(self, rid: str, *, prefix: bool = False) -> bool:
        """Whether a request with this id, or any whose id begins with it, was there; it is aborted."""
        if not prefix:
            return await self.supervisor.abort(rid)
        return bool((await self.call("abort_requests", {"rid_prefix": rid}))["aborted"])

    def smallest_request(self) -> RolloutParams:
        size = int(self.supervisor.description["size_multiple"])
        return RolloutParams(
            prompt="health",
            seed=0,
            width=size,
            height=size,
            num_frames=1,
            num_inference_steps=1,
            rollout=False,
            rollout_debug_mode=False,
            priority=HEALTH_PRIORITY,
            image=(plain_picture(size),) if self.supervisor.description["most_pictures"] else None,
        )

    async def server_info(self) -> dict[str, Any]:
        """The body of `/server_info`."""
        description, stats = await self.description(), await self.stats()
        return {
            **description,
            "served_model_name": self.model_name,
            "engine": self.engine_process(),
            "server": asdict(self.config),
            "stats": stats,
        }


def _occupancy(stats: Mapping[str, float], max_batch_size: int) -> dict[str, float]:
    """Samples a step, as a share of the largest batch."""
    if not stats.get("steps"):
        return {}
    return {"batch_occupancy": stats["evaluations"] / stats["steps"] / max_batch_size}
