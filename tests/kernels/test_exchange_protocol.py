"""The direct exchange's own text, run by threads of the CPU: no card needed to see a packet lost, mixed up or overwritten."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "plugins" / "kernels"
CUDA_INCLUDE = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"
TEXT = (KERNELS / "src" / "smxx_collectives.cu").read_text(encoding="utf-8")
BEGIN, END = "// Four bf16, added in fp32.", "__global__ void __launch_bounds__(kThreads)\n    sum_parts_kernel"

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or not CUDA_INCLUDE.is_dir(), reason="needs g++ and the CUDA headers"
)


def compiled(folder: Path, text: str) -> Path:
    """The emulator around a kernel text."""
    (folder / "exchange_text.inc").write_text(text, encoding="utf-8")
    program = folder / "emulator"
    include = [f"-I{folder}", f"-I{KERNELS / 'src'}", f"-I{KERNELS / 'include'}", f"-isystem{CUDA_INCLUDE}"]
    source = str(Path(__file__).parent / "exchange_emulator.cpp")
    subprocess.run(["g++", "-std=c++20", "-O1", "-w", *include, source, "-pthread", "-o", str(program)], check=True)
    return program


@pytest.fixture(scope="module")
def kernel_text() -> str:
    return TEXT[TEXT.index(BEGIN) : TEXT.index(END)]


def test_every_exchange_arrives_whole(tmp_path: Path, kernel_text: str) -> None:
    program = compiled(tmp_path, kernel_text)
    for num_ranks, num_blocks, num_calls in ((2, 3, 200), (3, 2, 200), (8, 1, 40)):
        command = [str(program), str(num_ranks), str(num_blocks), str(num_calls)]
        found = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert (found.returncode, found.stdout) == (0, "0 wrong\n"), command


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # One area instead of two: a fast rank overwrites what a slow one has not read.
        ("static_cast<int64_t>(call & 1) * memory.num_ranks * memory.capacity", "0"),
        # The number never changes: old packets pass for new ones.
        ("*static_cast<volatile uint32_t*>(memory.calls) = call;", ";"),
    ],
    ids=["one area", "one number"],
)
def test_the_emulator_sees_a_broken_protocol(tmp_path: Path, kernel_text: str, before: str, after: str) -> None:
    assert kernel_text.count(before) == 1
    program = compiled(tmp_path, kernel_text.replace(before, after))
    try:
        found = subprocess.run([str(program), "3", "2", "100"], capture_output=True, text=True, timeout=8)
    except subprocess.TimeoutExpired:
        return  # a rank waits for a packet that was overwritten
    assert found.returncode == 1
