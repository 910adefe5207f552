"""A Triton that dies without a word takes its engine process with it: nothing keeps the card's memory."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from server_process import wait_until
from triton_server import RunningTriton, TritonMissingError, installed_server

from glm_mtp_export.serving.triton import write_repository

pytestmark = [pytest.mark.triton, pytest.mark.timeout(300)]


def test_a_killed_server_leaves_no_engine_process(nano_artifact: Path, tmp_path: Path) -> None:
    try:
        _, environment = installed_server()
    except TritonMissingError as error:
        pytest.skip(f"no Triton here: {error}")
    write_repository(nano_artifact, tmp_path / "models", execution_environment=environment)
    triton = RunningTriton(tmp_path / "models", ("glm_mtp",), tmp_path / "triton.log")
    try:
        (worker,) = triton.worker_pids()
        os.kill(triton.process.pid, signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{worker}").exists(), seconds=40)
    finally:
        triton.stop()
