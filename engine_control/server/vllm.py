"""The control routes under vLLM's names: `router.include_router(vllm_router(port))`.

A refusal has its error's own status, in vLLM's envelope. Source of names, fields and replies: vLLM 0.33, and the RPCs
and bodies of SkyRL, verl and prime-rl. vLLM has some of these in its development mode only.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine_control.errors import (
    ConflictError,
    EngineError,
    EngineUnavailableError,
    InvalidRequestError,
    WeightSessionError,
)
from engine_control.server import vllm_fields as fields
from engine_control.server.bodies import Fields, add_route, fields_from, read_fields
from engine_control.server.failures import VllmRoute, json_response
from engine_control.server.port import ControlPort
from engine_control.server.sglang_fields import with_version

F = TypeVar("F", bound=Fields)
Rpc = Callable[[fields.CollectiveRpc], Awaitable[object]]


def vllm_router(port: ControlPort, *, transport: str | None = None) -> APIRouter:
    """All of them. `transport` names the weight transport of infos whose shape doesn't say it."""
    router = APIRouter(tags=["control: vLLM's names"], route_class=VllmRoute)
    control = _Control(port, transport)
    _add_pause_routes(router, control)
    _add_weight_routes(router, control)
    _add_memory_routes(router, control)
    _add_cache_routes(router, control)
    _add_rpc(router, control)
    return router


class _Control:
    """vLLM's verbs that are more than one command, or not quite one."""

    def __init__(self, port: ControlPort, transport: str | None) -> None:
        self._port = port
        self._transport = transport

    async def call(self, name: str, **arguments: Any) -> Any:
        """The command with those arguments that aren't None."""
        return await self._port.call(name, {key: value for key, value in arguments.items() if value is not None})

    async def pause(self, given: fields.Pause) -> None:
        await self.call(
            "pause_generation",
            mode=fields.pause_mode(given.mode, clear_cache=given.clear_cache),
            refuse_new=given.mode != "keep",
            clear_cache=given.clear_cache,
        )

    async def start(self, given: fields.StartWeightUpdate, selector: str | None = None) -> None:
        await self.call("begin_weight_update", **{**given.given(), **({"selector": selector} if selector else {})})

    async def init(self, info: Mapping[str, Any]) -> None:
        transport = fields.init_transport(info, self._transport)
        await self.call("init_weight_transfer", transport=transport, info=fields.init_info(info))

    async def shutdown(self) -> None:
        await self.call("shutdown_weight_transfer", transport=self._transport or "distributed", info={})

    async def update(self, given: object, transport: str | None = None, session_id: str | None = None) -> None:
        """As in vLLM, an update that fails ends the session too: it has to be started again."""
        info = fields.update_info(given)
        transport = transport or fields.update_transport(info, self._transport)
        try:
            await self.call("update_weights", transport=transport, info=info, session_id=session_id, flush_cache=False)
        except (WeightSessionError, ConflictError, EngineUnavailableError):
            raise  # there is no session, or it is somebody else's, or there is no engine
        except EngineError:
            await self._forget(session_id)
            raise

    async def finish(self, given: fields.FinishWeightUpdate) -> None:
        arguments = with_version(given.given(), given.weight_version)
        await self.call("end_weight_update", **arguments, flush_cache=False)  # /pause has cleared what it should

    async def sleep(self, given: fields.Sleep) -> None:
        """Pauses, and releases. If nothing can be released, generation goes on as before."""
        if given.level == 0:
            await self.call("pause_generation", mode="in_place", refuse_new=False)
            return
        was_paused = await self.call("is_paused")
        mode = fields.pause_mode(given.mode, clear_cache=True)
        await self.call("pause_generation", mode=mode, refuse_new=False, clear_cache=True)
        try:
            await self.call("release_memory_occupation", backup=given.level == 1)
        except EngineError:
            if not was_paused:
                await self.call("continue_generation")
            raise

    async def wake_up(self, given: fields.WakeUp) -> list[str]:
        """Resumes those tags, and generation with the last of them. Returns what is still released."""
        released: list[str] = (await self.call("control_state"))["released"]
        wanted = [tag for tag in released if not given.tags or tag in given.tags]
        if wanted:
            released = (await self.call("resume_memory_occupation", tags=wanted))["tags"]
        if not released:
            await self.call("continue_generation")
        return released

    async def reset_cache(self, given: fields.ResetPrefixCache) -> bool:
        try:
            await self.call("flush_cache")
        except ConflictError:
            if not given.reset_running_requests:
                return False
            was_paused = await self.call("is_paused")
            await self.call("pause_generation", mode="retract", refuse_new=False, clear_cache=True)
            if not was_paused:
                await self.call("continue_generation")
        return True

    async def _forget(self, session_id: str | None) -> None:
        try:
            await self.call("abort_weight_update", session_id=session_id)
        except EngineError:
            return  # the control layer has ended it already


