"""Pure ASGI middleware: bounds on request bodies and on what is in flight, the count of all requests, and their end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection

from prometheus_client import Gauge
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine_control.errors import BodyTimeoutError, EngineUnavailableError, PayloadTooLargeError, QueueFullError
from engine_control.server.failures import Failure
from engine_control.server.metrics import Metrics


class BodyLimit:
    """Refuses a body that is too long: by its Content-Length before a byte is read, or as soon as that many came in.
    Refuses one that isn't complete in time, too."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        failure: Failure,
        max_bytes: int,
        timeout_s: float,
        only: Collection[str] = (),
        but: Collection[str] = (),
        raised_by: tuple[str, str] = ("--max-body-mb", "--body-timeout-s"),
    ) -> None:
        """`only`: the limits are for requests to these paths, if any are named; `but`: for those to all others.
        `raised_by`: what raises the two limits, for those who run into them."""
        self._app = app
        self._failure = failure
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._only = frozenset(only)
        self._but = frozenset(but)
        self._raised_by = raised_by

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._concerns(scope):
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"")
        if declared.isdigit() and int(declared) > self._max_bytes:
            await self._failure(self._too_large(int(declared)))(scope, receive, send)
            return
        received, complete = 0, False
        deadline = asyncio.get_running_loop().time() + self._timeout_s

        async def limited() -> Message:
            nonlocal received, complete
            try:
                async with asyncio.timeout_at(None if complete else deadline):
                    message = await receive()
            except TimeoutError:
                raise self._late(received) from None
            received += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if received > self._max_bytes:
                raise self._too_large(received)
            return message

        await self._app(scope, limited, send)

    def _concerns(self, scope: Scope) -> bool:
        if not self._only and not self._but:
            return True
        path = "/" + scope["path"].rsplit("/", 1)[-1]
        return path not in self._but and (not self._only or path in self._only)

    def _late(self, received: int) -> BodyTimeoutError:
        return BodyTimeoutError(
            f"the body was not complete after {self._timeout_s:g} s; {received} bytes had arrived",
            value=received,
            hint=f"Send it faster, or raise the server's {self._raised_by[1]}.",
        )

    def _too_large(self, size: int) -> PayloadTooLargeError:
        return PayloadTooLargeError(
            f"a body of {size} bytes or more, at most {self._max_bytes} are read",
            value=size,
            hint=f"Send less, or raise the server's {self._raised_by[0]}.",
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
    """Counts the requests to some paths from their arrival to the last byte of their reply, and refuses more than so
    many at a time, and all of them while there is another `obstacle`."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        failure: Failure,
        paths: tuple[str, ...],
        gauge: Gauge,
        limit: int,
        obstacle: Callable[[], QueueFullError | None] = lambda: None,
    ) -> None:
        self._app = app
        self._failure = failure
        self._paths = paths
        self._gauge = gauge
        self._limit = limit
        self._obstacle = obstacle
        self._count = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].endswith(self._paths):
            await self._app(scope, receive, send)
            return
        refusal = self._refusal()
        if refusal is not None:
            await self._failure(refusal)(scope, receive, send)
            return
        self._count += 1
        self._gauge.set(self._count)
        try:
            await self._app(scope, receive, send)
        finally:
            self._count -= 1
            self._gauge.set(self._count)

    def _refusal(self) -> QueueFullError | None:
        if self._count >= self._limit:
            return QueueFullError(f"{self._count} requests are in flight", value=self._count, hint="Retry later.")
        return self._obstacle()


class EndAtShutdown:
    """Answers, at shutdown, each request that has no answer yet: with a 503, at once. Its work is cancelled."""

    class Requests:
        """The requests that are being served. `end` is called once, by the server, and then none is begun."""

        def __init__(self) -> None:
            self.unanswered: set[asyncio.Task[object]] = set()
            self.ending = False

        def end(self) -> None:
            self.ending = True
            for task in self.unanswered:
                task.cancel()

    def __init__(self, app: ASGIApp, *, failure: Failure, requests: EndAtShutdown.Requests) -> None:
        self._app = app
        self._failure = failure
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        task = asyncio.current_task()
        assert task is not None
        answered = False

        async def watched(message: Message) -> None:
            nonlocal answered
            answered = True
            self._requests.unanswered.discard(task)
            await send(message)

        self._requests.unanswered.add(task)
        try:
            if not self._requests.ending:
                await self._app(scope, receive, watched)
        except asyncio.CancelledError:
            if not self._requests.ending:
                raise
        finally:
            self._requests.unanswered.discard(task)
        if self._requests.ending and not answered:
            error = EngineUnavailableError(
                "the service is shutting down", code="shutting_down", hint="Retry once it is up again, or elsewhere."
            )
            await self._failure(error)(scope, receive, send)
