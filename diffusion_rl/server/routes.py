"""The routes. Each reads its request, asks the service, and answers; errors are mapped in `problem`."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel

from diffusion_rl import __version__
from diffusion_rl.server.encoding import CONTENT_TYPES
from diffusion_rl.server.negotiation import check_json_content_type, choose_wire
from diffusion_rl.server.problem import PROBLEM_TYPE, Problem
from diffusion_rl.server.responses import BodyResponse
from diffusion_rl.server.schema import EXAMPLE, RolloutRequest, load_json, outline
from diffusion_rl.server.service import RolloutService
from engine_control.errors import InvalidRequestError
from engine_control.server.clients import read_body, unless_disconnected
from engine_control.server.metrics import PAGE_TYPE

ROLLOUT_PATH = "/rollout/generate"
REFUSALS = {
    400: "The request can't be served as it stands; `field`, `value` and `hint` say why.",
    406: "No encoding fits the Accept header.",
    408: "The body did not arrive in time.",
    413: "The body is too long.",
    415: "The body is not labelled as JSON.",
    429: "Too much is waiting; retry later.",
    499: "The request was aborted.",
    500: "The engine met a fault, or the model produced non-finite values.",
    503: "The engine is starting, restarting or gone, or the service is shutting down; retry later.",
}
TENSOR_DOC = (
    'One row a sample. Tensors are `{"__tensor__": true, "data", "shape", "dtype"}`, where data is a safetensors file '
    "with the key `t`: base64 in JSON, bytes in msgpack. `application/vnd.safetensors` is one file for all rows: its "
    'metadata entry `rollout` holds the rows, with `{"__tensor__": name}` for each tensor.'
)


class AbortReply(BaseModel):
    """`aborted` is false if no such request was being computed."""

    success: bool
    aborted: bool


def rollout_router(service: RolloutService) -> APIRouter:
    """`/rollout/generate` and `/abort_request`."""
    router = APIRouter(tags=["rollout"])
    schema = {"schema": RolloutRequest.model_json_schema(), "examples": {"a group of four": {"value": EXAMPLE}}}

    @router.post(
        ROLLOUT_PATH,
        response_class=Response,
        responses={
            200: {"description": TENSOR_DOC, "content": {name: {} for name in CONTENT_TYPES.values()}},
            **_refusals(*REFUSALS),
        },
        openapi_extra={"requestBody": {"required": True, "content": {"application/json": schema}}},
    )
    async def generate(request: Request) -> Response:
        """Rolls out one prompt: `num_outputs_per_prompt` samples with their log-probs and, if asked for, trajectories.

        If the client closes the connection, its samples leave the batch before the next step.
        """
        wire = choose_wire(request.headers.get("accept"), service.config.rollout_wire)
        check_json_content_type(request.headers.get("content-type"))
        parsed = await read_body(request, service.parse)
        return BodyResponse(await unless_disconnected(request, service.roll_out(parsed, wire)), service.replies)

    @router.post("/abort_request", responses=_refusals(400, 503), response_model=AbortReply)
    async def abort_request(request: Request) -> AbortReply:
        """Aborts the request that was sent with this `rid`; it is answered with status 499, or, if it has
        `rollout_return_partial`, with 200 and its samples as they are. With `prefix: true`, all
        whose rid begins so; with `abort_all: true`, all."""
        check_json_content_type(request.headers.get("content-type"))
        body = await read_body(request, load_json)
        rid, prefix, everything = (body.get(name) for name in ("rid", "prefix", "abort_all"))
        for name, flag in (("prefix", prefix), ("abort_all", everything)):
            if not isinstance(flag, bool | None):
                raise InvalidRequestError("must be true or false", field=name, value=outline(flag), hint="See /docs.")
        if everything:
            found = await service.call("abort_requests", {"abort_all": True})
            return AbortReply(success=True, aborted=bool(found["aborted"]))
        if not isinstance(rid, str):
            raise InvalidRequestError(
                "must be a string", field="rid", value=outline(rid), hint="Send the request's rid, or abort_all: true."
            )
        return AbortReply(success=True, aborted=await service.abort(rid, prefix=bool(prefix)))

    return router


def info_router(service: RolloutService) -> APIRouter:
    """What is served and how, and metrics."""
    router = APIRouter(tags=["information"])

    @router.get("/server_info")
    async def server_info() -> Response:
        """What is loaded, how this service is configured, and the engine's counters."""
        return _json({**await service.server_info(), "version": __version__})

    @router.get("/model_info")
    @router.get("/v1/model_info", include_in_schema=False)
    async def model_info() -> Response:
        """The model, in SGLang's words."""
        description = await service.description()
        return _json({"model_type": "diffusion", "task_type": "T2I", "model_path": service.model_name, **description})

    @router.get("/v1/models")
    async def models() -> Response:
        """The model, as OpenAI lists models."""
        entry = {
            "id": service.model_name,
            "object": "model",
            "created": service.started_at,
            "owned_by": "diffusion-rl",
            "task_type": "T2I",
            "pipeline_class": service.supervisor.description.get("pipeline_class"),
        }
        return _json({"object": "list", "data": [entry]})

    @router.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(service.metrics.page(await service.stats()), media_type=PAGE_TYPE)

    return router


def _refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    content = {PROBLEM_TYPE: {"schema": Problem.model_json_schema()}}
    return {status: {"description": REFUSALS[status], "content": content} for status in statuses}


def _json(value: object) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