def _add(
    router: APIRouter, path: str, shape: type[F], answer: Callable[[F], Awaitable[object]], method: str = "POST"
) -> None:
    """A route that reads those fields, from the query or the body, and answers with that JSON; empty if it is None."""

    async def endpoint(request: Request) -> Response:
        value = await answer(await read_fields(request, shape))
        return Response() if value is None else json_response(value)

    add_route(router, path, shape, endpoint, method)


def _add_pause_routes(router: APIRouter, control: _Control) -> None:
    async def pause(given: fields.Pause) -> object:
        await control.pause(given)
        return {"status": "paused"}

    async def resume(given: fields.Nothing) -> object:
        await control.call("continue_generation")
        return {"status": "resumed"}

    async def is_paused(given: fields.Nothing) -> object:
        return {"is_paused": await control.call("is_paused")}

    async def abort(given: fields.AbortRequests) -> object:
        wanted = {"rids": given.request_ids} if given.request_ids else {"abort_all": True}
        return {"status": "aborted", **await control.call("abort_requests", **wanted)}

    _add(router, "/pause", fields.Pause, pause)
    _add(router, "/resume", fields.Nothing, resume)
    _add(router, "/is_paused", fields.Nothing, is_paused, "GET")
    _add(router, "/abort_requests", fields.AbortRequests, abort)


def _add_weight_routes(router: APIRouter, control: _Control) -> None:
    async def init(given: fields.InitTransfer) -> object:
        await control.init(given.init_info)
        return {"message": "Weight transfer initialized"}

    async def shutdown(given: fields.Nothing) -> object:
        await control.shutdown()
        return {"message": "Weight transfer shut down"}

    async def start(given: fields.StartWeightUpdate) -> object:
        await control.start(given)
        return {"message": "Weight update started"}

    async def start_draft(given: fields.StartWeightUpdate) -> object:
        await control.start(given, "draft")
        return {"message": "Draft weight update started"}

    async def update(given: fields.UpdateWeights) -> object:
        if given.update_info is None and given.weight_dir is not None:
            arguments = {"transport": "disk", "info": {"model_path": given.weight_dir}, "flush_cache": False}
            await control.call("update_weights", **arguments, session_id=given.session_id)
        else:
            await control.update(given.update_info, session_id=given.session_id)
        return {"status": "ok", "message": "Weights updated"}

    async def finish(given: fields.FinishWeightUpdate) -> object:
        await control.finish(given)
        return {"message": "Weight update finished"}

    async def info(given: fields.Nothing) -> object:
        return await control.call("weight_info")

    async def world_size(given: fields.Nothing) -> object:
        return {"world_size": await control.call("world_size")}

    _add(router, "/init_weight_transfer_engine", fields.InitTransfer, init)
    _add(router, "/shutdown_weight_transfer_engine", fields.Nothing, shutdown)
    _add(router, "/start_weight_update", fields.StartWeightUpdate, start)
    _add(router, "/start_draft_weight_update", fields.StartWeightUpdate, start_draft)
    _add(router, "/update_weights", fields.UpdateWeights, update)
    _add(router, "/finish_weight_update", fields.FinishWeightUpdate, finish)
    _add(router, "/weight_checker", fields.WeightChecker, lambda given: _check(control, given))
    _add(router, "/weight_info", fields.Nothing, info, "GET")
    _add(router, "/get_world_size", fields.Nothing, world_size, "GET")


