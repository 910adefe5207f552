"""Our declaration of the plugin ABI against TensorRT's.

`abi_expected.txt` is what abi_report printed when compiled against the official headers of TensorRT 11.1.0.106. Ours
must print the same; with TENSORRT_ROOT the official headers at hand must, too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

PLUGINS = Path(__file__).parents[2] / "plugins"
EXPECTED = (Path(__file__).parent / "abi_expected.txt").read_text(encoding="utf-8")
CUDA_INCLUDE = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None or not (CUDA_INCLUDE / "cuda_runtime_api.h").is_file(),
    reason="needs g++ and the CUDA headers",
)


def report(folder: Path, source: Path, *options: str) -> str:
    """Compile abi_report and give what it prints."""
    program = folder / "abi_report"
    compile_command = [
        "g++",
        "-std=c++17",
        "-Wall",
        "-Wno-deprecated-declarations",
        f"-isystem{CUDA_INCLUDE}",
        *options,
    ]
    subprocess.run([*compile_command, str(source), "-o", str(program)], check=True)
    return subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout


@needs_compiler
def test_own_declaration_has_tensorrts_layout(tmp_path: Path) -> None:
    assert report(tmp_path, PLUGINS / "abi" / "abi_report.cpp") == EXPECTED


@needs_compiler
@pytest.mark.skipif("TENSORRT_ROOT" not in os.environ, reason="TENSORRT_ROOT names no official headers")
def test_official_headers_have_the_expected_layout(tmp_path: Path) -> None:
    include = Path(os.environ["TENSORRT_ROOT"]) / "include"
    options = ("-DGLM_OFFICIAL_TENSORRT_HEADERS", f"-isystem{include}")
    assert report(tmp_path, PLUGINS / "abi" / "abi_report.cpp", *options) == EXPECTED


@needs_compiler
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "    virtual int32_t getNbTactics() noexcept { return 0; }\n",
            "    virtual int32_t getMoreTactics() noexcept { return 0; }\n"
            "    virtual int32_t getNbTactics() noexcept { return 0; }\n",
        ),
        ("    DataType type;\n    TensorFormat format;", "    TensorFormat format;\n    DataType type;"),
        ('"PLUGIN_V3ONE_BUILD", 2, 0', '"PLUGIN_V3ONE_BUILD", 1, 0'),
        ("kINT8, kINT32, kBOOL, kUINT8", "kINT8, kINT32, kUINT8, kBOOL"),
    ],
    ids=["table order", "struct order", "interface version", "enumerator"],
)
def test_report_sees_a_changed_declaration(tmp_path: Path, before: str, after: str) -> None:
    shutil.copytree(PLUGINS / "abi", tmp_path / "abi")
    (tmp_path / "tensorrt").mkdir()
    shutil.copy(PLUGINS / "tensorrt" / "trt_api.h", tmp_path / "tensorrt")
    header = tmp_path / "abi" / "trt_plugin_abi.h"
    text = header.read_text(encoding="utf-8")
    assert text.count(before) == 1
    header.write_text(text.replace(before, after), encoding="utf-8")
    assert report(tmp_path, tmp_path / "abi" / "abi_report.cpp") != EXPECTED
