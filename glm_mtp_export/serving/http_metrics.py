"""Counts responses by path and status, in the same Prometheus registry as the engine's numbers."""

from __future__ import annotations

from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["ResponseCounter"]

_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics"})


class ResponseCounter:
    """An ASGI middleware. Unknown paths are one label, or a scanner could fill the registry."""

    def __init__(self, app: ASGIApp, *, registry: Any) -> None:
        import prometheus_client

        self._app = app
        labels = ["path", "status"]
        self._responses = prometheus_client.Counter(
            "glm_mtp_http_responses", "HTTP responses", labels, registry=registry
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in _PATHS else "other"
        is_answered = False

        async def counted(message: Message) -> None:
            nonlocal is_answered
            if message["type"] == "http.response.start":
                is_answered = True
                self._responses.labels(path=path, status=str(message["status"])).inc()
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except Exception:
            if not is_answered:  # the answer to a bug is made outside of all middleware
                self._responses.labels(path=path, status="500").inc()
            raise
