"""A process that serves one app: it listens first, then starts what the app needs, and ends when told, or when its
engine never starts."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import errno
import logging
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI
from prometheus_client import Gauge

from engine_control.errors import EngineUnavailableError, InvalidRequestError, QueueFullError
from engine_control.server.bodies import WEIGHT_PATHS
from engine_control.server.connections import REPLY_GRACE_S, Server, limited_protocol
from engine_control.server.failures import Failure
from engine_control.server.metrics import Metrics
from engine_control.server.middleware import BodyLimit, CountRequests, EndAtShutdown, LimitInFlight
from engine_control.server.service import EngineService

logger = logging.getLogger(__name__)

SHUTDOWN_GRACE_S = round(REPLY_GRACE_S) + 2  # by then every connection is closed; uvicorn cancels what is left
StartFailure = Callable[[EngineUnavailableError], None]


@dataclass(frozen=True)
class Address:
    """Where a service listens, and for how long it waits for a request's headers and for a client to take its reply."""

    host: str
    port: int
    header_timeout_s: float
    send_timeout_s: float


class RequestLimits(Protocol):
    """The bounds that every service configures, under these names."""

    @property
    def max_body_bytes(self) -> int: ...

    @property
    def body_timeout_s(self) -> float: ...

    @property
    def max_weights_body_bytes(self) -> int: ...

    @property
    def weights_body_timeout_s(self) -> float: ...

    @property
    def max_requests_in_flight(self) -> int: ...


def add_limits(
    app: FastAPI,
    metrics: Metrics,
    limits: RequestLimits,
    *,
    failure: Failure,
    paths: tuple[str, ...],
    in_flight: Gauge,
    obstacle: Callable[[], QueueFullError | None] = lambda: None,
) -> None:
    """Bounds what comes in: bodies, those of routes that take weights by bounds of their own, and the requests to
    `paths` at a time. Afterwards the app has what `serve_app` ends at a shutdown, and counts every answer."""
    app.state.requests = EndAtShutdown.Requests()
    app.add_middleware(
        BodyLimit,
        failure=failure,
        max_bytes=limits.max_body_bytes,
        timeout_s=limits.body_timeout_s,
        but=WEIGHT_PATHS,
    )
    app.add_middleware(
        BodyLimit,
        failure=failure,
        max_bytes=limits.max_weights_body_bytes,
        timeout_s=limits.weights_body_timeout_s,
        only=WEIGHT_PATHS,
        raised_by=("max_weights_body_bytes", "weights_body_timeout_s"),
    )
    app.add_middleware(
        LimitInFlight,
        failure=failure,
        paths=paths,
        gauge=in_flight,
        limit=limits.max_requests_in_flight,
        obstacle=obstacle,
    )
    app.add_middleware(EndAtShutdown, failure=failure, requests=app.state.requests)
    app.add_middleware(CountRequests, metrics=metrics)  # added last, so outermost: it sees every answer


@contextlib.asynccontextmanager
async def engine_running(
    service: EngineService, address: Address, on_start_failure: StartFailure | None
) -> AsyncIterator[None]:
    """The engine process, from its start to its end: an app's lifespan. If it never takes requests, `on_start_failure`
    gets the error, once."""
    service.supervisor.start()
    watch = asyncio.create_task(_report_start(service, address, on_start_failure))
    try:
        yield
    finally:
        watch.cancel()
        await service.supervisor.stop()


def serve_app(make_app: Callable[[StartFailure], FastAPI], address: Address, *, log: str) -> None:
    """Serves until SIGTERM or SIGINT. Afterwards the engine process is gone too.

    `make_app` gets what its `engine_running` is to call; the app has its `add_limits`.
    `log`: the app's own logger, which is shown beside the control layer's.

    Raises:
        InvalidRequestError: the address can't be listened on, and no engine was started.
        EngineUnavailableError: the engine failed to start; its last lines stand in the message.
    """
    listener = _listen(address.host, address.port)
    failures: list[EngineUnavailableError] = []

    def give_up(error: EngineUnavailableError) -> None:
        failures.append(error)
        server.should_exit = True

    app = make_app(give_up)
    server = Server(
        uvicorn.Config(
            app,
            host=address.host,
            port=address.port,
            http=limited_protocol(header_timeout_s=address.header_timeout_s, send_timeout_s=address.send_timeout_s),
            ws="none",
            access_log=False,
            log_config=_log_config(log),
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


def _log_config(log: str) -> dict[str, Any]:
    """Uvicorn's own, with our loggers beside its."""
    config: dict[str, Any] = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
    for name in (log, "engine_control"):
        config["loggers"][name] = {"handlers": ["default"], "level": "INFO", "propagate": False}
    return config


async def _report_start(service: EngineService, address: Address, on_start_failure: StartFailure | None) -> None:
    try:
        await service.supervisor.wait_ready()
    except EngineUnavailableError as error:
        logger.error("%s", error)
        if on_start_failure is not None:
            on_start_failure(error)
        return
    logger.info("%s is ready at http://%s:%d", service.model_name, address.host, address.port)
