"""Engines of the embedded model: every op of ours a plugin, no cache copied, nothing written that cannot be used."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from glm_mtp_export.artifact import (
    MANIFEST_NAME,
    PORTABLE,
    STEP_NAME,
    Manifest,
    cache_specs,
    file_record,
    step_inputs,
    step_outputs,
)
from glm_mtp_export.config import SpeculationConfig
from glm_mtp_export.engine import tensorrt
from glm_mtp_export.engine.profile import EngineProfile
from glm_mtp_export.engine_manifest import EngineManifest, Machine, engine_directory
from glm_mtp_export.errors import EngineError
from glm_mtp_export.plugin_library import LIBRARY_NAME, PluginLibrary
from glm_mtp_export.tensorrt_toolchain import load_toolchain

EVERYTHING = SpeculationConfig(
    num_speculative_tokens=3,
    use_relaxed_acceptance_for_thinking=True,
    enable_structured_output=True,
    enable_penalties=True,
    num_logprobs=2,
)
NO_DRAFTS = SpeculationConfig(num_speculative_tokens=0)


@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "speculation"),
    [
        ("bfloat16", "bfloat16", None),
        ("float8_e4m3fn", "float8_e4m3fn", None),
        ("float4_e2m1fnx2", "float8_e4m3fn", None),
        ("bfloat16", "bfloat16", EVERYTHING),
        ("bfloat16", "bfloat16", NO_DRAFTS),
    ],
    ids=["bf16", "fp8", "nvfp4", "everything compiled in", "no drafts"],
)
def test_every_node_of_ours_is_a_plugin_layer_and_no_cache_is_copied(
    exported, profile: EngineProfile, dtype: str, cache_dtype: str, speculation: SpeculationConfig | None
) -> None:
    artifact, manifest = exported(dtype, cache_dtype, speculation)
    report = tensorrt.build(artifact, profile, check_only=True)
    assert {f.name: f.num_nodes for f in report.preflight.findings} == dict(manifest.ops)
    assert {f.runs_as for f in report.preflight.findings} == {"plugin"}
    num_nodes = sum(manifest.ops.values())
    plugins = [layer for layer in report.layers if layer.kind in ("PluginV3", "custom_layer")]
    assert len(plugins) == 2 * num_nodes  # one set a profile
    writers = manifest.ops["GlmIndexer"] + manifest.ops["GlmMlaAttention"]
    assert sum(layer.kind == "PluginV3" for layer in report.layers) == 2 * writers
    # A copied pool would show in the scratch memory, which holds everything between the layers.
    # The largest pool is 5 layers of 512 pages; an eighth of them must need exactly the same.
    fewer = dataclasses.replace(profile, num_pages=profile.num_pages // 8)
    assert tensorrt.build(artifact, fewer, check_only=True).activation_bytes == report.activation_bytes
    assert report.plan_bytes < 16e6  # no weight inside
    assert not engine_directory(artifact, profile.backend).exists()


def changed(artifact: Path, target: Path, change) -> Path:
    """A copy of an artifact with another step graph under a manifest that vouches for it."""
    shutil.copytree(artifact, target)
    model = onnx.load(target / STEP_NAME)
    change(model)
    onnx.save(model, target / STEP_NAME)
    manifest = Manifest.load(target)
    files = {**manifest.files, STEP_NAME: file_record(target / STEP_NAME)}
    text = dataclasses.replace(manifest, files=files).to_json()
    (target / MANIFEST_NAME).write_text(text, encoding="utf-8")
    return target


def read_stale(model: onnx.ModelProto) -> None:
    """The second indexer reads the pool as it was before the first wrote."""
    writers = [node for node in model.graph.node if node.op_type == "GlmIndexer"]
    writers[1].input[7] = writers[0].input[7]


def test_a_stale_read_is_refused(exported, profile: EngineProfile, tmp_path: Path) -> None:
    artifact = changed(exported("bfloat16", "bfloat16")[0], tmp_path / "stale", read_stale)
    with pytest.raises(EngineError, match="expected one writer up to 'target_indexer_out'"):
        tensorrt.build(artifact, profile, check_only=True)


def test_copies_that_the_builder_would_make_are_refused(
    exported, profile: EngineProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The builder's own words count, even where our check of the graph sees nothing."""
    monkeypatch.setattr(tensorrt, "check_cache_threads", lambda model, caches: None)
    artifact = changed(exported("bfloat16", "bfloat16")[0], tmp_path / "stale", read_stale)
    with pytest.raises(EngineError, match=r"would copy a cache on every call|cannot build it"):
        tensorrt.build(artifact, profile, check_only=True)


