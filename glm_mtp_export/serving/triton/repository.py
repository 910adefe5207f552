"""Writes a Triton model repository for an engine folder: `glm-mtp triton ENGINE_DIR -o model_repository`.

    model_repository/
      glm_mtp/            streaming (decoupled): generate_stream, gRPC streams; also generate with one response
      glm_mtp_generate/   plain: infer and generate with exactly one response
      README.md, client_http.sh, client_grpc.py      examples that match the configs

In: an engine folder and names. Out: files, replaced as a whole. Both models share one engine process, which the streaming
one starts. What may go wrong: an engine folder that is not whole, or a target that holds something else, raises `ArtifactError`
or `OptionError` before anything is written.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from glm_mtp_export.artifact import Manifest
from glm_mtp_export.engine_manifest import BACKENDS
from glm_mtp_export.errors import OptionError
from glm_mtp_export.runtime.tokenizer import Tokenizer
from glm_mtp_export.serving.triton.examples import grpc_example, http_example, readme
from glm_mtp_export.serving.triton.fields import INPUTS, OUTPUTS, Field

__all__ = ["config_text", "write_repository"]

_NAME = re.compile(r"[A-Za-z0-9_.-]+")


def write_repository(
    engine_dir: str | Path,
    out: str | Path,
    *,
    model_name: str = "glm_mtp",
    backend: str = "onnxruntime",
    max_sequences: int = 512,
    engine_python: str | None = None,
    execution_environment: str | Path | None = None,
) -> tuple[Path, Path]:
    """Write both models; returns their folders.

    `engine_python`: interpreter of the engine process, by default the one running now. `execution_environment`: folder or
    .tar.gz that Triton's stub uses (numpy before 2 for servers up to 24.12); without it the stub's default is used.
    """
    engine, target = Path(engine_dir).resolve(), Path(out)
    manifest = Manifest.load(engine)
    manifest.verify_files(engine)
    Tokenizer.load(engine)
    if backend not in BACKENDS:
        raise OptionError(f"backend is {backend!r}, expected one of {', '.join(BACKENDS)}.")
    if max_sequences < 1:
        raise OptionError(f"max_sequences is {max_sequences}, expected 1 or more.")
    if engine == target.resolve() or engine in target.resolve().parents:
        raise OptionError(f"{out}: lies in the engine folder. Choose a folder of its own for the model repository.")
    if not _NAME.fullmatch(model_name):
        raise OptionError(f"model name {model_name!r}: use letters, digits, '_', '.' and '-' only.")
    parameters = {
        "engine_dir": str(engine),
        "backend": backend,
        "max_sequences": str(max_sequences),
        "num_ranks": str(manifest.parallel.tensor_parallel_size),
        "engine_python": engine_python or sys.executable,
    }
    if execution_environment is not None:
        parameters["EXECUTION_ENV_PATH"] = str(Path(execution_environment).resolve())
    names = (model_name, f"{model_name}_generate")
    folders = (target / names[0], target / names[1])
    for folder in folders:
        if folder.exists() and not (folder / "config.pbtxt").is_file():
            raise OptionError(f"{folder}: exists and is no Triton model. Choose another output folder or name.")
    for folder, name, sibling, is_streaming in zip(folders, names, reversed(names), (True, False), strict=True):
        _write_model(folder, config_text(name, {**parameters, "sibling": sibling}, is_streaming=is_streaming))
    (target / "README.md").write_text(readme(*names), encoding="utf-8")
    (target / "client_http.sh").write_text(http_example(*names), encoding="utf-8")
    (target / "client_grpc.py").write_text(grpc_example(*names), encoding="utf-8")
    return folders


def config_text(name: str, parameters: dict[str, str], *, is_streaming: bool) -> str:
    """`config.pbtxt` of one model."""
    lines = [f"name: {_quoted(name)}", 'backend: "python"', "max_batch_size: 0"]
    if is_streaming:
        lines.append("model_transaction_policy { decoupled: true }")
    lines += ["input [", ",\n".join(_tensor(field, optional=True) for field in INPUTS), "]"]
    lines += ["output [", ",\n".join(_tensor(field, optional=False) for field in OUTPUTS), "]"]
    # One instance serves all clients: the bridge never blocks, the engine batches.
    lines.append("instance_group [ { count: 1 kind: KIND_CPU } ]")
    for key, value in parameters.items():
        lines.append(f"parameters {{ key: {_quoted(key)} value {{ string_value: {_quoted(value)} }} }}")
    return "\n".join(lines) + "\n"


def _tensor(field: Field, *, optional: bool) -> str:
    rest = " optional: true" if optional else ""
    return (
        f"  # {field.doc}\n"
        f"  {{ name: {_quoted(field.name)} data_type: TYPE_{field.data_type} dims: [ {field.dims} ]{rest} }}"
    )


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _write_model(folder: Path, config: str) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config, encoding="utf-8")
    here = Path(__file__).parent
    shutil.copyfile(here / "stub_model.py", folder / "1" / "model.py")
    shutil.copyfile(here / "engine_client.py", folder / "1" / "engine_client.py")
