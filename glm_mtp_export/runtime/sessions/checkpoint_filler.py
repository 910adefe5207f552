"""Fills device buffers with weights straight from the checkpoint, whole or one rank's slices, and says how far it is.

In: the manifest of the artifact as exported, and the rank. Out: a callable for `TensorRtSession`. The host holds a few pieces of
one weight at a time. A checkpoint that moved or changed raises CheckpointError.
"""

from __future__ import annotations

import logging
from typing import BinaryIO, cast

import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from glm_mtp_export.artifact import Manifest, WeightEntry
from glm_mtp_export.checkpoint.sharding import rank_plan
from glm_mtp_export.checkpoint.view import CheckpointView
from glm_mtp_export.checkpoint.weights import write_entry
from glm_mtp_export.runtime.cuda import DeviceBuffer
from glm_mtp_export.runtime.logs import log_event

__all__ = ["CheckpointFiller"]

_log = logging.getLogger(__name__)
_PROGRESS_STEPS = 10  # lines a rank logs while it loads


class CheckpointFiller:
    """Called with a weight of the rank's plan and the buffer that takes it."""

    def __init__(self, manifest: Manifest, rank: int = 0) -> None:
        self._view = CheckpointView.open(manifest.checkpoint, manifest.mtp_checkpoint or None)
        self._whole = {entry.name: entry for entry in manifest.weights}
        self._parallel, self._rank = manifest.parallel, rank
        self._num_bytes = sum(entry.num_bytes for entry in rank_plan(manifest.weights, manifest.parallel))
        self._done = 0
        console = Console(stderr=True)
        # One bar on a terminal; elsewhere, and for the other ranks, lines in the log.
        self._bar = _bar(console, self._num_bytes) if console.is_terminal and rank == 0 else None

    def __call__(self, entry: WeightEntry, buffer: DeviceBuffer) -> None:
        file = cast(BinaryIO, _DeviceWriter(buffer))
        write_entry(self._view, self._whole[entry.name], file, parallel=self._parallel, rank=self._rank)
        before, self._done = self._done, self._done + entry.num_bytes
        if self._bar is not None:
            self._bar.update(TaskID(0), completed=self._done)
            if self._done == self._num_bytes:
                self._bar.stop()
            return
        if before * _PROGRESS_STEPS // self._num_bytes != self._done * _PROGRESS_STEPS // self._num_bytes:
            fields = {"rank": self._rank, "gib": self._done / 2**30, "of_gib": self._num_bytes / 2**30}
            log_event(_log, logging.INFO, "weights_loaded", **fields)


def _bar(console: Console, num_bytes: int) -> Progress:
    columns = (TextColumn("weights"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    bar = Progress(*columns, TimeRemainingColumn(), console=console)
    bar.add_task("weights", total=num_bytes)
    bar.start()
    return bar


class _DeviceWriter:
    """A file whose bytes lie on the card."""

    def __init__(self, buffer: DeviceBuffer) -> None:
        self._buffer, self._offset = buffer, 0

    def write(self, data: memoryview) -> int:
        """Copy behind what was written before."""
        piece = np.frombuffer(data, dtype=np.uint8)
        self._buffer.write(piece, self._offset)
        self._offset += piece.nbytes
        return piece.nbytes
