"""Export within the memory that there is: a limit leaves the reference run out, and the export still ends well."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import glm_mtp_export.export.exporter as exporter
from glm_mtp_export.artifact import Manifest
from glm_mtp_export.engine.onnxruntime import build
from glm_mtp_export.engine.profile import load_profile
from glm_mtp_export.export import ExportOptions, export_checkpoint
from glm_mtp_export.export.memory import free_memory_bytes


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
    monkeypatch.setattr(exporter, "free_memory_bytes", lambda: 1 << 28)
    out = tmp_path / "artifact"
    export_checkpoint(checkpoint, out, ExportOptions())
    assert "reference.safetensors" not in Manifest.load(out).files
    engine, check = build(out, load_profile("nano-cpu"))
    assert not check.performed and engine.notes == ("no self-check: the artifact holds no reference",)
