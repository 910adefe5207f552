"""What an export writes, that it runs in plain ONNX Runtime, and what it refuses without leaving anything behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from safetensors.numpy import load_file

from glm_mtp_export.artifact import DEVICE, PORTABLE, Manifest, cache_specs
from glm_mtp_export.checkpoint import CheckpointView, weight_plan
from glm_mtp_export.checkpoint.synthetic import T6_CONFIG, write_stand_in, write_synthetic
from glm_mtp_export.config import ParallelConfig, SpeculationConfig
from glm_mtp_export.engine.onnxruntime import build
from glm_mtp_export.engine.profile import load_profile
from glm_mtp_export.errors import ArtifactError, CheckpointError, EngineError, OptionError
from glm_mtp_export.export import ExportOptions, export_checkpoint
from glm_mtp_export.export.assemble import weight_offsets, with_bodies, with_external_weights
from glm_mtp_export.export.reference import reference_feeds
from glm_mtp_export.export.trace import traced_step
from glm_mtp_export.ops import OP_TABLE, PLUGIN_ATTRIBUTES


def run_plain(artifact: Path) -> dict[str, np.ndarray]:
    """The reference's first call in ONNX Runtime, with nothing of the package registered."""
    manifest = Manifest.load(artifact)
    session = ort.InferenceSession(str(artifact / "step.onnx"), providers=["CPUExecutionProvider"])
    reference = load_file(str(artifact / "reference.safetensors"))
    pages = reference[manifest.caches[0].name].shape[1]
    feeds = reference_feeds(manifest.config, manifest.speculation, reference["prompt"], None, 0, pages)
    feeds |= {c.name: np.zeros([pages if e == "N" else e for e in c.shape("N")], np.float32) for c in manifest.caches}
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, feeds), strict=True))


