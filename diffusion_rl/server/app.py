"""The service: `create_app` for any ASGI server, `serve` for a process of its own."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI

from diffusion_rl.config import EngineConfig, ServerConfig
from diffusion_rl.server.problem import http_problem, problem_response
from diffusion_rl.server.routes import ROLLOUT_PATH, info_router, rollout_router
from diffusion_rl.server.service import RolloutService
from engine_control.server.failures import install_error_handlers
from engine_control.server.health import health_router
from engine_control.server.lora import lora_router
from engine_control.server.serving import Address, StartFailure, add_limits, engine_running, serve_app
from engine_control.server.sglang import sglang_router
from engine_control.server.vllm import vllm_router

DESCRIPTION = """Rollouts of diffusion models for RL post-training: images, per-step log-probs, trajectories and the
conditioning to re-score them. Errors are `application/problem+json` with a stable `code`, the `field` and a `hint`."""


def create_app(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    *,
    on_start_failure: StartFailure | None = None,
) -> FastAPI:
    """The service as an ASGI app, whose lifespan is the engine process's. Several apps may live in one process.

    The app answers from its first moment; `/health` says when the engine takes requests. If it never does,
    `on_start_failure` gets the error, once.

    What concerns connections instead of requests is `serve`'s: under another ASGI server, limits on slow headers and on
    clients that take nothing of a reply are that server's, and so is the end of requests at its shutdown.
    """
    service = RolloutService(engine_config, server_config)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with engine_running(service, _address(server_config), on_start_failure):
            yield

    app = FastAPI(title="diffusion-rl", description=DESCRIPTION, lifespan=lifespan)
    app.state.service = service
    install_error_handlers(app, problem_response, http_problem)
    app.include_router(rollout_router(service))
    app.include_router(health_router(service))
    app.include_router(info_router(service))
    app.include_router(sglang_router(service, engine="diffusion"))
    app.include_router(vllm_router(service))
    app.include_router(lora_router(service))
    add_limits(
        app,
        service.metrics,
        server_config,
        failure=problem_response,
        paths=(ROLLOUT_PATH,),
        in_flight=service.in_flight,
        obstacle=service.replies.refusal,
    )
    return app


def serve(engine_config: EngineConfig, server_config: ServerConfig) -> None:
    """Serves until SIGTERM or SIGINT. Afterwards the engine process is gone too.

    Raises:
        InvalidRequestError: the address can't be listened on, and no engine was started.
        EngineUnavailableError: the engine failed to start; its last lines stand in the message.
    """
    serve_app(
        lambda give_up: create_app(engine_config, server_config, on_start_failure=give_up),
        _address(server_config),
        log="diffusion_rl",
    )


def _address(config: ServerConfig) -> Address:
    return Address(config.host, config.port, config.body_timeout_s, config.send_timeout_s)