def test_an_engine_directory_is_complete_and_checks_out(
    exported, profile: EngineProfile, library: PluginLibrary, tmp_path: Path
) -> None:
    artifact = tmp_path / "artifact"
    shutil.copytree(exported("float8_e4m3fn", "float8_e4m3fn")[0], artifact)
    report = tensorrt.build(artifact, profile)
    folder = engine_directory(artifact, "tensorrt-rtx")
    assert report.directory == folder
    assert {p.name for p in folder.iterdir()} == {"engine.plan", LIBRARY_NAME, "engine.json"}
    built = EngineManifest.load(folder)
    assert built == report.manifest
    assert (built.compute_capability, built.newer_cards, built.plugin_archs) == ("8.9", True, library.archs)
    machine = Machine(dict(built.toolchain), "9.0", "13.0", library.sha256)
    step = Manifest.load(artifact).files[STEP_NAME].sha256
    built.check(folder, machine, step)
    (folder / "engine.plan").write_bytes(b"")
    with pytest.raises(EngineError, match=r"engine\.plan has 0 bytes"):
        built.check(folder, machine, step)
    tensorrt.build(artifact, profile)  # replaces the damaged one
    EngineManifest.load(folder).check(folder, machine, step)


def test_a_process_that_built_an_engine_can_load_the_library_beside_it(
    exported, profile: EngineProfile, library: PluginLibrary, tmp_path: Path
) -> None:
    artifact, _manifest = exported("bfloat16", "bfloat16", None)
    tensorrt.build(artifact, profile, check_only=True)
    beside = tmp_path / LIBRARY_NAME
    shutil.copy2(library.path, beside)
    loaded = load_toolchain(profile.backend).load_plugins(beside)
    assert loaded.path == library.path.resolve()
    assert set(library.ops) <= {creator.name for creator in loaded.creators}


def test_a_portable_artifact_is_refused(exported, profile: EngineProfile, tmp_path: Path) -> None:
    artifact = tmp_path / "portable"
    shutil.copytree(exported("bfloat16", "bfloat16")[0], artifact)
    device = Manifest.load(artifact)
    caches = cache_specs(device.config, PORTABLE, "float32", 1)
    manifest = dataclasses.replace(
        device, dialect=PORTABLE, cache_dtype="float32", caches=caches,
        inputs=step_inputs(device.config, device.speculation, caches), outputs=step_outputs(device.speculation, caches),
    )  # fmt: skip
    (artifact / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
    with pytest.raises(EngineError, match="Export it again with --dialect device"):
        tensorrt.build(artifact, profile, check_only=True)


def test_a_hidden_library_is_named(exported, profile: EngineProfile, tmp_path: Path) -> None:
    artifact = exported("bfloat16", "bfloat16")[0]
    with pytest.raises(EngineError, match=r"nowhere\.so: no plugin library there.*build-plugins"):
        tensorrt.build(artifact, profile, plugins=tmp_path / "nowhere.so", check_only=True)
    (tmp_path / "foreign.so").write_bytes(b"\x7fELF")
    with pytest.raises(EngineError, match=r"foreign\.so: not a plugin library of this project"):
        tensorrt.build(artifact, profile, plugins=tmp_path / "foreign.so", check_only=True)


def test_a_library_of_another_version_is_named(
    exported, profile: EngineProfile, library: PluginLibrary, tmp_path: Path
) -> None:
    """The same sources compiled as version 2, over the kernels that are there."""
    sources = Path(__file__).parents[3] / "plugins"
    kernels = library.path.parent / "kernels" / "libglm_kernels.a"
    cuda = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    newer = tmp_path / "newer.so"
    defines = ['-DGLM_PLUGIN_VERSION="2"', '-DGLM_PLUGIN_ARCHS="90a"', '-DGLM_PLUGIN_RELEASE="9.9"']
    command = ["g++", "-std=c++17", "-O0", "-fPIC", "-shared", "-fvisibility=hidden", *defines]
    command += [f"-I{sources / 'kernels' / 'include'}", f"-isystem{cuda / 'include'}"]
    command += [*map(str, sorted((sources / "tensorrt").glob("*.cpp"))), str(kernels), f"-L{cuda / 'lib64'}"]
    subprocess.run([*command, "-lcudart_static", "-ldl", "-lrt", "-lpthread", "-o", str(newer)], check=True)
    artifact = exported("bfloat16", "bfloat16")[0]
    # In a process of its own: a registry keeps what it once took, and this one has version 1 already.
    program = (
        "import sys; from pathlib import Path; from glm_mtp_export.engine.tensorrt import build; "
        "from glm_mtp_export.engine.profile import load_profile; "
        "build(Path(sys.argv[1]), load_profile('nano-h200'), plugins=Path(sys.argv[2]), check_only=True)"
    )
    found = subprocess.run([sys.executable, "-c", program, str(artifact), str(newer)], capture_output=True, text=True)
    assert found.returncode == 1
    assert f"plugin library: {newer}" in found.stderr
    assert "GlmIndexer (namespace glm, version 1; 4 nodes): nothing; the library offers version 2 in" in found.stderr


def test_without_its_loader_path_tensorrt_rtx_is_refused_in_words(exported) -> None:
    """Its parser would end the process without any."""
    artifact = exported("bfloat16", "bfloat16")[0]
    program = (
        "import sys; from pathlib import Path; from glm_mtp_export.engine.tensorrt import build; "
        "from glm_mtp_export.engine.profile import load_profile; "
        "build(Path(sys.argv[1]), load_profile('nano-h200'), check_only=True)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"}
    command = [sys.executable, "-c", program, str(artifact)]
    found = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert found.returncode == 1
    assert "EngineError: libtensorrt_rtx.so is not on the loader's path" in found.stderr
