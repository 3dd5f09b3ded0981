"""The control routes under SGLang's names: `router.include_router(sglang_router(port, engine="llm"))`.

A refusal has its error's own status and `{"success": false, "message", "code", "hint"}`. Source of names, fields and
replies: SGLang 0.5.23, its language-model and its diffusion server.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from engine_control.errors import ConflictError, EngineError, EngineUnavailableError
from engine_control.server import sglang_fields as fields
from engine_control.server.bodies import RAW_TYPES, add_route, media_type, read_fields, read_query, read_raw, schema_of
from engine_control.server.failures import SglangRoute, json_response, retry_headers
from engine_control.server.port import ControlPort

F = TypeVar("F", bound=fields.SglangFields)
Methods = tuple[str, ...]
READY_WAIT_S = 1.0

POST: Methods = ("POST",)
BOTH: Methods = ("GET", "POST")
PLAIN: tuple[tuple[str, Methods, type[fields.SglangFields]], ...] = (
    ("/begin_weight_update", POST, fields.BeginWeightUpdate),
    ("/end_weight_update", POST, fields.EndWeightUpdate),
    ("/abort_weight_update", POST, fields.AbortWeightUpdate),
    ("/update_weights_from_distributed", POST, fields.UpdateWeightsFromDistributed),
    ("/update_weights_from_ipc", POST, fields.UpdateWeightsFromIpc),
    ("/init_weights_update_group", POST, fields.InitWeightsUpdateGroup),
    ("/destroy_weights_update_group", POST, fields.DestroyWeightsUpdateGroup),
    ("/update_weight_version", POST, fields.UpdateWeightVersion),
    ("/get_weights_by_name", BOTH, fields.GetWeightsByName),
    ("/get_weights_checksum", POST, fields.GetWeightsChecksum),
    ("/update_weights_from_tensor_checker", POST, fields.CheckTensors),
    ("/pause_generation", POST, fields.PauseGeneration),
    ("/continue_generation", POST, fields.ContinueGeneration),
)
"""Routes that answer with what the command returns."""


def sglang_router(port: ControlPort, *, engine: Literal["diffusion", "llm"]) -> APIRouter:
    """All of them. Of a diffusion engine, release and resume answer with a report, not with null, and `/abort_request`
    is the app's own, since the two of SGLang's servers don't agree there."""
    router = APIRouter(tags=["control: SGLang's names"], route_class=SglangRoute)
    for path, methods, shape in PLAIN:
        _add(router, path, methods, shape, _plain(port))
    _add_update_routes(router, port)
    _add(router, "/weights_checker", BOTH, fields.WeightsChecker, _checked(port))
    report = _plain(port) if engine == "diffusion" else _silent(port, json_response(None))
    _add(router, "/release_memory_occupation", BOTH, fields.ReleaseMemory, report)
    _add(router, "/resume_memory_occupation", BOTH, fields.ResumeMemory, report)
    _add(router, "/flush_cache", BOTH, fields.FlushCache, _flushed(port))
    if engine == "llm":
        _add(router, "/abort_request", POST, fields.AbortRequest, _silent(port, Response()))
    _add_state_routes(router, port)
    return router


def _add(
    router: APIRouter, path: str, methods: Methods, shape: type[F], answer: Callable[[F], Awaitable[Response]]
) -> None:
    """A route that reads those fields and answers so."""

    async def endpoint(request: Request) -> Response:
        return await answer(await read_fields(request, shape))

    for method in methods:
        add_route(router, path, shape, endpoint, method)


def _plain(port: ControlPort) -> Callable[[fields.SglangFields], Awaitable[Response]]:
    """Answers with what the command returns."""

    async def answer(given: fields.SglangFields) -> Response:
        return _result(await port.call(*given.command()))

    return answer


def _silent(port: ControlPort, reply: Response) -> Callable[[fields.SglangFields], Awaitable[Response]]:
    """Answers with that reply, whatever the command returns."""

    async def answer(given: fields.SglangFields) -> Response:
        await port.call(*given.command())
        return reply

    return answer


def _checked(port: ControlPort) -> Callable[[fields.SglangFields], Awaitable[Response]]:
    """As SGLang does, with the digests of each rank; here all ranks' are in one."""

    async def answer(given: fields.SglangFields) -> Response:
        result: Mapping[str, Any] = await port.call(*given.command())
        ranks = {"ranks": [{"checksums": result["checksums"]}]} if "checksums" in result else {}
        return _result({**result, **ranks})

    return answer


def _flushed(port: ControlPort) -> Callable[[fields.SglangFields], Awaitable[Response]]:
    """Text; a server that is busy answers 400, as SGLang's clients expect that poll it."""

    async def answer(given: fields.SglangFields) -> Response:
        try:
            await port.call(*given.command())
        except EngineError as error:
            status = 400 if isinstance(error, ConflictError) else error.status
            return PlainTextResponse(f"{error}\n", status, headers=retry_headers(error))
        return PlainTextResponse("Cache flushed.\n")

    return answer


def _add_update_routes(router: APIRouter, port: ControlPort) -> None:
    async def from_disk(given: fields.UpdateWeightsFromDisk) -> Response:
        return _result({"num_paused_requests": 0, **await port.call(*given.command())})

    async def from_tensor(request: Request) -> Response:
        if media_type(request) not in RAW_TYPES:
            given = await read_fields(request, fields.UpdateWeightsFromTensor)
            return _result(await port.call(*given.command()))
        beside = read_query(request, fields.RawTensors)
        info = {"load_format": "safetensors", "safetensors": await read_raw(request)}
        return _result(await port.call(*fields.update_command(beside, "tensor", info)))

    _add(router, "/update_weights_from_disk", POST, fields.UpdateWeightsFromDisk, from_disk)
    extra = schema_of(fields.UpdateWeightsFromTensor)
    extra["requestBody"]["content"].update({kind: {} for kind in sorted(RAW_TYPES)})
    router.add_api_route(
        "/update_weights_from_tensor",
        from_tensor,
        methods=["POST"],
        name="update_weights_from_tensor",
        description=fields.UpdateWeightsFromTensor.__doc__,
        response_class=Response,
        openapi_extra=extra,
    )


def _add_state_routes(router: APIRouter, port: ControlPort) -> None:
    @router.get("/get_weight_version", response_class=Response)
    async def get_weight_version() -> Response:
        """What the weights are called."""
        return json_response({"weight_version": (await port.call("weight_info", {}))["weight_version"]})

    @router.get("/ready", response_class=Response, responses={503: {"description": "A request would not run now."}})
    async def ready() -> Response:
        """Whether a request would be computed at once: not while the engine is starting, paused, asleep or updated."""
        try:
            state = await port.control_state(READY_WAIT_S)
        except EngineUnavailableError as error:
            return json_response({"status": "unready", "state": "unavailable", "reason": error.message}, 503)
        if state is not None and state["generation"] == "ok":
            return json_response({"status": "ready", "state": state["state"]})
        known = state or {"state": "unknown"}
        reason = known.get("reason") or f"the engine is {known['state']}"
        return json_response({"status": "unready", "state": known["state"], "reason": reason}, 503)


def _result(result: object) -> Response:
    """What a command returned. One that says itself that it failed gets status 400."""
    failed = isinstance(result, Mapping) and result.get("success") is False
    return json_response(result, 400 if failed else 200)
