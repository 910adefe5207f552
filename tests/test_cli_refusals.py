"""What cannot be used is one line that names the file or field and the way out, with exit code 2 and nothing written.

Through the command line as a user types it; the wording of each message is tested where it is made.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from glm_mtp_export.checkpoint.synthetic import Tensor, write_synthetic
from glm_mtp_export.cli import main
from glm_mtp_export.config import SpeculationConfig
from glm_mtp_export.demo import nano_checkpoint
from glm_mtp_export.export import ExportOptions, export_checkpoint
from glm_mtp_export.runtime import Completion, GenerationResult, Runtime

Edit = Callable[[dict[str, Tensor]], None]


def refused(*arguments: object) -> str:
    """The error of a command that must fail: its one line."""
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exit_code == 2, (result.stdout, result.stderr, result.exception)
    lines = [line for line in result.stderr.splitlines() if line.strip() and "━" not in line and "─" not in line]
    errors = [line for line in lines if line.startswith("Error: ")]
    assert len(errors) == 1 and lines[-1] == errors[0], result.stderr
    assert "Traceback" not in result.stderr and errors[0].endswith((".", "'")), errors
    return errors[0]


def dropping(*names: str) -> Edit:
    return lambda tensors: [tensors.pop(name) for name in names] and None


def renaming(old: str, new: str) -> Edit:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def replaced(name: str, dtype: str, shape: tuple[int, ...]) -> Edit:
    widths = {"BF16": np.uint16, "I8": np.int8, "F32": np.float32}
    return lambda tensors: tensors.update({name: Tensor(dtype, shape, np.ones(shape, widths[dtype]))})


OWN = "model.layers.1.mlp.experts.3"
# how the checkpoint differs from T6, what the line must name
CHECKPOINTS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"edit": dropping("model.layers.2.self_attn.indexer.wk.weight")}, ("layers.2.self_attn.indexer.wk",)),
    ({"edit": dropping("model.layers.6.self_attn.indexer.k_norm.bias")}, ("layers.6.self_attn.indexer.k_norm.bias",)),
    ({"layout": "fp8", "edit": dropping("model.layers.3.self_attn.o_proj.weight_scale_inv")}, ("o_proj", "FP8 without")),
    ({"with_draft": False}, ("config.json says 1 MTP layer", "--num-speculative-tokens 0")),
    ({"edit": renaming(f"{OWN}.up_proj.weight", f"{OWN}.w3_proj.weight")}, (f"{OWN}.w3_proj.weight", f"{OWN}.up_proj")),
    ({"edit": dropping("lm_head.weight")}, ("missing: lm_head",)),
    ({"index_topk_pattern": "SFFFFF"}, ("index_topk_pattern", "no earlier full layer")),
    ({"index_topk_pattern": "FFS"}, ("index_topk_pattern", "6 letters")),
    ({"index_topk_pattern": "FFXFSS"}, ("index_topk_pattern", "6 letters")),
    ({"rope_parameters": None}, ("rope_theta is missing",)),
    ({"rope_parameters": {"rope_theta": 8e6, "rope_type": "yarn"}}, ("rope_type is 'yarn'",)),
    ({"num_nextn_predict_layers": 0}, ("num_nextn_predict_layers is 0", "--num-speculative-tokens 0")),
    ({"n_group": 3}, ("n_group is 3", "divisor")),
    ({"num_hidden_layers": "6"}, ("num_hidden_layers is '6'",)),
    ({"index_topk": "2048"}, ("index_topk is '2048'",)),
    ({"edit": replaced("model.norm.weight", "BF16", (63,))}, ("model.norm.weight is [63], expected [64]",)),
    ({"edit": replaced("lm_head.weight", "I8", (320, 64))}, ("lm_head.weight is I8",)),
]  # fmt: skip


@pytest.mark.parametrize(("change", "named"), CHECKPOINTS, ids=["-".join(named)[:40] for _, named in CHECKPOINTS])
def test_checkpoints_that_cannot_be_exported(tmp_path: Path, change: dict[str, Any], named: tuple[str, ...]) -> None:
    keys = {k: v for k, v in change.items() if k not in ("edit", "layout", "with_draft")}
    write_synthetic(
        tmp_path / "t6",
        edit_config=lambda raw: [raw.pop(k, None) if v is None else raw.update({k: v}) for k, v in keys.items()] and None,
        **{k: v for k, v in change.items() if k not in keys},
    )  # fmt: skip
    line = refused("export", tmp_path / "t6", "-o", tmp_path / "out")
    assert all(text in line for text in named), line
    assert "t6" in line  # the folder or file
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t6"]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


DAMAGE: list[tuple[Callable[[Path], object], tuple[str, ...]]] = [
    (lambda t: cut(t / "model-00001-of-00002.safetensors"), ("model-00001-of-00002.safetensors: has", "fetch it again")),
    (lambda t: (t / "model-00002-of-00002.safetensors").unlink(), ("names model-00002", "Fetch the missing shards")),
    (lambda t: (t / "config.json").write_text("{"), ("config.json: not valid JSON", "Fetch this file again")),
    (lambda t: (t / "config.json").unlink(), ("config.json: no such file", "Give the folder")),
    (lambda t: (t / "model.safetensors.index.json").write_text("[]"), ("index.json: holds list",)),
    (lambda t: (t / "tokenizer.json").write_text("{}"), ("tokenizer.json",)),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "named"), DAMAGE, ids=[n[0][:30] for _, n in DAMAGE])
def test_damaged_folders(tmp_path: Path, damage: Callable[[Path], object], named: tuple[str, ...]) -> None:
    damage(write_synthetic(tmp_path / "t6"))
    line = refused("export", tmp_path / "t6", "-o", tmp_path / "out")
    assert all(text in line for text in named), line
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t6"]


def test_a_file_in_the_place_of_a_folder_is_told_apart_from_a_damaged_one(tmp_path: Path) -> None:
    t6 = write_synthetic(tmp_path / "t6")
    for command in (("inspect",), ("export", "-o", tmp_path / "out")):
        assert "Give the folder that holds config.json" in refused(*command, t6 / "config.json")


OPTIONS: list[tuple[tuple[object, ...], str]] = [
    (("--num-speculative-tokens", 9), "--num-speculative-tokens is 9, expected 0..8"),
    (("--num-logprobs", -5), "--num-logprobs is -5, expected -1 (none), 0 or more"),
    (("--num-logprobs", 5000), "--num-logprobs is 5000, the tokenizer has 320 ids"),
    (("--relaxed-topk", 5), "--relaxed-topk would change nothing without --use-relaxed-acceptance-for-thinking"),
    (("--relaxed-delta", 0.1, "--relaxed-topk", 2), "--relaxed-topk and --relaxed-delta would change nothing"),
    (("--use-relaxed-acceptance-for-thinking", "--relaxed-delta", "nan"), "--relaxed-delta is nan"),
    (("--cache-dtype", "float8_e4m3fn"), "--cache-dtype is 'float8_e4m3fn', expected float32"),
    (("--dtype", "float8_e4m3fn"), "or the portable dialect without --dtype"),
    (("--tensor-parallel-size", 2), "needs --dialect device"),
    (("--dtype", "float16"), "'float16' is not one of"),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS, ids=[m[:30] for _, m in OPTIONS])
def test_options_that_cannot_be_met(tmp_path: Path, options: tuple[object, ...], message: str) -> None:
    assert message in refused("export", write_synthetic(tmp_path / "t6"), "-o", tmp_path / "out", *options)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t6"]


def test_relaxed_acceptance_looks_at_no_more_tokens_than_there_are(tmp_path: Path) -> None:
    relaxed = ("--use-relaxed-acceptance-for-thinking", "--relaxed-topk", 483)
    line = refused("export", nano_checkpoint(), "-o", tmp_path / "out", *relaxed)
    assert "--relaxed-topk is 483, the tokenizer has 482" in line


def test_relaxed_acceptance_needs_a_tokenizer_that_marks_thinking(tmp_path: Path) -> None:
    checkpoint = tmp_path / "c"
    shutil.copytree(nano_checkpoint(), checkpoint)
    tokenizer = (checkpoint / "tokenizer.json").read_text(encoding="utf-8")
    (checkpoint / "tokenizer.json").write_text(tokenizer.replace("<think>", "<muse>"), encoding="utf-8")
    line = refused("export", checkpoint, "-o", tmp_path / "out", "--use-relaxed-acceptance-for-thinking")
    assert "tokenizer.json has no <think>, so there is no thinking phase to relax" in line


def test_outputs_that_cannot_be_written_are_known_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    t6 = write_synthetic(tmp_path / "t6")
    (tmp_path / "file").write_text("keep")
    monkeypatch.setattr("glm_mtp_export.export.exporter.traced_step", None)  # would be a TypeError
    assert "file is a file. Choose another directory" in refused("export", t6, "-o", tmp_path / "file" / "out")
    assert "is not an artifact" in refused("export", t6, "-o", tmp_path / "file")
    assert "is not an artifact" in refused("export", t6, "-o", t6)
    monkeypatch.chdir(tmp_path)
    assert "is the current directory" in refused("export", t6, "-o", ".")
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    assert "cannot be written by this user" in refused("export", t6, "-o", tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "t6"]


def test_what_this_user_may_not_read_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    t6 = write_synthetic(tmp_path / "t6")
    honest = Path.open

    def closed(name: str) -> Callable[..., Any]:
        def opened(self: Path, *arguments: Any, **options: Any) -> Any:
            if self.name == name:
                raise PermissionError(13, "Permission denied", str(self))
            return honest(self, *arguments, **options)

        return opened

    for name in ("config.json", "model-00002-of-00002.safetensors"):
        monkeypatch.setattr(Path, "open", closed(name))
        assert f"{name}: this user may not read it. Give read permission." in refused("inspect", t6)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("refusals") / "t6"
    export_checkpoint(write_synthetic(out.parent / "c"), out, ExportOptions(speculation=SpeculationConfig(1)))
    return out


def edited(artifact: Path, section: str | None, **fields: object) -> None:
    """Change fields of the manifest, or of one of its sections."""
    path = artifact / "manifest.json"
    raw = json.loads(path.read_text())
    (raw if section is None else raw[section]).update(fields)
    path.write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda a: (a / "weights.bin").unlink(), "weights.bin is missing"),
        (lambda a: cut(a / "weights.bin"), "weights.bin has"),
        (lambda a: (a / "step.onnx").write_bytes(b"?"), "step.onnx has 1 bytes"),
        (lambda a: (a / "manifest.json").write_text("{"), "manifest.json: not a manifest of this release"),
        (lambda a: (a / "manifest.json").unlink(), "manifest.json: cannot be read (No such file or directory)"),
        (lambda a: edited(a, "speculation", num_speculative_tokens=2),
         "found ('next_draft_tokens', 'int32', ('B', 1)), expected ('next_draft_tokens', 'int32', ('B', 2))"),
        (lambda a: edited(a, "config", vocab_size="320"), "vocab_size is '320', expected int"),
        (lambda a: edited(a, "config", eos_token_ids=["x"]), "eos_token_ids is ('x',), expected tuple[int, ...]"),
        (lambda a: edited(a, "config", index_head_dim=8), "caches: found ('target_indexer.0', 1, 'N', 64, 16, 'float32')"),
        (lambda a: edited(a, None, dialect="mobile"), "dialect is 'mobile', expected 'portable' or 'device'"),
        (lambda a: edited(a, None, thinking_token_ids={"think": None}), "thinking_token_ids is {'think': None}"),
        (lambda a: edited(a, None, color="red"), "unexpected keyword argument 'color'"),
        (lambda a: edited(a, None, format_version=99), "format_version is 99, this release reads 1"),
    ],
    ids=["no weights", "cut weights", "other graph", "damaged manifest", "no manifest", "other K", "text for a number",
         "ids that are none", "other cache", "unknown dialect", "marker without an id", "unknown field", "other version"],
)  # fmt: skip
def test_damaged_artifacts(tmp_path: Path, artifact: Path, damage: Callable[[Path], object], message: str) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(artifact, broken)
    damage(broken)
    before = sorted(p.relative_to(broken) for p in broken.rglob("*"))
    for command in (("build-engine",), ("generate", "-p", "x"), ("verify",)):
        assert message in refused(*command, broken), command
    assert sorted(p.relative_to(broken) for p in broken.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("build-engine", "--check-only"), "--check-only: for the tensorrt backends only"),
        (("build-engine", "--strict-plugins", "--plugins", "x.so"), "--plugins, --strict-plugins: for the tensorrt"),
        (("build-engine", "--timing-cache", "x"), "--timing-cache: for the tensorrt backends only"),
        (
            ("generate", "-p", "x", "--backend", "onnx"),
            "'onnx' is not one of 'onnxruntime', 'tensorrt', 'tensorrt-rtx'",
        ),
        (("generate", "-p", "x", "--top-k", 2**40), "top_k is 1099511627776, expected at most 2147483647"),
        (("serve", "--port", 99999), "99999 is not in the range 0<=x<=65535"),
        (("triton", "-o", "out", "--max-sequences", 0), "0 is not in the range x>=1"),
        (("bench", "serve", "--plot", "load.txt"), "--plot is load.txt, expected a name that ends in .png or .svg"),
        (("bench", "serve", "--plot", "nowhere/load.png"), "nowhere is no folder"),
        (("bench", "serve", "--prompts", os.devnull), f"--prompts {os.devnull}: holds no prompt"),
    ],
)
def test_options_that_would_change_nothing_or_fail_late(
    artifact: Path, arguments: tuple[object, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refused(*arguments, artifact)
    assert list(tmp_path.iterdir()) == []


def test_an_answer_that_broke_off_is_no_success(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Completion(0, (5,), "x", "error", error="the logits held a NaN at output token 1")
    monkeypatch.setattr(Runtime, "generate", lambda self, prompts, params: [GenerationResult("r", (1,), (lost,))])
    monkeypatch.setattr("glm_mtp_export.runtime.runtime.Tokenizer.load", lambda path: None)
    line = refused("generate", artifact, "-p", "x")
    assert "answer 1 of 1 broke off: the logits held a NaN at output token 1." in line


def test_a_plan_for_more_drafts_than_an_export_takes_is_refused(tmp_path: Path) -> None:
    t6 = write_synthetic(tmp_path / "t6")
    assert "expected 0..8" in refused("plan", t6, "--gpus", 1, "--num-speculative-tokens", 9)
    assert "--max-total-context is -5, expected 0 (no cap) or more" in refused("plan", t6, "--max-total-context", -5)
    assert "give --gpus 2 or more" in refused("plan", t6, "--gpus", 1, "--expert-parallel")
    assert "--picture is x.txt, expected a name" in refused("plan", t6, "--picture", "x.txt")


def test_verify_needs_prompts_and_tokens(artifact: Path) -> None:
    assert "0 is not in the range x>=1" in refused("verify", artifact, "--num-prompts", 0)
    assert "-2 is not in the range x>=1" in refused("verify", artifact, "--max-tokens", -2)


def test_files_of_an_artifact_can_be_read_by_others(artifact: Path) -> None:
    """A service runs as another user than the one that exported."""
    modes = {p.stat().st_mode & 0o777 for p in artifact.iterdir() if p.is_file()}
    assert len(modes) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_stopped_export_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    """Stopped while the temporary folder is there."""
    command = [sys.executable, "-m", "glm_mtp_export", "export", str(nano_checkpoint()), "-o", str(tmp_path / "out")]
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[1],
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.default_int_handler
        ),  # shells ignore it in background jobs
    ) as process:
        while process.poll() is None and not list(tmp_path.iterdir()):
            time.sleep(0.001)
        process.send_signal(number)
        assert process.stderr is not None
        assert b"Aborted" in process.stderr.read()
    assert process.returncode == 1 and list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="needs to mount a small file system")
def test_a_full_disk_leaves_nothing(tmp_path: Path, artifact: Path) -> None:
    t6, disk = write_synthetic(tmp_path / "t6"), tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)], check=False)
    if mounted.returncode:
        pytest.skip("cannot mount here")
    try:
        needed = json.loads((artifact / "manifest.json").read_text())["files"]["weights.bin"]["num_bytes"]
        with (disk / "others").open("wb") as file:  # leave room for the weights, not for the rest
            file.write(bytes(max(0, 3 * 2**20 - needed - 2**14)))
        line = refused("export", t6, "-o", disk / "out")
        assert "No space left" in line and "Free space or choose another directory" in line
        with (disk / "others").open("wb") as file:
            file.write(bytes(2 * 2**20))
        assert "the weights need" in refused("export", t6, "-o", disk / "out")
        assert [p.name for p in disk.iterdir()] == ["others"]
    finally:
        subprocess.run(["umount", str(disk)], check=True)
