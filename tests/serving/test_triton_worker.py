"""The engine process's side without a Triton: messages over its socket, from a scripted engine."""

from __future__ import annotations

import json
import os
import queue
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_model import Script, make_runtime
from server_process import wait_until

from glm_mtp_export.serving.served_model import ServedModel
from glm_mtp_export.serving.triton.engine_client import EngineClient, EngineProcessError, socket_path
from glm_mtp_export.serving.triton.worker import Worker

ANSWER = "ok</think>Let me see.<tool_call>f<arg_key>k</arg_key><arg_value>数 🎉</arg_value></tool_call>"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"k": {"type": "string"}}}}}]


class Side:
    """A worker and a client connected to it."""

    def __init__(self, folder: Path, path: Path, script: Script, **options: Any) -> None:
        self.runtime = make_runtime(folder, script)
        model = ServedModel.load(folder, "nano", self.runtime.tokenizer)
        self.worker = Worker(self.runtime, model, str(path), **options)
        self._thread = threading.Thread(target=self.worker.serve_forever, daemon=True)
        self._thread.start()
        wait_until(path.exists)
        self.path = str(path)
        self.client = EngineClient(self.path, None)

    def ask(self, **inputs: Any) -> list[dict[str, Any]]:
        """All events of one request."""
        events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.client.submit({"inputs": {k: v if isinstance(v, list) else [v] for k, v in inputs.items()}}, events.put)
        found = [events.get(timeout=30)]
        while not found[-1]["final"]:
            found.append(events.get(timeout=30))
        return found

    def is_idle(self) -> bool:
        gauges = self.runtime.gauges()
        return (
            gauges.num_running == gauges.num_waiting == gauges.num_pages_held == self.worker._front.num_sequences == 0
        )

    def close(self) -> None:
        self.client.close()
        self.worker.close()
        self._thread.join()


@pytest.fixture
def start(folder: Path, tmp_path: Path) -> Iterator[Callable[..., Side]]:
    sides: list[Side] = []

    def make(script: Script | None = None, **options: Any) -> Side:
        sides.append(Side(folder, tmp_path / f"{len(sides)}.sock", script or Script(), **options))
        return sides[-1]

    yield make
    for side in sides:
        side.close()


def joined(events: list[dict[str, Any]], name: str) -> str:
    return "".join(event["outputs"].get(name, [""])[0] for event in events)


def test_streamed_equals_whole(start: Callable[..., Side]) -> None:
    side = start(Script({"call": ANSWER}))
    fields = {"messages": json.dumps([{"role": "user", "content": "call"}]), "tools": json.dumps(TOOLS)}
    (whole,) = side.ask(**fields)
    parts = side.ask(streaming=True, **fields)
    assert len(parts) > 3 and [event["final"] for event in parts].count(True) == 1
    assert joined(parts, "text_output") == joined([whole], "text_output") == "Let me see."
    assert joined(parts, "reasoning_content") == joined([whole], "reasoning_content") == "ok"
    for events in (parts, [whole]):
        (call,) = json.loads(joined(events, "tool_calls"))
        assert json.loads(call["function"]["arguments"]) == {"k": "数 🎉"}
    last, only = parts[-1]["outputs"], whole["outputs"]
    names = ("finish_reason", "prompt_tokens", "completion_tokens", "total_draft_tokens", "acceptance_rate")
    assert {n: last[n] for n in names} == {n: only[n] for n in names}
    assert side.runtime.tokenizer is not None
    num_tokens = len(side.runtime.tokenizer.encode(ANSWER)) + 1  # and the stop id
    assert (last["finish_reason"], last["completion_tokens"]) == (["tool_calls"], [num_tokens])


def test_outputs_follow_the_return_flags(start: Callable[..., Side]) -> None:
    side = start()
    flags = {"return_finish_reason": False, "return_stop_reason": False, "return_perf_metrics": False}
    (event,) = side.ask(text_input="x", sampling_param_max_tokens=4, **flags)
    assert set(event["outputs"]) == {"text_output"}
    (event,) = side.ask(text_input="x", sampling_param_max_tokens=4, return_cumulative_logprob=True)
    assert event["outputs"]["cumulative_logprob"] == [-1.0]  # four tokens of -0.25


def test_default_length_and_stop_reason(start: Callable[..., Side]) -> None:
    side = start(Script({"once": " upon a time"}))
    (event,) = side.ask(text_input="endless")
    assert (event["outputs"]["completion_tokens"], event["outputs"]["finish_reason"]) == ([32], ["length"])
    (event,) = side.ask(text_input="once", sampling_param_stop=["zz", "a t"])
    assert event["outputs"]["text_output"] == [" upon "] and event["outputs"]["stop_reason"] == ["a t"]


@pytest.mark.parametrize(
    ("inputs", "part"),
    [
        ({}, "Found none of"),
        ({"text_input": ["a", "b"]}, "text_input has 2 values"),
        ({"text_input": "a", "sampling_param_temperature": float("inf")}, "not a finite number"),
        ({"messages": "[]"}, "messages is empty"),
        ({"messages": "[[]]"}, "lists of objects"),
        ({"messages": '[{"role": "x"}]'}, "unknown role"),
        ({"messages": "[" + '{"a":' * 70 + "1" + "}" * 70 + "]"}, "nests deeper"),
        ({"messages": "[]", "chat_template_kwargs": '{"messages": 1}'}, "cannot be set"),
        ({"text_input": "a\ud800"}, "not valid Unicode"),
    ],
)
def test_bad_input_is_the_requests_fault(start: Callable[..., Side], inputs: dict[str, Any], part: str) -> None:
    side = start()
    (event,) = side.ask(**inputs)
    assert (event["type"], event["code"]) == ("error", "invalid") and part in event["message"], event
    assert side.ask(text_input="x", sampling_param_max_tokens=1)[0]["type"] == "outputs"


