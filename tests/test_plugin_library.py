"""Finding and building the plugin library: every refusal names what was tried and what to do."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from glm_mtp_export import plugin_library
from glm_mtp_export.engine.plugins import build_plugins
from glm_mtp_export.errors import EngineError, MissingDependencyError, OptionError
from glm_mtp_export.plugin_library import LIBRARY_NAME, describe_plugins, find_plugins

INFO = (
    r"{\"release\": \"0.1.0\", \"archs\": \"90a,100a\", \"cuda\": 13000, \"kernels_abi\": 1, \"namespace\": \"glm\", "
    r"\"version\": \"1\", \"ops\": [\"GlmRouter\", \"GlmLinear\"]}"
)


def library(folder: Path, source: str) -> Path:
    """Compile a shared library."""
    path = folder / LIBRARY_NAME
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)]
    subprocess.run(command, input=source, text=True, check=True)
    return path


needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")


@needs_gcc
def test_a_library_describes_itself(tmp_path: Path) -> None:
    path = library(tmp_path, f'const char* glm_mtp_plugins_info(void) {{ return "{INFO}"; }}')
    found = describe_plugins(path)
    assert (found.archs, found.cuda, found.ops) == (("90a", "100a"), "13.0", ("GlmRouter", "GlmLinear"))
    assert len(found.sha256) == 64
    assert found.to_dict()["archs"] == ["90a", "100a"]


@needs_gcc
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("int something_else;", "undefined symbol: glm_mtp_plugins_info"),
        ('const char* glm_mtp_plugins_info(void) { return "{}"; }', "release"),
        ("#include <stdlib.h>\nconst char* glm_mtp_plugins_info(void) { abort(); }", "no description"),
    ],
    ids=["foreign", "empty", "crashes"],
)
def test_other_libraries_are_refused_and_take_nothing_down(tmp_path: Path, source: str, reason: str) -> None:
    path = library(tmp_path, source)
    with pytest.raises(EngineError, match="not a plugin library of this project") as error:
        describe_plugins(path)
    assert reason in str(error.value) + repr(error.value.__cause__)


def test_every_path_tried_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin_library, "default_build_dir", lambda: tmp_path / "build")
    with pytest.raises(EngineError) as error:
        find_plugins()
    assert f"tried {tmp_path / 'build' / LIBRARY_NAME}" in str(error.value)
    assert "glm-mtp build-plugins" in str(error.value)


@pytest.mark.parametrize(
    ("arch", "message"),
    [(("80",), "--arch 80: supported are 90a, 100a"), (("90",), "--arch 90: supported"), ((), "--arch is empty")],
)
def test_architectures_that_are_not_supported(arch: tuple[str, ...], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        build_plugins(arch)


def test_sources_and_compiler_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match=r"no CMakeLists\.txt there\. Run this from a checkout"):
        build_plugins(source_dir=tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependencyError, match="cmake is not on the PATH"):
        build_plugins()


@pytest.mark.skipif(shutil.which("cmake") is None or shutil.which("nvcc") is None, reason="needs cmake and nvcc")
def test_a_failed_build_shows_the_end_of_the_compilers_output(tmp_path: Path) -> None:
    (tmp_path / "CMakeLists.txt").write_text('message(FATAL_ERROR "these sources are broken")\n', encoding="utf-8")
    with pytest.raises(EngineError) as error:
        build_plugins(build_dir=tmp_path / "build", source_dir=tmp_path)
    assert "these sources are broken" in str(error.value)
    assert f"delete {tmp_path / 'build'} and retry" in str(error.value)
