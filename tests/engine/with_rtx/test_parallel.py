"""Engines of tensor-parallel ranks, built without a card: the embedded model for two and eight ranks, GLM-5.2 for eight."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from glm_mtp_export.artifact import Manifest
from glm_mtp_export.checkpoint.layouts import RELEASES
from glm_mtp_export.checkpoint.memory_plan import plan_memory
from glm_mtp_export.checkpoint.sharding import rank_plan
from glm_mtp_export.checkpoint.synthetic import write_stand_in
from glm_mtp_export.config import ParallelConfig, SpeculationConfig
from glm_mtp_export.engine import tensorrt
from glm_mtp_export.engine.profile import EngineProfile, load_profile
from glm_mtp_export.export import ExportOptions, export_checkpoint

NANO = Path(__file__).parents[3] / "glm_mtp_export" / "data" / "glm52-nano"
DRAFTS = SpeculationConfig(num_speculative_tokens=3)


def check(artifact: Path, manifest: Manifest, profile: EngineProfile) -> tensorrt.BuildReport:
    """Build, and find every node of ours among the plugin layers, the collectives included."""
    report = tensorrt.build(artifact, profile, check_only=True)
    assert {f.name: f.num_nodes for f in report.preflight.findings} == dict(manifest.ops)
    assert {f.runs_as for f in report.preflight.findings} == {"plugin"}
    plugins = [layer for layer in report.layers if layer.kind in ("PluginV3", "custom_layer")]
    assert len(plugins) == 2 * sum(manifest.ops.values())  # one set a profile
    assert not [layer for layer in report.layers if layer.kind in ("signal", "wait")]  # one stream keeps their order
    return report


@pytest.mark.parametrize(
    ("dtype", "parallel"),
    [
        ("bfloat16", ParallelConfig(2)),
        ("bfloat16", ParallelConfig(8, True)),
        ("float4_e2m1fnx2", ParallelConfig(8)),
    ],
    ids=["bf16 over 2", "bf16 over 8, whole experts", "nvfp4 over 8"],
)
def test_every_node_of_a_rank_is_a_plugin(
    tmp_path: Path, profile: EngineProfile, dtype: str, parallel: ParallelConfig
) -> None:
    options = ExportOptions(dialect="device", dtype=dtype, speculation=DRAFTS, parallel=parallel)
    manifest = export_checkpoint(NANO, tmp_path / "artifact", options)
    layers = manifest.config.num_hidden_layers
    # Two sums a layer with the norms that read them, the draft layer at each of three steps; a (value, id) pair a draft; the
    # target's logits.
    assert manifest.ops["GlmAllReduceAddRmsNorm"] == 2 * (layers + 3)
    assert (manifest.ops["GlmBestOfRanks"], manifest.ops["GlmAllGatherColumns"]) == (3, 1)
    assert check(tmp_path / "artifact", manifest, profile).plan_bytes < 16e6


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["glm-5.2-fp8", "glm-5.2-nvfp4"])
def test_the_whole_model_for_eight_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    release = RELEASES[name]
    write_stand_in(tmp_path / "checkpoint", release.config, release.layout, num_shards=1, filling="headers")
    begin = time.perf_counter()
    options = ExportOptions(
        dialect="device", cache_dtype="float8_e4m3fn", speculation=DRAFTS, parallel=ParallelConfig(8)
    )
    manifest = export_checkpoint(tmp_path / "checkpoint", tmp_path / "artifact", options)
    export_seconds = time.perf_counter() - begin
    report = check(tmp_path / "artifact", manifest, load_profile("glm-5.2-fp8-check"))
    held = sum(entry.num_bytes for entry in rank_plan(manifest.weights, manifest.parallel))
    planned = plan_memory(tmp_path / "checkpoint", gpus=8, gpu_memory=141, max_batch=64, cache_dtype="float8_e4m3fn")
    with capsys.disabled():
        print(
            f"\n{name} over 8 ranks: {sum(manifest.ops.values())} nodes, {held / 1e9:.1f} GB of weights a rank; export "
            f"{export_seconds:.1f} s, build {report.parse_seconds + report.build_seconds:.1f} s, plan "
            f"{report.plan_bytes / 1e6:.1f} MB, scratch {report.activation_bytes / 1e9:.2f} GB a rank"
        )
    assert held == planned.ranks[0].target_weights + planned.ranks[0].draft_weights
    assert manifest.ops["GlmAllReduceAddRmsNorm"] == 2 * (78 + 3)
    # The caches are whole on every rank, 29 GB at this profile; scratch memory holds no copy of one.
    assert report.activation_bytes < 2.9e9
