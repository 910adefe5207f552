"""Reading bytes of tensors at any offset, from any thread, into memory that the caller owns.

In: `TensorInfo` records and uint8 buffers. Out: the bytes, by positioned reads of files that are opened once. A file that
cannot be read, or ends too early, raises `CheckpointError` naming file and tensor.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from glm_mtp_export.errors import CheckpointError

if TYPE_CHECKING:
    from glm_mtp_export.checkpoint.index import TensorInfo

__all__ = ["FileReader"]

# From here on the whole range is asked for at once; the kernel's own read-ahead takes a far smaller step at a time.
_AHEAD_BYTES = 1 << 20
_MOST_BYTES = 1 << 30  # of one call: Linux reads at most 2 GiB less a page at once


class FileReader:
    """Open files of a checkpoint; `close` closes them. A context manager."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()

    def read_into(self, info: TensorInfo, buffer: npt.NDArray[np.uint8], begin: int = 0) -> None:
        """Fill `buffer` (uint8, contiguous, e.g. pinned memory) with a tensor's bytes from `begin` on."""
        view, done = buffer.data, 0
        try:
            descriptor = self._descriptor(info.file)
            if len(view) >= _AHEAD_BYTES:
                os.posix_fadvise(descriptor, info.offset + begin, len(view), os.POSIX_FADV_WILLNEED)
            while done < len(view):
                count = os.preadv(descriptor, [view[done : done + _MOST_BYTES]], info.offset + begin + done)
                if count == 0:
                    raise CheckpointError(
                        f"{info.file}: {info.name} cannot be read, the file ends after its header or was cut. "
                        "Fetch this shard (a headers-only checkpoint can be inspected and planned, not run)."
                    )
                done += count
        except OSError as error:
            raise CheckpointError(
                f"{info.file}: {info.name} cannot be read ({error}). Fetch this shard again."
            ) from error

    def _descriptor(self, path: Path) -> int:
        found = self._descriptors.get(path)
        if found is None:
            with self._lock:
                found = self._descriptors.get(path)
                if found is None:
                    found = self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return found

    def close(self) -> None:
        """Close what was opened; no read may be under way."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def __enter__(self) -> FileReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
