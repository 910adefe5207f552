"""The OpenAI-compatible HTTP server: chat completions and completions over a runtime, for people without Triton.

Endpoints: POST /v1/chat/completions, POST /v1/completions, GET /v1/models, GET /v1/models/{id}, GET /health,
GET /metrics. Errors have OpenAI's body. Statuses: 400 a request that cannot be served, 404 unknown model or path,
408 a body too slow, 413 a body too large, 429 queue full (with Retry-After), 503 stopping or failed, 504 over the time
limit, 500 a bug or an answer lost to unusable logits.

A client that disconnects, or stops reading for `write_seconds`, cancels its request; slot and pages are free within one
step. The engine runs in a thread of its own, rendering and encoding of prompts in a few others; the event loop only
moves text.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import fastapi
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from glm_mtp_export import __version__
from glm_mtp_export.errors import GlmMtpError, OptionError
from glm_mtp_export.runtime.request import Delta, Request
from glm_mtp_export.runtime.runtime import Runtime
from glm_mtp_export.serving.front import SUBMIT_THREADS, Event, Front
from glm_mtp_export.serving.http_limits import BodyLimits
from glm_mtp_export.serving.http_metrics import ResponseCounter
from glm_mtp_export.serving.openai_errors import (
    TimeLimitError,
    message_of,
    on_error,
    on_http_exception,
    on_invalid_body,
    refusal,
    status_of,
)
from glm_mtp_export.serving.openai_requests import (
    PreparedRequest,
    prepare_chat,
    prepare_completion,
)
from glm_mtp_export.serving.openai_responses import Answer, SequenceFailedError
from glm_mtp_export.serving.openai_schema import ChatCompletionRequest, CompletionRequest, ErrorResponse
from glm_mtp_export.serving.served_model import ServedModel
from glm_mtp_export.serving.sse import EventStream

__all__ = ["ServerLimits", "create_app", "run"]

_log = logging.getLogger(__name__)
_Body = TypeVar("_Body", ChatCompletionRequest, CompletionRequest)


@dataclass(frozen=True)
class ServerLimits:
    """What one client may cost. Times in seconds."""

    max_body_bytes: int = 8 << 20
    max_sequences: int = 512  # running and waiting
    read_seconds: float = 30.0
    write_seconds: float = 30.0
    ping_seconds: float = 15.0  # of silence in a stream before a comment is sent
    request_seconds: float = 3600.0
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        for name in (
            "max_body_bytes",
            "max_sequences",
            "read_seconds",
            "write_seconds",
            "ping_seconds",
            "request_seconds",
        ):
            if getattr(self, name) <= 0:
                raise OptionError(f"{name} is {getattr(self, name)}, expected above 0.")


class _Server:
    """Turns one HTTP request into runtime requests and back."""

    def __init__(self, front: Front, model: ServedModel, limits: ServerLimits) -> None:
        self.front = front
        self.model = model
        self.limits = limits
        # Rendering and encoding are work: a few threads bound it.
        self._preparing = ThreadPoolExecutor(max_workers=4, thread_name_prefix="http-prepare")
        # Submitting and aborting only wait for the engine to finish its step: with few threads, few would join a step.
        self._submitting = ThreadPoolExecutor(max_workers=SUBMIT_THREADS, thread_name_prefix="http-submit")

    async def answer(
        self,
        http: HttpRequest,
        body: _Body,
        prepare: Callable[[_Body, ServedModel, str], PreparedRequest],
        prefix: str,
    ) -> Response:
        """The response to one request, streamed or whole."""
        loop = asyncio.get_running_loop()
        request_id = f"{prefix}-{uuid.uuid4().hex}"
        prepared = await loop.run_in_executor(self._preparing, prepare, body, self.model, request_id)
        self.front.check_size(sum(prompt.request.params.n for prompt in prepared.prompts))
        answer = Answer(prepared, self.model)
        events = self._events(prepared)
        if not prepared.streams:
            return await self._whole(http, answer, events)
        # The first event decides the status: a refusal must not hide in a stream that began with 200.
        first = await self._first(http, events)
        if first is None:
            return Response(status_code=499)  # nobody reads it
        return EventStream(
            self._stream(answer, first, events, prepared),
            write_seconds=self.limits.write_seconds,
            ping_seconds=self.limits.ping_seconds,
        )

    async def _first(self, http: HttpRequest, events: AsyncGenerator[Delta, None]) -> Delta | None:
        """The first delta; None when the client left before it came."""
        waiting = asyncio.ensure_future(anext(events))
        leaving = asyncio.ensure_future(_left(http))
        try:
            await asyncio.wait({waiting, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return await waiting
            return None
        finally:
            failed = not waiting.done() or waiting.exception() is not None
            await _cancelled(waiting, leaving)
            if failed:
                await events.aclose()

    async def _whole(self, http: HttpRequest, answer: Answer, events: AsyncGenerator[Delta, None]) -> Response:
        async def collect() -> None:
            async for delta in events:
                answer.take(delta)

        collecting = asyncio.ensure_future(collect())
        leaving = asyncio.ensure_future(_left(http))
        try:
            await asyncio.wait({collecting, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                return Response(status_code=499)  # nobody reads it
            await collecting
        finally:
            await _cancelled(collecting, leaving)
            await events.aclose()
        return JSONResponse(answer.body())

    async def _stream(
        self, answer: Answer, first: Delta, events: AsyncGenerator[Delta, None], prepared: PreparedRequest
    ) -> AsyncGenerator[dict[str, Any], None]:
        try:
            for chunk in answer.opening_chunks():
                yield chunk
            for chunk in answer.chunks(first):
                yield chunk
            async for delta in events:
                for chunk in answer.chunks(delta):
                    yield chunk
            if prepared.includes_usage:
                yield answer.usage_chunk()
        except Exception as error:  # the status is sent: the error travels as an event, as OpenAI's clients expect
            status, kind = status_of(error)
            if status == 500:
                _log.exception("request %s failed in its stream", prepared.id)
            yield {"error": {"message": message_of(error), "type": kind, "param": None, "code": str(status)}}
        finally:
            await events.aclose()

    async def _events(self, prepared: PreparedRequest) -> AsyncGenerator[Delta, None]:
        """Deltas of all prompts until every sequence has ended; leaving early aborts them."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Event] = asyncio.Queue()  # bounded by max_tokens of the request
        deadline = loop.time() + self.limits.request_seconds
        is_over = threading.Event()

        def sink(event: Event) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, event)

        def submit(request: Request) -> None:
            # The client may leave before the front knows of its request, and an abort would find nothing.
            if not is_over.is_set():
                self.front.submit(request, sink)
            if is_over.is_set():
                self.front.abort(request.request_id)

        num_open = sum(prompt.request.params.n for prompt in prepared.prompts)
        try:
            for prompt in prepared.prompts:
                await loop.run_in_executor(self._submitting, submit, prompt.request)
            while num_open:
                try:
                    event = await asyncio.wait_for(queue.get(), deadline - loop.time())
                except asyncio.TimeoutError:
                    raise TimeLimitError(
                        f"The request ran longer than {self.limits.request_seconds:g} s and was ended. "
                        "Lower max_tokens, or stream and stop when enough has come."
                    ) from None
                if isinstance(event, GlmMtpError):
                    raise event
                num_open -= event.finished
                yield event
        finally:
            if num_open:
                is_over.set()
                for prompt in prepared.prompts:  # not here: an abort waits for the engine's lock
                    self._submitting.submit(self.front.abort, prompt.request.request_id)


