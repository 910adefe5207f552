"""The inspect report: counts, sizes, verdicts."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from glm_mtp_export.checkpoint.layouts import RELEASES
from glm_mtp_export.checkpoint.report import InspectReport, inspect_report, render
from glm_mtp_export.checkpoint.synthetic import FORMATS, Tensor, write_stand_in, write_synthetic


def report_of(directory: Path, **options: Any) -> InspectReport:
    return inspect_report(write_synthetic(directory, **options))


def text_of(report: InspectReport) -> str:
    stream = io.StringIO()
    Console(file=stream, width=160).print(render(report))
    return stream.getvalue()


@pytest.mark.parametrize("layout", FORMATS)
def test_parameters_do_not_depend_on_the_format_and_bytes_are_those_on_disk(tmp_path: Path, layout: str) -> None:
    report, plain = report_of(tmp_path / "a", layout=layout), report_of(tmp_path / "b")
    assert report.num_parameters == plain.num_parameters
    assert {(g.model, g.group): g.num_parameters for g in report.groups} == {
        (g.model, g.group): g.num_parameters for g in plain.groups
    }
    payload = 0
    for path in (tmp_path / "a").glob("*.safetensors"):
        data = path.read_bytes()
        payload += len(data) - 8 - int.from_bytes(data[:8], "little")
    assert report.num_bytes == payload
    assert report.exit_code == 0


def test_layers_and_tensors_of_t6(tmp_path: Path) -> None:
    report = report_of(tmp_path)
    assert (report.num_layers, report.num_dense_layers, report.num_sparse_layers) == (6, 1, 5)
    assert report.full_indexer_layers == (0, 1, 2) and report.num_shared_indexer_layers == 3
    assert (report.num_trunk_tensors, report.num_mtp_tensors, report.num_unknown_tensors) == (220, 47, 0)
    assert report.expert_layout == "per expert" and report.dtype == "bfloat16"
    experts = next(g for g in report.groups if (g.model, g.group) == ("target", "experts"))
    assert (experts.num_modules, experts.num_parameters) == (5 * 8 * 3, 5 * 8 * 3 * 32 * 64)
    assert experts.num_bytes == 2 * experts.num_parameters and experts.precisions == {"bfloat16": 120}


def test_nvfp4_counts_two_values_a_byte(tmp_path: Path) -> None:
    report = report_of(tmp_path, layout="nvfp4")
    experts = next(g for g in report.groups if (g.model, g.group) == ("target", "experts"))
    values = 5 * 8 * 3 * 32 * 64
    assert experts.precisions == {"nvfp4": 120} and experts.num_parameters == values
    assert experts.num_bytes == values // 2 + values // 16 + 120 * 8
    assert report.dtype == "float4_e2m1fnx2"


def test_packed_save_without_mtp_layer(tmp_path: Path) -> None:
    report = report_of(tmp_path, packed=True, with_draft=False)
    assert report.expert_layout == "packed" and report.num_mtp_tensors == 0
    assert (report.target_usable, report.mtp_usable, report.exit_code) == (True, False, 3)
    text = text_of(report)
    assert "experts packed" in text and "Only the target can be exported" in text
    assert "config.json says 1 MTP layer, layer 6 is not in any file" in text


def test_unusable_target_is_reported_not_raised(tmp_path: Path) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors["foo"] = tensors.pop("model.norm.weight")

    report = report_of(tmp_path, edit=edit)
    assert report.exit_code == 2 and report.num_unknown_tensors == 1 and report.dtype is None
    text = text_of(report)
    assert "unknown tensors: foo" in text and "missing: model.norm" in text and "cannot be exported" in text


def test_tied_head_counts_once(tmp_path: Path) -> None:
    tied, untied = report_of(tmp_path / "a", tie_word_embeddings=True), report_of(tmp_path / "b")
    assert untied.num_parameters - tied.num_parameters == 320 * 64
    assert tied.num_bytes == untied.num_bytes - 2 * 320 * 64


def test_json_has_every_field_and_the_totals(tmp_path: Path) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.6.self_attn.k_scale"] = Tensor("F32", (1,), np.array([0.5], np.float32))

    report = report_of(tmp_path, layout="fp8", edit=edit)
    found = json.loads(report.to_json())
    assert found["num_parameters"] == report.num_parameters and found["exit_code"] == 0
    assert found["kv_scales"] == {"model.layers.6.self_attn.k_scale": 0.5}
    assert found["groups"][3]["group"] == "attention"
    assert sum(g["num_parameters"] for g in found["groups"]) == found["num_parameters"]
    assert report.to_json() == inspect_report(tmp_path).to_json()


def test_mixed_precisions_are_listed(tmp_path: Path) -> None:
    text = text_of(report_of(tmp_path, layout="fp8"))
    assert "12 bfloat16, 30 fp8_block" in text  # two latent norms and five projections in each of six layers
    assert "Target and MTP layer can be exported; --dtype float8_e4m3fn needs no conversion." in text


def test_sizes_of_small_checkpoints_are_in_a_unit_that_shows_them(tmp_path: Path) -> None:
    report = report_of(tmp_path)
    experts = next(g for g in report.groups if (g.model, g.group) == ("target", "experts"))
    text = text_of(report)
    assert "MiB" in text and "GiB" not in text and f"{experts.num_bytes / 2**20:.2f}" in text
    large = inspect_report(write_stand_in(tmp_path / "x", RELEASES["glm-5.2-slice-nvfp4"].config, "nvfp4"))
    assert "GiB" in text_of(large) and f"{large.num_bytes / 2**30:.2f}" in text_of(large)


def test_table_fits_eighty_columns_without_cutting_a_number(tmp_path: Path) -> None:
    release = RELEASES["glm-5.2-slice-nvfp4"]
    report = inspect_report(write_stand_in(tmp_path / "x", release.config, "nvfp4"))
    stream = io.StringIO()
    Console(file=stream, width=80).print(render(report))
    assert "…" not in stream.getvalue() and f"{report.num_parameters:,}" in stream.getvalue()
