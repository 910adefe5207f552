"""The embedded model as a job of two and four processes: each reads its slices, all give the ids of the whole model."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "rank_nano.py"


def start(whole_experts: bool, **environment: str) -> subprocess.Popen[str]:
    """One process; launcher variables of this one do not reach it."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    env = {name: value for name, value in os.environ.items() if name not in names} | environment
    command = [sys.executable, str(PROGRAM), str(int(whole_experts))]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(processes: list[subprocess.Popen[str]]) -> str:
    """What the first one printed, when all ended well."""
    try:
        texts = [process.communicate(timeout=240) for process in processes]
        assert [process.returncode for process in processes] == [0] * len(processes), texts
        return texts[0][0]
    finally:
        for process in processes:
            process.kill()


@pytest.fixture(scope="module")
def whole() -> list[list[int]]:
    """Ids of one process with all weights."""
    return json.loads(finished([start(False)]))


@pytest.mark.parametrize(("size", "whole_experts"), [(2, False), (4, True)], ids=["2 by columns", "4 by experts"])
def test_ranks_give_the_whole_models_ids(whole: list[list[int]], size: int, whole_experts: bool) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])  # the job meets one above, the sums two above
    launcher = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [start(whole_experts, RANK=str(rank), LOCAL_RANK=str(rank), **launcher) for rank in range(size)]
    found = json.loads(finished(ranks))
    assert found == whole
    assert len(found) == 3 and sum(map(len, found)) >= 15
