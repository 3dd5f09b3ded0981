"""What is served and how, under SGLang's names."""

from __future__ import annotations

import time

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from starlette.responses import Response

from engine_control import __version__
from engine_control.process import EngineState
from engine_control.server.failures import SglangRoute, json_response
from engine_control.server.metrics import PAGE_TYPE
from llm_runtime.server.service import LLMService


def info_router(service: LLMService) -> APIRouter:
    """`/model_info`, `/server_info`, loads, `/ping`, `/version` and `/metrics`."""
    router = APIRouter(tags=["information"], route_class=SglangRoute)

    @router.get("/model_info")
    @router.get("/get_model_info", include_in_schema=False)
    async def model_info() -> Response:
        """The model, and the version of its weights."""
        return json_response(await service.model_info())

    @router.get("/server_info")
    @router.get("/get_server_info", include_in_schema=False)
    async def server_info() -> Response:
        """What is loaded, how this service is configured, and the engine's counters."""
        return json_response({**await service.server_info(), "version": __version__})

    @router.get("/v1/loads")
    async def loads() -> Response:
        """What is in the engine right now: who aborted everything polls it until nothing is."""
        return json_response({"timestamp": time.time(), "version": __version__, "loads": [await service.loads()]})

    @router.get("/get_load")
    async def get_load() -> Response:
        """The same in an older form, which routers ask for."""
        load = await service.loads()
        row = {
            "dp_rank": 0,
            "num_reqs": load["num_total_reqs"],
            "num_waiting_reqs": load["num_waiting_reqs"],
            "num_tokens": load["num_total_tokens"],
        }
        return json_response([row])

    @router.get("/ping", responses={503: {"description": "The engine takes no requests."}})
    async def ping() -> JSONResponse:
        """Whether the engine's process is there."""
        state = service.supervisor.state
        return JSONResponse({"status": state.value}, 200 if state is EngineState.READY else 503)

    @router.get("/version")
    async def version() -> Response:
        """Of this package."""
        return json_response({"version": __version__})

    @router.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(service.metrics.page(await service.stats()), media_type=PAGE_TYPE)

    return router
