"""A tensor-parallel job: rank 0 schedules and sends each call's inputs to the others, which run the same call on their slice.

In: a `RankPlace`, what this rank runs (`JobIdentity`, equal on all ranks) and a function that loads the rank's session. Out: on
rank 0 a `StepSession`; on the others `follow`, which returns when rank 0 closes. What may go wrong: a rank that fails, dies, hangs
or does not fit ends the job on every rank: one line in the log that names it, waits for other ranks aborted, `EngineError` from the
call at hand, and after a time of grace the end of the process, since nothing else wakes a call that waits for a dead card.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Protocol, TypeVar, cast

from glm_mtp_export.errors import EngineError, GlmMtpError
from glm_mtp_export.runtime.logs import log_event
from glm_mtp_export.runtime.rank_link import Kind, LinkLostError, RankLink, RankTimeouts, connect, listen
from glm_mtp_export.runtime.rank_place import RankPlace
from glm_mtp_export.runtime.session import (
    AheadSession,
    Int32,
    SessionOver,
    StepInputs,
    StepOutputs,
    StepSession,
    can_launch_ahead,
)
from glm_mtp_export.runtime.step_message import packed, packed_bitmask, unpacked, unpacked_bitmask

__all__ = [
    "LOST_EXIT_CODE",
    "AheadLeaderSession",
    "JobIdentity",
    "LeaderSession",
    "RankGroup",
    "RankLoader",
    "follow",
    "lead",
]

_log = logging.getLogger(__name__)
LOST_EXIT_CODE = 70  # of a process that was ended by force
_LAST_WORDS_SECONDS = 0.5
_HELLO_SECONDS = 5.0  # for whoever connects to say who it is
_Result = TypeVar("_Result")
_Inner = TypeVar("_Inner", bound=StepSession)


@dataclass(frozen=True)
class JobIdentity:
    """What all ranks must agree on before anything is loaded."""

    release: str
    manifest_sha256: str
    backend: str


class RankGroup(Protocol):
    """The backend's own group, over which the ranks' cards talk."""

    def check(self) -> None:
        """Raise EngineError when it has failed."""

    def abort(self) -> None:
        """End every wait for the other ranks. From any thread."""


class RankLoader(Protocol):
    """How a rank's session comes to be."""

    def name_group(self) -> bytes:
        """A name for the backend's group; on rank 0."""

    def load(self, group_name: bytes, on_group: Callable[[RankGroup], None]) -> StepSession:
        """Join the group, hand it to `on_group`, load the session."""


class _Job:
    """Why the job cannot go on, once there is a reason; what ends it."""

    def __init__(self, place: RankPlace, timeouts: RankTimeouts) -> None:
        self.place = place
        self.timeouts = timeouts
        self.reason: str | None = None
        self.group: RankGroup | None = None
        self.step_began: float | None = None
        self.ending = threading.Event()  # as it should: nothing that happens now is a loss
        self.closed = threading.Event()
        self._lock = threading.Lock()

    def lose(self, reason: str) -> None:
        """End the job, once."""
        with self._lock:
            if self.reason is not None or self.ending.is_set():
                return
            self.reason = reason
        log_event(_log, logging.ERROR, "rank_lost", rank=self.place.rank, reason=reason)
        timer = threading.Timer(self.timeouts.grace, self._end_by_force)
        timer.daemon = True
        timer.start()
        if self.group is not None:
            try:
                self.group.abort()
            except GlmMtpError as error:
                _log.error("the group of cards cannot be aborted: %s", error)

    def check(self) -> None:
        if self.reason is not None:
            raise EngineError(f"The tensor-parallel job has ended: {self.reason.rstrip('.')}. Start it again.")

    def watch(self) -> None:
        """What a heartbeat also looks at."""
        began = self.step_began
        if began is not None and time.monotonic() - began > self.timeouts.step:
            self.lose(f"a step has not ended for {self.timeouts.step:g} s on rank {self.place.rank}")
        if self.group is not None and self.reason is None:
            try:
                self.group.check()
            except EngineError as error:
                self.lose(str(error))

    def watched(self, work: Callable[[], _Result]) -> _Result:
        """Do what may wait for this rank's card."""
        self.step_began = time.monotonic()
        try:
            result = work()
        except Exception:
            self.check()  # the reason counts, not what it led to
            raise
        finally:
            self.step_began = None
        self.check()
        return result

    def _end_by_force(self) -> None:
        if self.closed.is_set():
            return
        _log.error("rank %d does not come to an end; ending the process", self.place.rank)
        logging.shutdown()
        os._exit(LOST_EXIT_CODE)


def _start(name: str, work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, name=f"glm-mtp-{name}", daemon=True)
    thread.start()
    return thread


def _identified(place: RankPlace, identity: JobIdentity) -> bytes:
    here = {"rank": place.rank, "num_ranks": place.num_ranks, "host": socket.gethostname(), "pid": os.getpid()}
    return json.dumps(here | asdict(identity)).encode()


# ---- rank 0