async def _check(control: _Control, given: fields.WeightChecker) -> object:
    if given.action == "checksum":
        return {"checksums": (await control.call("weights_checker", action="checksum"))["checksums"]}
    if given.action == "reset":
        await control.call("weights_checker", action="reset_tensors")
        return {"status": "reset"}
    if given.baseline is None:
        raise InvalidRequestError("compare needs a baseline", field="baseline", hint="Send what checksum returned.")
    found = await control.call("weights_checker", action="compare", baseline=given.baseline)
    return {"match": found["success"], "mismatches": found.get("mismatches", [])}


def _add_memory_routes(router: APIRouter, control: _Control) -> None:
    async def sleep(given: fields.Sleep) -> object:
        await control.sleep(given)
        return {"status": "sleeping", "level": given.level}

    async def wake_up(given: fields.WakeUp) -> object:
        released = await control.wake_up(given)
        return {"status": "sleeping" if released else "awake", "tags": given.tags}

    async def is_sleeping(given: fields.Nothing) -> object:
        return {"is_sleeping": await control.call("is_sleeping")}

    async def release_kv_cache(given: fields.Nothing) -> object:
        await control.call("release_memory_occupation", tags=["kv_cache"])
        return {"status": "kv_cache_released"}

    _add(router, "/sleep", fields.Sleep, sleep)
    _add(router, "/wake_up", fields.WakeUp, wake_up)
    _add(router, "/is_sleeping", fields.Nothing, is_sleeping, "GET")
    _add(router, "/release_kv_cache_memory", fields.Nothing, release_kv_cache)


def _add_cache_routes(router: APIRouter, control: _Control) -> None:
    async def reset_prefix_cache(given: fields.ResetPrefixCache) -> object:
        return {"success": await control.reset_cache(given)}

    async def reset(given: fields.Nothing) -> None:
        await control.call("flush_cache")

    _add(router, "/reset_prefix_cache", fields.ResetPrefixCache, reset_prefix_cache)
    _add(router, "/reset_mm_cache", fields.Nothing, reset)
    _add(router, "/reset_encoder_cache", fields.Nothing, reset)


def _add_rpc(router: APIRouter, control: _Control) -> None:
    async def start(rpc: fields.CollectiveRpc) -> None:
        await control.start(fields.StartWeightUpdate())

    async def finish(rpc: fields.CollectiveRpc) -> None:
        version = rpc.arguments("weight_version").get("weight_version")
        await control.finish(fields.FinishWeightUpdate(weight_version=version))

    async def by_group(rpc: fields.CollectiveRpc) -> None:
        await control.update(rpc.arguments("update_info").get("update_info"), "distributed")

    async def by_ipc(rpc: fields.CollectiveRpc) -> None:
        await control.update(rpc.arguments("update_info").get("update_info"), "ipc")

    async def sleep(rpc: fields.CollectiveRpc) -> None:
        await control.sleep(fields_from(rpc.arguments("level"), fields.Sleep))

    async def wake_up(rpc: fields.CollectiveRpc) -> None:
        tags = rpc.arguments("tags").get("tags")
        named = {"tags": tags.split(",") if isinstance(tags, str) else tags}  # over HTTP, vLLM's arguments are text
        await control.wake_up(fields_from(named, fields.WakeUp))

    async def resume(rpc: fields.CollectiveRpc) -> None:
        await control.call("continue_generation")

    async def flush(rpc: fields.CollectiveRpc) -> None:
        await control.call("flush_cache")

    methods: dict[str, Rpc] = {
        "skyrl_start_weight_update": start,
        "update_weights_nccl": by_group,
        "update_weights_ipc": by_ipc,
        "update_weights_from_ipc": by_ipc,
        "skyrl_finish_weight_update": finish,
        "sleep": sleep,
        "wake_up": wake_up,
        "resume_generation": resume,
        "reset_encoder_cache": flush,
        "reset_prefix_cache": flush,
    }

    async def collective_rpc(rpc: fields.CollectiveRpc) -> object:
        if rpc.method not in methods:
            raise InvalidRequestError(
                f"there is no RPC {rpc.method!r}",
                code="unknown_rpc",
                field="method",
                value=rpc.method,
                hint=f"Known: {', '.join(sorted(methods))}.",
            )
        result = await methods[rpc.method](rpc)
        return {"results": [result] * await control.call("world_size")}

    _add(router, "/collective_rpc", fields.CollectiveRpc, collective_rpc)
