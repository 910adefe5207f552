"""Engines of other machines, releases and artifacts are refused, by name and with what to do."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from glm_mtp_export.artifact import file_record
from glm_mtp_export.engine_manifest import ENGINE_MANIFEST_NAME, PLAN_NAME, EngineManifest, EngineProfile, Machine
from glm_mtp_export.errors import EngineError, OptionError

PROFILE = EngineProfile("nano-h200", "tensorrt-rtx", num_pages=16, max_batch=4, max_rows=64, max_context=256)
MACHINE = Machine({"tensorrt_rtx": "1.6.1.120", "cuda": "13.0"}, "9.0", "13.0", "ab" * 32)


@pytest.fixture
def engine(tmp_path: Path) -> EngineManifest:
    """A manifest and its plan in tmp_path, for MACHINE."""
    (tmp_path / PLAN_NAME).write_bytes(b"a plan")
    made = EngineManifest(
        backend="tensorrt-rtx",
        profile=PROFILE,
        toolchain=dict(MACHINE.toolchain),
        compute_capability="8.0",
        plugin_sha256=MACHINE.plugin_sha256,
        plugin_archs=("90a",),
        step_sha256="cd" * 32,
        files={PLAN_NAME: file_record(tmp_path / PLAN_NAME)},
        num_plugin_layers=126,
        newer_cards=True,
    )
    (tmp_path / ENGINE_MANIFEST_NAME).write_text(made.to_json(), encoding="utf-8")
    return made


def test_round_trip(engine: EngineManifest, tmp_path: Path) -> None:
    assert EngineManifest.load(tmp_path) == engine
    engine.check(tmp_path, MACHINE, "cd" * 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"toolchain": {"tensorrt_rtx": "1.7.1.116", "cuda": "13.0"}},
            "built with tensorrt_rtx 1.6.1.120, here is 1.7.1",
        ),
        ({"toolchain": {"cuda": "13.0"}}, "built with tensorrt_rtx 1.6.1.120, here is none"),
        ({"driver_cuda": "12.8"}, "needs CUDA 13.0, this driver serves 12.8"),
        ({"compute_capability": "7.5"}, "built for compute capability 8.0 or newer, this card has 7.5"),
        ({"compute_capability": "12.0"}, "holds code for 90a, this card has compute capability 12.0"),
        ({"plugin_sha256": "00" * 32}, f"plugin library sha256 {'ab' * 6}, found {'00' * 6}"),
    ],
)
def test_other_machines_are_refused(
    engine: EngineManifest, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineError) as error:
        engine.check(tmp_path, dataclasses.replace(MACHINE, **change), "cd" * 32)
    assert message in str(error.value)
    assert str(error.value).endswith("Rebuild with: glm-mtp build-engine --backend tensorrt-rtx --profile nano-h200")


def test_a_plan_for_one_card_runs_on_no_newer_one(engine: EngineManifest, tmp_path: Path) -> None:
    exact = dataclasses.replace(engine, newer_cards=False)
    with pytest.raises(EngineError, match=r"built for compute capability 8\.0, this card has 9\.0"):
        exact.check(tmp_path, MACHINE, "cd" * 32)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "engine.plan has 0 bytes, expected 6"), (b"b plan", "differs from its sha256"), (None, "is missing")],
    ids=["zero bytes", "edited", "missing"],
)
def test_damaged_plans_are_refused_before_they_are_read(
    engine: EngineManifest, tmp_path: Path, content: bytes | None, message: str
) -> None:
    (tmp_path / PLAN_NAME).unlink()
    if content is not None:
        (tmp_path / PLAN_NAME).write_bytes(content)
    with pytest.raises(EngineError) as error:
        engine.check(tmp_path, MACHINE, "cd" * 32)
    assert message in str(error.value)


def test_another_graph_is_refused_and_all_reasons_come_together(engine: EngineManifest, tmp_path: Path) -> None:
    with pytest.raises(EngineError) as error:
        engine.check(tmp_path, dataclasses.replace(MACHINE, compute_capability="7.5"), "ef" * 32)
    assert "built from another step.onnx" in str(error.value)
    assert "this card has 7.5" in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not an engine manifest"),
        ("{}", "format_version"),
        ('{"format_version": 7}', "format_version is 7, this release reads 1"),
    ],
)
def test_unreadable_manifests(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / ENGINE_MANIFEST_NAME).write_text(text, encoding="utf-8")
    with pytest.raises(EngineError) as error:
        EngineManifest.load(tmp_path)
    assert message in str(error.value)
    assert "glm-mtp build-engine" in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "tensorrt_rtx"}, "Did you mean 'tensorrt-rtx'?"),
        ({"max_batch": 0}, "max_batch is 0, expected 1 or more"),
        ({"max_rows": 2}, "max_rows is 2, below max_batch 4"),
        ({"max_context": 2000}, "max_context 2000 needs 32 pages, num_pages is 16"),
        ({"opt_batch": 5}, "opt_batch is 5, expected 0 to max_batch 4"),
        ({"threads": -1}, "threads is -1"),
        ({"max_total_context": 255}, "max_total_context is 255, expected 0 or at least max_context 256"),
        ({"max_total_context": -1}, "max_total_context is -1"),
    ],
)
def test_senseless_profiles(change: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as error:
        dataclasses.replace(PROFILE, **change)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"max_bach": 4}, "unknown field 'max_bach'. Did you mean 'max_batch'?"),
        ({"num_pages": "16"}, "num_pages is '16', expected a whole number"),
        ({"num_pages": True}, "num_pages is True, expected a whole number"),
        ({"backend": "tensorrt"}, "name, num_pages, max_batch, max_rows, max_context missing"),
    ],
)
def test_profile_fields_are_checked(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as error:
        EngineProfile.from_mapping(raw, "x.toml")
    assert str(error.value).startswith("x.toml: ")
    assert message in str(error.value)
