"""Export within the memory that there is: it says what it takes, ends well where that fits, and refuses in advance where not."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

import glm_mtp_export.export.exporter as exporter
from glm_mtp_export.artifact import DEVICE, PORTABLE, Manifest
from glm_mtp_export.checkpoint import CheckpointView, weight_plan
from glm_mtp_export.checkpoint.layouts import T6_CONFIG
from glm_mtp_export.checkpoint.synthetic import write_stand_in
from glm_mtp_export.engine.onnxruntime import build
from glm_mtp_export.engine.profile import load_profile
from glm_mtp_export.errors import ArtifactError, OptionError
from glm_mtp_export.export import ExportOptions, export_checkpoint
from glm_mtp_export.export.memory import export_needs, free_memory_bytes

ROOT = Path(__file__).parents[2]


def test_free_memory_is_a_plausible_number():
    assert 1 << 20 < free_memory_bytes() < 1 << 50


def test_an_address_space_limit_counts():
    code = (
        "import resource; from glm_mtp_export.export.memory import free_memory_bytes; "
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 33, 1 << 33)); print(free_memory_bytes())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0 < int(done.stdout) < 1 << 33


def test_without_room_for_the_reference_the_export_ends_well_and_says_so(
    checkpoint: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(exporter, "free_memory_bytes", lambda: 400 << 20)
    out = tmp_path / "artifact"
    export_checkpoint(checkpoint, out, ExportOptions())
    assert "reference.safetensors" not in Manifest.load(out).files
    engine, check = build(out, load_profile("nano-cpu"))
    assert not check.performed and engine.notes == ("no self-check: the artifact holds no reference",)


def test_needs_follow_from_the_plan(checkpoint: Path):
    view = CheckpointView.open(checkpoint)
    plan = weight_plan(view, PORTABLE, None, True)
    values = sum(w.num_bytes for w in plan)
    needs = export_needs(plan, PORTABLE, 1 << 30)
    assert needs.reference_bytes - values == 512 << 20 and values <= needs.disk_bytes < 2 * values + 4096 * len(plan)
    assert export_needs(plan, PORTABLE, values - 1).reference_bytes == 0
    device = export_needs(weight_plan(view, DEVICE, "bfloat16", True), DEVICE, 1 << 30)
    assert (device.reference_bytes, device.disk_bytes) == (0, 0) and device.memory_bytes < needs.memory_bytes
    assert str(device) == "expected: 0.25 GiB of memory, 0.00 GiB of disk, no GPU"


@pytest.mark.parametrize(
    ("short", "error", "message"),
    [
        (
            "memory",
            OptionError,
            r"needs up to 2\d\d,\d+,\d+ bytes of memory, this process may take 1,024 more.*--ignore-",
        ),
        ("disk", ArtifactError, r"the weights need [\d,]+ bytes, 1,024 are free.*--ignore-preflight"),
    ],
)
def test_what_cannot_fit_is_refused_before_anything_is_written(
    checkpoint: Path, tmp_path: Path, monkeypatch, short: str, error: type[Exception], message: str
) -> None:
    if short == "memory":
        monkeypatch.setattr(exporter, "free_memory_bytes", lambda: 1024)
    else:
        usage = namedtuple("usage", "total used free")(1 << 30, 1 << 30, 1024)
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    announced = []
    with pytest.raises(error, match=message):
        export_checkpoint(checkpoint, tmp_path / "out", ExportOptions(), announce=announced.append)
    assert len(announced) == 1 and list(tmp_path.iterdir()) == []
    manifest = export_checkpoint(checkpoint, tmp_path / "out", ExportOptions(ignore_preflight=True))
    assert ("reference.safetensors" in manifest.files) == (short == "disk")


_LIMITED = """
import resource, sys
resource.setrlimit(getattr(resource, sys.argv[1]), (1 << 30, 1 << 30))
from glm_mtp_export.cli import main
main(["export", sys.argv[2], "-o", sys.argv[3]])
"""


@pytest.fixture(scope="module")
def big(tmp_path_factory) -> Path:
    """585 MiB of bf16."""
    sizes = {"vocab_size": 1 << 16, "hidden_size": 2048, "num_hidden_layers": 2, "moe_intermediate_size": 256}
    return write_stand_in(tmp_path_factory.mktemp("big"), T6_CONFIG | sizes, "bf16", filling="sparse")


def limited(limit: str, checkpoint: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _LIMITED, limit, str(checkpoint), str(out)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def test_a_gib_of_address_space_is_refused_in_advance(big: Path, tmp_path: Path) -> None:
    """The compilers' libraries alone map two thirds of it."""
    done = limited("RLIMIT_AS", big, tmp_path / "out")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    expected, refusal = (line for line in done.stderr.splitlines() if line.strip())
    assert "1.14 GiB of disk, no GPU" in expected
    assert refusal.startswith("Error: The export needs up to") and list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_gib_of_data_is_enough_for_a_checkpoint_of_600_mb(big: Path, tmp_path: Path) -> None:
    """What is allocated, not what is mapped; weights pass through in pieces."""
    done = limited("RLIMIT_DATA", big, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    manifest = Manifest.load(tmp_path / "out")
    assert manifest.files["weights.bin"].num_bytes > 1 << 30 and "reference.safetensors" not in manifest.files
