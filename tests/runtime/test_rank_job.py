"""Jobs of several ranks as processes over the toy model: same text, and one line and an end for every way to lose a rank."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import pytest

from glm_mtp_export.errors import EngineError, OptionError
from glm_mtp_export.runtime.rank_job import LOST_EXIT_CODE
from glm_mtp_export.runtime.rank_place import RankPlace, choose_card, place_from_environment
from glm_mtp_export.runtime.session import StepInputs
from glm_mtp_export.runtime.step_message import packed, packed_bitmask, unpacked, unpacked_bitmask

PROGRAM = Path(__file__).parent / "rank_process.py"
# Silence 2 s, step 3 s, grace 1 s in rank_process.py, and the start of an interpreter on a busy machine.
MOST_SECONDS = 45


@dataclass
class Ended:
    """What a rank left behind."""

    code: int
    stdout: str
    stderr: str


def free_port() -> int:
    """One that is free, and the next one too: the ranks meet one port above it."""
    while True:
        with socket.socket() as first, socket.socket() as second, contextlib.suppress(OSError, OverflowError):
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            second.bind(("127.0.0.1", port + 1))
            return port


def run_job(
    size: int, mode: str = "ok", culprit: int = 0, at: int = 0, prefixes: tuple[list[str], ...] = (), **environment: str
) -> tuple[list[Ended], float]:
    """Start `size` ranks, wait for all; what each left, and the seconds it took."""
    port, begin = str(free_port()), time.monotonic()
    processes = []
    for rank in range(size):
        names = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env = {**os.environ, **{name: str(value) for name, value in names.items()}, **environment}
        command = [*(prefixes[rank] if prefixes else []), sys.executable, str(PROGRAM), mode, str(culprit), str(at)]
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    ended = []
    try:
        for rank, process in enumerate(processes):
            if mode == "stop" and rank == culprit:
                continue
            left = max(MOST_SECONDS - (time.monotonic() - begin), 1)
            out, err = process.communicate(timeout=left)
            ended.append(Ended(process.returncode, out, err))
        return ended, time.monotonic() - begin
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """What one process generates."""
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, str(PROGRAM), "ok", "0", "0"]
    return json.loads(subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout)


def test_ranks_generate_what_one_process_does(alone: list[list[int]]) -> None:
    ended, _ = run_job(4)
    assert [e.code for e in ended] == [0] * 4, ended
    assert json.loads(ended[0].stdout) == alone
    calls = {json.loads(e.stdout)["calls"] for e in ended[1:]}
    assert len(calls) == 1 and calls.pop() > 3


def test_ranks_launch_ahead_together(alone: list[list[int]]) -> None:
    ended, _ = run_job(3, AHEAD="1")
    assert [e.code for e in ended] == [0] * 3, ended
    assert json.loads(ended[0].stdout) == alone
    told = [json.loads(e.stdout) for e in ended[1:]]
    assert told[0] == told[1]
    # One prefill at least continues nothing; the second request's masks depend on tokens that were not known.
    assert told[0]["launches"] == told[0]["calls"] > told[0]["continued"] > told[0]["masks"] > 0


def test_torchrun_starts_a_job(alone: list[list[int]], tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
    ]
    command += ["--redirects", "3", "--log-dir", str(tmp_path), str(PROGRAM), "ok", "0", "0"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=2 * MOST_SECONDS)
    assert found.returncode == 0, found.stderr
    texts = {path.parent.name: path.read_text(encoding="utf-8") for path in tmp_path.rglob("stdout.log")}
    assert json.loads(texts["0"]) == alone and json.loads(texts["1"])["calls"] > 3


def mpirun(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A job of three ranks under Open MPI; each writes to `folder`/1/rank.<n>/stdout. Skips without mpirun."""
    if shutil.which("mpirun") is None:
        pytest.skip("needs Open MPI's mpirun")
    names = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "MASTER_PORT": str(free_port())}
    command = ["mpirun", "-n", "3", "--oversubscribe", "-x", "MASTER_ADDR=127.0.0.1", "-x", "MASTER_PORT"]
    command += ["--output-filename", str(folder), sys.executable, str(PROGRAM), *arguments]
    env = {**os.environ, **names}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=2 * MOST_SECONDS)


def test_mpirun_starts_a_job_and_ends_with_a_lost_rank(alone: list[list[int]], tmp_path: Path) -> None:
    found = mpirun(tmp_path / "whole", "ok", "0", "0")
    assert found.returncode == 0, found.stderr
    texts = {path.parent.name: path.read_text(encoding="utf-8") for path in tmp_path.rglob("stdout")}
    assert json.loads(texts["rank.0"]) == alone
    assert all(json.loads(texts[f"rank.{rank}"])["calls"] > 3 for rank in (1, 2))
    found = mpirun(tmp_path / "lost", "die", "2", "3")
    assert found.returncode != 0 and "signal 9" in found.stderr + found.stdout


