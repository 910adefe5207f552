"""Every kind of checkpoint people have exports, passes the self-check, and states in its manifest what was odd about it."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from glm_mtp_export.artifact import DEVICE, FileRecord, Manifest
from glm_mtp_export.checkpoint.layouts import RELEASES
from glm_mtp_export.checkpoint.synthetic import Tensor, write_stand_in, write_synthetic
from glm_mtp_export.config import SpeculationConfig
from glm_mtp_export.engine.onnxruntime import build
from glm_mtp_export.engine.profile import load_profile
from glm_mtp_export.errors import ConfigError
from glm_mtp_export.export import ExportOptions, export_checkpoint

ROOT = Path(__file__).parents[2]


def own_copies(change: bool) -> Any:
    def edit(tensors: dict[str, Tensor]) -> None:
        layer = next(n.removesuffix("enorm.weight") for n in tensors if n.endswith(".enorm.weight"))
        for part, old in {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}.items():
            new, old = f"{layer}{part}.weight", f"{old}.weight"
            bits = tensors[old].bits.copy()
            tensors[new] = Tensor(tensors[old].dtype, tensors[old].shape, bits[::-1].copy() if change else bits)

    return edit


def checked(checkpoint: Path, out: Path, num_drafts: int = 2) -> Manifest:
    manifest = export_checkpoint(checkpoint, out, ExportOptions(speculation=SpeculationConfig(num_drafts)))
    _, check = build(out, load_profile("nano-cpu"))
    assert check.performed and check.worst.relative < 1e-4
    return manifest


SOON: list[dict[str, Any]] = [
    {"layout": "fp8"},
    {"layout": "nvfp4", "quantised_draft": True},
    {"edit": own_copies(change=True)},
]
LATER: list[dict[str, Any]] = [
    {"layout": "nvfp4"},
    {"layout": "ct-nvfp4"},
    {"layout": "ct-fp8"},
    {"packed": True},
    {"tie_word_embeddings": True},
    {"num_hidden_layers": 2, "first_k_dense_replace": 3},
    {"n_group": 4, "topk_group": 2},
    {"index_topk": 7},
    {"index_topk": 4096},
    {"indexer_types": ["full", "full", "shared", "full", "shared", "shared"], "num_hidden_layers": 6},
]


def named(options: dict[str, Any]) -> str:
    return "-".join(key if callable(value) else f"{key}={value}" for key, value in options.items())[:60]


@pytest.mark.parametrize("options", [*SOON, *(pytest.param(o, marks=pytest.mark.slow) for o in LATER)], ids=named)
def test_checkpoint_exports_and_passes_the_self_check(tmp_path: Path, options: dict[str, Any]) -> None:
    checked(write_synthetic(tmp_path / "c", **({"num_hidden_layers": 4} | options)), tmp_path / "out")


@pytest.mark.parametrize(("num_drafts", "num_used"), [(1, 1), (5, 3)])
def test_several_mtp_modules_pass_the_self_check(tmp_path: Path, num_drafts: int, num_used: int) -> None:
    """Modules that no draft step reaches leave neither weights nor caches; which step runs which is in the manifest."""
    write_synthetic(tmp_path / "c", num_hidden_layers=2, num_nextn_predict_layers=3)
    manifest = checked(tmp_path / "c", tmp_path / "out", num_drafts)
    modules = {w.name.split(".")[2] for w in manifest.weights if w.name.startswith("draft.")}
    assert modules == {str(m) for m in range(num_used)}
    pools = {c.name for c in manifest.caches if c.name.startswith("draft_mla")}
    assert pools == {f"draft_mla.{m}" for m in range(num_used)}
    assert ("draft_modules" in manifest.semantics) == (num_used > 1)
    assert num_used == 1 or "module j mod 3" in manifest.semantics["draft_modules"]


def test_several_mtp_modules_share_one_pool_in_the_device_dialect(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "c", num_hidden_layers=2, num_nextn_predict_layers=2)
    options = ExportOptions(dialect=DEVICE, dtype="bfloat16", speculation=SpeculationConfig(4))
    manifest = export_checkpoint(tmp_path / "c", tmp_path / "out", options)
    layers = {c.name: c.num_layers for c in manifest.caches}
    assert layers["draft_mla"] == layers["draft_indexer"] == 2
    # Over the verified rows each module writes once; of the four draft steps, three go on.
    assert manifest.ops["GlmIndexer"] == 2 + 2 and manifest.ops["GlmMlaAttention"] == 2 + 2 + 3


def test_several_mtp_modules_that_select_at_every_step_are_refused_with_the_way_out(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "c", num_nextn_predict_layers=2, index_share_for_mtp_iteration=False)
    with pytest.raises(ConfigError, match=r"Export with --num-speculative-tokens 1"):
        export_checkpoint(tmp_path / "c", tmp_path / "out", ExportOptions(speculation=SpeculationConfig(3)))
    assert not (tmp_path / "out").exists()


def test_a_tied_head_lies_in_the_weights_file_once(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "tied", num_hidden_layers=2, tie_word_embeddings=True)
    write_synthetic(tmp_path / "own", num_hidden_layers=2)
    tied, own = (checked(tmp_path / name, tmp_path / f"{name}-out") for name in ("tied", "own"))
    vocab_bytes = next(w.num_bytes for w in own.weights if w.name == "target.lm_head")
    sizes = [m.files["weights.bin"].num_bytes for m in (tied, own)]
    assert sizes[1] - sizes[0] == vocab_bytes
    graph = onnx.load(tmp_path / "tied-out" / "step.onnx", load_external_data=False).graph
    places = {t.name: {e.key: e.value for e in t.external_data} for t in graph.initializer}
    assert places["target.lm_head"] == places["target.embed"]
    ranges = [(int(p["offset"]), int(p["length"])) for name, p in places.items() if p and name != "target.lm_head"]
    assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(sorted(ranges)))  # nothing else shares


def exported(checkpoint: Path, out: Path) -> tuple[FileRecord, FileRecord]:
    """The graph and the weights as they lie on disk."""
    manifest = export_checkpoint(checkpoint, out, ExportOptions())
    return manifest.files["step.onnx"], manifest.files["weights.bin"]


def test_spellings_of_the_same_model_give_the_same_files(tmp_path: Path) -> None:
    """Rotary base in three places, equal copies in the MTP layer, packed experts."""
    same: list[dict[str, Any]] = [
        {},
        {"rope_parameters": None, "rope_theta": 8000000.0},
        {"rope_parameters": None, "rope_theta": 8000000, "rope_scaling": {"type": "default"}},
        {"edit": own_copies(change=False)},
        {"packed": True},
    ]
    files = {
        exported(write_synthetic(tmp_path / f"{i}", num_hidden_layers=2, **options), tmp_path / f"out-{i}")
        for i, options in enumerate(same)
    }
    assert len(files) == 1


def test_manifest_keeps_cache_scales_and_notices(tmp_path: Path) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        for layer in range(7):
            scale = np.array([0.5 + 0.1 * layer], np.float32)
            tensors[f"model.layers.{layer}.self_attn.k_proj.k_scale"] = Tensor("F32", (1,), scale)

    manifest = checked(write_synthetic(tmp_path / "c", layout="nvfp4", edit=edit, foo=1), tmp_path / "out")
    assert Manifest.load(tmp_path / "out") == manifest
    assert len(manifest.kv_scales) == 7
    assert manifest.kv_scales["model.layers.6.self_attn.k_proj.k_scale"] == pytest.approx(1.1)
    assert any("foo" in notice for notice in manifest.checkpoint_notices)


def test_manifest_states_the_error_of_a_conversion(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "q_lora_rank": 128, "moe_intermediate_size": 128, "num_hidden_layers": 2}
    write_synthetic(tmp_path / "c", **sizes)
    options = ExportOptions(dialect=DEVICE, dtype="float4_e2m1fnx2")
    (error,) = export_checkpoint(tmp_path / "c", tmp_path / "out", options).conversion_errors
    assert (error.model, error.group, error.stored, error.converted) == ("target", "experts", "bfloat16", "nvfp4")
    assert 0.05 < error.relative_rms < 0.15 and error.num_measured < error.num_values
    portable = export_checkpoint(tmp_path / "c", tmp_path / "out2", ExportOptions())
    assert portable.conversion_errors == ()
    oracle = export_checkpoint(tmp_path / "c", tmp_path / "out3", ExportOptions(dtype="float4_e2m1fnx2"))
    assert oracle.conversion_errors == (error,) and oracle.dtype == "float4_e2m1fnx2"
    assert {w.name for w in oracle.weights if w.rounded_to == "nvfp4"} == {
        w.name for w in oracle.weights if w.name.startswith("target.") and w.name.endswith((".w13", ".w2"))
    }
    assert oracle.files["weights.bin"] != portable.files["weights.bin"]
    assert oracle.files["step.onnx"] == portable.files["step.onnx"]
    _, check = build(tmp_path / "out3", load_profile("nano-cpu"))
    assert check.performed and Manifest.load(tmp_path / "out3") == oracle


def test_a_draft_in_a_format_of_its_own_is_stated_measured_and_checked(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "q_lora_rank": 128, "moe_intermediate_size": 128, "num_hidden_layers": 2}
    write_synthetic(tmp_path / "c", **sizes)
    stored = export_checkpoint(tmp_path / "c", tmp_path / "out", ExportOptions())
    made = export_checkpoint(tmp_path / "c", tmp_path / "out2", ExportOptions(draft_dtype="float4_e2m1fnx2"))
    assert (made.dtype, made.draft_dtype, stored.draft_dtype) == ("bfloat16", "float4_e2m1fnx2", "")
    assert [(e.model, e.group, e.converted) for e in made.conversion_errors] == [("draft", "experts", "nvfp4")]
    assert Manifest.load(tmp_path / "out2") == made
    _, check = build(tmp_path / "out2", load_profile("nano-cpu"))
    assert check.performed


_EXPORT = """
import json, resource, sys, time
from pathlib import Path
from glm_mtp_export.artifact import DEVICE
from glm_mtp_export.config import SpeculationConfig
from glm_mtp_export.export import ExportOptions, export_checkpoint
export_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]), ExportOptions(dialect=DEVICE, speculation=SpeculationConfig(3)))
usage = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps([usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024]))
"""


@pytest.mark.slow
def test_full_size_exports_from_headers_in_minutes_and_little_memory(tmp_path: Path) -> None:
    release = RELEASES["glm-5.2-fp8"]
    write_stand_in(tmp_path / "c", release.config, "fp8", num_shards=release.num_shards, filling="headers")
    command = [sys.executable, "-c", _EXPORT, tmp_path / "c", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    seconds, memory = json.loads(done.stdout.splitlines()[-1])
    assert seconds < 180 and memory < 8e9
    assert sum(p.stat().st_size for p in (tmp_path / "out").iterdir()) < 200e6
    manifest = Manifest.load(tmp_path / "out")
    assert len(manifest.weights) == 1837 and manifest.dtype == "float8_e4m3fn"
