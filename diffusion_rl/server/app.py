"""The service: `create_app` for any ASGI server, `serve` for a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import errno
import logging
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import uvicorn
from fastapi import FastAPI

from diffusion_rl.config import EngineConfig, ServerConfig
from diffusion_rl.server.connections import REPLY_GRACE_S, Server, limited_protocol
from diffusion_rl.server.middleware import BodyLimit, CountRequests, EndAtShutdown, LimitInFlight
from diffusion_rl.server.problem import install_error_handlers
from diffusion_rl.server.routes import ROLLOUT_PATH, health_router, info_router, rollout_router
from diffusion_rl.server.service import RolloutService
from engine_control.errors import EngineUnavailableError, InvalidRequestError
from engine_control.server.bodies import WEIGHT_PATHS
from engine_control.server.lora import lora_router
from engine_control.server.sglang import sglang_router
from engine_control.server.vllm import vllm_router

logger = logging.getLogger(__name__)

DESCRIPTION = """Rollouts of diffusion models for RL post-training: images, per-step log-probs, trajectories and the
conditioning to re-score them. Errors are `application/problem+json` with a stable `code`, the `field` and a `hint`."""
SHUTDOWN_GRACE_S = round(REPLY_GRACE_S) + 2  # by then every connection is closed; uvicorn cancels what is left


def create_app(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    *,
    on_start_failure: Callable[[EngineUnavailableError], None] | None = None,
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
        service.supervisor.start()
        watch = asyncio.create_task(_report_start(service, on_start_failure))
        try:
            yield
        finally:
            watch.cancel()
            await service.supervisor.stop()

    app = FastAPI(title="diffusion-rl", description=DESCRIPTION, lifespan=lifespan)
    app.state.service = service
    app.state.requests = EndAtShutdown.Requests()
    install_error_handlers(app)
    app.include_router(rollout_router(service))
    app.include_router(health_router(service))
    app.include_router(info_router(service))
    app.include_router(sglang_router(service, engine="diffusion"))
    app.include_router(vllm_router(service))
    app.include_router(lora_router(service))
    app.add_middleware(
        BodyLimit, max_bytes=server_config.max_body_bytes, timeout_s=server_config.body_timeout_s, but=WEIGHT_PATHS
    )
    app.add_middleware(
        BodyLimit,
        max_bytes=server_config.max_weights_body_bytes,
        timeout_s=server_config.weights_body_timeout_s,
        only=WEIGHT_PATHS,
        raised_by=("max_weights_body_bytes", "weights_body_timeout_s"),
    )
    app.add_middleware(
        LimitInFlight,
        path=ROLLOUT_PATH,
        gauge=service.metrics.rollouts_in_flight,
        limit=server_config.max_requests_in_flight,
        replies=service.replies,
    )
    app.add_middleware(EndAtShutdown, requests=app.state.requests)
    app.add_middleware(CountRequests, metrics=service.metrics)  # added last, so outermost: it sees every answer
    return app


def serve(engine_config: EngineConfig, server_config: ServerConfig) -> None:
    """Serves until SIGTERM or SIGINT. Afterwards the engine process is gone too.

    Raises:
        InvalidRequestError: the address can't be listened on, and no engine was started.
        EngineUnavailableError: the engine failed to start; its last lines stand in the message.
    """
    listener = _listen(server_config.host, server_config.port)
    failures: list[EngineUnavailableError] = []

    def give_up(error: EngineUnavailableError) -> None:
        failures.append(error)
        server.should_exit = True

    app = create_app(engine_config, server_config, on_start_failure=give_up)
    server = Server(
        uvicorn.Config(
            app,
            host=server_config.host,
            port=server_config.port,
            http=limited_protocol(server_config),
            ws="none",
            access_log=False,
            log_config=_log_config(),
            timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
        ),
        app.state.requests,
    )
    with listener:
        server.run(sockets=[listener])
    if failures:
        raise failures[0]


def _listen(host: str, port: int) -> socket.socket:
    """A socket bound to that address, before anything else is started that would have to be undone."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        used = error.errno == errno.EADDRINUSE
        raise InvalidRequestError(
            f"can't listen on {host} port {port}: " + ("another program does" if used else str(error)),
            code="bad_address",
            field="port" if used else "host",
            value=port if used else host,
            hint="Stop the other program, or choose another --port." if used else "Choose another --host.",
        ) from error
    return listener


def _log_config() -> dict[str, Any]:
    """Uvicorn's own, with our loggers beside its."""
    config = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
    for name in ("diffusion_rl", "engine_control"):
        config["loggers"][name] = {"handlers": ["default"], "level": "INFO", "propagate": False}
    return config


async def _report_start(
    service: RolloutService, on_start_failure: Callable[[EngineUnavailableError], None] | None
) -> None:
    config = service.config
    try:
        await service.supervisor.wait_ready()
    except EngineUnavailableError as error:
        logger.error("%s", error)
        if on_start_failure is not None:
            on_start_failure(error)
        return
    logger.info("%s is ready at http://%s:%d", service.model_name, config.host, config.port)