def test_the_file_runs_unchanged_without_this_package(artifact, tmp_path):
    script = f"""
import sys
import numpy as np, onnxruntime as ort, json
session = ort.InferenceSession({str(artifact / "step.onnx")!r}, providers=["CPUExecutionProvider"])
shapes = {{i.name: (i.type, i.shape) for i in session.get_inputs()}}
sizes = {{"B": 1, "B+1": 2, "T": 3, "P": 1, "N": 1}}
types = {{"tensor(int32)": np.int32, "tensor(int64)": np.int64, "tensor(float)": np.float32, "tensor(bool)": bool}}
feeds = {{n: np.zeros([sizes.get(d, d) for d in s], types[t]) for n, (t, s) in shapes.items()}}
feeds["row_offsets"][1] = 3
feeds["token_ids"][:] = [5, 6, 7]
feeds["next_prompt_token"][:] = -1
feeds["top_p"][:] = 1
out = session.run(["next_tokens"], feeds)
assert "glm_mtp_export" not in sys.modules
print(int(out[0][0]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert 0 <= int(done.stdout) < 320


def test_outputs_equal_the_exporters_reference(artifact):
    reference, found = load_file(str(artifact / "reference.safetensors")), run_plain(artifact)
    for name in ("num_accepted", "next_tokens", "next_draft_tokens"):
        assert np.array_equal(found[name], reference[f"first.{name}"])


def test_every_custom_node_is_in_the_table_and_carries_plugin_attributes(artifact):
    model = onnx.load(artifact / "step.onnx", load_external_data=False)
    onnx.checker.check_model(str(artifact / "step.onnx"))
    nodes = [n for n in model.graph.node if n.domain == "glm"]
    assert nodes and {n.op_type for n in nodes} <= set(OP_TABLE)
    for node in nodes:
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        assert {k: attributes[k].decode() for k in PLUGIN_ATTRIBUTES} == dict(PLUGIN_ATTRIBUTES)
        assert set(attributes) == {a.name for a in OP_TABLE[node.op_type].attributes} | set(PLUGIN_ATTRIBUTES)
    assert {f.name for f in model.functions} >= {n.op_type for n in nodes}
    assert {i.version for i in model.opset_import if i.domain == ""} == {23}


def test_inputs_and_outputs_are_those_of_the_manifest(artifact):
    manifest = Manifest.load(artifact)
    model = onnx.load(artifact / "step.onnx", load_external_data=False)
    for values, specs in ((model.graph.input, manifest.inputs), (model.graph.output, manifest.outputs)):
        assert [v.name for v in values] == [s.name for s in specs]
        for value, spec in zip(values, specs, strict=True):
            dims = value.type.tensor_type.shape.dim
            assert tuple(d.dim_param or d.dim_value for d in dims) == spec.shape, spec.name


def test_every_cache_is_written_and_read_in_one_line(artifact):
    """A reader takes the newest version: no pool version but the last has a writer after it, and none is read when stale."""
    model = onnx.load(artifact / "step.onnx", load_external_data=False)
    writers: dict[str, str] = {}
    for node in model.graph.node:
        if node.op_type in ("GlmIndexer", "GlmMlaAttention"):
            cache_in, cache_out = list(node.input)[-1], list(node.output)[1]
            assert cache_in not in writers, f"{cache_in} has two writers"
            writers[cache_in] = cache_out
    used = [name for node in model.graph.node for name in node.input]
    for version in (*writers, *writers.values()):
        assert used.count(version) <= 1


def test_all_experts_are_in_the_graph_and_routing_happens_at_run_time(checkpoint, artifact):
    manifest = Manifest.load(artifact)
    stacks = [w for w in manifest.weights if w.name.endswith(("moe.w13", "moe.w2"))]
    assert sum(w.shape[0] * (2 if w.name.endswith("w13") else 1) for w in stacks) == (5 + 1) * 8 * 3
    assert manifest.ops["GlmRouter"] == 5 + 3


def test_every_expert_of_every_layer_is_reached_at_run_time(tmp_path):
    """No expert is frozen or lost by tracing; that outputs equal the torch step's is tested above."""

    def even(tensors):  # the random biases of T6 leave an expert without a token
        for name in [n for n in tensors if n.endswith("e_score_correction_bias")]:
            tensors[name].bits[:] = 8

    copy = tmp_path / "copy"
    options = ExportOptions(speculation=SpeculationConfig(3))
    export_checkpoint(write_synthetic(tmp_path / "t6", edit=even), copy, options)
    model, manifest = onnx.load(copy / "step.onnx", load_external_data=False), Manifest.load(copy)
    routers = [node for node in model.graph.node if node.op_type == "GlmRouter"]
    chosen = [node.output[0] for node in routers]
    model.graph.output.extend(onnx.helper.make_tensor_value_info(n, onnx.TensorProto.INT32, None) for n in chosen)
    (copy / "step.onnx").write_bytes(model.SerializeToString())
    session = ort.InferenceSession(str(copy / "step.onnx"), providers=["CPUExecutionProvider"])
    pools = {c.name: np.zeros([1 if e == "N" else e for e in c.shape("N")], np.float32) for c in manifest.caches}
    seen = {node.input[1]: set() for node in routers}  # by weight: the draft's steps share one
    assert len(seen) == 5 + 1
    for token in range(300):  # in the draft only the last row of a call is routed, so many calls
        prompt = np.array([token, (7 * token) % 300], np.int32)
        feeds = reference_feeds(manifest.config, manifest.speculation, prompt, None, 0, 1) | pools
        for node, ids in zip(routers, session.run(chosen, feeds), strict=True):
            seen[node.input[1]] |= set(ids.reshape(-1).tolist())
    assert {name: sorted(experts) for name, experts in seen.items()} == {name: [*range(8)] for name in seen}


