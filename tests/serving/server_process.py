"""The server on a free loopback port, in a thread of the test's process."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import uvicorn

from glm_mtp_export.runtime.runtime import Runtime
from glm_mtp_export.serving.draining_server import DrainingServer
from glm_mtp_export.serving.openai_server import ServerLimits, create_app
from glm_mtp_export.serving.served_model import ServedModel


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(condition: Any, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.005)


class RunningServer:
    """`options` are those of ServerLimits."""

    def __init__(self, folder: Path, runtime: Runtime, **options: Any) -> None:
        options.setdefault("drain_seconds", 0.0)
        self.runtime = runtime
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.app = create_app(runtime, ServedModel.load(folder, "nano", runtime.tokenizer), ServerLimits(**options))
        config = uvicorn.Config(self.app, host="127.0.0.1", port=self.port, log_level="warning")
        self._server = DrainingServer(config, self.app.state.front, options["drain_seconds"])
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        wait_until(lambda: self._server.started)
        # one client each for all requests: making one costs more than a request
        limits = httpx.Limits(max_connections=200, max_keepalive_connections=64)
        self.client = httpx.Client(timeout=60, limits=limits, trust_env=False)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.client.post(f"{self.url}{path}", json=body, **options)

    def get(self, path: str) -> httpx.Response:
        return self.client.get(f"{self.url}{path}")

    def is_idle(self) -> bool:
        """Nothing runs or waits, and no page is held."""
        gauges = self.runtime.gauges()
        return (gauges.num_running, gauges.num_waiting, gauges.num_pages_held, self.app.state.front.num_sequences) == (
            0,
            0,
            0,
            0,
        )

    def stop(self, *, keep_client: bool = False, is_forced: bool = False) -> None:
        """`keep_client`: a request that is still on its way needs it. `is_forced`: as after a second signal."""
        if not keep_client:
            self.client.close()
            self.openai.close()
        self._server.force_exit = is_forced
        self._server.should_exit = True
        self._thread.join(timeout=20)
