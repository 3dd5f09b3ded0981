"""Whether a service is well: the routes that routers, orchestrators and trainers poll."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from engine_control.errors import EngineError
from engine_control.process import EngineState
from engine_control.server.service import EngineService

HEALTH_WAIT_S = 0.05  # of /health for the engine's state, of which the last known one will do


def health_router(service: EngineService) -> APIRouter:
    """`/health`, `/liveness` and `/health_generate`."""
    router = APIRouter(tags=["health"])

    @router.get("/health", responses={503: {"description": "Starting, restarting, gone, or with broken weights."}})
    async def health() -> JSONResponse:
        """Whether the engine is well. Answers at once, whatever the engine is doing; paused or asleep, it is well."""
        state = service.supervisor.state
        if state is EngineState.READY:
            known = await service.control_state(HEALTH_WAIT_S)
            if known is not None and known["state"] == "inconsistent":
                return JSONResponse({"status": "unhealthy", "state": "inconsistent", "error": known["reason"]}, 503)
            return JSONResponse({"status": "ok"})
        error = service.supervisor.last_error
        status = "starting" if state is EngineState.STARTING else "unhealthy"
        text = error.message if error is not None else f"the engine is {state.value}"
        return JSONResponse({"status": status, "state": state.value, "error": text}, 503)

    @router.get("/liveness")
    async def liveness() -> JSONResponse:
        """Whether this HTTP process lives, and no more than that."""
        return JSONResponse({"status": "ok"})

    @router.get("/health_generate", responses={503: {"description": "The request failed or took too long."}})
    async def health_generate() -> JSONResponse:
        """Runs a real request, the smallest there is."""
        try:
            await service.health_generate()
        except EngineError as error:
            return JSONResponse({"status": "unhealthy", "error": str(error)}, 503)
        except TimeoutError:
            limit = service.health_generate_timeout_s
            return JSONResponse({"status": "unhealthy", "error": f"no answer within {limit:g} s"}, 503)
        return JSONResponse({"status": "ok"})

    return router
