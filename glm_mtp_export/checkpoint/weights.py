"""Executes the weight plan: reads checkpoint rows, converts them and gives the bytes of each graph weight.

In: a `CheckpointView` and `WeightEntry` records of the whole plan, and for a tensor-parallel rank its `ParallelConfig`
and number. Out: numpy arrays (bfloat16 as uint16 bits, e4m3 as uint8), or the same bytes piece by piece, so that a
stack of experts never lies in memory as a whole. Stored codes pass through untouched where the wanted format is the
stored one; otherwise values go through exact float32. Damage raises `CheckpointError`.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from glm_mtp_export.artifact import WeightEntry
from glm_mtp_export.checkpoint.parts import cut_parts
from glm_mtp_export.checkpoint.sharding import rank_cut, rank_entry
from glm_mtp_export.checkpoint.view import CheckpointView
from glm_mtp_export.config import ParallelConfig

__all__ = ["NUM_READERS", "Progress", "fill", "materialise", "pieces", "stream", "write_entry"]

Progress = Callable[[int], None]  # called with the bytes of the graph weight that were just finished
WHOLE = ParallelConfig()
NUM_READERS = min(4, os.cpu_count() or 1)  # numpy and reads release the interpreter; each holds a few pieces of memory
_NUMPY: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "bfloat16": np.dtype("<u2"),
    "float8_e4m3fn": np.dtype("u1"),
    "uint8": np.dtype("u1"),
}


def pieces(
    view: CheckpointView, entry: WeightEntry, parallel: ParallelConfig = WHOLE, rank: int = 0
) -> Iterator[npt.NDArray[Any]]:
    """Consecutive parts of the weight in row-major order, each about PIECE_BYTES or less (NVFP4: one matrix).

    The next few pieces are read and converted by threads while the caller works on this one.
    """
    cut = rank_cut(entry, parallel, rank)
    parts = (smaller for part in cut_parts(view, entry, cut) for smaller in part.cut(entry))
    first = list(islice(parts, 2))
    if len(first) < 2:
        yield from (part.made(entry) for part in first)
        return
    with ThreadPoolExecutor(NUM_READERS) as readers:
        waiting: deque[Future[npt.NDArray[Any]]] = deque()
        try:
            for part in chain(first, parts):
                waiting.append(readers.submit(part.made, entry))
                if len(waiting) > NUM_READERS:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            readers.shutdown(cancel_futures=True)


def fill(
    view: CheckpointView,
    entry: WeightEntry,
    buffer: npt.NDArray[np.uint8],
    progress: Progress | None = None,
    parallel: ParallelConfig = WHOLE,
    rank: int = 0,
) -> None:
    """Write the weight's bytes into `buffer` (uint8, contiguous, of exactly its size: pinned memory, a mapped file).

    Raises ValueError for a buffer of another size.
    """
    expected = rank_entry(entry, parallel).num_bytes
    if buffer.dtype != np.uint8 or buffer.shape != (expected,):
        raise ValueError(f"{entry.name}: buffer is {buffer.dtype} {buffer.shape}, expected uint8 ({expected},)")
    done = 0
    for piece in pieces(view, entry, parallel, rank):
        buffer[done : done + piece.nbytes].view(piece.dtype)[:] = piece.reshape(-1)
        done += piece.nbytes
        if progress:
            progress(piece.nbytes)
    _check_complete(entry, done, expected)


def materialise(
    view: CheckpointView, entry: WeightEntry, parallel: ParallelConfig = WHOLE, rank: int = 0
) -> npt.NDArray[Any]:
    """The weight, or a rank's slice of it, in its entry's shape; bfloat16 as uint16 bits, e4m3 as uint8."""
    result = np.empty(rank_entry(entry, parallel).shape, _NUMPY[entry.dtype])
    fill(view, entry, result.reshape(-1).view(np.uint8), None, parallel, rank)
    return result


def stream(
    view: CheckpointView, entries: Iterable[WeightEntry], progress: Progress | None = None
) -> Iterator[tuple[WeightEntry, npt.NDArray[Any]]]:
    """Each weight in turn; only one is in memory unless the caller keeps them."""
    for entry in entries:
        yield entry, materialise(view, entry)
        if progress:
            progress(entry.num_bytes)


def write_entry(
    view: CheckpointView,
    entry: WeightEntry,
    file: BinaryIO,
    progress: Progress | None = None,
    parallel: ParallelConfig = WHOLE,
    rank: int = 0,
) -> int:
    """Write the weight's bytes at the file's position, piece by piece; gives the number of bytes."""
    done = 0
    for piece in pieces(view, entry, parallel, rank):
        file.write(np.ascontiguousarray(piece).data)
        done += piece.nbytes
        if progress:
            progress(piece.nbytes)
    _check_complete(entry, done, rank_entry(entry, parallel).num_bytes)
    return done


def _check_complete(entry: WeightEntry, found: int, expected: int) -> None:
    if found != expected:  # a bug, not an input
        raise AssertionError(f"{entry.name}: recipe {entry.recipe} made {found} bytes of {expected}")
