"""The generated files, without a server: configs parse, examples and config agree, nothing else is overwritten."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from glm_mtp_export.errors import ArtifactError, OptionError
from glm_mtp_export.serving.triton import write_repository
from glm_mtp_export.serving.triton.fields import INPUTS, OUTPUTS
from glm_mtp_export.serving.triton.repository import config_text

service = pytest.importorskip("tritonclient.grpc.model_config_pb2")
text_format = pytest.importorskip("google.protobuf.text_format")


def parsed(folder: Path) -> Any:
    return text_format.Parse((folder / "config.pbtxt").read_text(encoding="utf-8"), service.ModelConfig())


@pytest.fixture(scope="module")
def repository(nano_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("repository") / "models"
    write_repository(nano_artifact, out)
    return out


def test_configs_are_what_triton_reads(repository: Path, nano_artifact: Path) -> None:
    streaming, plain = parsed(repository / "glm_mtp"), parsed(repository / "glm_mtp_generate")
    assert streaming.model_transaction_policy.decoupled and not plain.model_transaction_policy.decoupled
    for config, sibling in ((streaming, plain.name), (plain, streaming.name)):
        assert (config.backend, config.max_batch_size, len(config.instance_group)) == ("python", 0, 1)
        found = {i.name: (service.DataType.Name(i.data_type), list(i.dims), i.optional) for i in config.input}
        assert found == {f.name: (f"TYPE_{f.data_type}", [f.dims], True) for f in INPUTS}
        assert [o.name for o in config.output] == [f.name for f in OUTPUTS]
        parameters = {key: value.string_value for key, value in config.parameters.items()}
        assert parameters == {
            "engine_dir": str(nano_artifact.resolve()),
            "backend": "onnxruntime",
            "max_sequences": "512",
            "num_ranks": "1",
            "engine_python": sys.executable,
            "sibling": sibling,
        }


def test_llmapi_names_are_there() -> None:
    inputs = {f.name for f in INPUTS}
    wanted = ("max_tokens", "temperature", "top_k", "top_p", "stop", "seed", "frequency_penalty", "presence_penalty")
    assert {"text_input", "streaming", "return_finish_reason", "return_stop_reason"} <= inputs
    assert {f"sampling_param_{name}" for name in wanted} <= inputs
    outputs = {f.name for f in OUTPUTS}
    assert {"text_output", "finish_reason", "stop_reason", "cumulative_logprob", "acceptance_rate"} <= outputs
    assert {"total_draft_tokens", "total_accepted_draft_tokens"} <= outputs


def test_examples_use_the_shapes_of_the_config(repository: Path) -> None:
    dims = {i.name: list(i.dims) for i in parsed(repository / "glm_mtp_generate").input}
    script = (repository / "client_http.sh").read_text(encoding="utf-8")
    bodies = [json.loads(body.replace('\\"', '\\"')) for body in re.findall(r"-d '(\{.*?\n\})'", script, re.DOTALL)]
    assert len(bodies) == 3
    (request,) = (body for body in bodies if "inputs" in body)
    for tensor in request["inputs"]:
        expected = dims[tensor["name"]]
        assert tensor["shape"] == [len(tensor["data"])] and expected in ([-1], tensor["shape"])
    for body in bodies:
        assert {name for name in body if name not in ("inputs", "outputs")} <= set(dims)


def test_names_in_examples_and_readme_are_the_models(nano_artifact: Path, tmp_path: Path) -> None:
    write_repository(nano_artifact, tmp_path, model_name="my-model")
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"my-model", "my-model_generate"}
    for name in ("client_http.sh", "client_grpc.py", "README.md"):
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert "my-model" in text and "@" not in text and 'glm_mtp"' not in text


def test_strings_are_quoted_for_protobuf() -> None:
    config = config_text("m", {"engine_dir": 'a "quoted" \\ path', "sibling": "s"}, is_streaming=True)
    found = text_format.Parse(config, service.ModelConfig())
    assert found.parameters["engine_dir"].string_value == 'a "quoted" \\ path'


def test_writing_again_replaces_and_nothing_foreign_is_removed(nano_artifact: Path, tmp_path: Path) -> None:
    write_repository(nano_artifact, tmp_path, execution_environment=tmp_path / "env")
    (tmp_path / "glm_mtp" / "1" / "stale.py").touch()
    write_repository(nano_artifact, tmp_path)
    assert not (tmp_path / "glm_mtp" / "1" / "stale.py").exists()
    assert "EXECUTION_ENV_PATH" not in parsed(tmp_path / "glm_mtp").parameters
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "important.txt").touch()
    with pytest.raises(OptionError, match="is no Triton model"):
        write_repository(nano_artifact, tmp_path, model_name="mine")
    assert (tmp_path / "mine" / "important.txt").exists()


def test_bad_arguments_are_refused_before_anything_is_written(nano_artifact: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ArtifactError, match="cannot be read"):
        write_repository(tmp_path, out)
    with pytest.raises(OptionError, match="use letters"):
        write_repository(nano_artifact, out, model_name="a/b")
    assert not out.exists()


def test_the_stub_needs_nothing_of_the_package(repository: Path) -> None:
    for name in ("model.py", "engine_client.py"):
        imports = re.findall(r"^(?:from|import) (\w+)", (repository / "glm_mtp" / "1" / name).read_text(), re.MULTILINE)
        allowed = {"__future__", "numpy", "triton_python_backend_utils", "engine_client", *sys.stdlib_module_names}
        assert set(imports) <= allowed


def test_a_repository_of_a_damaged_artifact_is_not_written(nano_artifact: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(nano_artifact, broken)
    (broken / "step.onnx").unlink()
    with pytest.raises(ArtifactError, match=r"step\.onnx is missing"):
        write_repository(broken, tmp_path / "models")
    assert not (tmp_path / "models").exists()


def test_what_a_repository_cannot_be_is_refused(nano_artifact: Path, tmp_path: Path) -> None:
    out = tmp_path / "models"
    with pytest.raises(OptionError, match="backend is 'onnx', expected one of"):
        write_repository(nano_artifact, out, backend="onnx")
    with pytest.raises(OptionError, match="max_sequences is 0, expected 1 or more"):
        write_repository(nano_artifact, out, max_sequences=0)
    for inside in (nano_artifact, nano_artifact / "models"):
        with pytest.raises(OptionError, match="lies in the engine folder"):
            write_repository(nano_artifact, inside)
    assert not out.exists() and not (nano_artifact / "README.md").exists()
