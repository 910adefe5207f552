"""GLM-5.2 at full size, from headers alone: counts and bytes equal the published ones."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from glm_mtp_export.checkpoint import CheckpointView, stored_dtype, weight_plan
from glm_mtp_export.checkpoint.layouts import RELEASES
from glm_mtp_export.checkpoint.report import inspect_report
from glm_mtp_export.checkpoint.synthetic import write_stand_in

# tensors, payload bytes, shards, bytes by type code (fp32 in elements), as published
PUBLISHED = {
    "glm-5.2-bf16": (59585, 1506659919872, 282, {"F32": 19456 * 4}),
    "glm-5.2-fp8": (118629, 755617140416, 141, {"F8_E4M3": 751226191872, "F32": 45872560 * 4}),
    "glm-5.2-nvfp4": (
        232385,
        464795267072,
        47,
        {"U8": 362387865600, "F8_E4M3": 45298483200, "BF16": 28554189824 * 2, "F32": 134656 * 4},
    ),
}
LAYER_TENSORS = {"glm-5.2-bf16": (17, 787, 782, 791), "glm-5.2-fp8": (27, 1565, 1558, 1569)}


@dataclass(frozen=True)
class Made:
    name: str
    root: Path
    view: CheckpointView
    scan_seconds: float


@pytest.fixture(scope="module", params=sorted(PUBLISHED))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    release, root = RELEASES[request.param], tmp_path_factory.mktemp(request.param)
    write_stand_in(root, release.config, release.layout, num_shards=release.num_shards, filling="headers")
    begin = time.process_time()
    view = CheckpointView.open(root)
    return Made(request.param, root, view, time.process_time() - begin)


def test_counts_and_bytes_equal_the_published_ones(made: Made) -> None:
    name, root, view = made.name, made.root, made.view
    num_tensors, num_bytes, num_shards, by_type = PUBLISHED[name]
    sizes: Counter[str] = Counter()
    for info in view.store.tensors.values():
        sizes[info.dtype] += info.num_bytes
    assert len(view.store.tensors) == num_tensors and sizes.total() == num_bytes
    assert len(list(root.glob("*.safetensors"))) == len(view.store.files) == num_shards
    assert {code: sizes[code] for code in by_type} == by_type
    layers = Counter(n.split(".")[2] for n in view.store.tensors if n.startswith("model.layers."))
    if name in LAYER_TENSORS:
        assert tuple(layers[i] for i in ("0", "6", "3", "78")) == LAYER_TENSORS[name]
    written = sum(p.stat().st_size for p in root.iterdir())
    assert written < 200e6


def test_inspect_is_fast_and_counts_true_parameters(made: Made) -> None:
    begin = time.process_time()
    report = inspect_report(made.view)
    assert made.scan_seconds + time.process_time() - begin < 10
    assert report.num_parameters == 753_329_940_480
    assert sum(g.num_parameters for g in report.groups if g.model == "draft") == 9_952_920_576
    assert report.num_bytes == PUBLISHED[made.name][1]
    assert len(report.full_indexer_layers) == 21 and report.headers_only and report.exit_code == 0


def test_device_plan_is_as_big_as_the_checkpoint(made: Made) -> None:
    """Nothing is lost or doubled. bf16: only k_norm goes from bf16 to fp32. FP8: kv_b and the index key become bf16."""
    name, view = made.name, made.view
    plan = weight_plan(view, "device", stored_dtype(view), with_draft=True)
    planned, stored = sum(e.num_bytes for e in plan), PUBLISHED[name][1]
    wider_norms = 22 * 2 * 128 * 2
    if name == "glm-5.2-bf16":
        assert planned == stored + wider_norms
    elif name == "glm-5.2-fp8":
        kv_b, wk = 28672 * 512, 128 * 6144
        assert planned == stored + wider_norms + 79 * (kv_b - 224 * 4 * 4) + 22 * (wk - 48 * 4)
    else:
        assert planned == stored + wider_norms - 75 * 256 * 3 * 4  # static activation scales are dropped
    names = {e.name: e for e in plan}
    assert names["target.layers.3.attn.qkv_a"].shape == (2048 + 576, 6144)
    if name == "glm-5.2-fp8":
        assert names["target.layers.3.attn.qkv_a_scale"].shape == (16 + 5, 48)
        assert names["draft.layers.0.moe.w13_scale"].shape == (256, 32, 48)
