"""The commands of docs/serving.md work as written."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner
from server_process import RunningServer

from glm_mtp_export.cli import main
from glm_mtp_export.runtime.runtime import Runtime

TEXT = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def server(nano_artifact: Path) -> Iterator[RunningServer]:
    running = RunningServer(nano_artifact, Runtime.load(nano_artifact))
    yield running
    running.stop()


def test_curl_examples_are_answered(server: RunningServer) -> None:
    found = re.findall(r"curl -sS http://127\.0\.0\.1:8000(\S+) .*?-d '(\{.*?\n\})'", TEXT, re.DOTALL)
    assert [path for path, _ in found] == ["/v1/chat/completions", "/v1/completions"]
    for path, body in found:
        answer = httpx.post(server.url + path, json=json.loads(body), timeout=60)
        assert answer.status_code == 200, answer.text
    chat = httpx.post(server.url + found[0][0], json=json.loads(found[0][1]), timeout=60).json()
    assert chat["choices"][0]["message"]["content"] == "42"


def test_named_paths_fields_and_statuses_exist(server: RunningServer) -> None:
    description = server.get("/openapi.json").json()
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics"):
        assert path in description["paths"] and path in TEXT
    fields = description["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    sentence = TEXT.split("those of vLLM users:")[1].split("Sampling\ndefaults")[0]
    named = set(re.findall(r"`(\w+)`", sentence)) - {"regex", "grammar", "choice"}
    assert len(named) >= 10 and named <= set(fields)
    statuses = set(re.findall(r"^\| (\d{3})", TEXT, re.MULTILINE)) | {"413"}
    assert statuses == set(description["paths"]["/v1/chat/completions"]["post"]["responses"]) - {"200"}


def test_commands_exist(nano_artifact: Path, tmp_path: Path) -> None:
    assert "glm-mtp serve ENGINE_DIR --port 8000" in TEXT and "glm-mtp triton ENGINE_DIR -o model_repository" in TEXT
    assert CliRunner().invoke(main, ["serve", "--help"]).exit_code == 0
    done = CliRunner().invoke(main, ["triton", str(nano_artifact), "-o", str(tmp_path / "model_repository")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "model_repository" / "glm_mtp" / "config.pbtxt").is_file()
    options = ["--model-name", "mine", "--max-sequences", "7", "--execution-environment", str(tmp_path / "env")]
    done = CliRunner().invoke(main, ["triton", str(nano_artifact), "-o", str(tmp_path / "other"), *options])
    assert done.exit_code == 0, done.output
    config = (tmp_path / "other" / "mine_generate" / "config.pbtxt").read_text(encoding="utf-8")
    assert '"7"' in config and f'"{tmp_path / "env"}"' in config
