"""Bodies before they are parsed: how large, how slow, how deep, and whether they are text at all.

An ASGI middleware in front of the application. It reads the whole body within limits, answers 413, 408 or 400 itself,
and hands the application a body that `json.loads` cannot stumble over. Disconnects pass through to the application.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["MAX_JSON_DEPTH", "BodyLimits", "error_body", "json_depth_exceeds"]

_MOST_DISCARDED = 256 << 20  # bytes of a body that is too large
MAX_JSON_DEPTH = 64
"""Deeper than any schema or message in use, far from Python's recursion limit."""


def error_body(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> bytes:
    """OpenAI's error object as JSON. ASCII only: messages may quote text that is not valid Unicode."""
    return json.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}}).encode("ascii")


def json_depth_exceeds(body: bytes, limit: int) -> bool:
    """True when brackets nest deeper than `limit` outside strings. Linear, and right for every valid JSON text."""
    depth = 0
    in_string = escaped = False
    if body.count(b"[") + body.count(b"{") <= limit:
        return False
    for byte in body:
        if in_string:
            if escaped:
                escaped = False
            elif byte == 0x5C:
                escaped = True
            elif byte == 0x22:
                in_string = False
        elif byte == 0x22:
            in_string = True
        elif byte in b"[{":
            depth += 1
            if depth > limit:
                return True
        elif byte in b"]}":
            depth -= 1
    return False


class BodyLimits:
    """`max_bytes` of a body, `read_seconds` for all of it to arrive."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, read_seconds: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._read_seconds = read_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH"):
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"")
        if declared.isdigit() and int(declared) > self._max_bytes:
            await self._discard(receive)
            await self._refuse(send, 413, self._too_large())
            return
        try:
            body = await asyncio.wait_for(self._read(receive), self._read_seconds)
        except asyncio.TimeoutError:
            await self._refuse(send, 408, f"The body did not arrive within {self._read_seconds:g} s.")
            return
        if body is None:
            return  # the client left
        problem = self._problem(body)
        if problem is not None:
            if len(body) > self._max_bytes:
                await self._discard(receive)
            await self._refuse(send, *problem)
            return
        await self._app(scope, _replayed(body, receive), send)

    def _problem(self, body: bytes) -> tuple[int, str] | None:
        if len(body) > self._max_bytes:
            return 413, self._too_large()
        try:
            body.decode("utf-8")
        except UnicodeDecodeError as error:
            return 400, f"The body is not valid UTF-8 (byte {error.start}). Encode it as UTF-8."
        if json_depth_exceeds(body, MAX_JSON_DEPTH):
            return 400, f"The JSON nests deeper than {MAX_JSON_DEPTH} levels. Flatten it."
        return None

    def _too_large(self) -> str:
        return f"The body is larger than {self._max_bytes} bytes. Send a shorter conversation."

    async def _read(self, receive: Receive) -> bytes | None:
        """The body; one byte more than allowed when it is too large; None when the client left."""
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > self._max_bytes or not message.get("more_body", False):
                return b"".join(chunks)

    async def _discard(self, receive: Receive) -> None:
        """Read on, keeping nothing, so that a client that still sends gets to read its answer: closing a connection with unread
        bytes resets it. A body without end is cut off."""

        async def read() -> None:
            size = 0
            while size < _MOST_DISCARDED:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
                size += len(message.get("body", b""))

        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(read(), self._read_seconds)

    async def _refuse(self, send: Send, status: int, message: str) -> None:
        body = error_body(message, "invalid_request_error")
        # The body may not have been read to its end: the connection cannot be used again.
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _replayed(body: bytes, receive: Receive) -> Receive:
    sent = False

    async def replay() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        message: dict[str, Any] = {"type": "http.request", "body": body, "more_body": False}
        return message

    return replay
