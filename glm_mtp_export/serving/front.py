"""Between the runtime and every server: admission, delivery to one receiver a request, and an end for each of them.

In: runtime requests from any thread. Out: their deltas, handed to the request's sink on the engine's thread. The front
counts what runs and waits, so that a full queue is refused at once instead of growing.

What may go wrong: too many sequences raise `QueueFullError`; an unusable request `RequestError`; after `close` has
begun or the engine has failed `UnavailableError`. Requests that were running then get the error through their sink,
once.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from glm_mtp_export.errors import EngineError, GlmMtpError, RequestError
from glm_mtp_export.runtime.request import Delta, Request
from glm_mtp_export.runtime.runtime import Runtime

__all__ = ["SUBMIT_THREADS", "Event", "Front", "QueueFullError", "Sink", "UnavailableError"]

Event: TypeAlias = "Delta | GlmMtpError"
Sink = Callable[[Event], None]
"""Called with each delta of a request in order, or once with the error that ended it. Must not block."""

_FAILED = "The engine failed; the server's log says why. Restart the server."
_STOPPED = "The server was stopped before the request ended."
SUBMIT_THREADS = 128
"""Threads of a server that call `submit`: each waits for the step in progress, so as many requests can join the next one."""
_MAX_STRUCTURE_CHARACTERS = 64 << 10
"""Of a schema or grammar. Most of this size compile in less than a second, all of it one core's on the submitting thread."""


class QueueFullError(RequestError):
    """Too many requests are waiting; try again later."""


class UnavailableError(GlmMtpError):
    """The engine takes no requests: it is stopping, or it failed."""


@dataclass
class _Live:
    sink: Sink
    num_open: int  # sequences without their last delta


class Front:
    """Admits requests to one `Runtime`. `max_sequences`: running and waiting ones together."""

    def __init__(self, runtime: Runtime, *, max_sequences: int = 512) -> None:
        self.runtime = runtime
        self.max_sequences = max_sequences
        self._live: dict[str, _Live] = {}
        self._num_sequences = 0
        self._lock = threading.Lock()
        self._is_closing = False
        if runtime.engine.capabilities.has_token_bitmask:
            # It takes seconds; without this the first structured request would stall everyone else's.
            with contextlib.suppress(ImportError):
                importlib.import_module("xgrammar")

    @property
    def num_sequences(self) -> int:
        """Sequences running or waiting."""
        return self._num_sequences

    @property
    def is_ready(self) -> bool:
        """True while requests are taken."""
        return not self._is_closing and self.runtime.is_healthy

    def check_size(self, num_sequences: int) -> None:
        """RequestError for what will not fit however often it is tried."""
        if num_sequences > self.max_sequences:
            raise RequestError(
                f"The request asks for {num_sequences} sequences at once (prompts times n), at most {self.max_sequences} "
                "run or wait here. Split it."
            )

    def submit(self, request: Request, sink: Sink) -> None:
        """Queue a request; returns when the engine has taken it, within one step. Deltas may arrive before that."""
        _check_structure(request)
        self.check_size(request.params.n)
        live = _Live(sink, request.params.n)
        with self._lock:
            if self._is_closing:
                raise UnavailableError("The server is stopping and takes no requests. Send it to another replica.")
            if self._num_sequences + request.params.n > self.max_sequences:
                raise QueueFullError(
                    f"{self._num_sequences} sequences are running or waiting, {request.params.n} more would exceed the "
                    f"limit of {self.max_sequences}. Try again in a moment."
                )
            self._num_sequences += request.params.n
            self._live[request.request_id] = live
        try:
            self.runtime.submit(
                request.prompt_token_ids,
                request.params,
                request_id=request.request_id,
                priority=request.priority,
                stream=request.stream,
                on_delta=self._deliver,
            )
        except BaseException as error:
            self._drop(request.request_id)
            if not self.runtime.is_healthy:  # `error` may be the session's own exception
                raise UnavailableError(_STOPPED if self._is_closing else _FAILED) from error
            if isinstance(error, EngineError):  # draining
                raise UnavailableError(str(error)) from error
            raise
        if request.request_id not in self._live:  # it ended, or `abort` came before the engine knew of it
            self.runtime.abort(request.request_id)

    def abort(self, request_id: str) -> None:
        """End a request within one step; harmless if it has ended. Nothing more is delivered for it."""
        if self._drop(request_id):
            self.runtime.abort(request_id)

    def close(self, drain_seconds: float = 0.0) -> None:
        """Refuse new requests, let running ones finish for so long, end the rest, close the runtime."""
        self._is_closing = True
        if drain_seconds > 0:
            self.runtime.drain(drain_seconds)
        self.runtime.close()

    def _deliver(self, delta: Delta) -> None:
        with self._lock:
            live = self._live.get(delta.request_id)
            if live is None:
                return
            if delta.finished:
                live.num_open -= 1
                self._num_sequences -= 1
                if live.num_open == 0:
                    del self._live[delta.request_id]
        if delta.completion is not None and delta.completion.finish_reason == "error" and not self.runtime.is_healthy:
            # What the session said is for the log; the client needs to know that asking again here is of no use.
            self._drop(delta.request_id)
            live.sink(UnavailableError(_STOPPED if self._is_closing else _FAILED))
            return
        live.sink(delta)

    def _drop(self, request_id: str) -> bool:
        """Forget a request that has not ended; False when it has."""
        with self._lock:
            live = self._live.pop(request_id, None)
            if live is not None:
                self._num_sequences -= live.num_open
        return live is not None


def _check_structure(request: Request) -> None:
    structure = request.params.structured_output
    if structure is None:
        return
    tags = (structure.structural_tag, structure.tool_calls)
    texts = (structure.json_schema, structure.regex, structure.grammar, *tags, *structure.choice)
    size = sum(len(text) for text in texts if text)
    if size > _MAX_STRUCTURE_CHARACTERS:
        raise RequestError(
            f"The schema, grammar or tool definitions to enforce have {size} characters, at most "
            f"{_MAX_STRUCTURE_CHARACTERS} are taken. Send a smaller one."
        )