async def _cancelled(*tasks: asyncio.Future[Any]) -> None:
    """Cancel what still runs and wait until it has; results and errors of these tasks are of no interest any more."""
    for task in tasks:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


async def _left(http: HttpRequest) -> None:
    """Returns when the client has disconnected."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


def create_app(runtime: Runtime, model: ServedModel, limits: ServerLimits | None = None) -> fastapi.FastAPI:
    """The ASGI application. It owns `runtime` from here on and closes it when the application shuts down."""
    limits = limits or ServerLimits()
    front = Front(runtime, max_sequences=limits.max_sequences)
    server = _Server(front, model, limits)

    @contextlib.asynccontextmanager
    async def lifespan(app: fastapi.FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(front.close, limits.drain_seconds)

    app = fastapi.FastAPI(title="glm-mtp", version=__version__, lifespan=lifespan, redoc_url=None, docs_url=None)
    app.state.front = front
    registry = runtime.metrics_registry()
    app.add_middleware(BodyLimits, max_bytes=limits.max_body_bytes, read_seconds=limits.read_seconds)
    app.add_middleware(ResponseCounter, registry=registry)
    app.add_exception_handler(RequestValidationError, on_invalid_body)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(GlmMtpError, on_error)
    app.add_exception_handler(SequenceFailedError, on_error)
    app.add_exception_handler(Exception, on_error)
    _add_generation(app, server)
    _add_information(app, server, runtime, registry)
    _describe(app)
    return app


def _add_generation(app: fastapi.FastAPI, server: _Server) -> None:
    errors: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorResponse} for status in (400, 404, 408, 413, 429, 500, 503, 504)
    }

    @app.post("/v1/chat/completions", responses=errors, response_model=None)
    async def chat_completions(body: ChatCompletionRequest, http: HttpRequest) -> Response:
        """Answer a conversation, streamed as server-sent events or as a whole."""
        return await server.answer(http, body, prepare_chat, "chatcmpl")

    @app.post("/v1/completions", responses=errors, response_model=None)
    async def completions(body: CompletionRequest, http: HttpRequest) -> Response:
        """Continue one or several prompts."""
        return await server.answer(http, body, prepare_completion, "cmpl")


def _add_information(app: fastapi.FastAPI, server: _Server, runtime: Runtime, registry: Any) -> None:
    def entry() -> dict[str, Any]:
        return {
            "id": server.model.name,
            "object": "model",
            "created": 0,
            "owned_by": "glm-mtp",
            "max_model_len": runtime.context_limit.length,
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model served here."""
        return {"object": "list", "data": [entry()]}

    @app.get("/v1/models/{model_id:path}", responses={404: {"model": ErrorResponse}}, response_model=None)
    async def one_model(model_id: str) -> Response:
        """The served model by its id."""
        if model_id != server.model.name:
            return refusal(404, "not_found_error", f"model {model_id!r} is not served here.", code="model_not_found")
        return JSONResponse(entry())

    @app.get("/health", responses={503: {"description": "stopping or failed"}}, response_model=None)
    async def health() -> Response:
        """200 while requests are taken."""
        ready = server.front.is_ready
        content = {"status": "ready" if ready else "unavailable", "sequences": server.front.num_sequences}
        return JSONResponse(content, status_code=200 if ready else 503)

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        """The engine's numbers in Prometheus' text format."""
        import prometheus_client

        return Response(prometheus_client.generate_latest(registry), media_type="text/plain; version=0.0.4")


