"""The plugin library as the host sees it: where it is, and what it says about itself.

In: a path, or nothing. Out: `PluginLibrary`, with digest, release, architectures and ops as the library reports them,
without TensorRT or GPU. What may go wrong: a library that is missing or not ours raises `EngineError` with every path.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from glm_mtp_export.artifact import file_record
from glm_mtp_export.errors import EngineError

__all__ = ["LIBRARY_NAME", "PluginLibrary", "default_build_dir", "describe_plugins", "find_plugins"]

LIBRARY_NAME = "libglm_mtp_plugins.so"
_CHECKOUT = Path(__file__).parents[1]
_DESCRIBE = """
import ctypes, sys
describe = ctypes.CDLL(sys.argv[1]).glm_mtp_plugins_info
describe.restype = ctypes.c_char_p
print(describe().decode())
"""


@dataclass(frozen=True)
class PluginLibrary:
    """What a plugin library says about itself."""

    path: Path
    sha256: str
    release: str
    archs: tuple[str, ...]
    cuda: str  # version of the CUDA runtime inside, such as "13.0"
    namespace: str
    version: str
    ops: tuple[str, ...]

    def to_dict(self) -> dict[str, object]:
        """For JSON reports."""
        return {**self.__dict__, "path": str(self.path), "archs": list(self.archs), "ops": list(self.ops)}


def default_build_dir() -> Path:
    """build/plugins of a checkout; the user's cache when the package is installed without its sources beside it."""
    if (_CHECKOUT / "plugins" / "CMakeLists.txt").is_file():
        return _CHECKOUT / "build" / "plugins"
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "glm-mtp" / "plugins"


def describe_plugins(path: Path) -> PluginLibrary:
    """Load the library at `path` and read what it reports. Raises EngineError."""
    if not path.is_file():
        raise EngineError(f"{path}: no plugin library there. Build it with: glm-mtp build-plugins")
    # In a process of its own: a library with missing symbols must not take the caller down.
    command = [sys.executable, "-c", _DESCRIBE, str(path.resolve())]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        raw = json.loads(found.stdout)
        return PluginLibrary(
            path=path,
            sha256=file_record(path).sha256,
            release=raw["release"],
            archs=tuple(raw["archs"].split(",")),
            cuda=f"{raw['cuda'] // 1000}.{raw['cuda'] % 1000 // 10}",
            namespace=raw["namespace"],
            version=raw["version"],
            ops=tuple(raw["ops"]),
        )
    except (ValueError, KeyError) as error:
        reason = (found.stderr.strip().splitlines() or ["no description"])[-1]
        raise EngineError(
            f"{path}: not a plugin library of this project ({reason}). Build it with: glm-mtp build-plugins"
        ) from error


def find_plugins(path: Path | None = None) -> PluginLibrary:
    """The library at `path`, else the one that build-plugins made. Raises EngineError naming every path tried."""
    if path is not None:
        return describe_plugins(path)
    tried = [default_build_dir() / LIBRARY_NAME]
    for candidate in tried:
        if candidate.is_file():
            return describe_plugins(candidate)
    raise EngineError(
        f"{LIBRARY_NAME} not found; tried {', '.join(map(str, tried))}. "
        "Build it with 'glm-mtp build-plugins' or name it with --plugins."
    )
