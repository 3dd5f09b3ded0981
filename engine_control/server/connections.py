"""What is done to single connections: time limits that uvicorn lacks, and a shutdown that answers everybody in time.

An app sees requests, not connections: it can't tell a client that sends its headers byte by byte, nor cut off one that
takes nothing of its reply. A connection that is cut off here reaches the app as a disconnect.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from engine_control.server.middleware import EndAtShutdown

logger = logging.getLogger(__name__)

REPLY_GRACE_S = 3.0  # at shutdown, for clients that are taking a finished reply
MAX_HEADER_BYTES = 64 * 1024


def limited_protocol(*, header_timeout_s: float, send_timeout_s: float) -> type[HttpToolsProtocol]:
    """Uvicorn's protocol, with limits on headers that don't end and on replies that nobody takes."""

    class LimitedProtocol(HttpToolsProtocol):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._awaiting: asyncio.TimerHandle | None = None  # the headers of a request
            self._sending: asyncio.TimerHandle | None = None
            self._in_headers = False
            self._header_bytes = 0

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._await_headers()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_awaiting()
            self._stop_sending()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self.cycle is None or self.cycle.response_complete:  # so no app waits for it, with a limit of its own
                self._await_headers()
            continued = self._in_headers
            super().data_received(data)
            if continued and self._in_headers:
                self._header_bytes += len(data)
                if self._header_bytes > MAX_HEADER_BYTES:
                    self._cut_off("%s sent more than %d bytes of headers", MAX_HEADER_BYTES)

        def on_message_begin(self) -> None:
            self._in_headers, self._header_bytes = True, 0
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._in_headers = False
            self._stop_awaiting()
            super().on_headers_complete()

        def pause_writing(self) -> None:
            super().pause_writing()
            if self._sending is None:
                self._sending = self.loop.call_later(
                    send_timeout_s, self._cut_off, "%s took nothing of its reply for %g s", send_timeout_s
                )

        def resume_writing(self) -> None:
            self._stop_sending()
            super().resume_writing()

        def _await_headers(self) -> None:
            if self._awaiting is None:
                self._awaiting = self.loop.call_later(
                    header_timeout_s, self._cut_off, "%s sent no whole request in %g s", header_timeout_s
                )

        def _stop_awaiting(self) -> None:
            if self._awaiting is not None:
                self._awaiting.cancel()
                self._awaiting = None

        def _stop_sending(self) -> None:
            if self._sending is not None:
                self._sending.cancel()
                self._sending = None

        def _cut_off(self, why: str, limit: float) -> None:
            logger.info(f"connection closed: {why}", self.client or "a client", limit)
            self.transport.abort()

    return LimitedProtocol


class Server(uvicorn.Server):
    """Uvicorn's server. When it is told to end, requests without an answer get one at once (`EndAtShutdown`), and
    clients that are taking their reply have `REPLY_GRACE_S` for the rest of it."""

    def __init__(self, config: uvicorn.Config, open_requests: EndAtShutdown.Requests) -> None:
        super().__init__(config)
        self._open_requests = open_requests

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._open_requests.end()
        cutting_off = asyncio.create_task(self._cut_off_the_rest())
        try:
            await super().shutdown(sockets)
        finally:
            cutting_off.cancel()

    async def _cut_off_the_rest(self) -> None:
        await asyncio.sleep(REPLY_GRACE_S)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
