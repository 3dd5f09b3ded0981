"""How a request's body is read, and how a client that leaves before it is answered is noticed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TypeVar

from starlette.requests import Request

from engine_control.errors import RequestAbortedError

T = TypeVar("T")
SMALL_BODY_BYTES = 64 * 1024  # takes a millisecond to parse, however it is made


async def read_body(request: Request, read: Callable[[bytes], T], *, small: int = SMALL_BODY_BYTES) -> T:
    """What `read` makes of the request's body: one of more than `small` bytes in a worker thread, so that the event
    loop stays free."""
    body = await request.body()
    return read(body) if len(body) <= small else await asyncio.to_thread(read, body)


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
