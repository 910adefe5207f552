"""scripts/gpu_stages/ranks.py starts ranks of one machine, on cards of their own or on one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gpu_stages" / "ranks.py"
sys.path.insert(0, str(ROOT / "scripts"))

from gpu_stages import ranks  # noqa: E402


def test_ranks_have_cards_of_their_own_where_there_are_enough() -> None:
    for rank in range(2):
        env = ranks.rank_environment(rank, 2, cards=2)
        assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"]) == (str(rank), str(rank), "2")
        assert not any(name.startswith("NCCL") for name in env)
    assert ranks.rank_environment(0, 1, cards=1) == {}


@pytest.mark.parametrize("cards", [0, 1, 3])
def test_ranks_that_share_a_card_are_hosts_of_their_own_to_nccl(cards: int) -> None:
    found = [ranks.rank_environment(rank, 4, cards) for rank in range(4)]
    assert {env["LOCAL_RANK"] for env in found} == {"0"}
    assert len({env["NCCL_HOSTID"] for env in found}) == 4
    assert len({env["MASTER_PORT"] for env in found}) == 1


def launched(tmp_path: Path, code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "launch", "2", sys.executable, "-c", code, str(tmp_path)]
    return subprocess.run(command, text=True, capture_output=True, check=False, timeout=60)


def test_launch_runs_a_command_once_a_rank(tmp_path: Path) -> None:
    code = (
        "import os, sys, json; json.dump({k: os.environ[k] for k in ('RANK', 'WORLD_SIZE')}, "
        "open(sys.argv[1] + '/' + os.environ['RANK'], 'w'))"
    )
    assert launched(tmp_path, code).returncode == 0
    assert [json.loads((tmp_path / str(rank)).read_text())["WORLD_SIZE"] for rank in range(2)] == ["2", "2"]


@pytest.mark.parametrize("end", ["sys.exit(3)", "os.kill(os.getpid(), 9)"], ids=["exit", "signal"])
def test_launch_fails_when_a_rank_does(tmp_path: Path, end: str) -> None:
    result = launched(tmp_path, f"import os, sys\nif os.environ['RANK'] == '1': {end}")
    assert result.returncode != 0
