"""Server-sent events that notice when nobody reads: a client that is gone, or one that stopped taking bytes.

In: an async iterator of JSON objects. Out: an ASGI response. The iterator is closed in every case, so that the request
behind it is aborted: on disconnect, on a write that takes longer than `write_seconds`, on an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

__all__ = ["EventStream"]

_log = logging.getLogger(__name__)


class EventStream(Response):
    """`data: {...}` lines, then `data: [DONE]`; a comment every `ping_seconds` of silence."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[dict[str, Any], None], *, write_seconds: float, ping_seconds: float
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._write_seconds = write_seconds
        self._ping_seconds = ping_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run until the events end or the client does."""
        writer = asyncio.ensure_future(self._write(send))
        watcher = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({writer, watcher}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (writer, watcher):
                if not task.done():
                    task.cancel()
                with contextlib.suppress(asyncio.CancelledError, OSError):
                    await task
            await self._events.aclose()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            while (event := await self._next(send)) is not None:
                data = b"data: " + json.dumps(event, ensure_ascii=False).encode("utf-8", "replace") + b"\n\n"
                await self._send(send, data, more=True)
            await self._send(send, b"data: [DONE]\n\n", more=True)
            await self._send(send, b"", more=False)
        except asyncio.TimeoutError:
            _log.warning("a client stopped reading for %g s; its request ends", self._write_seconds)

    async def _next(self, send: Send) -> dict[str, Any] | None:
        """The next event; None at the end. Comments go out while it takes long: proxies close silent connections."""
        waiting = asyncio.ensure_future(anext(self._events, None))
        try:
            while not (await asyncio.wait({waiting}, timeout=self._ping_seconds))[0]:
                await self._send(send, b": ping\n\n", more=True)
            return waiting.result()
        finally:
            if not waiting.done():
                waiting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await waiting

    async def _send(self, send: Send, data: bytes, *, more: bool) -> None:
        message = {"type": "http.response.body", "body": data, "more_body": more}
        await asyncio.wait_for(send(message), self._write_seconds)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
