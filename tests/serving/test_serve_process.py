"""`run` and the modules in processes of their own: what is imported, what a signal does, what a taken port says."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from server_process import free_port, wait_until

MODULES = [
    "glm_mtp_export.chat.parser",
    "glm_mtp_export.chat.template",
    "glm_mtp_export.serving.openai_server",
    "glm_mtp_export.serving.triton",
    "glm_mtp_export.serving.triton.worker",
]


@pytest.mark.parametrize("module", MODULES)
def test_the_run_tower_brings_no_torch_and_no_onnx(module: str) -> None:
    code = f"import sys, {module}; print(sorted(m for m in sys.modules if m in ('torch', 'onnx', 'transformers')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_the_triton_worker_needs_no_web_framework() -> None:
    code = "import sys, glm_mtp_export.serving.triton.worker; print([m for m in ('fastapi', 'pydantic') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def test_serve_answers_until_it_is_told_to_stop(nano_artifact: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "glm_mtp_export", "serve", str(nano_artifact), "--port", str(port)]
    process = subprocess.Popen([*command, "--model-name", "nano"], stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: process.poll() is not None or answers(f"http://127.0.0.1:{port}/health"), seconds=60)
        assert process.poll() is None, process.communicate()[1]
        body = {"model": "nano", "prompt": "Hello", "max_tokens": 5}
        assert httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=30).status_code == 200
        # only this machine is listened to
        with socket.socket() as other:
            other.settimeout(2)
            assert other.connect_ex(("127.0.0.2", port)) != 0
        os.kill(process.pid, signal.SIGTERM)
        process.communicate(timeout=30)
        assert process.returncode in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.wait()


def test_a_taken_port_is_told_before_the_engine_is_loaded(nano_artifact: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "glm_mtp_export", "serve", str(nano_artifact), "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"127.0.0.1:{port} cannot be listened on" in done.stderr and "Traceback" not in done.stderr