@pytest.mark.parametrize("layers", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (8, 12))])
def test_the_draft_selects_for_itself_at_any_depth_of_the_trunk(tmp_path, layers):
    """For these depths the schedule's formula says "shared" where the MTP layer stands."""
    checkpoint, out = write_synthetic(tmp_path / "t6", num_hidden_layers=layers), tmp_path / "out"
    export_checkpoint(checkpoint, out, ExportOptions(dialect=DEVICE, speculation=SpeculationConfig(3)))
    nodes = onnx.load(out / "step.onnx").graph.node
    indexers = {n.output[0]: n for n in nodes if n.op_type == "GlmIndexer"}
    owners = [i for i in indexers if any("draft" in name for name in indexers[i].input)]
    assert len(owners) == 1 and len(indexers) == 1 + len(Manifest.load(out).config.full_layers)
    sources = {output: n for n in nodes for output in n.output}

    def made_from(name, seen):
        if name in indexers:
            return {name}
        node = sources.get(name)
        if node is None or name in seen:
            return set()
        return set().union(*(made_from(i, seen | {name}) for i in node.input if i))

    readers = [n for n in nodes if n.op_type == "GlmMlaAttention" and any("draft" in i for i in n.input)]
    selections = OP_TABLE["GlmMlaAttention"].inputs
    place = [i.name for i in selections].index("selection")
    first = readers[0]
    assert made_from(first.input[place], frozenset()) == set(owners)


def test_the_graph_stays_small_when_the_weights_pass_two_gigabytes(tmp_path):
    """Planned and traced from headers; the file of weights is written tensor by tensor, so only the graph could grow."""
    vocabulary = 13_000_000  # 3.3 GB of float32 each in embedding and head
    big = T6_CONFIG | {"vocab_size": vocabulary, "num_hidden_layers": 2}
    view = CheckpointView.open(write_stand_in(tmp_path, big, "bf16"))
    weights, speculation = weight_plan(view, PORTABLE, None, True), SpeculationConfig(1)
    caches = cache_specs(view.config, PORTABLE, "float32", 1)
    model = traced_step(view.config, speculation, caches, weights, vocabulary, (), ParallelConfig(), PORTABLE)
    with_bodies(model)
    with_external_weights(model, weights, "weights.bin")
    offsets, size = weight_offsets(weights)
    assert size > 6 << 30 and max(offsets.values()) > 1 << 31
    (tmp_path / "step.onnx").write_bytes(model.SerializeToString())
    assert (tmp_path / "step.onnx").stat().st_size < 1 << 20
    with (tmp_path / "weights.bin").open("wb") as file:
        file.truncate(size)
    onnx.checker.check_model(str(tmp_path / "step.onnx"))
    entries = {
        e.key: e.value for e in next(t for t in model.graph.initializer if t.name == "target.lm_head").external_data
    }
    assert int(entries["offset"]) == offsets["target.lm_head"] and entries["location"] == "weights.bin"


@pytest.mark.parametrize("k", [0, 1, 7])
def test_any_number_of_drafts_passes_the_self_check(checkpoint, tmp_path, k):
    out = tmp_path / "artifact"
    export_checkpoint(checkpoint, out, ExportOptions(speculation=SpeculationConfig(k)))
    _, check = build(out, load_profile("nano-cpu"))
    assert check.performed and check.worst.relative < 1e-4
    names = {t.name for t in Manifest.load(out).outputs}
    assert ("next_draft_tokens" in names) == (k > 0)


def test_all_build_options_together_pass_the_self_check(checkpoint, tmp_path):
    speculation = SpeculationConfig(
        2, True, 5, 0.2, enable_structured_output=True, enable_penalties=True, num_logprobs=3
    )
    out = tmp_path / "artifact"
    manifest = export_checkpoint(checkpoint, out, ExportOptions(speculation=speculation))
    build(out, load_profile("nano-cpu"))
    assert {"token_bitmask", "relaxed_delta", "output_counts"} <= {t.name for t in manifest.inputs}
    assert Manifest.load(out) == manifest