@pytest.mark.parametrize("ahead", ["0", "1"], ids=["one by one", "ahead"])
@pytest.mark.parametrize(
    ("mode", "culprit", "line"),
    [
        ("die", 2, "rank 2 ended without a word"),
        ("raise", 1, "the card fell off the bus"),
        ("raise", 0, "the card fell off the bus"),
        ("hang", 1, "a step has not ended for 3 s"),
        ("stop", 1, "rank 1 has been silent for 2 s"),
    ],
    ids=["killed", "error", "error of rank 0", "hung", "stopped"],
)
def test_a_lost_rank_ends_the_job_with_its_line(mode: str, culprit: int, line: str, ahead: str) -> None:
    ended, seconds = run_job(3, mode, culprit, at=3, AHEAD=ahead)
    survivors = [e for rank, e in enumerate(ended) if not (mode == "die" and rank == culprit)]
    assert {e.code for e in survivors} == {2}, survivors
    if mode == "die":
        assert ended[culprit].code == -9
    for each in survivors:
        lines = each.stderr.splitlines()
        assert any(text.startswith("Error: ") and line in text for text in lines), each.stderr
        assert sum("rank_lost" in text for text in lines) <= 1
    assert seconds < MOST_SECONDS


def test_rank_0_dying_ends_the_others() -> None:
    ended, _ = run_job(3, "die", 0, at=3)
    assert [e.code for e in ended] == [-9, 2, 2]
    assert all("job has ended: rank 0 ended without a word" in e.stderr for e in ended[1:])


def test_a_call_that_nothing_wakes_is_ended_by_force() -> None:
    ended, _ = run_job(2, "die", 1, at=3, ABORT_IS_DEAF="1")
    assert [e.code for e in ended] == [LOST_EXIT_CODE, -9]
    assert "rank 0: ERROR rank_lost rank=0" in ended[0].stderr and "ending the process" in ended[0].stderr


def test_a_rank_of_another_release_is_refused_by_name() -> None:
    ended, _ = run_job(2, "other-release", 1)
    assert [e.code for e in ended] == [2, 2]
    for each in ended:
        assert "has release '2', rank 0 has '1'. Start all ranks with the same" in each.stderr


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_cannot_load_ends_the_others_before_the_first_call(culprit: int) -> None:
    ended, _ = run_job(3, "refuse-to-load", culprit)
    assert [e.code for e in ended] == [2] * 3
    assert all("no room for the weights" in e.stderr for e in ended)


def test_a_rank_that_never_comes_is_named() -> None:
    port = str(free_port())
    names = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    code = (
        "from rank_process import *; import sys; from dataclasses import replace\n"
        "try: lead(place_from_environment(), JobIdentity('1', 'd', 't'), Loader(0), replace(TIMEOUTS, join=0.5))\n"
        "except EngineError as error: sys.exit(str(error))"
    )
    env = {**os.environ, **names, "PYTHONPATH": str(PROGRAM.parent)}
    found = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=MOST_SECONDS)
    assert found.stderr.strip().endswith("rank 1, 2 did not join within 0.5 s. See their logs.")


@pytest.fixture
def two_machines() -> Iterator[tuple[str, str]]:
    """Two network namespaces joined by a cable; skips where they cannot be made."""
    names = (f"glm{os.getpid() % 10000}a", f"glm{os.getpid() % 10000}b")
    if shutil.which("ip") is None:
        pytest.skip("needs iproute2")
    commands = [f"ip netns add {name}" for name in names]
    commands.append(f"ip link add {names[0]} netns {names[0]} type veth peer name {names[1]} netns {names[1]}")
    for index, name in enumerate(names, 1):
        commands += [f"ip -n {name} addr add 10.77.0.{index}/24 dev {name}", f"ip -n {name} link set {name} up"]
        commands += [f"ip -n {name} link set lo up"]
    try:
        for command in commands:
            found = subprocess.run(command.split(), capture_output=True, text=True)
            if found.returncode:
                pytest.skip(f"{command}: {found.stderr.strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def test_ranks_of_two_machines_meet_and_notice_a_cut_cable(two_machines, alone: list[list[int]]) -> None:
    here, there = two_machines
    prefixes = tuple(["ip", "netns", "exec", name] for name in (here, here, there))
    ended, _ = run_job(3, prefixes=prefixes, MASTER_ADDR="10.77.0.1")
    assert [e.code for e in ended] == [0] * 3, ended
    assert json.loads(ended[0].stdout) == alone
    # Nobody closes a connection over a cut cable: only silence tells.
    cut = ["sh", "-c", f'"$@" & work=$!; sleep 6; ip link set {there} down; wait $work', "sh"]
    prefixes = (prefixes[0], prefixes[1], [*prefixes[2], *cut])
    ended, seconds = run_job(3, "hang", 9, at=4, prefixes=prefixes, MASTER_ADDR="10.77.0.1", STEP_SECONDS="60")
    assert [e.code for e in ended] == [2] * 3, ended
    assert "rank 2 has been silent for 2 s" in ended[0].stderr or "rank 2 takes no data" in ended[0].stderr
    assert seconds < MOST_SECONDS


# ---- the environment


def test_places_of_the_launchers() -> None:
    assert place_from_environment({}) is None
    assert place_from_environment({"RANK": "0", "WORLD_SIZE": "1"}) is None
    torchrun = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "1234"}
    assert place_from_environment(torchrun) == RankPlace(9, 16, 1, "node0", 1235)
    mpirun = {
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_SIZE": "8",
        "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    }
    assert place_from_environment(mpirun) == RankPlace(3, 8, 3, "127.0.0.1", 29501)
    assert place_from_environment({"PMI_RANK": "1", "PMI_SIZE": "2"}) == RankPlace(1, 2, 1, "127.0.0.1", 29501)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2, but WORLD_SIZE is 2"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x', expected a number"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "-1"}, "MASTER_PORT is '-1'"),
    ],
)
def test_an_environment_that_makes_no_sense_is_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        place_from_environment(environment)