def test_an_abort_is_answered_once_and_frees_the_slot(start: Callable[..., Side]) -> None:
    side = start(Script(step_seconds=0.01))
    events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    fields = {"text_input": ["x"], "streaming": [True], "sampling_param_max_tokens": [5000]}
    number = side.client.submit({"inputs": fields}, events.put)
    assert not events.get(timeout=10)["final"]
    side.client.abort(number)
    side.client.abort(number)
    while not (event := events.get(timeout=10))["final"]:
        pass
    assert event["code"] == "cancelled"
    wait_until(side.is_idle, seconds=3)
    assert events.empty()


def test_a_connection_that_ends_takes_its_requests_with_it_and_no_others(start: Callable[..., Side]) -> None:
    side = start(Script(step_seconds=0.01))
    other = EngineClient(side.path, None)
    lost: list[dict[str, Any]] = []
    kept: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    fields = {"text_input": ["x"], "sampling_param_max_tokens": [4000]}
    other.submit({"inputs": fields}, lost.append)
    side.client.submit({"inputs": {**fields, "sampling_param_max_tokens": [40]}}, kept.put)
    wait_until(lambda: side.runtime.gauges().num_running == 2)
    other.close()
    assert [event["code"] for event in lost] == ["unavailable"]
    assert kept.get(timeout=10)["type"] == "outputs"
    wait_until(side.is_idle, seconds=3)


def test_too_many_requests_are_unavailable(start: Callable[..., Side]) -> None:
    side = start(Script(step_seconds=0.01), max_sequences=1)
    first: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    side.client.submit({"inputs": {"text_input": ["x"], "sampling_param_max_tokens": [60]}}, first.put)
    wait_until(lambda: side.worker._front.num_sequences == 1)
    (event,) = side.ask(text_input="x")
    assert event["code"] == "unavailable" and "limit of 1" in event["message"]
    assert first.get(timeout=10)["type"] == "outputs"


def test_a_failed_engine_is_unavailable_and_the_metrics_say_so(start: Callable[..., Side]) -> None:
    side = start(Script(fail_after_calls=2))
    assert side.worker.metrics()["gauges"]["engine_up"] == 1
    for _ in range(2):
        (event,) = side.ask(text_input="x", sampling_param_max_tokens=100)
        assert event["code"] == "unavailable" and "fell off the bus" not in event["message"]
    assert side.worker.metrics()["gauges"]["engine_up"] == 0


def test_only_this_user_can_reach_the_socket(
    start: Callable[..., Side], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    side = start()
    assert stat.S_IMODE(os.stat(side.path).st_mode) == 0o600
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = Path(socket_path("/engine", 1))
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert socket_path("/engine", 2) != str(path) != socket_path("/other", 1)
    path.parent.chmod(0o755)
    with pytest.raises(EngineProcessError, match="mode 0700"):
        socket_path("/engine", 1)


def test_without_an_engine_process_the_client_says_what_to_load(tmp_path: Path) -> None:
    with pytest.raises(EngineProcessError, match="Load the streaming model"):
        EngineClient(str(tmp_path / "none.sock"), None).submit({"inputs": {}}, print)


def test_a_process_that_cannot_load_is_told(tmp_path: Path) -> None:
    with pytest.raises(EngineProcessError, match=r"rank 0 of 1\) ended with code 3 while loading"):
        EngineClient(str(tmp_path / "x.sock"), ["sh", "-c", "exit 3"])


def test_one_process_a_rank_with_torchruns_variables(folder: Path, tmp_path: Path) -> None:
    """Rank 0 connects and serves; the others are told where they stand; all end with the client."""
    program = tmp_path / "rank.py"
    program.write_text(
        "import json, os, socket, sys\n"
        "names = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR', 'MASTER_PORT')\n"
        f"path = {str(tmp_path)!r} + '/' + os.environ['RANK'] + '.json'\n"
        "json.dump({n: os.environ[n] for n in names}, open(path + '.part', 'w'))\n"
        "os.rename(path + '.part', path)\n"
        "listener = socket.socket(socket.AF_UNIX)\n"
        "if os.environ['RANK'] == '0':\n"
        "    listener.bind(sys.argv[-1]); listener.listen()\n"
        "    sys.stdin.read()\n"
        "else:\n"
        "    import time\n"
        "    while not os.path.exists(path.replace('json', 'end')): time.sleep(0.05)\n"
    )
    client = EngineClient(str(tmp_path / "x.sock"), [sys.executable, str(program)], num_ranks=3)
    wait_until(lambda: all((tmp_path / f"{rank}.json").exists() for rank in range(3)))
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert [(f["RANK"], f["LOCAL_RANK"], f["WORLD_SIZE"]) for f in found] == [(str(r), str(r), "3") for r in range(3)]
    assert len({(f["MASTER_ADDR"], f["MASTER_PORT"]) for f in found}) == 1
    processes = list(client._processes)
    for rank in (1, 2):
        (tmp_path / f"{rank}.end").touch()
    client.close()
    assert all(process.poll() is not None for process in processes)


def test_a_rank_that_cannot_load_ends_the_others(tmp_path: Path) -> None:
    command = ["sh", "-c", 'if [ "$RANK" = 1 ]; then exit 7; fi; cat > /dev/null; sleep 0']
    with pytest.raises(EngineProcessError, match=r"rank 1 of 2\) ended with code 7"):
        EngineClient(str(tmp_path / "x.sock"), command, num_ranks=2)
