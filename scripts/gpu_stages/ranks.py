"""The embedded model over several ranks of one machine, against one, with TensorRT-RTX; with fewer cards than ranks they share one.

    ranks.py prepare WORK SIZE [DTYPE]   artifacts and engines of one and of SIZE ranks (by columns, by experts); needs no card
    ranks.py answers ARTIFACT OUT        on every rank of a launcher, or alone: answers, step times, a long answer; rank 0 has OUT
    ranks.py check WORK SIZE [DTYPE]     answers of one and of SIZE ranks against each other; prints a JSON line
    ranks.py killed WORK SIZE [DTYPE]    kills the last rank in the middle of a long answer; prints a JSON line
    ranks.py launch SIZE COMMAND...      runs a command as SIZE ranks, for lack of cards on a single one, which torchrun does not

`check` and `killed` prepare what is not there, and exit with 1 when a bound is broken: ids equal one card's but where its two
likeliest tokens are closer than CLOSE_NATS (sums of slices round differently; quantised activations step further); a killed rank
ends the others within END_SECONDS. DTYPE is of the weights, bfloat16 unless given. Ranks that share a card wait for each other by
turns of it, so their times mean nothing; what they compute is what they compute on cards of their own.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from glm_mtp_export.config import ParallelConfig, SpeculationConfig  # noqa: E402
from glm_mtp_export.runtime import Runtime, SamplingParams  # noqa: E402
from glm_mtp_export.runtime.sessions.rank import follow_artifact  # noqa: E402
from gpu_stages import nano  # noqa: E402
from gpu_stages.artifacts import at_home, built  # noqa: E402

CLOSE_NATS = {"bfloat16": 0.1, "float8_e4m3fn": 1.5, "float4_e2m1fnx2": 1.5}
END_SECONDS, JOB_SECONDS = 45, 120
BACKEND, PORT = "tensorrt-rtx", 29610


def splits(size: int) -> dict[str, ParallelConfig]:
    """Artifacts by name."""
    return {"one": ParallelConfig(), "columns": ParallelConfig(size), "experts": ParallelConfig(size, True)}


def prepare(work: Path, size: int, dtype: str) -> None:
    """Export and build what is not there."""
    for name, parallel in splits(size).items():
        artifact = work / dtype / name
        speculation = SpeculationConfig(num_speculative_tokens=nano.NUM_DRAFTS, num_logprobs=2)
        built(artifact, dtype, nano.CACHE_DTYPES[dtype], speculation, parallel)
        at_home(artifact)


def answers(artifact: Path, out: Path) -> None:
    """One rank's part."""
    logging.basicConfig(level=logging.INFO)
    if follow_artifact(artifact, BACKEND):
        return
    with Runtime.load(artifact, BACKEND) as runtime:
        found = nano.answers(runtime, 2)
        rows = nano.decode_rows(runtime.session, runtime.session.manifest.dtype)
        size = runtime.session.manifest.parallel.tensor_parallel_size
        length = 3500 if size <= num_cards() else 350
        params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        out.with_suffix(".ready").touch()
        num_calls = sum(1 for delta in runtime.stream(nano.questions()[0].prompt, params) if delta.token_ids)
    margins = [[p.top[0][1] - p.top[1][1] if len(p.top) > 1 else None for p in c.logprobs] for c in found]
    report = {"ids": [list(c.token_ids) for c in found], "margins": margins, "rows": rows, "long_calls": num_calls}
    out.write_text(json.dumps(report), encoding="utf-8")


def num_cards() -> int:
    """Cards that the driver lists; 0 without one."""
    if shutil.which("nvidia-smi") is None:
        return 0
    return len(subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).stdout.splitlines())


def rank_environment(rank: int, size: int, cards: int) -> dict[str, str]:
    """What a launcher sets for a rank of this machine, nothing for a job of one. NCCL refuses two ranks on one card of a host, so
    where they share one each is made a host of its own, and large sums go through the loopback interface."""
    if size == 1:
        return {}
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(PORT), "RANK": str(rank), "WORLD_SIZE": str(size)}
    if cards >= size:
        return env | {"LOCAL_RANK": str(rank)}
    apart = dict.fromkeys(("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"), "1")
    return env | apart | {"LOCAL_RANK": "0", "NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo"}


def started(command: list[str], size: int, out: Path | None) -> list[subprocess.Popen[bytes]]:
    """The processes of a job, rank 0 first; each logs beside `out`, if there is one."""
    processes, cards = [], num_cards()
    for rank in range(size):
        env = {**os.environ, **rank_environment(rank, size, cards)}
        if out is None:
            processes.append(subprocess.Popen(command, env=env))
            continue
        with out.with_suffix(f".rank{rank}.log").open("wb") as log:
            processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))
    return processes


