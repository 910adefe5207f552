"""TensorRT or TensorRT-RTX, for the builder and the runtime: the module, the plugin registry, every line they log.

In: the backend's name. Out: `Toolchain`. What may go wrong: a package that is not installed raises
`MissingDependencyError`. For building, TensorRT-RTX without its unversioned library on the loader's path raises
`EngineError`, because its ONNX parser would end the process at the first plugin.
"""

from __future__ import annotations

import ctypes
import importlib
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from glm_mtp_export.artifact import file_record
from glm_mtp_export.errors import EngineError, MissingDependencyError

__all__ = [
    "Creator",
    "LoadedPlugins",
    "LogLine",
    "Toolchain",
    "library_in_use",
    "load_toolchain",
    "require_parser_library",
]

_MODULES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
_RTX_LIBRARY = "libtensorrt_rtx.so"


@dataclass(frozen=True)
class Creator:
    """A plugin creator as a registry or a library lists it."""

    name: str
    version: str
    namespace: str


@dataclass(frozen=True)
class LoadedPlugins:
    """The library that a process runs with, which may be another copy than it was asked for, and all creators registered."""

    path: Path
    creators: tuple[Creator, ...]


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

    def errors(self, first_line: int = 0) -> str:
        """What the toolchain and the plugins complained about from that line on, one line each."""
        return "\n".join(f"  {line.text}" for line in self.lines[first_line:] if line.severity <= 1)

    def load_plugins(self, path: Path) -> LoadedPlugins:
        """Load a plugin library, unless one of the same content is loaded. Raises EngineError.

        A registry takes each plugin once, so a process runs with one library, whatever copies of it the engines bring.
        """
        content, registry = file_record(path).sha256, self.module.get_plugin_registry()
        if content not in _LOADED:
            before, known = len(self.lines), _creators(registry)
            registry.load_library(str(path.resolve()))
            if set(_creators(registry)) == set(known):
                reason = "; ".join(line.text for line in self.lines[before:]) or "the registry took no creator from it"
                others = ", ".join(map(str, _LOADED.values()))
                hint = f" This process has loaded another build of it, {others}: start a new one." if others else ""
                raise EngineError(
                    f"{path}: {self.name} {self.version} cannot use this plugin library ({reason}).{hint}"
                )
            _LOADED[content] = path.resolve()
        return LoadedPlugins(_LOADED[content], _creators(registry))


def _creators(registry: Any) -> tuple[Creator, ...]:
    return tuple(Creator(c.name, c.plugin_version, c.plugin_namespace) for c in registry.all_creators)


def library_in_use(path: Path) -> Path:
    """The copy of a plugin library that this process has loaded, else `path`. What a library keeps, each copy has for itself."""
    if not _LOADED or not path.is_file():
        return path
    return _LOADED.get(file_record(path).sha256, path)


_LOADED: dict[str, Path] = {}  # by content
_TOOLCHAINS: dict[str, Toolchain] = {}


def load_toolchain(backend: str) -> Toolchain:
    """Import the backend's package. One object a process, which holds one logger and one registry."""
    name = _MODULES[backend]
    if name in _TOOLCHAINS:
        return _TOOLCHAINS[name]
    try:
        module = importlib.import_module(name)
    except (ImportError, OSError) as error:
        package = "tensorrt" if name == "tensorrt" else "tensorrt-rtx"
        raise MissingDependencyError(
            f"--backend {backend} needs the Python package {name} ({error}): pip install {package}"
        ) from error
    toolchain = Toolchain(name, module, None)
    toolchain.logger = _logger(module, toolchain.lines)
    _TOOLCHAINS[name] = toolchain
    return toolchain


def require_parser_library(toolchain: Toolchain) -> None:
    """TensorRT-RTX's parser opens an unversioned name when it meets a plugin; wheels ship only the versioned one."""
    if not toolchain.is_rtx:
        return
    try:
        ctypes.CDLL(_RTX_LIBRARY)
    except OSError as error:
        library = Path(str(toolchain.module.__file__)).parents[1] / "tensorrt_rtx_libs" / f"{_RTX_LIBRARY}.1"
        raise EngineError(
            f"{_RTX_LIBRARY} is not on the loader's path; TensorRT-RTX's parser would end this process without it. "
            f"Link it to {library} in a folder that LD_LIBRARY_PATH names before Python starts."
        ) from error


def _logger(module: ModuleType, lines: list[LogLine]) -> Any:
    class Collector(module.ILogger):  # type: ignore[name-defined]
        def __init__(self) -> None:
            module.ILogger.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            lines.append(LogLine(int(severity), text))

    return Collector()