def test_the_device_dialect_takes_weights_as_inputs_and_holds_none(checkpoint, tmp_path):
    out = tmp_path / "artifact"
    manifest = export_checkpoint(checkpoint, out, ExportOptions(dialect=DEVICE, dtype="bfloat16"))
    model = onnx.load(out / "step.onnx")
    names = [i.name for i in model.graph.input]
    assert names == [t.name for t in manifest.inputs] + [w.name for w in manifest.weights]
    assert (out / "step.onnx").stat().st_size < 200_000 and not (out / "weights.bin").exists()
    assert [c.name for c in manifest.caches] == ["target_mla", "target_indexer", "draft_mla", "draft_indexer"]
    with pytest.raises(EngineError, match="device dialect"):
        build(out, load_profile("nano-cpu"))


@pytest.mark.parametrize(("dialect", "waits"), [(PORTABLE, False), (DEVICE, True)])
def test_only_the_device_dialect_waits_for_a_mask(checkpoint, tmp_path, dialect, waits):
    options = ExportOptions(dialect=dialect, speculation=SpeculationConfig(1, enable_structured_output=True))
    manifest = export_checkpoint(checkpoint, tmp_path / "artifact", options)
    graph = onnx.load(tmp_path / "artifact" / "step.onnx", load_external_data=False).graph
    names = [t.name for t in manifest.inputs if t.name.startswith("mask_")]
    assert names == ["mask_turn", "mask_ready"] * waits
    (mask,) = [node for node in graph.node if node.op_type == "GlmMaskLogits"]
    constants = {t.name: onnx.numpy_helper.to_array(t).tolist() for t in graph.initializer if not t.external_data}
    tickets = list(mask.input[2:])
    assert tickets == names if waits else [constants[name] for name in tickets] == [[0], [0]]


def test_a_moved_artifact_builds_from_anywhere(artifact, tmp_path, monkeypatch):
    moved = tmp_path / "elsewhere" / "moved"
    shutil.copytree(artifact, moved)
    monkeypatch.chdir("/")
    build(moved, load_profile("nano-cpu"))
    (moved / "weights.bin").unlink()
    with pytest.raises(ArtifactError, match=r"weights\.bin is missing"):
        build(moved, load_profile("nano-cpu"))


