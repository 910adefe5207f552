"""A scripted model under the real engine, and a server over it on a free port of this machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import glm_mtp_export

sys.path.insert(0, str(Path(__file__).parent))

from scripted_model import Script, make_runtime, write_folder
from server_process import RunningServer


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizer, template and generation config, as an engine folder holds them."""
    return write_folder(tmp_path_factory.mktemp("engine"))


@pytest.fixture
def serve(folder: Path) -> Iterator[Callable[..., RunningServer]]:
    """Start a server over a script: `serve(script, max_sequences=..., ...)`; it stops when the test ends."""
    running: list[RunningServer] = []

    def start(script: Script | None = None, **options: object) -> RunningServer:
        running.append(RunningServer(folder, make_runtime(folder, script or Script()), **options))
        return running[-1]

    yield start
    for server in running:
        server.stop()


@pytest.fixture(scope="module")
def shared_server(folder: Path) -> Iterator[RunningServer]:
    """One server for all tests of a module that leave nothing behind."""
    server = RunningServer(folder, make_runtime(folder, Script()))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def nano_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained nano checkpoint, exported with three drafts, grammars and log-probabilities."""
    checkpoint = Path(glm_mtp_export.__file__).parent / "data" / "glm52-nano"
    target = tmp_path_factory.mktemp("nano") / "artifact"
    options = ["--num-speculative-tokens", "3", "--enable-structured-output", "--num-logprobs", "3"]
    command = [sys.executable, "-m", "glm_mtp_export", "export", str(checkpoint), "-o", str(target), *options]
    # in a process of its own: the exporter brings torch, which the run tower must not see
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return target
