"""The direct exchange's own text, run by threads of the CPU: no card needed to see a packet lost, mixed up or overwritten."""

from __future__ import annotations

import subprocess
from pathlib import Path

import emulated
import pytest
from emulated import KERNELS

pytestmark = emulated.needs_compiler


def between(name: str, begin: str, end: str) -> str:
    """The text of a kernel source from `begin` up to `end`, both of which stand there once."""
    text = (KERNELS / "src" / name).read_text(encoding="utf-8")
    assert text.count(begin) == text.count(end) == 1, name
    return text[text.index(begin) : text.index(end)]


PROTOCOL = between("smxx_exchange.cuh", "// ---- the protocol", "}  // namespace glm") + between(
    "rms_row.cuh", "// First column of the thread's group v", "}  // namespace glm"
)
KERNEL_TEXT = between(
    "smxx_collectives.cu",
    "// Four bf16, added in fp32.",
    "__global__ void __launch_bounds__(kThreads)\n    join_columns_kernel",
) + between("smxx_sum_norm.cu", "// ---- the kernel, which", "// ---- end of what the test runs")


def compiled(folder: Path, protocol: str = PROTOCOL, kernels: str = KERNEL_TEXT) -> Path:
    """The emulator around the texts."""
    texts = {"protocol_text.inc": protocol, "kernel_text.inc": kernels}
    return emulated.compiled(folder, "exchange_emulator.cpp", texts)


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("emulator"))


@pytest.mark.parametrize("kernel", ["sum", "norm", "both"])
def test_every_exchange_arrives_whole(emulator: Path, kernel: str) -> None:
    for num_ranks, num_blocks, num_calls in ((2, 3, 200), (3, 2, 200), (8, 1, 40)):
        command = [str(emulator), str(num_ranks), str(num_blocks), str(num_calls), kernel]
        found = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert (found.returncode, found.stdout) == (0, "0 wrong\n"), command


@pytest.mark.parametrize("kernel", ["sum", "norm"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        # One area instead of two: a fast rank overwrites what a slow one has not read.
        ("static_cast<int64_t>(number & 1) * memory.num_ranks * memory.capacity", "0"),
        # The number never changes: old packets pass for new ones.
        ("*static_cast<volatile uint32_t*>(memory.calls) = number;", ";"),
    ],
    ids=["one area", "one number"],
)
def test_the_emulator_sees_a_broken_protocol(tmp_path: Path, before: str, after: str, kernel: str) -> None:
    assert PROTOCOL.count(before) == 1
    program = compiled(tmp_path, PROTOCOL.replace(before, after))
    try:
        found = subprocess.run([str(program), "3", "2", "100", kernel], capture_output=True, text=True, timeout=5)
    except subprocess.TimeoutExpired:
        return  # a rank waits for a packet that was overwritten
    assert found.returncode == 1


def test_the_emulator_sees_a_sum_in_the_wrong_place(tmp_path: Path) -> None:
    before = "glm::packet_at(from + width / 8)"
    assert KERNEL_TEXT.count(before) == 1
    program = compiled(tmp_path, kernels=KERNEL_TEXT.replace(before, "glm::packet_at(from)"))
    found = subprocess.run([str(program), "2", "2", "20", "norm"], capture_output=True, text=True, timeout=60)
    assert found.returncode == 1
