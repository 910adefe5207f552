"""Cuts a weight into chunks that fit a buffer and can be written in any order, by any thread.

In: what `weights.write_entry` takes, and the size of a buffer. Out: `Chunk` records, and a `ChunkWriter` a thread that puts
a chunk's bytes into memory of the caller: the same bytes as `write_entry`'s, from the same parts. What is stored as it is
wanted goes from the file straight into that memory; of a cut by columns, whole rows go through a small scratch buffer. Damage
raises `CheckpointError`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from glm_mtp_export.artifact import WeightEntry
from glm_mtp_export.checkpoint.formats import FP8_BLOCK_FORMAT
from glm_mtp_export.checkpoint.index import StoredRows
from glm_mtp_export.checkpoint.numeric import FP8_BLOCK, U8
from glm_mtp_export.checkpoint.parts import Part, cut_parts
from glm_mtp_export.checkpoint.reading import FileReader
from glm_mtp_export.checkpoint.sharding import rank_cut, rank_entry
from glm_mtp_export.checkpoint.view import CheckpointView
from glm_mtp_export.checkpoint.weights import WHOLE
from glm_mtp_export.config import ParallelConfig

__all__ = ["Chunk", "ChunkWriter", "weight_chunks"]

_SCRATCH_BYTES = 2 << 20  # stays in a core's cache between the read and the cut


@dataclass(frozen=True)
class Chunk:
    """Bytes [offset, offset + num_bytes) of a weight, or of a rank's slice of it, made by consecutive parts."""

    entry: WeightEntry  # of the whole plan
    offset: int
    num_bytes: int
    parts: tuple[Part, ...]


def weight_chunks(
    view: CheckpointView, entry: WeightEntry, most_bytes: int, parallel: ParallelConfig = WHOLE, rank: int = 0
) -> Iterator[Chunk]:
    """The chunks of a weight in order, nearly all of them full.

    None is larger than `most_bytes`, unless the fewest rows that can be made alone are: one, a block of 128 in FP8, a matrix
    that is converted to NVFP4.
    """
    parts: list[Part] = []
    offset = size = 0
    for part in cut_parts(view, entry, rank_cut(entry, parallel, rank)):
        rest: Part | None = part
        while rest is not None:
            head, tail = _split(rest, entry, most_bytes - size)
            num_bytes = _num_bytes(head, entry)
            if parts and size + num_bytes > most_bytes:
                yield Chunk(entry, offset, size, tuple(parts))
                parts, offset, size = [], offset + size, 0
                continue
            parts.append(head)
            size += num_bytes
            rest = tail
    if parts:
        yield Chunk(entry, offset, size, tuple(parts))
    if (found := offset + size) != (expected := rank_entry(entry, parallel).num_bytes):  # a bug, not an input
        raise AssertionError(f"{entry.name}: recipe {entry.recipe} made {found} bytes of {expected}")


def _num_bytes(part: Part, entry: WeightEntry) -> int:
    rows, columns = part.made_shape(entry)
    return rows * columns * entry.item_bytes


def _split(part: Part, entry: WeightEntry, room: int) -> tuple[Part, Part | None]:
    """The first rows of a part, as many as fit into `room` bytes but at least one, and the rest of it.

    Where values are computed it is the part's own cut that counts, since that bounds the memory of the arithmetic.
    """
    if part.stored(entry) is None:
        stop = next(part.cut(entry)).stop
    else:
        _, columns = part.made_shape(entry)
        # FP8 codes are stored codes only from a whole block on.
        rows = FP8_BLOCK if entry.format == FP8_BLOCK_FORMAT else 1
        made = 1 if entry.component == "block_scale" else rows
        stop = min(part.stop, part.start + rows * max(1, room // (made * columns * entry.item_bytes)))
    if stop == part.stop:
        return part, None
    return replace(part, stop=stop), replace(part, start=stop)


class ChunkWriter:
    """Writes chunks into memory; one a thread, since it owns the scratch buffer. The reader may be shared."""

    def __init__(self, reader: FileReader) -> None:
        self._reader = reader
        self._scratch = np.empty(_SCRATCH_BYTES, np.uint8)

    def write(self, chunk: Chunk, buffer: U8) -> None:
        """Fill `buffer` (uint8, contiguous, `chunk.num_bytes` long)."""
        done = 0
        for part in chunk.parts:
            size = _num_bytes(part, chunk.entry)
            out, rows = buffer[done : done + size], part.stored(chunk.entry)
            if rows is None:
                made = part.made(chunk.entry)
                out.view(made.dtype).reshape(made.shape)[...] = made
            elif part.kept is None:
                self._reader.read_into(rows.info, out, rows.first * rows.row_bytes)
            else:
                self._write_columns(rows, part.kept[1], out)
            done += size

    def _write_columns(self, rows: StoredRows, kept: slice, out: U8) -> None:
        """Some columns of stored rows. A page of the file holds the others too, so whole rows are read."""
        pitch, count = rows.row_bytes, rows.last - rows.first
        item = pitch // rows.info.shape[-1]
        table = out.reshape(count, -1)
        if pitch > len(self._scratch):
            self._scratch = np.empty(pitch, np.uint8)
        step = len(self._scratch) // pitch
        for start in range(0, count, step):
            stop = min(start + step, count)
            read = self._scratch[: (stop - start) * pitch]
            self._reader.read_into(rows.info, read, (rows.first + start) * pitch)
            table[start:stop] = read.reshape(stop - start, pitch)[:, kept.start * item : kept.stop * item]