def test_each_rank_sees_its_own_card() -> None:
    place = RankPlace(5, 8, 1, "", 0)
    environment: dict[str, str] = {}
    choose_card(place, environment)
    assert environment == {"CUDA_VISIBLE_DEVICES": "1"}
    environment = {"CUDA_VISIBLE_DEVICES": "4,6"}
    choose_card(place, environment)
    assert environment == {"CUDA_VISIBLE_DEVICES": "6"}
    with pytest.raises(OptionError, match=r"CUDA_VISIBLE_DEVICES=4 names 1 cards, but this is local rank 1"):
        choose_card(place, {"CUDA_VISIBLE_DEVICES": "4"})


# ---- the message


def step() -> StepInputs:
    """Odd sizes, so that alignment matters; arrays that take no memory among them."""
    one, two = np.arange(5, dtype=np.int32), np.arange(3, dtype=np.int32)
    flags, reals = np.array([True, False, True]), np.array([0.5, 1.0, 2.0], dtype=np.float32)
    ids = np.broadcast_to(np.int32(7), (3000,))
    mask = np.broadcast_to(np.int32(-1), (3, 2, 500))
    return StepInputs(
        token_ids=one, row_offsets=np.array([0, 1, 3, 5], np.int32), num_drafts=two, draft_tokens=np.ones((3, 1), np.int32),
        cache_lengths=two, block_table=np.arange(6, dtype=np.int32).reshape(3, 2), next_prompt_token=-two,
        temperature=reals, top_k=two, top_p=reals, min_p=reals, seed=np.array([1, -(2**62), 3]), sample_offset=two,
        in_thinking_phase=flags, history_ids=ids, history_offsets=np.array([0, 0, 3000, 3000], np.int32), token_bitmask=mask,
    )  # fmt: skip


def test_a_step_travels_unchanged() -> None:
    message = packed(step())
    assert len(message) < 1000, "3000 equal ids take eight bytes, and so do 3000 words of a mask"
    found, follows = unpacked(message)
    assert follows is None
    for field in fields(StepInputs):
        before, after = getattr(step(), field.name), getattr(found, field.name)
        if before is None:
            assert after is None
        else:
            assert after.dtype == before.dtype and np.array_equal(after, before), field.name


def test_what_a_call_continues_and_its_mask_travel_unchanged() -> None:
    follows = np.array([1, -1, 0], np.int32)
    found = unpacked(packed(step(), follows))[1]
    assert found is not None and found.dtype == np.int32 and found.tolist() == [1, -1, 0]
    mask = np.arange(12, dtype=np.int32).reshape(3, 2, 2)
    assert np.array_equal(unpacked_bitmask(packed_bitmask(mask)), mask)
    with pytest.raises(EngineError, match="cannot be read"):
        unpacked_bitmask(packed(replace(step(), token_bitmask=None)))


def test_an_array_that_changes_travels_whole_even_when_it_is_constant_now() -> None:
    mask = np.full((3, 2, 2), -1, np.int32)
    first = packed_bitmask(mask)
    mask[1, 0, 0] = 5
    assert unpacked_bitmask(packed_bitmask(mask))[1, 0, 0] == 5 and len(first) > mask.nbytes
    view = mask[:1]
    view.setflags(write=False)  # but not what it is a view of
    mask[:] = 3
    assert len(packed_bitmask(view)) > view.nbytes


@pytest.mark.parametrize("damage", [lambda m: m[:-9], lambda m: m[:40], lambda m: b"\xff" + m[1:]])
def test_a_damaged_step_is_refused(damage) -> None:
    with pytest.raises(EngineError, match="cannot be read"):
        unpacked(damage(packed(step())))