def _describe(app: fastapi.FastAPI) -> None:
    """FastAPI documents its own 422 for bodies; here an invalid body is 400."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            for path in schema["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def run(
    engine_dir: str | Path,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    model_name: str | None = None,
    backend: str = "onnxruntime",
    limits: ServerLimits | None = None,
) -> None:
    """Serve an engine folder until interrupted. Other machines reach it only with an explicit `host`."""
    import uvicorn

    from glm_mtp_export.serving.draining_server import DrainingServer

    directory = Path(engine_dir)
    limits = limits or ServerLimits()
    listener = _listening_socket(host, port)  # before the engine, which may take minutes to load
    runtime = Runtime.load(directory, backend=backend)
    try:
        model = ServedModel.load(directory, model_name or directory.resolve().name, runtime.tokenizer)
        app = create_app(runtime, model, limits)
    except BaseException:
        runtime.close()
        raise
    config = uvicorn.Config(app, log_level="info", timeout_keep_alive=75, h11_max_incomplete_event_size=64 << 10)
    _log.info("serving %s on http://%s:%d/v1", model.name, host, port)
    DrainingServer(config, app.state.front, limits.drain_seconds).run(sockets=[listener])


def _listening_socket(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:  # getaddrinfo takes any number, modulo 65536
        raise OptionError(f"port is {port}, expected 0..65535.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, OverflowError) as error:
        raise OptionError(f"{host}:{port} cannot be listened on ({error}). Choose another --host or --port.") from error
    return listener
