"""Moves weights from the checkpoint's files into device buffers as fast as disk and bus allow.

In: a view, weights of the whole plan and a buffer on the card for each (of a rank: for its slices). Out: the buffers are
filled when `load_weights` returns. A few threads take chunks in the order of the plan. Each owns two pinned buffers in turn: it
reads the files into one, or computes what is not stored as it is wanted, while the other is on its way to the card. So the host
holds `NUM_THREADS` x 2 x `STAGING_BYTES`, whatever the model's size, and what the arithmetic of a chunk takes.

What may go wrong: damage in a file raises `CheckpointError`, a failed copy `EngineError`; the other threads have ended, and
nothing is under way any more, when the error reaches the caller.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from glm_mtp_export.artifact import WeightEntry
from glm_mtp_export.checkpoint.chunks import Chunk, ChunkWriter, weight_chunks
from glm_mtp_export.checkpoint.reading import FileReader
from glm_mtp_export.checkpoint.view import CheckpointView
from glm_mtp_export.config import ParallelConfig
from glm_mtp_export.runtime.cuda import DeviceBuffer, PinnedBuffer, Stream, use_device

__all__ = ["NUM_THREADS", "STAGING_BYTES", "CardStaging", "Staging", "load_weights"]

NUM_THREADS = 8
STAGING_BYTES = 8 << 20


class Staging(Protocol):
    """Host memory that one copy to the card at a time is made from. Made and used by one thread."""

    view: NDArray[np.uint8]

    def wait(self) -> None:
        """Until the last copy has passed and `view` may be written again."""

    def send(self, buffer: DeviceBuffer, num_bytes: int, offset: int) -> None:
        """Queue a copy of the first `num_bytes` to `offset` in the buffer."""

    def close(self) -> None:
        """Wait, and free it."""


class CardStaging:
    """Pinned memory with a stream of its own."""

    def __init__(self, num_bytes: int) -> None:
        use_device()
        self._stream, self._pinned = Stream(), PinnedBuffer(num_bytes)
        self.view = self._pinned.view

    def wait(self) -> None:
        """Until the last copy has passed and `view` may be written again."""
        self._stream.synchronize()

    def send(self, buffer: DeviceBuffer, num_bytes: int, offset: int) -> None:
        """Queue a copy of the first `num_bytes` to `offset` in the buffer."""
        buffer.upload(self._pinned, num_bytes, self._stream, offset)

    def close(self) -> None:
        """Wait, and free it."""
        try:
            self._stream.synchronize()
        finally:
            self._stream.close()
            self._pinned.close()


def load_weights(
    view: CheckpointView,
    entries: Sequence[WeightEntry],
    buffers: Mapping[str, DeviceBuffer],
    parallel: ParallelConfig,
    rank: int,
    progress: Callable[[int], None],
    staging: Callable[[int], Staging] = CardStaging,
    num_threads: int = NUM_THREADS,
    staging_bytes: int = STAGING_BYTES,
) -> None:
    """Fill the buffer of each entry (of the whole plan) with the bytes of this rank's slice.

    `progress` is called, by any thread but one at a time, with the bytes that are on their way. Raises CheckpointError and
    EngineError.
    """
    chunks = (chunk for entry in entries for chunk in weight_chunks(view, entry, staging_bytes, parallel, rank))
    with FileReader() as reader:
        load = _Load(chunks, buffers, reader, progress, staging, staging_bytes)
        with ThreadPoolExecutor(num_threads, "weights") as pool:
            try:
                workers = [pool.submit(load.work) for _ in range(num_threads)]
                for worker in workers:
                    worker.result()
            finally:
                load.stop()


class _Load:
    """What the threads of one load share."""

    def __init__(
        self,
        chunks: Iterator[Chunk],
        buffers: Mapping[str, DeviceBuffer],
        reader: FileReader,
        progress: Callable[[int], None],
        staging: Callable[[int], Staging],
        staging_bytes: int,
    ) -> None:
        self._chunks, self._buffers, self._reader = chunks, buffers, reader
        self._progress, self._staging, self._staging_bytes = progress, staging, staging_bytes
        self._planning, self._counting = threading.Lock(), threading.Lock()
        self._stopped = False

    def stop(self) -> None:
        """Let the threads end after the chunk at hand."""
        self._stopped = True

    def _next(self) -> Chunk | None:
        with self._planning:
            return None if self._stopped else next(self._chunks, None)

    def work(self) -> None:
        """What each thread does until no chunk is left."""
        try:
            with ExitStack() as held:
                turns = [held.enter_context(closing(self._staging(self._staging_bytes))) for _ in range(2)]
                writer = ChunkWriter(self._reader)
                while (chunk := self._next()) is not None:
                    turns.reverse()
                    self._move(chunk, writer, turns[0])
                    with self._counting:
                        self._progress(chunk.num_bytes)
        except BaseException:
            self.stop()
            raise

    def _move(self, chunk: Chunk, writer: ChunkWriter, staging: Staging) -> None:
        buffer = self._buffers[chunk.entry.name]
        staging.wait()
        if chunk.num_bytes <= self._staging_bytes:
            writer.write(chunk, staging.view[: chunk.num_bytes])
            staging.send(buffer, chunk.num_bytes, chunk.offset)
            return
        whole = np.empty(chunk.num_bytes, np.uint8)
        writer.write(chunk, whole)
        for start in range(0, chunk.num_bytes, self._staging_bytes):
            piece = whole[start : start + self._staging_bytes]
            staging.wait()
            staging.view[: len(piece)] = piece
            staging.send(buffer, len(piece), chunk.offset + start)
