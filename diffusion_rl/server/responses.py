"""How a rollout's reply is sent, and how a client that leaves meanwhile is noticed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse

from diffusion_rl.server.encoding import EncodedBody
from engine_control.errors import RequestAbortedError

T = TypeVar("T")


def body_response(body: EncodedBody) -> StreamingResponse:
    """Sends the body chunk by chunk, with its exact length; the chunks are made in a worker thread, not on the event
    loop, and no faster than the client takes them."""
    headers = {"content-length": str(body.content_length), "vary": "Accept"}
    return StreamingResponse(body.chunks(), media_type=body.content_type, headers=headers)


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
