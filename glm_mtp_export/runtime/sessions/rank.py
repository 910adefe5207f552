"""One rank of a tensor-parallel engine on its card: the group of cards, the rank's slices of the weights, the engine.

In: an artifact exported for N ranks, with its engine, and this process's `RankPlace`. Out: on rank 0 a `StepSession` over all
ranks (`open_leader`), on the others a loop that ends with the job (`follow_artifact`). Every rank reads only its slices from the
checkpoint. What may go wrong: a job of another size than the artifact's raises `EngineError` with the command to start it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from glm_mtp_export import __version__
from glm_mtp_export.artifact import MANIFEST_NAME, Manifest, WeightEntry
from glm_mtp_export.checkpoint.sharding import rank_plan
from glm_mtp_export.engine_manifest import EngineManifest, EngineProfile, engine_directory
from glm_mtp_export.errors import EngineError
from glm_mtp_export.plugin_library import LIBRARY_NAME
from glm_mtp_export.runtime.collectives import Collectives
from glm_mtp_export.runtime.cuda import DeviceBuffer, use_device
from glm_mtp_export.runtime.logs import log_event
from glm_mtp_export.runtime.rank_job import JobIdentity, LeaderSession, RankGroup, follow, lead
from glm_mtp_export.runtime.rank_place import RankPlace, choose_card, place_from_environment
from glm_mtp_export.runtime.session import (
    AheadSession,
    Int32,
    SessionOver,
    StepInputs,
    StepOutputs,
    StepSession,
    can_launch_ahead,
)
from glm_mtp_export.runtime.sessions.checkpoint_filler import CheckpointFiller
from glm_mtp_export.tensorrt_toolchain import library_in_use

__all__ = [
    "AheadRankSession",
    "RankFiller",
    "RankSession",
    "follow_artifact",
    "open_leader",
    "rank_session",
    "require_place",
]

_log = logging.getLogger(__name__)
_Inner = TypeVar("_Inner", bound=StepSession)

RankFiller = Callable[[Manifest, int], Callable[[WeightEntry, DeviceBuffer], None]]
"""From the whole manifest and a rank: what writes an entry of that rank's plan into its buffer."""


@dataclasses.dataclass(frozen=True)
class _RankInputs(StepInputs):
    rank: Int32 | None = None  # [1]


class RankSession(SessionOver[_Inner]):
    """A session whose graph also wants to know its rank, and whose weights are the rank's slices; leaves the group of cards when it
    closes."""

    def __init__(self, session: _Inner, place: RankPlace, close_group: Callable[[], None]) -> None:
        super().__init__(session)
        self._rank = np.array([place.rank], dtype=np.int32)
        self._close_group = close_group

    def run(self, inputs: StepInputs) -> StepOutputs:
        """One call; every rank must make it."""
        return self._session.run(self._with_rank(inputs))

    def _with_rank(self, inputs: StepInputs) -> StepInputs:
        values = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}
        return _RankInputs(**values, rank=self._rank)

    def close(self) -> None:
        """Engine and captured graphs first: the group cannot be left while a graph holds it."""
        self._session.close()
        self._close_group()


class AheadRankSession(RankSession[AheadSession]):
    """The same over a session that launches ahead; every rank must do the same in the same order."""

    def launch(self, inputs: StepInputs, follows: Int32 | None = None) -> None:
        """Queue a call."""
        self._session.launch(self._with_rank(inputs), follows)

    def supply_bitmask(self, token_bitmask: Int32) -> None:
        """The mask of the call launched last."""
        self._session.supply_bitmask(token_bitmask)

    def collect(self) -> StepOutputs:
        """Wait for the oldest call."""
        return self._session.collect()


def rank_session(session: StepSession, place: RankPlace, close_group: Callable[[], None]) -> RankSession:
    """One that launches ahead if `session` does."""
    if can_launch_ahead(session):
        return AheadRankSession(session, place, close_group)
    return RankSession(session, place, close_group)


class _CardLoader:
    """Loads a rank's TensorRT session."""

    def __init__(
        self, directory: Path, manifest: Manifest, profile: EngineProfile, place: RankPlace, filler: RankFiller
    ) -> None:
        self._directory, self._manifest, self._profile, self._place = directory, manifest, profile, place
        self._filler = filler
        choose_card(place)
        folder = engine_directory(directory, profile.backend)
        EngineManifest.load(folder)  # a missing engine is named before its library is
        self._group = Collectives(library_in_use(folder / LIBRARY_NAME))

    def name_group(self) -> bytes:
        return self._group.unique_id()

    def load(self, group_name: bytes, on_group: Callable[[RankGroup], None]) -> StepSession:
        from glm_mtp_export.runtime.sessions.tensorrt import TensorRtSession

        place = self._place
        use_device()
        self._group.init(group_name, place.rank, place.num_ranks)
        on_group(self._group)
        log_event(_log, logging.INFO, "group_joined", rank=place.rank, direct_bytes=self._group.direct_bytes)
        sliced = dataclasses.replace(self._manifest, weights=rank_plan(self._manifest.weights, self._manifest.parallel))
        fill = self._filler(self._manifest, place.rank)
        try:
            session = TensorRtSession.load(self._directory, sliced, self._profile, fill)
        except BaseException:
            self._group.abort()
            raise
        return rank_session(session, place, self._group.close)


def require_place(directory: Path, manifest: Manifest) -> RankPlace | None:
    """This process's place in the job that the artifact needs; None for an artifact of one card. Raises EngineError."""
    place = place_from_environment()
    size, found = manifest.parallel.tensor_parallel_size, place.num_ranks if place else 1
    if size != found:
        launcher = "" if size == 1 else f"torchrun --nproc-per-node {size} -m "
        raise EngineError(
            f"{directory}: the artifact is for {size} rank{'s' * (size > 1)}, this job has {found}. "
            f"Start it with: {launcher}glm_mtp_export ..."
        )
    return place


def open_leader(
    directory: Path, manifest: Manifest, profile: EngineProfile, filler: RankFiller = CheckpointFiller
) -> LeaderSession:
    """Rank 0's session over all ranks."""
    place = require_place(directory, manifest)
    if place is None or place.rank != 0:
        raise EngineError(f"{directory}: only rank 0 of the job takes requests.")
    identity = _identity(directory, profile.backend)
    return lead(place, identity, _CardLoader(directory, manifest, profile, place, filler))


def follow_artifact(directory: Path, backend: str, filler: RankFiller = CheckpointFiller) -> bool:
    """Be one of the ranks above 0 until the job ends; False at once when this process is none."""
    place = place_from_environment()
    if place is None or place.rank == 0:
        return False
    manifest = Manifest.load(directory)
    require_place(directory, manifest)
    profile = EngineManifest.load(engine_directory(directory, backend)).profile
    num_calls = follow(place, _identity(directory, backend), _CardLoader(directory, manifest, profile, place, filler))
    log_event(_log, logging.INFO, "rank_ended", rank=place.rank, calls=num_calls)
    return True


def _identity(directory: Path, backend: str) -> JobIdentity:
    digest = hashlib.sha256((directory / MANIFEST_NAME).read_bytes()).hexdigest()
    return JobIdentity(__version__, digest, backend)
