"""A real Triton on free loopback ports, from the server that the nvidia-pytriton wheel carries.

The wheel is fetched once with pip into a folder that later runs reuse, and unpacked; the stub gets a virtual environment of
its own with numpy before 2, which this release's Python backend needs.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from pathlib import Path

import httpx
from server_process import free_port

WHEEL = "nvidia-pytriton==0.7.0"


class TritonMissingError(Exception):
    """The server cannot be had here."""


def _cache() -> Path:
    folder = Path(os.environ.get("GLM_MTP_TEST_CACHE", Path(tempfile.gettempdir()) / f"glm-mtp-tests-{os.getuid()}"))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise TritonMissingError(f"{' '.join(command[:4])} failed: {done.stderr.strip().splitlines()[-1:]}")


def installed_server() -> tuple[Path, Path]:
    """Folder of the unpacked server and of the stub's environment."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    root = _cache() / f"triton-{version}"
    server, environment = root / "pytriton" / "tritonserver", root / "environment"
    if (root / "complete").exists():
        return server, environment
    with tempfile.TemporaryDirectory() as download:
        _run(sys.executable, "-m", "pip", "download", "--no-deps", "-d", download, WHEEL)
        (wheel,) = Path(download).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(root)
    stub = server / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.exists():
        raise TritonMissingError(f"the wheel has no stub for Python {version}")
    for program in (server / "bin" / "tritonserver", stub):
        program.chmod(0o755)
    link = server / "backends" / "python" / stub.name
    link.unlink(missing_ok=True)
    link.symlink_to(stub)
    _run(sys.executable, "-m", "venv", str(environment))
    _run(str(environment / "bin" / "python"), "-m", "pip", "install", "-q", "numpy<2")
    (root / "complete").touch()
    return server, environment


class RunningTriton:
    """Started with explicit model control, so that tests can unload and load."""

    def __init__(self, repository: Path, models: tuple[str, ...], log: Path) -> None:
        server, _ = installed_server()
        self.http, self.grpc, self.metrics_port = free_port(), free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.http}"
        self.log = log
        self._models = models
        command = [str(server / "bin" / "tritonserver"), "--model-repository", str(repository)]
        command += ["--backend-directory", str(server / "backends"), "--model-control-mode", "explicit"]
        for model in models:
            command += ["--load-model", model]
        for kind, port in (("http", self.http), ("grpc", self.grpc), ("metrics", self.metrics_port)):
            command += [f"--{kind}-address", "127.0.0.1", f"--{kind}-port", str(port)]
        command += ["--exit-timeout-secs", "5"]
        libraries = str(sysconfig.get_config_var("LIBDIR"))
        environment = {**os.environ, "LD_LIBRARY_PATH": libraries, "OMP_NUM_THREADS": "1"}
        with log.open("wb") as stream:
            self.process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=environment)
        deadline = time.monotonic() + 90
        while not self.is_ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise AssertionError("Triton did not start:\n" + log.read_text(errors="replace")[-4000:])
            time.sleep(0.1)

    def is_ready(self) -> bool:
        """All models ready. Triton as a whole is not while any other model has failed to load."""
        urls = [f"{self.url}/v2/health/live", *(f"{self.url}/v2/models/{model}/ready" for model in self._models)]
        try:
            return all(httpx.get(url, timeout=5).status_code == 200 for url in urls)
        except httpx.TransportError:
            return False

    def worker_pids(self) -> list[int]:
        """Engine processes started by this Triton's stubs."""
        return [pid for pid in _pids_of(b"glm_mtp_export.serving.triton.worker") if self.process.pid in _ancestors(pid)]

    def metric(self, name: str) -> float:
        lines = httpx.get(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=5).text.splitlines()
        return float(next((line.split()[-1] for line in lines if line.startswith(name + "{")), "nan"))

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _pids_of(argument: bytes) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and argument in (entry / "cmdline").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue  # it ended while we looked
    return found


def _ancestors(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):  # it ended while we looked
        while pid > 1:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
            found.append(pid)
    return found
