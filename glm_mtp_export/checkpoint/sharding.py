"""Which slice of each graph weight a tensor-parallel rank holds, and the arrays of that slice.

In: the whole weight plan and a `ParallelConfig`. Out: the plan of one rank, with the shapes the rank's graph sees (equal for all
ranks), and for each entry the ranges of the whole weight that make it. A stack of gate and up rows is cut in each half. A cut that
would go through an FP8 block or an NVFP4 group, or that leaves unequal parts, raises `CheckpointError` naming the weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from glm_mtp_export.artifact import WeightEntry
from glm_mtp_export.checkpoint.formats import FP8_BLOCK_FORMAT, NVFP4
from glm_mtp_export.checkpoint.numeric import FP8_BLOCK, NVFP4_GROUP
from glm_mtp_export.config import ParallelConfig
from glm_mtp_export.errors import CheckpointError

__all__ = ["Cut", "rank_cut", "rank_entry", "rank_plan"]


@dataclass(frozen=True)
class Cut:
    """Ranges of a whole weight's axis that make a rank's slice, in order. axis None: all of it."""

    axis: int | None
    ranges: tuple[tuple[int, int], ...] = ()


def _is_routed(entry: WeightEntry) -> bool:
    return entry.recipe in ("experts_gate_up", "experts_down")


def _num_halves(entry: WeightEntry) -> int:
    """Stacked parts of the cut axis that each rank needs a share of: gate and up."""
    return 2 if entry.name.removesuffix("_scale").endswith(("gate_up", "w13")) else 1


def rank_cut(entry: WeightEntry, parallel: ParallelConfig, rank: int) -> Cut:
    """Where rank `rank`'s slice of a whole-plan entry lies. Raises CheckpointError."""
    size = parallel.tensor_parallel_size
    if size == 1:
        return Cut(None)
    if parallel.expert_parallel and _is_routed(entry):
        count = _share(entry, entry.shape[0], size, 1, "experts")
        return Cut(0, ((rank * count, (rank + 1) * count),))
    axis = entry.shard_axis
    if axis is None:
        return Cut(None)
    halves = _num_halves(entry)
    part = entry.shape[axis] // halves
    count = _share(entry, part, size, _granule(entry, axis), "rows" if axis == len(entry.shape) - 2 else "columns")
    starts = (half * part + rank * count for half in range(halves))
    return Cut(axis, tuple((start, start + count) for start in starts))


def _granule(entry: WeightEntry, axis: int) -> int:
    """Extents of a slice must be a multiple of this so that no scale belongs to two ranks."""
    if entry.component != "values":
        return 1  # whole scales
    if entry.format == FP8_BLOCK_FORMAT:
        return FP8_BLOCK
    if entry.format == NVFP4 and axis == len(entry.shape) - 1:
        return NVFP4_GROUP // 2  # packed, two a byte
    return 1


def _share(entry: WeightEntry, extent: int, size: int, granule: int, what: str) -> int:
    if extent % size or (extent // size) % granule:
        unit = {1: what, FP8_BLOCK: f"{what} in blocks of {FP8_BLOCK}"}.get(
            granule, f"{what} in groups of {NVFP4_GROUP}"
        )
        raise CheckpointError(
            f"{entry.name}: {extent} {what} cannot be cut into {size} equal parts of whole {unit}. "
            "Use a smaller --tensor-parallel-size, or --expert-parallel for routed experts."
        )
    return extent // size


def rank_entry(entry: WeightEntry, parallel: ParallelConfig) -> WeightEntry:
    """The entry with the shape of one rank's slice; the same for every rank."""
    cut = rank_cut(entry, parallel, 0)
    if cut.axis is None:
        return entry
    shape = list(entry.shape)
    shape[cut.axis] = sum(stop - start for start, stop in cut.ranges)
    return replace(entry, shape=tuple(shape))


def rank_plan(entries: Sequence[WeightEntry], parallel: ParallelConfig) -> tuple[WeightEntry, ...]:
    """The plan of one rank. All cuts that cannot be made are reported together."""
    problems: list[str] = []
    planned: list[WeightEntry] = []
    for entry in entries:
        try:
            planned.append(rank_entry(entry, parallel))
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        more = f" ({len(problems) - 1} more weights alike.)" if len(problems) > 1 else ""
        raise CheckpointError(problems[0] + more)
    return tuple(planned)
