"""The stub's side of the engine process: start it, send requests, hand events back. Standard library only.

Triton's Python stub may run another interpreter than the engine (old numpy, no onnxruntime), so the engine runs in a process
of its own. Both models of a repository talk to the one process: the streaming model starts it, its sibling only connects.
Messages are a 4-byte big-endian length and that much JSON, over a Unix socket that only this user can open.

What may go wrong: the process cannot start, or ends: `EngineProcessError`, and every open request gets an error event.
This file is copied into the model repository beside model.py and imports nothing of the package.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import stat
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["EngineClient", "EngineProcessError", "read_message", "socket_path", "write_message"]

Message = dict[str, Any]
OnEvent = Callable[[Message], None]
_CONNECT_INTERVAL_SECONDS = 0.05
_STOP_SECONDS = 15.0


class EngineProcessError(Exception):
    """The engine process is not there."""


def socket_path(engine_dir: str, server_pid: int) -> str:
    """Where the models of one Triton server meet: in a folder only this user can enter."""
    folder = os.path.join(tempfile.gettempdir(), f"glm-mtp-{os.getuid()}")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise EngineProcessError(f"{folder}: must be a folder of this user with mode 0700. Remove it.")
    name = hashlib.sha256(f"{server_pid} {engine_dir}".encode()).hexdigest()[:24]
    return os.path.join(folder, f"{name}.sock")


def write_message(connection: socket.socket, message: Message) -> None:
    """Send one message; the caller holds the connection's write lock."""
    data = json.dumps(message).encode("ascii")
    connection.sendall(struct.pack(">I", len(data)) + data)


def read_message(stream: Any) -> Message | None:
    """The next message of a buffered binary reader; None at its end."""
    header = stream.read(4)
    if len(header) < 4:
        return None
    (size,) = struct.unpack(">I", header)
    data = stream.read(size)
    if len(data) < size:
        return None
    message: Message = json.loads(data)
    return message


class EngineClient:
    """One connection to the engine process. Thread-safe.

    `command` starts the process, or one a card with `num_ranks` above 1 (as torchrun would; rank 0 serves, the others end
    with it). None: only connect, when the first request comes.
    """

    def __init__(
        self, path: str, command: Sequence[str] | None, on_metrics: OnEvent | None = None, num_ranks: int = 1
    ) -> None:
        self._path = path
        self._on_metrics = on_metrics
        self._lock = threading.Lock()  # of the table and of writing
        self._receivers: dict[int, OnEvent] = {}
        self._next_id = 0
        self._connection: socket.socket | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._reader: threading.Thread | None = None
        if command is not None:
            self._start(command, num_ranks)

    def submit(self, message: Message, on_event: OnEvent) -> int:
        """Send a request. `on_event` gets its events on the reader's thread; the last has "final" true."""
        with self._lock:
            if self._connection is None:
                self._connect()
            connection = self._connection
            assert connection is not None
            request_id = self._next_id
            self._next_id += 1
            self._receivers[request_id] = on_event
            try:
                write_message(connection, {"type": "submit", "id": request_id, **message})
            except OSError as error:
                del self._receivers[request_id]
                raise EngineProcessError(f"The engine process is gone ({error}). Reload the model.") from error
        return request_id

    def abort(self, request_id: int) -> None:
        """Ask the engine to end a request; its last event still comes."""
        with self._lock:
            if request_id in self._receivers and self._connection is not None:
                with contextlib.suppress(OSError):  # the reader notices and ends every request
                    write_message(self._connection, {"type": "abort", "id": request_id})

    def close(self) -> None:
        """End the connection, and the processes if this client started them. Open requests get their error first."""
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if self._reader is not None:
            self._reader.join()
        self._end_processes()

    def _end_processes(self) -> None:
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()  # rank 0 ends itself when this pipe does, also if we crash
        deadline = time.monotonic() + _STOP_SECONDS
        for process in self._processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()

    def _start(self, command: Sequence[str], num_ranks: int) -> None:
        # Triton's own variables would lead another interpreter astray.
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV")}
        if os.path.exists(self._path):
            os.unlink(self._path)
        port = str(_free_port()) if num_ranks > 1 else ""
        for rank in range(num_ranks):
            if num_ranks > 1:
                environment |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(rank)}
                environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            stdin = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            process = subprocess.Popen([*command, "--socket", self._path], stdin=stdin, env=environment)
            self._processes.append(process)
        while True:  # loading a large model takes as long as it takes
            for rank, process in enumerate(self._processes):
                if process.poll() is not None:
                    self._end_processes()
                    raise EngineProcessError(
                        f"The engine process (rank {rank} of {num_ranks}) ended with code {process.returncode} while "
                        "loading; its messages are in Triton's log above."
                    )
            try:
                with self._lock:
                    self._connect()
                return
            except EngineProcessError:
                time.sleep(_CONNECT_INTERVAL_SECONDS)

    def _connect(self) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(self._path)
        except OSError as error:
            connection.close()
            raise EngineProcessError(
                "The engine process is not running. Load the streaming model of this repository, which starts it."
            ) from error
        self._connection = connection
        self._reader = threading.Thread(target=self._read, args=(connection,), name="engine-events", daemon=True)
        self._reader.start()

    def _read(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as stream:
            while True:
                try:
                    message = read_message(stream)
                except OSError:
                    message = None
                if message is None:
                    break
                if message["type"] == "metrics":
                    if self._on_metrics is not None:
                        self._on_metrics(message)
                    continue
                with self._lock:
                    receiver = self._receivers.get(message["id"])
                    if message["final"]:
                        self._receivers.pop(message["id"], None)
                if receiver is not None:
                    receiver(message)
        with self._lock:
            if self._connection is connection:
                self._connection = None
            receivers, self._receivers = self._receivers, {}
        text = "The engine process ended; Triton's log has its last words. Reload the model."
        for receiver in receivers.values():
            receiver({"type": "error", "code": "unavailable", "message": text, "final": True})


def _free_port() -> int:
    """A port whose successor is free too: the ranks meet one above MASTER_PORT."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port
