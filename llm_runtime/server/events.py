"""Replies that are streams of server-sent events."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine_control.errors import EngineError, RequestAbortedError
from engine_control.server.clients import unless_disconnected

DONE = b"data: [DONE]\n\n"
Failed = Callable[[EngineError], dict[str, Any]]


async def event_stream(request: Request, events: AsyncGenerator[dict[str, Any], None], failed: Failed) -> Response:
    """Events as they come, then `[DONE]`. The first one is waited for here, so that a request that is refused gets the
    status of its error; an error after it is the last event, as `failed` writes it.

    Raises:
        EngineError: what came instead of the first event; `RequestAbortedError` if the client went away.
    """
    try:
        first = await unless_disconnected(request, _next(events))
    except BaseException:
        await events.aclose()
        raise
    return _EventStream(request, first, events, failed)


class _EventStream(Response):
    """Sends events until they or the client end. Then the generator behind them is closed, and with it its request."""

    def __init__(
        self,
        request: Request,
        first: dict[str, Any] | None,
        events: AsyncGenerator[dict[str, Any], None],
        failed: Failed,
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._request = request
        self._first = first
        self._events = events
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._events):
            with contextlib.suppress(RequestAbortedError, OSError):  # the client is gone: there is nobody to tell
                await unless_disconnected(self._request, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self._data():
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": DONE, "more_body": False})

    async def _data(self) -> AsyncIterator[bytes]:
        if self._first is None:
            return
        yield _event(self._first)
        try:
            async for event in self._events:
                yield _event(event)
        except EngineError as error:
            yield _event(self._failed(error))


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


async def _next(events: AsyncGenerator[dict[str, Any], None]) -> dict[str, Any] | None:
    return await anext(events, None)
