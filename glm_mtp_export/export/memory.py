"""How much memory this process may still take, on Linux; elsewhere unknown, which is treated as plenty."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

__all__ = ["free_memory_bytes"]


def free_memory_bytes() -> int:
    """The least of what the machine has free and what this process is limited to (address space, control group)."""
    limits = [sys.maxsize]
    with contextlib.suppress(ValueError, OSError, AttributeError):  # not Linux
        limits.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + _cached_bytes())
    limits += [limit for limit in (_address_space_left(), _group_left()) if limit is not None]
    return max(min(limits), 0)


def _cached_bytes() -> int:
    """Page cache that the kernel gives back on demand: MemAvailable beyond MemFree."""
    fields = {}
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        fields[name] = int(value.split()[0]) * 1024
    return max(fields.get("MemAvailable", 0) - fields.get("MemFree", 0), 0)


def _address_space_left() -> int | None:
    try:
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        if soft == resource.RLIM_INFINITY:
            return None
        used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE")
        return soft - used
    except (ImportError, OSError, ValueError):
        return None


def _group_left() -> int | None:
    """What the control group of a container leaves."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text(encoding="ascii").strip()
        return None if limit == "max" else int(limit) - int((root / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