class LeaderSession(SessionOver[_Inner]):
    """A `StepSession` over all ranks. Made by `lead`."""

    def __init__(self, job: _Job, links: dict[int, RankLink], session: _Inner) -> None:
        super().__init__(session)
        self._job = job
        self._links = links

    def run(self, inputs: StepInputs) -> StepOutputs:
        """One call on every rank; the results are this rank's, which are every rank's."""
        return self._everywhere(Kind.STEP, packed(inputs), lambda: self._session.run(inputs))

    def _everywhere(self, kind: Kind, message: bytes, work: Callable[[], _Result]) -> _Result:
        """Have the others do what the message says, and do the same here."""
        self._job.check()
        for rank, link in self._links.items():
            _send(self._job, rank, link, kind, message)
        try:
            return self._job.watched(work)
        except Exception as error:
            self._job.lose(f"rank 0 failed: {error}")
            _end(self._job, self._links)
            raise

    def close(self) -> None:
        """End the job on every rank."""
        self._job.ending.set()
        for rank, link in self._links.items():
            if self._job.reason is None:
                _send(self._job, rank, link, Kind.CLOSE)
        self._session.close()
        for link in self._links.values():
            link.close()
        self._job.closed.set()


class AheadLeaderSession(LeaderSession[AheadSession]):
    """An `AheadSession` over all ranks: the others queue, mask and collect the calls that rank 0 does, in its order."""

    def launch(self, inputs: StepInputs, follows: Int32 | None = None) -> None:
        """Queue a call on every rank."""
        self._everywhere(Kind.LAUNCH, packed(inputs, follows), lambda: self._session.launch(inputs, follows))

    def supply_bitmask(self, token_bitmask: Int32) -> None:
        """Give every rank the mask of the call launched last."""
        self._everywhere(Kind.MASK, packed_bitmask(token_bitmask), lambda: self._session.supply_bitmask(token_bitmask))

    def collect(self) -> StepOutputs:
        """Wait for the oldest call; the results are this rank's, which are every rank's."""
        return self._everywhere(Kind.COLLECT, b"", self._session.collect)


def lead(
    place: RankPlace, identity: JobIdentity, loader: RankLoader, timeouts: RankTimeouts | None = None
) -> LeaderSession:
    """Wait for all ranks, load this one's session, wait until all have. The session launches ahead if this rank's does. Raises
    EngineError when a rank is missing or lost."""
    timeouts = timeouts or RankTimeouts()
    job = _Job(place, timeouts)
    links: dict[int, RankLink] = {}
    with listen(place) as listener:
        _start("beats", lambda: _beat(job, lambda: tuple(links.items())))
        try:
            _gather(job, listener, identity, links)
            name = loader.name_group()
            ready = {rank: threading.Event() for rank in links}
            for rank, link in links.items():
                _start(f"rank-{rank}", partial(_hear_rank, job, rank, link, ready[rank]))
                _send(job, rank, link, Kind.WELCOME, name)
            session = loader.load(name, lambda group: setattr(job, "group", group))
            for event in ready.values():
                while not event.wait(0.1):
                    job.check()
        except BaseException as error:
            lost = job.reason is not None
            job.reason = job.reason or f"rank 0 failed: {str(error) or type(error).__name__}"
            _end(job, links)
            job.closed.set()
            if lost:
                job.check()
            raise
    if can_launch_ahead(session):
        return AheadLeaderSession(job, links, session)
    return LeaderSession(job, links, session)


def _gather(job: _Job, listener: socket.socket, identity: JobIdentity, links: dict[int, RankLink]) -> None:
    """Take connections until every rank has said who it is; a stranger is sent away."""
    deadline = time.monotonic() + job.timeouts.join
    own = json.loads(_identified(job.place, identity))
    while len(links) < job.place.num_ranks - 1:
        listener.settimeout(max(deadline - time.monotonic(), 0.01))
        try:
            connection, address = listener.accept()
        except TimeoutError:
            missing = sorted(set(range(1, job.place.num_ranks)) - set(links))
            raise EngineError(
                f"rank {', '.join(map(str, missing))} did not join within {job.timeouts.join:g} s. See their logs."
            ) from None
        link = RankLink(connection, min(job.timeouts.silence, _HELLO_SECONDS))
        try:
            kind, payload = link.receive()
            found = json.loads(payload) if kind is Kind.HELLO else None
            rank = found["rank"] if isinstance(found, dict) else None
        except (LinkLostError, ValueError, KeyError):
            rank = None
        if not isinstance(rank, int):
            _log.warning("a connection from %s does not belong to this job", address[0])
            link.close()
            continue
        if words := _misfit(own, found, rank, links):
            with contextlib.suppress(LinkLostError):
                link.send(Kind.FAILED, words.encode())
            raise EngineError(words)
        link.set_silence(job.timeouts.silence)
        links[rank] = link


