"""Stated conversion errors against a float64 comparison of the whole checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stored_reference as reference

from glm_mtp_export.artifact import ConversionError
from glm_mtp_export.checkpoint import CheckpointView, materialise, weight_plan
from glm_mtp_export.checkpoint.conversion import conversion_errors
from glm_mtp_export.checkpoint.layouts import T6_CONFIG
from glm_mtp_export.checkpoint.synthetic import write_stand_in, write_synthetic

WIDE = {
    "hidden_size": 192,
    "q_lora_rank": 128,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
    "n_routed_experts": 3,
}


def errors_of(
    directory: Path, dtype: str, max_parts: int = 10**6, **options: Any
) -> dict[tuple[str, str], ConversionError]:
    view = CheckpointView.open(write_synthetic(directory, **WIDE, **options))
    plan = weight_plan(view, "device", dtype, True)
    return {(e.model, e.group): e for e in conversion_errors(view, plan, max_parts)}


def test_what_passes_through_has_no_error(tmp_path: Path) -> None:
    assert errors_of(tmp_path / "a", "bfloat16") == {}
    assert errors_of(tmp_path / "b", "float4_e2m1fnx2", layout="nvfp4") == {}
    # FP8: only kv_b and the index key are rounded, to bf16
    found = errors_of(tmp_path / "c", "float8_e4m3fn", layout="fp8", block=(128, 128))
    assert set(found) == {(m, g) for m in ("target", "draft") for g in ("attention", "indexer")}
    assert all(0 < e.relative_rms < 2.0**-8 for e in found.values())
    heads, kv_rows = 4, 16 + 16
    assert found["draft", "attention"].num_values == heads * kv_rows * 32
    assert found["draft", "indexer"].num_values == 16 * 192  # wk; weights_proj is bf16 already


def test_error_of_nvfp4_experts_equals_a_direct_measurement(tmp_path: Path) -> None:
    found = errors_of(tmp_path, "float4_e2m1fnx2")
    assert set(found) == {("target", "experts")}
    error = found["target", "experts"]
    assert (error.stored, error.converted) == ("bfloat16", "nvfp4")
    assert error.num_measured == error.num_values == 2 * 3 * 3 * 128 * 192
    view = CheckpointView.open(tmp_path)
    plan = {e.name: e for e in weight_plan(view, "device", "float4_e2m1fnx2", True)}
    expected = reference.graph_weights(reference.read_all(tmp_path), T6_CONFIG | WIDE, (128, 128))
    difference = magnitude = 0.0
    for name in [n for n in expected if n.startswith("target") and n.endswith(("w13", "w2"))]:
        bits, groups, overall = (materialise(view, plan[f"{name}{part}"]) for part in ("", "_scale", "_global"))
        codes = np.stack([bits & 15, bits >> 4], -1).reshape(*bits.shape[:-1], -1)
        steps = np.repeat(reference.decode("F8_E4M3", groups.tobytes(), list(groups.shape)), 16, axis=2)
        per_row = np.repeat(overall.astype(np.float64), bits.shape[1] // overall.shape[1], axis=1)
        difference += np.square(reference.E2M1[codes] * steps * per_row[:, :, None] - expected[name]).sum()
        magnitude += np.square(expected[name]).sum()
    # the measurement multiplies in float32: three roundings of 2^-24 against errors of 2^-4
    assert error.relative_rms == pytest.approx((difference / magnitude) ** 0.5, rel=1e-5)
    assert 0.05 < error.relative_rms < 0.15 and error.largest_relative < 1 / 6 + 1 / 16


def test_fp8_conversion_is_finer_than_nvfp4(tmp_path: Path) -> None:
    found = errors_of(tmp_path, "float8_e4m3fn")
    assert all(0.01 < e.relative_rms < 2.0**-4 for e in found.values())
    assert ("draft", "experts") in found and ("target", "router") not in found


def test_sampling_says_how_much_was_measured(tmp_path: Path) -> None:
    error = errors_of(tmp_path, "float4_e2m1fnx2", max_parts=2)["target", "experts"]
    assert error.num_measured == 2 * 2 * 2 * 128 * 192 and error.num_values == 2 * 3 * 3 * 128 * 192


def test_headers_only_checkpoints_have_nothing_to_measure(tmp_path: Path) -> None:
    view = CheckpointView.open(write_stand_in(tmp_path, T6_CONFIG | WIDE, "bf16"))
    assert conversion_errors(view, weight_plan(view, "device", "float8_e4m3fn", True)) == ()
