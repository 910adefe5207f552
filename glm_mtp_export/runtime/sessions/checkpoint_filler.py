"""Fills device buffers with weights straight from the checkpoint, whole or one rank's slices, and says how far it is.

In: the manifest of the artifact as exported, and the rank. Out: a callable for `TensorRtSession`. What the host
holds meanwhile is `weight_loader`'s. A checkpoint that moved or changed raises CheckpointError.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from glm_mtp_export.artifact import Manifest, WeightEntry
from glm_mtp_export.checkpoint.sharding import rank_plan
from glm_mtp_export.checkpoint.view import CheckpointView
from glm_mtp_export.runtime.cuda import DeviceBuffer
from glm_mtp_export.runtime.logs import log_event
from glm_mtp_export.runtime.sessions.weight_loader import load_weights

__all__ = ["CheckpointFiller"]

_log = logging.getLogger(__name__)
_PROGRESS_STEPS = 10  # lines a rank logs while it loads


class CheckpointFiller:
    """Called once with each weight of the rank's plan and the buffer that takes it.

    The call that completes the plan loads them all, so that reads and copies run on from one weight to the next; when it
    returns, all bytes are there.
    """

    def __init__(self, manifest: Manifest, rank: int = 0) -> None:
        self._view = CheckpointView.open(manifest.checkpoint, manifest.mtp_checkpoint or None)
        self._whole, self._parallel, self._rank = manifest.weights, manifest.parallel, rank
        self._num_bytes = sum(entry.num_bytes for entry in rank_plan(manifest.weights, manifest.parallel))
        self._buffers: dict[str, DeviceBuffer] = {}

    def __call__(self, entry: WeightEntry, buffer: DeviceBuffer) -> None:
        self._buffers[entry.name] = buffer
        if len(self._buffers) < len(self._whole):
            return
        buffers, self._buffers = self._buffers, {}
        console = Console(stderr=True)
        # One bar on a terminal; elsewhere, and for the other ranks, lines in the log.
        is_shown = console.is_terminal and self._rank == 0
        with _bar(console, self._num_bytes) if is_shown else _lines(self._rank, self._num_bytes) as advance:
            load_weights(self._view, self._whole, buffers, self._parallel, self._rank, advance)


@contextmanager
def _bar(console: Console, num_bytes: int) -> Iterator[Callable[[int], None]]:
    columns = (TextColumn("weights"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("weights", total=num_bytes)
        yield lambda count: bar.advance(task, count)


@contextmanager
def _lines(rank: int, num_bytes: int) -> Iterator[Callable[[int], None]]:
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        before, done = done, done + count
        if before * _PROGRESS_STEPS // num_bytes != done * _PROGRESS_STEPS // num_bytes:
            fields = {"rank": rank, "gib": done / 2**30, "of_gib": num_bytes / 2**30}
            log_event(_log, logging.INFO, "weights_loaded", **fields)

    yield advance