def test_one_changed_scale_fails_the_self_check(artifact, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(artifact, broken)
    manifest = Manifest.load(broken)
    from glm_mtp_export.artifact import file_record
    from glm_mtp_export.export.assemble import weight_offsets

    offsets, _ = weight_offsets(manifest.weights)
    name = "target.layers.4.attn.o"
    entry = next(w for w in manifest.weights if w.name == name)
    with (broken / "weights.bin").open("r+b") as file:
        file.seek(offsets[name])
        values = np.frombuffer(file.read(entry.num_bytes), np.float32)
        file.seek(offsets[name])
        file.write((values * 1.5).astype(np.float32).tobytes())
    files = dict(manifest.files) | {"weights.bin": file_record(broken / "weights.bin")}
    (broken / "manifest.json").write_text(replace(manifest, files=files).to_json())
    with pytest.raises(EngineError, match="target_mla layer 5"):
        build(broken, load_profile("nano-cpu"))


def test_a_damaged_weights_file_is_refused_before_loading(artifact, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(artifact, broken)
    with (broken / "weights.bin").open("r+b") as file:
        file.seek(100)
        file.write(b"\xff")
    with pytest.raises(ArtifactError, match=r"weights\.bin differs from its sha256"):
        build(broken, load_profile("nano-cpu"))


def test_equal_inputs_give_equal_graphs(checkpoint, artifact, tmp_path):
    again = tmp_path / "again"
    export_checkpoint(checkpoint, again, ExportOptions(speculation=SpeculationConfig(3)))
    for name in ("step.onnx", "weights.bin", "reference.safetensors"):
        assert (again / name).read_bytes() == (artifact / name).read_bytes(), name


@pytest.mark.parametrize("head_dim", [16, 999, None])
def test_head_dim_in_the_config_changes_nothing(artifact, tmp_path, head_dim):
    other = write_synthetic(tmp_path / "t6", head_dim=head_dim)
    out = tmp_path / "artifact"
    export_checkpoint(other, out, ExportOptions(speculation=SpeculationConfig(3)))
    for name in ("step.onnx", "weights.bin"):
        assert (out / name).read_bytes() == (artifact / name).read_bytes(), name


def test_an_mtp_layer_from_another_folder_is_exported_and_recorded(tmp_path):
    trunk, other = write_synthetic(tmp_path / "a", with_draft=False), write_synthetic(tmp_path / "b", seed=1)
    manifest = export_checkpoint(trunk, tmp_path / "out", ExportOptions(mtp_checkpoint=other))
    assert (manifest.checkpoint, manifest.mtp_checkpoint) == (str(trunk), str(other))
    _, check = build(tmp_path / "out", load_profile("nano-cpu"))
    assert check.performed


def test_an_mtp_layer_that_is_missing_is_refused_and_can_be_left_out(tmp_path):
    stripped = write_synthetic(tmp_path / "t6", with_draft=False)
    out = tmp_path / "artifact"
    with pytest.raises(CheckpointError, match="num-speculative-tokens 0"):
        export_checkpoint(stripped, out, ExportOptions())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t6"]
    export_checkpoint(stripped, out, ExportOptions(speculation=SpeculationConfig(0)))
    build(out, load_profile("nano-cpu"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculation": SpeculationConfig(-1)}, "--num-speculative-tokens is -1"),
        ({"speculation": SpeculationConfig(9)}, "expected 0..8"),
        ({"speculation": SpeculationConfig(1, True, 0)}, "--relaxed-topk is 0"),
        ({"speculation": SpeculationConfig(1, True, 5, 1.5)}, "--relaxed-delta is 1.5"),
        ({"dialect": "onnx"}, "--dialect is 'onnx'"),
        ({"draft_dtype": "bfloat16", "speculation": SpeculationConfig(0)}, "--draft-dtype would change nothing"),
        ({"cache_dtype": "bfloat16"}, "expected float32 in the portable dialect"),
    ],
)
def test_options_out_of_range_are_refused_by_name(options, message):
    with pytest.raises(OptionError, match=message):
        ExportOptions(**options)


def test_what_is_in_the_way_is_not_overwritten(checkpoint, artifact, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "notes.txt").write_text("keep")
    with pytest.raises(OptionError, match="not an artifact"):
        export_checkpoint(checkpoint, folder, ExportOptions())
    assert (folder / "notes.txt").read_text() == "keep"
    with pytest.raises(OptionError, match="--overwrite"):
        export_checkpoint(checkpoint, artifact, ExportOptions())


def test_a_failure_half_way_leaves_nothing(checkpoint, tmp_path, monkeypatch):
    import glm_mtp_export.export.exporter as exporter

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporter, "write_entry", full)
    with pytest.raises(ArtifactError, match="No space left"):
        export_checkpoint(checkpoint, tmp_path / "out", ExportOptions())
    assert list(tmp_path.iterdir()) == []


def test_a_read_only_artifact_passes_the_check(artifact, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(artifact, copy)
    build(copy, load_profile("nano-cpu"))
    for path in copy.rglob("*"):
        if path.is_file():
            os.chmod(path, 0o444)
    from glm_mtp_export.engine.onnxruntime import check

    assert check(copy).performed


def test_the_manifest_states_every_choice_that_others_make_differently(artifact):
    raw = json.loads((artifact / "manifest.json").read_text())
    assert {"position_zero_embedding", "draft_hidden_state", "selection_ties", "random_draws"} <= set(raw["semantics"])
    assert raw["ops"] == Manifest.load(artifact).ops
    assert not any(str(Path.home()) in line for line in raw["semantics"].values())
