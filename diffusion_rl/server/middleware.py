"""Pure ASGI middleware: a bound on request bodies that is never buffered past, and the count of all requests."""

from __future__ import annotations

import time

from prometheus_client import Gauge
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diffusion_rl.server.metrics import Metrics
from diffusion_rl.server.problem import problem_response
from engine_control.errors import PayloadTooLargeError, QueueFullError


class BodyLimit:
    """Refuses a body that is too long: by its Content-Length before a byte is read, or as soon as that many came in."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"")
        if declared.isdigit() and int(declared) > self._max_bytes:
            await problem_response(self._error(int(declared)))(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise self._error(received)
            return message

        await self._app(scope, counted, send)

    def _error(self, size: int) -> PayloadTooLargeError:
        return PayloadTooLargeError(
            f"a body of {size} bytes or more, at most {self._max_bytes} are read",
            value=size,
            hint="Send less, or raise the server's --max-body-bytes.",
        )


class CountRequests:
    """Counts each request by route and status, and times it until the last byte of its reply."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        status = 500  # what the outermost layer answers if nothing within it does

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.request_finished(route, status, time.perf_counter() - began)


class LimitInFlight:
    """Counts the requests to one path from their arrival to the last byte of their reply, and refuses more than so
    many at a time: what a slow client has not yet taken of its reply is memory."""

    def __init__(self, app: ASGIApp, *, path: str, gauge: Gauge, limit: int) -> None:
        self._app = app
        self._path = path
        self._gauge = gauge
        self._limit = limit
        self._count = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].endswith(self._path):
            await self._app(scope, receive, send)
            return
        if self._count >= self._limit:
            error = QueueFullError(f"{self._count} requests are in flight", value=self._count, hint="Retry later.")
            await problem_response(error)(scope, receive, send)
            return
        self._count += 1
        self._gauge.set(self._count)
        try:
            await self._app(scope, receive, send)
        finally:
            self._count -= 1
            self._gauge.set(self._count)
