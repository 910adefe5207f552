"""The engine process behind the Triton models: `python -m glm_mtp_export.serving.triton.worker`, started by the stub.

In: requests as JSON messages over a Unix socket (see `engine_client`), from both models of a repository. Out: events with
output tensors, and the engine's numbers once a second. It ends when its standard input does, which is when the stub that
started it closes the pipe or dies; nothing is left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import queue
import socket
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from glm_mtp_export.errors import GlmMtpError, RequestError
from glm_mtp_export.runtime.rank_place import place_from_environment
from glm_mtp_export.runtime.runtime import Runtime
from glm_mtp_export.serving.front import SUBMIT_THREADS, Event, Front, QueueFullError, UnavailableError
from glm_mtp_export.serving.served_model import ServedModel
from glm_mtp_export.serving.triton.engine_client import Message, read_message, write_message
from glm_mtp_export.serving.triton.generation import Generation

__all__ = ["Worker", "main"]

_log = logging.getLogger(__name__)
_METRICS_INTERVAL_SECONDS = 1.0


class Worker:
    """Serves one socket. `serve_forever` returns after `close`."""

    def __init__(self, runtime: Runtime, model: ServedModel, path: str, *, max_sequences: int = 512) -> None:
        self._front = Front(runtime, max_sequences=max_sequences)
        self._model = model
        self._path = path
        # Rendering and encoding are work: a few threads bound it. Submitting only waits for the step in progress.
        self._preparing = ThreadPoolExecutor(max_workers=4, thread_name_prefix="prepare")
        self._submitting = ThreadPoolExecutor(max_workers=SUBMIT_THREADS, thread_name_prefix="submit")
        self._closing = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._num_connections = 0

    def serve_forever(self) -> None:
        """Take connections until closed."""
        unfinished = self._path + ".part"
        self._listener.bind(unfinished)
        os.chmod(unfinished, 0o600)
        self._listener.listen()
        os.rename(unfinished, self._path)  # whoever sees the name can connect
        while not self._closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                break
            self._num_connections += 1
            _Connection(connection, f"c{self._num_connections}", self).start()

    def close(self) -> None:
        """End everything that runs and stop listening."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        self._front.close()
        self._preparing.shutdown(cancel_futures=True)
        self._submitting.shutdown(cancel_futures=True)

    def metrics(self) -> Message:
        """The engine's numbers, by kind."""
        statistics, gauges = self._front.runtime.statistics, self._front.runtime.gauges()
        return {
            "type": "metrics",
            "gauges": {
                "engine_up": int(self._front.is_ready),
                "waiting_sequences": gauges.num_waiting,
                "running_sequences": gauges.num_running,
                "pages": gauges.num_pages,
                "pages_held": gauges.num_pages_held,
                "draft_is_dead": int(statistics.draft_is_dead),
            },
            "counters": {
                "calls": statistics.num_calls,
                "output_tokens": statistics.num_output_tokens,
                "draft_tokens": sum(statistics.drafted),
                "accepted_draft_tokens": sum(statistics.accepted),
                "preemptions": statistics.num_preemptions,
                "model_seconds": statistics.model_seconds,
            },
        }


