"""TensorRT or TensorRT-RTX as the builder uses them: one module object, the plugin registry, and every line they log.

In: the backend's name. Out: `Toolchain`. What may go wrong: a package that is not installed raises
`MissingDependencyError`; TensorRT-RTX without its unversioned library on the loader's path raises `EngineError`, because
its ONNX parser would end the process at the first plugin.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from glm_mtp_export.engine.preflight import Creator
from glm_mtp_export.errors import EngineError, MissingDependencyError

__all__ = ["LogLine", "Toolchain", "load_toolchain"]

_MODULES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
_RTX_LIBRARY = "libtensorrt_rtx.so"


@dataclass(frozen=True)
class LogLine:
    """One message; `severity` is the toolchain's number, 0 internal error .. 4 verbose."""

    severity: int
    text: str


@dataclass
class Toolchain:
    """A loaded TensorRT. `lines` grows while it works."""

    name: str  # tensorrt or tensorrt_rtx
    module: ModuleType
    logger: Any
    lines: list[LogLine] = field(default_factory=list)

    @property
    def version(self) -> str:
        """Such as 1.6.1.120."""
        return str(self.module.__version__)

    @property
    def is_rtx(self) -> bool:
        """True for TensorRT-RTX, which builds for a named target and needs no card."""
        return self.name == "tensorrt_rtx"

    def polygraphy(self) -> Any:
        """Polygraphy's loaders for this toolchain, logging through `logger`. Raises MissingDependencyError."""
        try:
            loaders = importlib.import_module("polygraphy.backend.trt")
            util = importlib.import_module("polygraphy.backend.trt.util")
        except ImportError as error:
            raise MissingDependencyError(
                f"building engines needs Polygraphy ({error}): pip install 'glm-mtp-export[gpu]'"
            ) from error
        util.TRT_LOGGER = self.logger  # the loaders take no logger, and their own keeps no lines
        return loaders

    @contextmanager
    def polygraphy_quiet(self) -> Iterator[None]:
        """Polygraphy prints its configuration and every error; ours say what to do."""
        logger = importlib.import_module("polygraphy.logger").G_LOGGER
        with logger.verbosity(logger.CRITICAL + 1):
            yield

    def load_plugins(self, path: Path) -> tuple[Creator, ...]:
        """Load a plugin library and return every creator that the registry then holds. Raises EngineError."""
        registry = self.module.get_plugin_registry()
        before = len(self.lines)
        known = {(c.name, c.plugin_version, c.plugin_namespace) for c in registry.all_creators}
        registry.load_library(str(path.resolve()))
        creators = tuple(Creator(c.name, c.plugin_version, c.plugin_namespace) for c in registry.all_creators)
        if {(c.name, c.version, c.namespace) for c in creators} == known and str(path.resolve()) not in _LOADED:
            reason = "; ".join(line.text for line in self.lines[before:]) or "the registry took no creator from it"
            raise EngineError(f"{path}: {self.name} {self.version} cannot use this plugin library ({reason}).")
        _LOADED.add(str(path.resolve()))
        return creators


_LOADED: set[str] = set()
_TOOLCHAINS: dict[str, Toolchain] = {}


def load_toolchain(backend: str) -> Toolchain:
    """Import the backend's package; the same object on every call, since the process holds one logger and one registry."""
    name = _MODULES[backend]
    if name in _TOOLCHAINS:
        return _TOOLCHAINS[name]
    if name == "tensorrt_rtx":
        os.environ["POLYGRAPHY_USE_TENSORRT_RTX"] = "1"  # read when Polygraphy is first imported
    try:
        module = importlib.import_module(name)
    except (ImportError, OSError) as error:
        package = "tensorrt" if name == "tensorrt" else "tensorrt-rtx"
        raise MissingDependencyError(
            f"--backend {backend} needs the Python package {name} ({error}): pip install {package}"
        ) from error
    if name == "tensorrt_rtx":
        _require_loadable(module)
    toolchain = Toolchain(name, module, None)
    toolchain.logger = _logger(module, toolchain.lines)
    _TOOLCHAINS[name] = toolchain
    return toolchain


def _require_loadable(module: ModuleType) -> None:
    """The parser opens the unversioned name when it meets a plugin; the wheels ship only the versioned one."""
    try:
        ctypes.CDLL(_RTX_LIBRARY)
    except OSError as error:
        folder = Path(str(module.__file__)).parents[1] / "tensorrt_rtx_libs"
        raise EngineError(
            f"{_RTX_LIBRARY} is not on the loader's path; TensorRT-RTX's ONNX parser would end this process without it. "
            f"Link it to {folder / _RTX_LIBRARY}.1 in a folder that LD_LIBRARY_PATH names before Python starts."
        ) from error


def _logger(module: ModuleType, lines: list[LogLine]) -> Any:
    class Collector(module.ILogger):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            module.ILogger.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            lines.append(LogLine(int(severity), text))

    return Collector()
