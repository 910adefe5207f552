"""A scripted model under the real engine, and a server over it on a free port of this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

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