def started_answers(artifact: Path, out: Path, size: int) -> list[subprocess.Popen[bytes]]:
    """A job that answers."""
    return started([sys.executable, __file__, "answers", str(artifact), str(out)], size, out)


def finished(processes: list[subprocess.Popen[bytes]], seconds: float) -> list[int | None]:
    """Exit codes; None for one that had to be killed."""
    deadline, codes = time.monotonic() + seconds, []
    for process in processes:
        try:
            codes.append(process.wait(max(deadline - time.monotonic(), 0.1)))
        except subprocess.TimeoutExpired:
            process.kill()
            codes.append(None)
    return codes


def last_words(out: Path, size: int) -> list[str]:
    """The ends of the ranks' logs."""
    logs = [out.with_suffix(f".rank{rank}.log") for rank in range(size)]
    return [f"{log.name}: {log.read_text(encoding='utf-8', errors='replace').strip()[-400:]}" for log in logs]


def killed(work: Path, size: int, dtype: str) -> bool:
    """Kill the last rank in the middle of a long answer; True when the others end as they should."""
    prepare(work, size, dtype)
    out = work / "killed.json"
    out.with_suffix(".ready").unlink(missing_ok=True)
    processes = started_answers(work / dtype / "columns", out, size)
    deadline = time.monotonic() + JOB_SECONDS
    while not out.with_suffix(".ready").exists() and time.monotonic() < deadline and processes[0].poll() is None:
        time.sleep(0.05)
    time.sleep(0.5)
    was_running = processes[0].poll() is None and out.with_suffix(".ready").exists()
    processes[-1].send_signal(signal.SIGKILL)
    begin = time.monotonic()
    codes = finished(processes, END_SECONDS)
    seconds = round(time.monotonic() - begin, 2)
    passed = was_running and codes[-1] == -signal.SIGKILL and None not in codes and 0 not in codes
    words = last_words(out, size)
    print(json.dumps({"size": size, "passed": passed, "codes": codes, "seconds": seconds, "last_words": words}))
    return passed


def check(work: Path, size: int, dtype: str) -> bool:
    """Everything else; True when all bounds hold."""
    prepare(work, size, dtype)
    found: dict[str, Any] = {}
    problems: list[str] = []
    seconds: dict[str, float] = {}
    for name, parallel in splits(size).items():
        out = work / dtype / f"{name}.json"
        out.unlink(missing_ok=True)
        begin, ranks = time.monotonic(), parallel.tensor_parallel_size
        codes = finished(started_answers(work / dtype / name, out, ranks), JOB_SECONDS)
        seconds[name] = round(time.monotonic() - begin, 1)
        if any(codes) or None in codes:
            problems += [f"{name}: exit codes {codes}", *last_words(out, ranks)]
            continue
        found[name] = json.loads(out.read_text(encoding="utf-8"))
    differences = {n: nano.first_differences(found["one"], r["ids"]) for n, r in found.items() if "one" in found}
    for name, places in differences.items():
        problems += [f"{name}: {d}" for d in places if d["margin"] is None or d["margin"] >= CLOSE_NATS[dtype]]
    summary = {
        "size": size,
        "cards": min(size, num_cards()),
        "dtype": dtype,
        "problems": problems,
        "differences": differences,
        "step_ms": {n: {row["batch"]: row["step_ms"] for row in report["rows"]} for n, report in found.items()},
        "long_calls": {n: report["long_calls"] for n, report in found.items()},
        "mean_ids": {n: round(statistics.mean(map(len, report["ids"])), 2) for n, report in found.items()},
        "seconds": seconds,
    }
    print(json.dumps(summary))
    return not problems


def main() -> None:
    """Run one of the programs of the module docstring."""
    if sys.argv[1] == "launch":
        codes = finished(started(sys.argv[3:], int(sys.argv[2]), None), JOB_SECONDS)
        sys.exit(max(code if code is not None and code >= 0 else 1 for code in codes))
    command, first, second = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    if command == "answers":
        answers(first, Path(second))
        return
    first.mkdir(parents=True, exist_ok=True)
    dtype = sys.argv[4] if len(sys.argv) > 4 else "bfloat16"
    if command == "prepare":
        prepare(first, int(second), dtype)
    elif not {"check": check, "killed": killed}[command](first, int(second), dtype):
        sys.exit(1)


if __name__ == "__main__":
    main()
