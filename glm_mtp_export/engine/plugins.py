"""The plugin library: building it from `plugins/`, finding it, describing it.

In: target architectures and a build folder, or a path. Out: `PluginLibrary`, with the library's digest, release,
architectures and ops as it reports them itself (no TensorRT and no GPU needed). What may go wrong: no compiler or no
sources raise `MissingDependencyError` or `EngineError`; a library that is missing or is not ours raises `EngineError`
with every path tried.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from glm_mtp_export import __version__
from glm_mtp_export.artifact import file_record
from glm_mtp_export.errors import EngineError, MissingDependencyError, OptionError

__all__ = [
    "LIBRARY_NAME",
    "SUPPORTED_ARCHS",
    "PluginLibrary",
    "build_plugins",
    "default_build_dir",
    "describe_plugins",
    "find_plugins",
]

LIBRARY_NAME = "libglm_mtp_plugins.so"
SUPPORTED_ARCHS = ("90a", "100a")
_CHECKOUT = Path(__file__).parents[2]
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


def build_plugins(
    arch: Sequence[str] = ("90a",),
    build_dir: Path | None = None,
    *,
    source_dir: Path | None = None,
    tensorrt_root: Path | None = None,
    jobs: int | None = None,
) -> Path:
    """Compile libglm_mtp_plugins.so for `arch` and return its path: minutes on two cores, then only what changed."""
    if unknown := [a for a in arch if a not in SUPPORTED_ARCHS]:
        supported = ", ".join(SUPPORTED_ARCHS)
        raise OptionError(f"--arch {','.join(unknown)}: supported are {supported} (90a Hopper, 100a Blackwell).")
    if not arch:
        raise OptionError(f"--arch is empty: name one or more of {', '.join(SUPPORTED_ARCHS)}.")
    source = source_dir or _CHECKOUT / "plugins"
    if not (source / "CMakeLists.txt").is_file():
        raise EngineError(f"{source}: no CMakeLists.txt there. Run this from a checkout, which has the CUDA sources.")
    for tool, need in (("cmake", "CMake 3.24 or newer"), ("nvcc", "the CUDA 13 toolkit")):
        if shutil.which(tool) is None:
            raise MissingDependencyError(f"{tool} is not on the PATH: install {need} to build the plugins.")
    folder = build_dir or default_build_dir()
    configure = ["cmake", "-S", str(source), "-B", str(folder), "-DCMAKE_BUILD_TYPE=Release"]
    configure += [f"-DGLM_CUDA_ARCHS={';'.join(arch)}", f"-DGLM_PLUGIN_RELEASE={__version__}"]
    configure += [f"-DTENSORRT_ROOT={tensorrt_root or ''}"]
    if shutil.which("ninja") and not (folder / "CMakeCache.txt").is_file():
        configure += ["-G", "Ninja"]
    _run(configure, folder)
    _run(["cmake", "--build", str(folder), "--parallel", str(jobs or os.cpu_count() or 1)], folder)
    return folder / LIBRARY_NAME


def _run(command: list[str], folder: Path) -> None:
    result = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if result.returncode:
        tail = "\n".join(result.stdout.splitlines()[-40:])
        step = " ".join(command[:3])
        raise EngineError(f"{step} failed with {result.returncode}:\n{tail}\nMend this, or delete {folder} and retry.")


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
