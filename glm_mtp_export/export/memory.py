"""What an export takes, and how much memory this process may still take.

In: the weight plan. Out: `ExportNeeds`, known before anything is traced or written. Free memory is read on Linux; elsewhere it is
unknown, which is treated as plenty.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from glm_mtp_export.artifact import PORTABLE, WeightEntry
from glm_mtp_export.checkpoint.parts import PIECE_BYTES
from glm_mtp_export.checkpoint.weights import NUM_READERS
from glm_mtp_export.export.assemble import weight_offsets

__all__ = ["ExportNeeds", "export_needs", "free_memory_bytes"]

# Tracing T6 takes 170 MiB of memory, tracing all of GLM-5.2 230 MiB, measured as growth after the imports; address space grows by
# 410 and 436 MiB, which counts where that is limited.
_TRACE_BYTES = 256 << 20
_MAPPED_BYTES = 200 << 20
# A piece is there as stored, as float32 and as written; one more is being written and one waits.
_COPIES, _PIECES = 3, NUM_READERS + 2
# The reference run holds all weights as float32, beside activations and caches of a few hundred rows.
_REFERENCE_HEADROOM_BYTES = 512 << 20


@dataclass(frozen=True)
class ExportNeeds:
    """Most that an export takes at once, beyond what the process has."""

    memory_bytes: int  # tracing, and weights on their way to the file
    reference_bytes: int  # of the reference run, which is left out where it does not fit; 0: none is made
    disk_bytes: int

    def __str__(self) -> str:
        reference = f", {_gib(self.reference_bytes)} with the reference run" if self.reference_bytes else ""
        return f"expected: {_gib(self.memory_bytes)} of memory{reference}, {_gib(self.disk_bytes)} of disk, no GPU"


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.2f} GiB"


def export_needs(weights: Iterable[WeightEntry], dialect: str, reference_limit_bytes: int) -> ExportNeeds:
    """Needs of an export with this weight plan; no reference is made beyond `reference_limit_bytes` of weights."""
    entries = tuple(weights) if dialect == PORTABLE else ()
    # Rounding to NVFP4 needs a whole matrix at once; other pieces are cut.
    largest = max((w.num_bytes // (w.shape[0] if len(w.shape) == 3 else 1) for w in entries), default=0)
    whole = max((w.num_bytes // w.shape[0] for w in entries if w.precision == "nvfp4"), default=0)
    piece = max(min(largest, PIECE_BYTES), whole)
    total = sum(w.num_bytes for w in entries)
    reference = total + _REFERENCE_HEADROOM_BYTES if entries and total <= reference_limit_bytes else 0
    return ExportNeeds(_TRACE_BYTES + _COPIES * _PIECES * piece, reference, weight_offsets(entries)[1])


def free_memory_bytes() -> int:
    """The least of what the machine has free and what this process is limited to (address space, control group)."""
    limits = [sys.maxsize]
    with contextlib.suppress(ValueError, OSError, AttributeError):  # not Linux
        limits.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + _cached_bytes())
    limits += [limit for limit in (*_process_limits_left(), _group_left()) if limit is not None]
    return max(min(limits), 0)


def _cached_bytes() -> int:
    """Page cache that the kernel gives back on demand: MemAvailable beyond MemFree."""
    fields = {}
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        fields[name] = int(value.split()[0]) * 1024
    return max(fields.get("MemAvailable", 0) - fields.get("MemFree", 0), 0)


def _process_limits_left() -> list[int]:
    """What the limits on address space and on data leave, where there are any."""
    try:
        import resource

        used = Path("/proc/self/statm").read_text(encoding="ascii").split()
        kinds = ((resource.RLIMIT_AS, used[0], _MAPPED_BYTES), (resource.RLIMIT_DATA, used[5], 0))
        limits = ((resource.getrlimit(kind)[0], int(n) * os.sysconf("SC_PAGE_SIZE") + more) for kind, n, more in kinds)
        return [soft - taken for soft, taken in limits if soft != resource.RLIM_INFINITY]
    except (ImportError, OSError, ValueError, IndexError):
        return []


def _group_left() -> int | None:
    """What the control group of a container leaves."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text(encoding="ascii").strip()
        return None if limit == "max" else int(limit) - int((root / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
