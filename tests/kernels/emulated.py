"""Kernel texts compiled for the CPU around an emulator of what they run on."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

__all__ = ["KERNELS", "compiled", "needs_compiler"]

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "plugins" / "kernels"
CUDA_INCLUDE = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None or not CUDA_INCLUDE.is_dir(), reason="needs g++ and the CUDA headers"
)


def compiled(folder: Path, emulator: str, texts: Mapping[str, str]) -> Path:
    """The program that `emulator` (a file beside this one) makes of the texts, which it includes by name."""
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    program = folder / "emulator"
    include = [f"-I{folder}", f"-I{KERNELS / 'src'}", f"-I{KERNELS / 'include'}", f"-isystem{CUDA_INCLUDE}"]
    command = ["g++", "-std=c++20", "-O1", "-w", *include, str(HERE / emulator), "-pthread", "-o", str(program)]
    subprocess.run(command, check=True)
    return program
