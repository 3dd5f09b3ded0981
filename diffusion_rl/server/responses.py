"""How a reply is sent, and how much of replies is not sent yet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from prometheus_client import Gauge
from starlette.concurrency import iterate_in_threadpool
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from diffusion_rl.server.encoding import EncodedBody
from engine_control.errors import QueueFullError


class RepliesInFlight:
    """The length of all replies that are not sent completely; their tensors are held until they are."""

    def __init__(self, *, limit: int, gauge: Gauge) -> None:
        self.held_bytes = 0
        self._limit = limit
        self._gauge = gauge

    def refusal(self) -> QueueFullError | None:
        """Why no further reply may be begun now: what a slow client has not yet taken is memory."""
        if self.held_bytes <= self._limit:
            return None
        return QueueFullError(
            f"{self.held_bytes} bytes of replies are not taken by their clients",
            code="reply_memory_full",
            value=self.held_bytes,
            hint="Read your replies; retry later, or raise the server's --max-reply-mb.",
        )

    def add(self, change: int) -> None:
        """Counts a reply that begins (its length), or one that has ended, well or not (minus its length)."""
        self.held_bytes += change
        self._gauge.set(self.held_bytes)


class BodyResponse(StreamingResponse):
    """Sends the body chunk by chunk, with its exact length, and no faster than the client takes them. Chunks that cost
    work are made in a worker thread, not on the event loop. Meanwhile the body is one of `replies`."""

    def __init__(self, body: EncodedBody, replies: RepliesInFlight) -> None:
        self._length = body.content_length
        self._replies = replies
        headers = {"content-length": str(self._length), "vary": "Accept"}
        chunks = iterate_in_threadpool(body.chunks()) if body.costs_work else _views(body)
        super().__init__(chunks, media_type=body.content_type, headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._replies.add(self._length)
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._replies.add(-self._length)


async def _views(body: EncodedBody) -> AsyncIterator[bytes | memoryview]:
    """The chunks of a body that is all memory by now; between two of them others have their turn."""
    for chunk in body.chunks():
        yield chunk
        await asyncio.sleep(0)
