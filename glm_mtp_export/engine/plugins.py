"""Building the plugin library from `plugins/`.

In: target architectures and a build folder. Out: the library's path. What may go wrong: no compiler or no sources raise
`MissingDependencyError` or `EngineError`, a failed compilation `EngineError` with the end of the compiler's output.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from glm_mtp_export import __version__
from glm_mtp_export.errors import EngineError, MissingDependencyError, OptionError
from glm_mtp_export.plugin_library import LIBRARY_NAME, PluginLibrary, default_build_dir, describe_plugins, find_plugins

__all__ = [
    "LIBRARY_NAME",
    "SUPPORTED_ARCHS",
    "PluginLibrary",
    "build_plugins",
    "default_build_dir",
    "describe_plugins",
    "find_plugins",
]

SUPPORTED_ARCHS = ("90a", "100a")
_CHECKOUT = Path(__file__).parents[2]


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
