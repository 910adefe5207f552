"""Loading TensorRT and a plugin library: what is missing or refused is said with what to do."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from glm_mtp_export import tensorrt_toolchain
from glm_mtp_export.errors import EngineError, MissingDependencyError
from glm_mtp_export.tensorrt_toolchain import (
    Creator,
    LoadedPlugins,
    LogLine,
    Toolchain,
    library_in_use,
    load_toolchain,
    require_parser_library,
)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No toolchain and no library loaded yet."""
    monkeypatch.setattr(tensorrt_toolchain, "_TOOLCHAINS", {})
    monkeypatch.setattr(tensorrt_toolchain, "_LOADED", {})


class Registry:
    """A plugin registry whose library offers `offered`."""

    def __init__(self, offered: list[Any]) -> None:
        self.all_creators: list[Any] = []
        self._offered = offered

    def load_library(self, path: str) -> None:
        """Takes what the library has, once."""
        self.all_creators += self._offered
        self._offered = []


def toolchain(offered: list[Any]) -> Toolchain:
    registry = Registry(offered)
    module = SimpleNamespace(__version__="1.6.1.120", get_plugin_registry=lambda: registry)
    return Toolchain("tensorrt_rtx", module, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("backend", "message"),
    [("tensorrt", "pip install tensorrt"), ("tensorrt-rtx", "pip install tensorrt-rtx")],
)
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, backend: str, message: str) -> None:
    def absent(name: str) -> ModuleType:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(MissingDependencyError, match=message):
        load_toolchain(backend)


def test_a_loaded_library_gives_its_creators_also_the_second_time(tmp_path: Path) -> None:
    made = SimpleNamespace(name="GlmRouter", plugin_version="1", plugin_namespace="glm")
    loaded = toolchain([made])
    for name in ("lib.so", "lib.so", "copy.so"):
        (tmp_path / name).write_bytes(b"one build")
        found = loaded.load_plugins(tmp_path / name)
        assert found == LoadedPlugins(tmp_path / "lib.so", (Creator("GlmRouter", "1", "glm"),))
    (tmp_path / "other.so").write_bytes(b"another build")
    assert library_in_use(tmp_path / "copy.so") == tmp_path / "lib.so"
    for name in ("other.so", "absent.so"):
        assert library_in_use(tmp_path / name) == tmp_path / name
    with pytest.raises(EngineError, match=r"other\.so: .* has loaded another build of it, .*lib\.so: start a new one"):
        loaded.load_plugins(tmp_path / "other.so")


def test_a_library_that_the_registry_takes_nothing_from_is_refused_in_its_words(tmp_path: Path) -> None:
    (tmp_path / "lib.so").write_bytes(b"")
    refused = toolchain([])
    registry = refused.module.get_plugin_registry()
    words = "Unable to load library: undefined symbol"
    registry.load_library = lambda path: refused.lines.append(LogLine(1, words))
    with pytest.raises(
        EngineError, match=r"lib\.so: tensorrt_rtx 1\.6\.1\.120 cannot use this plugin library \(Unable"
    ):
        refused.load_plugins(tmp_path / "lib.so")


def test_only_rtx_needs_the_unversioned_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(tensorrt_toolchain.ctypes, "CDLL", absent)
    require_parser_library(Toolchain("tensorrt", ModuleType("tensorrt"), None))
    module = ModuleType("tensorrt_rtx")
    module.__file__ = "/somewhere/tensorrt_rtx/__init__.py"
    with pytest.raises(EngineError, match=r"Link it to /somewhere/tensorrt_rtx_libs/libtensorrt_rtx\.so\.1"):
        require_parser_library(Toolchain("tensorrt_rtx", module, None))


def test_errors_are_those_after_a_line() -> None:
    made = toolchain([])
    made.lines += [LogLine(1, "old"), LogLine(3, "information"), LogLine(0, "internal"), LogLine(1, "new")]
    assert made.errors(1) == "  internal\n  new"