def _misfit(own: dict[str, Any], found: Any, rank: int, links: dict[int, RankLink]) -> str:
    """Why a rank cannot take part; empty when it can."""
    differing = [
        f"{name} {found.get(name)!r}, rank 0 has {own[name]!r}"
        for name in ("num_ranks", "release", "manifest_sha256", "backend")
        if found.get(name) != own[name]
    ]
    if rank in links or not 0 < rank < own["num_ranks"]:
        differing.append(f"number {rank}, which is taken or out of range")
    if not differing:
        return ""
    return (
        f"rank {rank} ({found.get('host')}, process {found.get('pid')}) has {'; '.join(differing)}. "
        "Start all ranks with the same command, release and artifact."
    )


def _hear_rank(job: _Job, rank: int, link: RankLink, ready: threading.Event) -> None:
    """Until the link ends; what a rank says is that it is ready, or why it failed."""
    try:
        while True:
            kind, payload = link.receive()
            if kind is Kind.READY:
                ready.set()
            elif kind is Kind.FAILED:
                job.lose(f"rank {rank} failed: {payload.decode(errors='replace')}")
    except LinkLostError as error:
        job.lose(f"rank {rank} {error}")


def _send(job: _Job, rank: int, link: RankLink, kind: Kind, payload: bytes = b"") -> None:
    try:
        link.send(kind, payload)
    except LinkLostError as error:
        # Its last words may still be on their way to the thread that receives.
        timer = threading.Timer(_LAST_WORDS_SECONDS, job.lose, (f"rank {rank} {error}",))
        timer.daemon = True
        timer.start()


def _end(job: _Job, links: dict[int, RankLink]) -> None:
    """Tell the others why; they end with the same line."""
    for link in links.values():
        with contextlib.suppress(LinkLostError):
            link.send(Kind.FAILED, (job.reason or "").encode())


def _beat(job: _Job, links: Callable[[], tuple[tuple[int, RankLink], ...]]) -> None:
    while not job.ending.wait(job.timeouts.beat) and job.reason is None:
        for rank, link in links():
            _send(job, rank, link, Kind.BEAT)
        job.watch()


# ---- the others


def follow(place: RankPlace, identity: JobIdentity, loader: RankLoader, timeouts: RankTimeouts | None = None) -> int:
    """Run rank 0's calls on this rank's session until it closes; the number of calls. Raises EngineError."""
    timeouts = timeouts or RankTimeouts()
    job, link = _Job(place, timeouts), connect(place, timeouts)
    inbox: queue.SimpleQueue[tuple[Kind, bytes] | None] = queue.SimpleQueue()
    _start("beats", lambda: _beat(job, lambda: ((0, link),)))
    session: StepSession | None = None
    hearing: threading.Thread | None = None
    num_calls = 0
    try:
        link.send(Kind.HELLO, _identified(place, identity))
        hearing = _start("rank-0", lambda: _hear_leader(job, link, inbox))
        name = _awaited(job, inbox)[1]
        session = loader.load(name, lambda group: setattr(job, "group", group))
        link.send(Kind.READY)
        while True:
            kind, message = _awaited(job, inbox)
            if kind is Kind.CLOSE:
                job.ending.set()
                return num_calls
            job.watched(partial(_perform, session, kind, message))
            num_calls += kind in (Kind.STEP, Kind.COLLECT)
    except LinkLostError as error:
        job.lose(f"rank 0 {error}")
        job.check()
        raise
    except Exception as error:
        with contextlib.suppress(LinkLostError):
            link.send(Kind.FAILED, (job.reason or str(error)).encode())
        job.ending.set()
        link.finish()
        if hearing is not None:
            hearing.join(_LAST_WORDS_SECONDS)  # closing before rank 0 has read would take the words back
        raise
    finally:
        job.ending.set()
        if session is not None:
            session.close()
        link.close()
        job.closed.set()


def _perform(session: StepSession, kind: Kind, message: bytes) -> None:
    """What rank 0 does with its session, on this rank's."""
    ahead = cast(AheadSession, session)  # rank 0 launches only if its session can, and all ranks load the same
    if kind is Kind.STEP:
        session.run(unpacked(message)[0])
    elif kind is Kind.LAUNCH:
        ahead.launch(*unpacked(message))
    elif kind is Kind.MASK:
        ahead.supply_bitmask(unpacked_bitmask(message))
    elif kind is Kind.COLLECT:
        ahead.collect()
    else:
        raise EngineError(
            f"rank 0 sent a message of kind {kind.name} in a running job. Start all ranks with one release."
        )


def _hear_leader(job: _Job, link: RankLink, inbox: queue.SimpleQueue[tuple[Kind, bytes] | None]) -> None:
    try:
        while True:
            kind, payload = link.receive()
            if kind is Kind.FAILED:
                job.lose(payload.decode(errors="replace"))
                break
            inbox.put((kind, payload))
            if kind is Kind.CLOSE:
                return
    except LinkLostError as error:
        job.lose(f"rank 0 {error}")
    inbox.put(None)


def _awaited(job: _Job, inbox: queue.SimpleQueue[tuple[Kind, bytes] | None]) -> tuple[Kind, bytes]:
    item = inbox.get()
    if item is None:
        job.check()
        raise EngineError("rank 0 closed the job before it began.")
    return item
