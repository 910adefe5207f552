"""The connection between rank 0 and another rank: framed messages over TCP, with heartbeats both ways.

In: bytes by kind. Out: the same, in order. A side that closes, or stays silent for longer than allowed, raises `LinkLostError`:
a process that was killed closes at once, a machine that vanished falls silent. Nothing that arrives is ever executed.
"""

from __future__ import annotations

import contextlib
import enum
import socket
import struct
import threading
import time
from dataclasses import dataclass

from glm_mtp_export.errors import EngineError
from glm_mtp_export.runtime.rank_place import RankPlace

__all__ = ["Kind", "LinkLostError", "RankLink", "RankTimeouts", "connect", "listen"]

_FRAME = struct.Struct("<IB")
_MOST_BYTES = 1 << 30  # of a message; masks and page tables of a large batch take some megabytes


class LinkLostError(Exception):
    """The other side is gone; the message says how."""


class Kind(enum.IntEnum):
    """What a message is."""

    HELLO = 1  # JSON: who joins
    WELCOME = 2  # all are there; the name of the group, for the backend
    READY = 3  # the session is loaded
    STEP = 4  # inputs of a call
    FAILED = 5  # text: why the job ends
    BEAT = 6  # still here
    CLOSE = 7  # the job is done
    LAUNCH = 8  # inputs of a call to queue, and which requests of the one before they continue
    MASK = 9  # of the call launched last
    COLLECT = 10  # wait for the oldest call launched


@dataclass(frozen=True)
class RankTimeouts:
    """Seconds. A job whose ranks stop talking ends after `silence` at the latest, a step that hangs after `step`."""

    join: float = 600.0  # until all ranks have connected
    silence: float = 30.0  # without a sign of life
    step: float = 300.0  # of one call
    grace: float = 10.0  # between the end of the job and the end of the process by force

    @property
    def beat(self) -> float:
        """Between two signs of life."""
        return self.silence / 4


class RankLink:
    """One side of a connection. Any thread may send; one thread receives."""

    def __init__(self, connection: socket.socket, silence: float) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._sending = threading.Lock()
        self.set_silence(silence)

    def set_silence(self, seconds: float) -> None:
        """How long the other side may say nothing, or take nothing."""
        self._silence = seconds
        self._connection.settimeout(seconds)

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        """Raises LinkLostError."""
        try:
            with self._sending:
                self._connection.sendall(_FRAME.pack(len(payload), kind) + payload)
        except TimeoutError as error:
            raise LinkLostError(f"takes no data for {self._silence:g} s") from error
        except OSError as error:
            raise _lost(error) from error

    def receive(self) -> tuple[Kind, bytes]:
        """The next message that is no heartbeat. Raises LinkLostError."""
        while True:
            num_bytes, kind = _FRAME.unpack(self._exactly(_FRAME.size))
            if num_bytes > _MOST_BYTES or kind not in Kind._value2member_map_:
                raise LinkLostError(f"sent a message of kind {kind} and {num_bytes} bytes, which no rank sends")
            payload = self._exactly(num_bytes)
            if kind != Kind.BEAT:
                return Kind(kind), payload

    def _exactly(self, num_bytes: int) -> bytes:
        buffer = bytearray(num_bytes)
        view = memoryview(buffer)
        try:
            while view:
                count = self._connection.recv_into(view)
                if not count:
                    raise LinkLostError("ended without a word")
                view = view[count:]
        except TimeoutError as error:
            raise LinkLostError(f"has been silent for {self._silence:g} s") from error
        except OSError as error:
            raise _lost(error) from error
        return bytes(buffer)

    def finish(self) -> None:
        """Send nothing more; what was sent still arrives, as long as this side goes on receiving."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """End both directions; a receive that waits returns."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _lost(error: OSError) -> LinkLostError:
    if isinstance(error, ConnectionError):
        return LinkLostError("ended without a word")
    return LinkLostError(f"cannot be reached ({error.strerror or error})")


def listen(place: RankPlace) -> socket.socket:
    """Rank 0's listening socket. Raises EngineError when the port is taken."""
    try:
        return socket.create_server((place.address, place.port), backlog=place.num_ranks)
    except OSError as error:
        raise EngineError(
            f"rank 0 cannot listen at {place.address}:{place.port} ({error.strerror or error}). Give torchrun another "
            "--master-port, and a --master-addr of this machine."
        ) from error


def connect(place: RankPlace, timeouts: RankTimeouts) -> RankLink:
    """Another rank's link to rank 0, which may start later. Raises EngineError after `join` seconds."""
    deadline = time.monotonic() + timeouts.join
    while True:
        try:
            left = max(deadline - time.monotonic(), 0.1)
            return RankLink(socket.create_connection((place.address, place.port), min(left, 5.0)), timeouts.silence)
        except OSError as error:
            if time.monotonic() >= deadline:
                raise EngineError(
                    f"rank {place.rank} found no rank 0 at {place.address}:{place.port} within {timeouts.join:g} s "
                    f"({error.strerror or error}). Check MASTER_ADDR, and the log of rank 0."
                ) from error
            time.sleep(0.1)
