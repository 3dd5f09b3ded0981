"""How a request's body is read, how a reply is sent, and how a client that leaves meanwhile is noticed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TypeVar

from prometheus_client import Gauge
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from diffusion_rl.server.encoding import EncodedBody
from engine_control.errors import RequestAbortedError

T = TypeVar("T")
SMALL_BODY_BYTES = 64 * 1024  # takes a millisecond to parse, however it is made


class RepliesInFlight:
    """The length of all replies that are not sent completely; their tensors are held until they are."""

    def __init__(self, *, limit: int, gauge: Gauge) -> None:
        self.held_bytes = 0
        self._limit = limit
        self._gauge = gauge

    @property
    def too_many(self) -> bool:
        return self.held_bytes > self._limit

    def add(self, change: int) -> None:
        """Counts a reply that begins (its length), or one that has ended, well or not (minus its length)."""
        self.held_bytes += change
        self._gauge.set(self.held_bytes)


class BodyResponse(StreamingResponse):
    """Sends the body chunk by chunk, with its exact length; the chunks are made in a worker thread, not on the event
    loop, and no faster than the client takes them. Meanwhile the body is one of `replies`."""

    def __init__(self, body: EncodedBody, replies: RepliesInFlight) -> None:
        self._length = body.content_length
        self._replies = replies
        headers = {"content-length": str(self._length), "vary": "Accept"}
        super().__init__(body.chunks(), media_type=body.content_type, headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._replies.add(self._length)
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._replies.add(-self._length)


async def read_body(request: Request, read: Callable[[bytes], T]) -> T:
    """What `read` makes of the request's body: a large one in a worker thread, so that the event loop stays free."""
    body = await request.body()
    return read(body) if len(body) <= SMALL_BODY_BYTES else await asyncio.to_thread(read, body)


async def unless_disconnected(request: Request, work: Coroutine[None, None, T]) -> T:
    """The result of `work`, which is cancelled if the client goes away first. The request's body must be read before.

    Raises:
        RequestAbortedError: the client went away.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise RequestAbortedError("the client closed the connection")
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