class _Connection:
    """One model's connection: a thread reads, another writes, so that a slow reader stops neither engine nor others."""

    def __init__(self, connection: socket.socket, name: str, worker: Worker) -> None:
        self._connection = connection
        self._name = name
        self._worker = worker
        self._outbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._open: dict[int, str] = {}  # request ids by the client's number, until their last event is in the outbox
        self._lock = threading.Lock()  # of `_open` together with the outbox: nothing follows a last event

    def start(self) -> None:
        """Begin serving it."""
        for target in (self._read, self._write, self._report):
            threading.Thread(target=target, name=f"{self._name}-{target.__name__}", daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(OSError), self._connection.makefile("rb") as stream:
            while (message := read_message(stream)) is not None:
                if message["type"] == "submit":
                    number = message["id"]
                    self._open[number] = f"{self._name}-{number}"
                    self._worker._preparing.submit(self._prepare, number, message["inputs"])
                elif message["type"] == "abort":
                    self._abort(message["id"])
        for number in list(self._open):
            self._abort(number)
        self._outbox.put(None)

    def _prepare(self, number: int, inputs: dict[str, list[Any]]) -> None:
        request_id = self._open.get(number)
        if request_id is None:
            return  # aborted before its turn
        try:
            generation = Generation(request_id, inputs, self._worker._model)
            self._worker._submitting.submit(self._submit, number, generation)
        except Exception as error:
            self._fail(number, error)

    def _submit(self, number: int, generation: Generation) -> None:
        request_id = generation.request.request_id
        if number not in self._open:
            return
        try:
            self._worker._front.submit(generation.request, lambda event: self._deliver(number, generation, event))
        except Exception as error:
            self._fail(number, error)
        else:
            if number not in self._open:  # aborted while it was being submitted
                self._worker._front.abort(request_id)

    def _deliver(self, number: int, generation: Generation, event: Event) -> None:
        """On the engine's thread."""
        if isinstance(event, GlmMtpError):
            self._fail(number, event)
            return
        if event.completion is not None and event.completion.finish_reason in ("abort", "error"):
            self._fail(number, UnavailableError(event.completion.error or "The server ended the request."))
            return
        outputs, is_last = generation.take(event)
        if outputs is not None:
            self._put(number, {"type": "outputs", "outputs": outputs, "final": is_last})

    def _abort(self, number: int) -> None:
        request_id = self._open.get(number)
        if request_id is not None and self._error(number, "cancelled", "The request was cancelled."):
            self._worker._front.abort(request_id)

    def _fail(self, number: int, error: Exception) -> None:
        if isinstance(error, QueueFullError | UnavailableError):
            self._error(number, "unavailable", str(error))
        elif isinstance(error, RequestError):
            self._error(number, "invalid", str(error))
        else:
            _log.error("request %s-%d failed", self._name, number, exc_info=error)
            text = (
                str(error)
                if isinstance(error, GlmMtpError)
                else "The engine process met an unexpected error; see its log."
            )
            self._error(number, "internal", text)

    def _error(self, number: int, code: str, text: str) -> bool:
        return self._put(number, {"type": "error", "code": code, "message": text, "final": True})

    def _put(self, number: int, message: Message) -> bool:
        """Send an event; False when the request has had its last one."""
        with self._lock:
            if number not in self._open:
                return False
            if message["final"]:
                del self._open[number]
            self._outbox.put({**message, "id": number})
        return True

    def _write(self) -> None:
        with contextlib.suppress(OSError), self._connection:
            while (message := self._outbox.get()) is not None:
                write_message(self._connection, message)

    def _report(self) -> None:
        while not self._worker._closing.wait(_METRICS_INTERVAL_SECONDS) and self._connection.fileno() >= 0:
            self._outbox.put(self._worker.metrics())


def main(arguments: Sequence[str] | None = None) -> int:
    """Load the engine, serve until standard input ends."""
    parser = argparse.ArgumentParser(description="The engine process of the Triton models; the stub starts it.")
    parser.add_argument("--engine-dir", type=Path, required=True)
    parser.add_argument("--backend", default="onnxruntime")
    parser.add_argument("--socket", required=True)
    parser.add_argument("--max-sequences", type=int, default=512)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="glm-mtp engine: %(levelname)s %(name)s: %(message)s")
    try:
        if place_from_environment() is not None:
            from glm_mtp_export.runtime.sessions.rank import follow_artifact

            if follow_artifact(options.engine_dir, options.backend):
                return 0  # another rank than 0: it has worked for rank 0 until the end
        runtime = Runtime.load(options.engine_dir, backend=options.backend)
        model = ServedModel.load(options.engine_dir, options.engine_dir.name, runtime.tokenizer)
    except GlmMtpError as error:
        print(f"glm-mtp engine: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    worker = Worker(runtime, model, options.socket, max_sequences=options.max_sequences)

    def end_with_stdin() -> None:
        sys.stdin.buffer.read()
        worker.close()

    parent = threading.Thread(target=end_with_stdin, name="parent", daemon=True)
    parent.start()
    worker.serve_forever()
    parent.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
