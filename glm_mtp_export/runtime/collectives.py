"""The plugin library's side of a tensor-parallel group: joining, aborting, leaving. NCCL is found in its Python package.

In: the plugin library of an engine. Out: a `Collectives` for this process, which drives one card. A call that fails raises
`EngineError` with the library's words.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
from pathlib import Path

from glm_mtp_export.errors import EngineError

__all__ = ["Collectives"]

_ID_BYTES = 128
_NCCL = "libnccl.so.2"


class Collectives:
    """This process's place in the group of its plugin library."""

    def __init__(self, library: Path) -> None:
        _preload_nccl()
        self._library = ctypes.CDLL(str(library.resolve()))
        self._library.glm_mtp_collectives_last_error.restype = ctypes.c_char_p
        self._library.glm_mtp_collectives_direct_bytes.restype = ctypes.c_int64

    def unique_id(self) -> bytes:
        """A name for a new group; rank 0 makes it and gives it to all."""
        name = ctypes.create_string_buffer(_ID_BYTES)
        self._call("unique_id", name)
        return name.raw

    def init(self, name: bytes, rank: int, num_ranks: int) -> None:
        """Join on the current card; returns when all ranks have."""
        self._call("init", ctypes.create_string_buffer(name, _ID_BYTES), rank, num_ranks)

    @property
    def direct_bytes(self) -> int:
        """Payload up to which the ranks write into each other's memory; 0 when NCCL carries everything."""
        return int(self._library.glm_mtp_collectives_direct_bytes())

    def check(self) -> None:
        """Raise when NCCL has lost another rank."""
        self._call("check")

    def abort(self) -> None:
        """End every wait for the other ranks. From any thread."""
        self._call("abort")

    def close(self) -> None:
        """Leave; captured graphs must be gone."""
        self._call("close")

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, f"glm_mtp_collectives_{name}")(*arguments)
        if status:
            words = (self._library.glm_mtp_collectives_last_error() or b"").decode(errors="replace")
            raise EngineError(f"the tensor-parallel group failed ({status}): {words}.")


def _preload_nccl() -> None:
    """Load the package's NCCL, so that the plugin library finds it under its name whatever the loader's path is."""
    with contextlib.suppress(ModuleNotFoundError):
        spec = importlib.util.find_spec("nvidia.nccl")
        for folder in (spec.submodule_search_locations if spec else None) or []:
            path = Path(folder) / "lib" / _NCCL
            if path.is_file():
                ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
