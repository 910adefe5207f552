"""The command line: what a newcomer runs works, and what is wrong is one line with exit code 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from glm_mtp_export.cli import main
from glm_mtp_export.demo import nano_checkpoint


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(scope="module")
def nano(tmp_path_factory) -> Path:
    """The trained model as an artifact with three drafts, exported and built through the command line."""
    out = tmp_path_factory.mktemp("cli") / "nano"
    code, stdout, stderr = run("export", nano_checkpoint(), "-o", out, "--num-speculative-tokens", 3)
    assert code == 0, stderr
    assert "portable dialect, bfloat16, K = 3" in stdout
    code, stdout, stderr = run("build-engine", out, "--backend", "onnxruntime")
    assert code == 0, stderr
    assert "engine ready" in stdout
    return out


def test_the_demo_answers_its_sums_and_accepts_drafts(tmp_path):
    code, stdout, stderr = run("demo", "-o", tmp_path / "nano")
    assert code == 0, stderr
    assert "6 of 6 right" in stdout
    assert float(stdout.split("tokens per call: ")[1].split(",")[0]) > 2


@pytest.mark.slow
def test_export_and_build_of_the_shipped_model_take_little_time_and_memory(tmp_path):
    """Processor seconds on two cores, so that a busy machine does not fail it; both commands as a user starts them."""
    seconds = 0.0
    for command in (
        ("export", nano_checkpoint(), "-o", tmp_path / "nano", "--num-speculative-tokens", 3),
        ("build-engine", tmp_path / "nano"),
    ):
        arguments = [sys.executable, "-m", "glm_mtp_export", *map(str, command)]
        process = os.posix_spawn(sys.executable, arguments, os.environ)
        _, status, usage = os.wait4(process, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert usage.ru_maxrss * 1024 < 3e9
        seconds += usage.ru_utime + usage.ru_stime
    assert seconds < 90


def test_generate_answers_a_message_and_reports_acceptance(nano):
    code, stdout, stderr = run("generate", nano, "-m", "What is 417 + 385?")
    assert code == 0, stderr
    assert "802" in stdout and "tokens per call: " in stderr


def test_generate_json_has_ids_and_reasons(nano):
    code, stdout, _ = run("generate", nano, "-m", "What is 17 + 5?", "--no-thinking", "--json", "--max-tokens", 8)
    first = json.loads(stdout)[0]
    assert code == 0 and first["text"].strip().startswith("22") and first["finish_reason"] == "stop"
    assert first["num_accepted"] <= first["num_drafted"]


def test_sampling_with_a_seed_is_repeatable(nano):
    arguments = ("generate", nano, "-p", "Hello", "--temperature", 1.5, "--max-tokens", 24, "--json", "--seed")
    first, again, other = (json.loads(run(*arguments, seed)[1])[0]["token_ids"] for seed in (3, 3, 4))
    assert first == again != other


def test_verify_passes_on_nano(nano):
    code, stdout, stderr = run("verify", nano, "--num-prompts", 3, "--max-tokens", 24, "--json")
    assert code == 0, stdout + stderr
    report = json.loads(stdout)
    assert report["passed"] and report["differences"] == [] and report["worst_layer_error"] < 1e-4
    assert [s["engine"] for s in report["selections"]] == [1.0] * 4 and all(
        s["fp8_keys"] > 0.95 for s in report["selections"]
    )


def test_inspect_shows_the_layers_and_says_that_mtp_can_be_exported():
    code, stdout, _ = run("inspect", nano_checkpoint())
    assert code == 0 and "MTP" in stdout
    code, stdout, _ = run("inspect", nano_checkpoint(), "--json")
    assert code == 0 and json.loads(stdout)


def test_doctor_names_what_is_missing_and_how_to_get_it():
    code, stdout, _ = run("doctor", "--json")
    findings = {f["name"]: f for f in json.loads(stdout)}
    assert code == 0 and findings["backend onnxruntime"]["status"] == "ok"
    assert all(f["remedy"] for f in findings.values() if f["status"] != "ok")


def test_speculative_config_spellings_are_the_same_options(tmp_path):
    code, stdout, stderr = run(
        "export", nano_checkpoint(), "-o", tmp_path / "out",
        "--speculative-config.num-speculative-tokens", 2,
        "--speculative-config.use-relaxed-acceptance-for-thinking",
        "--speculative-config.relaxed-topk", 5, "--speculative-config.relaxed-delta", 0.1,
    )  # fmt: skip
    assert code == 0, stderr
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["speculation"]["relaxed_topk"] == 5 and manifest["speculation"]["num_speculative_tokens"] == 2
    assert "K = 2" in stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("inspect", "nowhere"), "nowhere"),
        (("export", "nowhere", "-o", "out"), "nowhere"),
        (("build-engine", "nowhere"), "manifest.json: cannot be read"),
        (("build-engine", "nowhere", "--profile", "nano-gpu"), "Did you mean"),
        (("generate", "nowhere", "-p", "x"), "manifest.json: cannot be read"),
        (("verify", "nowhere"), "manifest.json: cannot be read"),
        (("triton", "nowhere", "-o", "out"), "manifest.json: cannot be read"),
        (("plan", "nowhere"), "nowhere"),
    ],
)
def test_wrong_paths_are_one_line_with_exit_code_2(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, stderr = run(*arguments)
    assert code == 2 and message in stderr and "Traceback" not in stderr
    assert len(stderr.strip().splitlines()) <= 4
    assert list(tmp_path.iterdir()) == []


def test_a_misspelt_option_is_offered_the_right_one():
    code, _, stderr = run("export", "x", "-o", "y", "--num-speculative-token", 3)
    assert code == 2 and "--num-speculative-tokens" in stderr


def test_generate_without_a_prompt_says_what_to_give(nano):
    code, _, stderr = run("generate", nano)
    assert code == 2 and "--prompt or --message" in stderr


def test_a_prompt_beyond_the_context_limit_is_refused(nano):
    code, _, stderr = run("generate", nano, "-p", "word " * 5000)
    assert code == 2 and "Traceback" not in stderr and "4096" in stderr


def test_every_command_has_help_that_fits_the_terminal():
    for name in main.commands:
        code, stdout, _ = run(name, "--help")
        assert code == 0 and stdout.startswith("Usage:")
        assert main.commands[name].get_short_help_str().endswith((".", "..."))


def test_the_module_runs_as_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "glm_mtp_export", "--version"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "glm-mtp" in done.stdout
