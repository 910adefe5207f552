"""The script that writes checkpoints, its fillings, and memory that stays bounded on big tensors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from glm_mtp_export.checkpoint import CheckpointView, materialise, weight_plan
from glm_mtp_export.checkpoint.layouts import GLM_5_2_CONFIG, RELEASES, T6_CONFIG
from glm_mtp_export.checkpoint.synthetic import FORMATS, write_stand_in, write_synthetic
from glm_mtp_export.errors import CheckpointError

ROOT = Path(__file__).parents[2]


def make(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "scripts" / "make_checkpoint.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})


@pytest.mark.parametrize("name", ["t6", "t6-fp8", "t6-nvfp4"])
def test_named_tiny_checkpoints_hold_random_weights(tmp_path: Path, name: str) -> None:
    done = make(name, "-o", tmp_path, "--set", "num_hidden_layers=3")
    assert done.returncode == 0, done.stderr
    view = CheckpointView.open(tmp_path)
    assert view.config.num_hidden_layers == 3 and view.has_draft and not view.store.headers_only
    entry = next(e for e in weight_plan(view, "portable", "bfloat16", True) if e.name == "draft.layers.0.moe.w2")
    assert np.std(materialise(view, entry)) > 0.1


def test_config_file_in_another_format_as_sparse_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(T6_CONFIG))
    done = make(
        tmp_path / "config.json", "--format", "ct-nvfp4", "--data", "sparse", "--shards", "3", "-o", tmp_path / "o"
    )
    assert done.returncode == 0, done.stderr
    view = CheckpointView.open(tmp_path / "o")
    assert len(view.store.files) == 3 and view.precision("model.layers.1.mlp.experts.0.up_proj") == "nvfp4"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["glm-6"], "glm-6 is no known name"),
        (["t6", "--set", "x"], "expected key=value"),
        (["t6", "--set", "hidden_size=zero"], "hidden_size is 'zero'"),
        (["nowhere.json"], "no such file"),
    ],
)
def test_bad_requests_are_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = make(*arguments, "-o", tmp_path / "o")
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("layout", FORMATS)
def test_random_stand_in_equals_the_synthetic_checkpoint(tmp_path: Path, layout: str) -> None:
    write_stand_in(tmp_path / "a", T6_CONFIG, layout, filling="random", num_shards=2, block=(16, 16))
    write_synthetic(tmp_path / "b", layout=layout, block=(16, 16))
    a, b = CheckpointView.open(tmp_path / "a"), CheckpointView.open(tmp_path / "b")
    for entry in weight_plan(a, "portable", "bfloat16", True):
        assert materialise(a, entry).tobytes() == materialise(b, entry).tobytes()


def test_headers_only_checkpoint_is_planned_but_not_read(tmp_path: Path) -> None:
    view = CheckpointView.open(write_stand_in(tmp_path, RELEASES["glm-5.2-slice-fp8"].config, "fp8"))
    entry = weight_plan(view, "device", "float8_e4m3fn", True)[0]
    with pytest.raises(CheckpointError, match="the file ends after its header"):
        materialise(view, entry)


_WRITE = """
import resource, sys
from glm_mtp_export.checkpoint import CheckpointView, weight_plan, write_entry
view = CheckpointView.open(sys.argv[1])
plan = [e for e in weight_plan(view, "portable", "bfloat16", True) if e.name == "target.embed"]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with open("/dev/null", "wb") as file:
    written = sum(write_entry(view, entry, file) for entry in plan)
print(written, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_three_gib_embedding_is_written_in_little_memory(tmp_path: Path) -> None:
    """1.5 GiB of bf16 become 3 GiB of fp32; a piece takes 32 MiB, each of at most four readers a few of them."""
    raw = T6_CONFIG | {"vocab_size": 1 << 17, "hidden_size": 6144, "n_routed_experts": 2, "num_hidden_layers": 1}
    write_stand_in(tmp_path, {**raw, "tie_word_embeddings": True}, "bf16", filling="sparse")
    done = subprocess.run(
        [sys.executable, "-c", _WRITE, tmp_path], capture_output=True, text=True, cwd=ROOT, check=True
    )
    written, extra = map(int, done.stdout.split())
    assert written == 3 * 2**30 and extra < 5 * 4 * 2**25


def test_reader_imports_no_torch_and_no_onnx() -> None:
    code = (
        "import sys, glm_mtp_export.checkpoint.report, glm_mtp_export.checkpoint.memory_plan;"
        "import glm_mtp_export.checkpoint.synthetic, glm_mtp_export.checkpoint.digest;"
        "import glm_mtp_export.checkpoint.conversion;"
        "print([m for m in ('torch', 'onnx', 'onnxruntime', 'ml_dtypes', 'safetensors', 'matplotlib', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_full_size_config_is_the_published_one() -> None:
    types = GLM_5_2_CONFIG["indexer_types"]
    assert [i for i, kind in enumerate(types) if kind == "full"] == [0, 1, 2, *range(6, 75, 4)]
