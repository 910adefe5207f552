"""Sums through NCCL, their own text run by threads of the CPU: order of adding, places of the parts, bytes on the wire."""

from __future__ import annotations

import subprocess
from pathlib import Path

import emulated
import pytest
from emulated import KERNELS

BEST, GATHER, SWAP, SHARES = range(4)
TEXT = (KERNELS / "src" / "smxx_large_sums.cu").read_text(encoding="utf-8")

pytestmark = emulated.needs_compiler


def compiled(folder: Path, text: str) -> Path:
    """The emulator around the text between its marks and the constants above it."""
    paths = text[text.index("// ---- the ways of a sum") : text.index("// ---- end of what the test runs")]
    constants = [line for line in text.splitlines() if line.startswith("constexpr int64_t")]
    return emulated.compiled(folder, "large_sums_emulator.cpp", {"sum_paths.inc": "\n".join([*constants, paths])})


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("sums"), TEXT)


def found(program: Path, num_ranks: int, count: int, path: int, in_place: bool = False) -> str:
    command = [str(program), str(num_ranks), str(count), str(path), str(int(in_place))]
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("path", [GATHER, SWAP, SHARES])
@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_every_path_adds_in_rank_order(emulator: Path, num_ranks: int, path: int, in_place: bool) -> None:
    payloads = 2 * (num_ranks - 1) / num_ranks if path == SHARES else num_ranks - 1
    expected = f"0 wrong, {payloads:g} payloads arrived, path {path}\n"
    assert found(emulator, num_ranks, 8 * num_ranks * 37, path, in_place) == expected


@pytest.mark.parametrize(
    ("num_ranks", "rows", "path"),
    [
        (2, 85, GATHER),  # 1 MiB is between them
        (2, 86, SWAP),
        (2, 1024, SWAP),
        (8, 48, GATHER),  # 4 MiB from seven ranks
        (8, 49, SHARES),
        (8, 1024, SHARES),
        (3, 512, SHARES),
        (7, 128, GATHER),  # 6144 * 128 elements are no multiple of 56
    ],
)
def test_the_path_follows_the_size(emulator: Path, num_ranks: int, rows: int, path: int) -> None:
    text = found(emulator, num_ranks, rows * 6144, BEST)
    assert text.startswith("0 wrong") and text.endswith(f"path {path}\n")


def test_the_emulator_sees_another_order(tmp_path: Path) -> None:
    before = "sum_parts(entry, parts, share, x + group.rank * share, group.rank, sum"
    assert TEXT.count(before) == 1
    after = before.replace("group.rank, sum", "(group.rank + 1) % group.num_ranks, sum")
    program = compiled(tmp_path, TEXT.replace(before, after))
    assert not found(program, 3, 8 * 3 * 37, SHARES).startswith("0 wrong")
