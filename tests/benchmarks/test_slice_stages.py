"""The stage table of the slice counts what the roofline of the whole step counts, and knows every node of the graph."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import slice_stages
import slice_step

from glm_mtp_export.artifact import Manifest
from glm_mtp_export.config import ParallelConfig


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slice")
    slice_step.prepare(folder, "fp8", "float8_e4m3fn", ParallelConfig(), -1)
    return folder / "artifact"


def test_bytes_of_all_stages_are_those_of_the_roofline(artifact: Path) -> None:
    manifest, stages = Manifest.load(artifact), slice_stages.node_stages(artifact / "step.onnx")
    for batch in slice_step.BATCHES:
        rows = slice_stages.decode_rows(
            dict.fromkeys(stages, 1.0), stages, manifest, batch, slice_step.CONTEXT,
            lambda part, count: slice_step.expert_bytes(manifest, part, count),
        )  # fmt: skip
        milliseconds = sum(row.work or 0 for row in rows) / slice_stages.HBM_BYTES_PER_SECOND * 1000
        # The roofline also counts norms and reads each request's latents once for all draft steps.
        assert milliseconds == pytest.approx(slice_step.roofline_ms(manifest, batch), rel=0.03)


def test_layers_that_the_engine_joined_go_to_a_node_they_name(artifact: Path) -> None:
    stages = slice_stages.node_stages(artifact / "step.onnx")
    layers = {"node_experts_fp8": 2.0, "copy of node_experts_fp8_1 and more": 0.5, "[trainStation3]": 0.25}
    assert slice_stages.by_stage(layers, stages) == {
        ("target", "experts"): 2.5,
        ("target", slice_stages.OTHER): 0.25,
    }


def test_every_product_of_the_target_counts_its_operations_in_prefill(artifact: Path) -> None:
    manifest, stages = Manifest.load(artifact), slice_stages.node_stages(artifact / "step.onnx")
    rows = slice_stages.prefill_rows(dict.fromkeys(stages, 1.0), stages, manifest, 8128)
    counted = {row.stage for row in rows if row.part == "target" and row.work}
    assert counted == {stage for part, stage in stages.values() if part == "target"} - {"head", slice_stages.OTHER}
    experts = next(row for row in rows if (row.part, row.stage) == ("target", "experts"))
    # Six sparse layers, eight experts a token, three matrices of 6144 x 2048, two operations an element.
    assert experts.work == 6 * 8 * 3 * 6144 * 2048 * 2 * 8128
