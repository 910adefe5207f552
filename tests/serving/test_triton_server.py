"""The generated repository in a real Triton: same texts as the runtime, streams, errors, cancellation, restarts."""

from __future__ import annotations

import json
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from server_process import wait_until
from triton_server import RunningTriton, TritonMissingError, installed_server

from glm_mtp_export.runtime.runtime import Runtime
from glm_mtp_export.runtime.sampling import SamplingParams
from glm_mtp_export.serving.triton import write_repository

grpcclient = pytest.importorskip("tritonclient.grpc")

pytestmark = [pytest.mark.triton, pytest.mark.timeout(300)]
STREAM, PLAIN = "glm_mtp", "glm_mtp_generate"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
GREEDY = {"sampling_param_temperature": 0.0}


@pytest.fixture(scope="module")
def triton(nano_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningTriton]:
    try:
        _, environment = installed_server()
    except TritonMissingError as error:
        pytest.skip(f"no Triton here: {error}")
    repository = tmp_path_factory.mktemp("triton") / "model_repository"
    write_repository(nano_artifact, repository, max_sequences=70, execution_environment=environment)
    server = RunningTriton(repository, (STREAM, PLAIN), repository.parent / "triton.log")
    server.repository = repository  # type: ignore[attr-defined]
    yield server
    server.stop()


@pytest.fixture(scope="module")
def runtime(nano_artifact: Path) -> Iterator[Runtime]:
    with Runtime.load(nano_artifact) as loaded:
        yield loaded


@pytest.fixture(autouse=True)
def stays_ready(triton: RunningTriton) -> Iterator[None]:
    yield
    assert triton.is_ready()


def generate(triton: RunningTriton, model: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{triton.url}/v2/models/{model}/generate", json=fields, timeout=60)


def stream(triton: RunningTriton, **fields: Any) -> list[dict[str, Any]]:
    with httpx.stream("POST", f"{triton.url}/v2/models/{STREAM}/generate_stream", json=fields, timeout=60) as answer:
        assert answer.status_code == 200
        return [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line]


def tensor(name: str, kind: str, values: list[Any]) -> Any:
    dtype = {"BYTES": np.object_, "BOOL": np.bool_, "INT32": np.int32, "FP32": np.float32, "UINT64": np.uint64}[kind]
    found = grpcclient.InferInput(name, [len(values)], kind)
    found.set_data_from_numpy(np.array(values, dtype=dtype))
    return found


def refused_as_unavailable(answer: httpx.Response) -> bool:
    """Triton 2.51 answers every error of a Python model on `generate` with 400; gRPC keeps the code."""
    return answer.status_code in (400, 503)


def idle(triton: RunningTriton) -> bool:
    return (triton.metric("glm_mtp_running_sequences"), triton.metric("glm_mtp_waiting_sequences")) == (0, 0)


PROMPTS = ["Hello", "What is 12 + 7?", "Привет 🎉 数", "KEY"]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_same_text_on_every_way_as_from_the_runtime(triton: RunningTriton, runtime: Runtime, prompt: str) -> None:
    (expected,) = runtime.generate(prompt, SamplingParams(temperature=0.0, max_tokens=40))
    fields = {"text_input": prompt, "sampling_param_max_tokens": 40, **GREEDY}
    whole = generate(triton, PLAIN, **fields).json()
    assert whole["text_output"] == expected.text and whole["finish_reason"] == expected.finish_reason
    assert generate(triton, STREAM, **fields).json()["text_output"] == expected.text
    parts = stream(triton, streaming=True, **fields)
    assert "".join(part["text_output"] for part in parts) == expected.text
    for answer in (whole, parts[-1]):
        statistics = expected.completions[0].statistics
        assert answer["completion_tokens"] == len(expected.token_ids)
        assert answer["total_draft_tokens"] == statistics.num_drafted
        assert answer["total_accepted_draft_tokens"] == statistics.num_accepted
        rate = statistics.num_accepted / max(statistics.num_drafted, 1)
        assert answer["acceptance_rate"] == pytest.approx(rate, abs=1e-6)


def test_prompt_and_text_round_trip_as_utf8(triton: RunningTriton) -> None:
    prompt = "Привет, 数 🎉"
    fields = {"text_input": prompt, "sampling_param_exclude_input_from_output": False, "sampling_param_max_tokens": 1}
    assert generate(triton, PLAIN, **fields).json()["text_output"].startswith(prompt)


def test_plain_infer_with_shapes_of_the_config(triton: RunningTriton, runtime: Runtime) -> None:
    inputs = [
        {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["Hello"]},
        {"name": "sampling_param_max_tokens", "datatype": "INT32", "shape": [1], "data": [20]},
        {"name": "sampling_param_temperature", "datatype": "FP32", "shape": [1], "data": [0.0]},
        {"name": "sampling_param_stop", "datatype": "BYTES", "shape": [2], "data": ["zzzz", "yyyy"]},
        {"name": "return_cumulative_logprob", "datatype": "BOOL", "shape": [1], "data": [True]},
    ]
    answer = httpx.post(f"{triton.url}/v2/models/{PLAIN}/infer", json={"inputs": inputs}, timeout=60).json()
    found = {output["name"]: output for output in answer["outputs"]}
    (expected,) = runtime.generate("Hello", SamplingParams(temperature=0.0, max_tokens=20, logprobs=0))
    assert found["text_output"]["data"] == [expected.text] and found["text_output"]["shape"] == [1]
    total = sum(entry.logprob or 0.0 for entry in expected.completions[0].logprobs or ())
    # float32 on the wire, sums of twenty values below ten
    assert found["cumulative_logprob"]["data"][0] == pytest.approx(total, abs=1e-4)


def test_a_conversation_with_a_tool_call_and_its_result(triton: RunningTriton) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Bado?"}]
    fields = {"tools": json.dumps(TOOLS), **GREEDY}
    first = generate(triton, PLAIN, messages=json.dumps(messages), **fields).json()
    (call,) = json.loads(first["tool_calls"])
    assert first["finish_reason"] == "tool_calls" and first["text_output"] == ""
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("get_weather", {"city": "Bado"})
    messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    messages.append({"role": "tool", "tool_call_id": call["id"], "content": '{"sky": "rainy"}'})
    second = generate(triton, PLAIN, messages=json.dumps(messages), **fields).json()
    assert second["text_output"] == "The weather in Bado is rainy." and second["finish_reason"] == "stop"


def test_a_streamed_conversation_equals_the_whole_one(triton: RunningTriton, runtime: Runtime) -> None:
    messages = json.dumps([{"role": "user", "content": "What is 123 + 456?"}])
    fields = {"messages": messages, "sampling_param_max_tokens": 200, **GREEDY}
    whole = generate(triton, PLAIN, **fields).json()
    parts = stream(triton, streaming=True, **fields)
    assert len(parts) > 3
    for name in ("text_output", "reasoning_content"):
        assert "".join(part.get(name, "") for part in parts) == whole[name]
    assert whole["text_output"] == "579"


def test_grpc_stream_marks_exactly_one_final_response(triton: RunningTriton, runtime: Runtime) -> None:
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with grpcclient.InferenceServerClient(f"127.0.0.1:{triton.grpc}") as client:
        client.start_stream(lambda result, error: results.put((result, error)))
        inputs = [
            tensor("text_input", "BYTES", [b"Hello"]),
            tensor("streaming", "BOOL", [True]),
            tensor("sampling_param_max_tokens", "INT32", [30]),
            tensor("sampling_param_temperature", "FP32", [0.0]),
        ]
        client.async_stream_infer(STREAM, inputs, enable_empty_final_response=True)
        text, finals = "", 0
        while not finals:
            result, error = results.get(timeout=30)
            assert error is None, error
            found = result.as_numpy("text_output")
            text += found[0].decode() if found is not None else ""
            finals += result.get_response().parameters["triton_final_response"].bool_param
        time.sleep(0.2)
        assert results.empty()
        client.stop_stream()
    (expected,) = runtime.generate("Hello", SamplingParams(temperature=0.0, max_tokens=30))
    assert text == expected.text


def test_sampling_is_reproducible_and_equal_to_the_runtimes(triton: RunningTriton, runtime: Runtime) -> None:
    fields = {"text_input": "Hello", "sampling_param_max_tokens": 30, "sampling_param_temperature": 1.0}
    fields |= {"sampling_param_top_p": 0.9, "sampling_param_top_k": 40}
    for seed, signed in ((7, 7), (2**64 - 5, -5)):
        params = SamplingParams(temperature=1.0, top_p=0.9, top_k=40, seed=signed, max_tokens=30)
        (expected,) = runtime.generate("Hello", params)
        assert generate(triton, PLAIN, sampling_param_seed=seed, **fields).json()["text_output"] == expected.text


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "Found none of text_input"),
    ({"text_input": "a", "input_ids": [1]}, "text_input and input_ids"),
    ({"text_input": ""}, "The prompt is empty"),
    ({"text_input": "x " * 9000}, "The prompt has"),
    ({"text_input": "a", "sampling_param_max_tokens": 10**6}, "context limit"),
    ({"text_input": "a", "sampling_param_temperature": -1.0}, "temperature is -1"),
    ({"text_input": "a", "sampling_param_temprature": 0.5}, "sampling_param_temprature"),
    ({"text_input": "a", "sampling_param_best_of": 2}, "best_of other than 1"),
    ({"text_input": "a", "sampling_param_stop": [""]}, "stop has an empty string"),
    ({"text_input": "a", "tools": "[]"}, "tools needs messages"),
    ({"messages": "{"}, "messages is not JSON"),
    ({"messages": "{}"}, "messages is a JSON dict"),
    ({"messages": "[1]"}, "lists of objects"),
    ({"messages": "[" * 50_000}, "messages is not JSON"),
    ({"messages": json.dumps([{"role": "user", "content": [[[]]] * 3}])}, "expected 'text'"),
    ({"input_ids": [10**6]}, "outside the vocabulary"),
]


@pytest.mark.parametrize("row", range(len(BAD)))
@pytest.mark.parametrize("model", [STREAM, PLAIN])
def test_bad_input_is_told_so(triton: RunningTriton, model: str, row: int) -> None:
    fields, part = BAD[row]
    refused = generate(triton, model, **fields)
    assert 400 <= refused.status_code < 500, refused.text
    assert part in refused.json()["error"], refused.text


@pytest.mark.parametrize(
    "fields", [{"text_input": "a", "sampling_param_temperature": "hot"}, {"text_input": 5}, {"text_input": ["a", "b"]}]
)
def test_wrong_types_are_refused_by_triton_itself(triton: RunningTriton, fields: dict[str, Any]) -> None:
    refused = generate(triton, PLAIN, **fields)
    # the status is Triton's choice: 400 for shapes, 500 for JSON of another type
    assert refused.status_code in (400, 500) and refused.json()["error"]


def test_text_that_is_not_utf8(triton: RunningTriton) -> None:
    client = grpcclient.InferenceServerClient(f"127.0.0.1:{triton.grpc}")
    with client, pytest.raises(Exception, match="not valid UTF-8"):
        client.infer(PLAIN, [tensor("text_input", "BYTES", [b"a\xff"])])


def test_streaming_on_the_plain_model_says_where_to_go(triton: RunningTriton) -> None:
    refused = generate(triton, PLAIN, text_input="a", streaming=True)
    assert refused.status_code == 400 and f"Use model {STREAM}" in refused.json()["error"]


def test_a_cancelled_grpc_stream_frees_its_slot(triton: RunningTriton) -> None:
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    client = grpcclient.InferenceServerClient(f"127.0.0.1:{triton.grpc}")
    client.start_stream(lambda result, error: results.put((result, error)))
    inputs = [
        tensor("text_input", "BYTES", [b"Hello"]),
        tensor("streaming", "BOOL", [True]),
        tensor("sampling_param_ignore_eos", "BOOL", [True]),
        tensor("sampling_param_max_tokens", "INT32", [3900]),
    ]
    before = triton.metric("glm_mtp_output_tokens")
    client.async_stream_infer(STREAM, inputs)
    for _ in range(2):
        assert results.get(timeout=30)[1] is None
    client.stop_stream(cancel_requests=True)
    client.close()
    wait_until(lambda: triton.metric("glm_mtp_output_tokens") > before)
    wait_until(lambda: idle(triton))
    assert triton.metric("glm_mtp_output_tokens") - before < 3000


def test_a_client_that_closes_its_http_stream_frees_its_slot(triton: RunningTriton) -> None:
    body = {
        "text_input": "Hello",
        "streaming": True,
        "sampling_param_max_tokens": 3900,
        "sampling_param_ignore_eos": True,
    }
    before = triton.metric("glm_mtp_output_tokens")
    with httpx.stream("POST", f"{triton.url}/v2/models/{STREAM}/generate_stream", json=body, timeout=60) as answer:
        for _, _line in zip(range(3), answer.iter_lines(), strict=False):
            pass
    wait_until(lambda: triton.metric("glm_mtp_output_tokens") > before)
    wait_until(lambda: idle(triton), seconds=60)


def test_a_client_that_stops_reading_stops_nobody_else(triton: RunningTriton) -> None:
    body = {
        "text_input": "Hello",
        "streaming": True,
        "sampling_param_max_tokens": 1500,
        "sampling_param_ignore_eos": True,
    }
    data = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", triton.http), timeout=10) as connection:
        head = f"POST /v2/models/{STREAM}/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        for _ in range(5):
            answer = generate(triton, PLAIN, text_input="Hello", sampling_param_max_tokens=5)
            assert answer.status_code == 200
    wait_until(lambda: idle(triton), seconds=60)


def test_sixty_four_clients_at_once(triton: RunningTriton, runtime: Runtime) -> None:
    prompts = [f"What is {i} + {i + 1}?" for i in range(64)]
    params = SamplingParams(temperature=0.0, max_tokens=24)
    expected = [result.text for result in runtime.generate(prompts, params)]

    def ask(i: int) -> str:
        fields = {"text_input": prompts[i], "sampling_param_max_tokens": 24, **GREEDY}
        if i % 2:
            return str(generate(triton, PLAIN, **fields).json()["text_output"])
        return "".join(part["text_output"] for part in stream(triton, streaming=True, **fields))

    with ThreadPoolExecutor(64) as pool:
        assert list(pool.map(ask, range(64))) == expected
    wait_until(lambda: idle(triton))


def test_a_full_queue_is_an_error_and_nothing_hangs(triton: RunningTriton) -> None:
    fields = {"text_input": "Hello", "sampling_param_max_tokens": 30, "sampling_param_ignore_eos": True}
    with ThreadPoolExecutor(110) as pool:
        answers = list(pool.map(lambda _: generate(triton, PLAIN, **fields), range(110)))
    refused = [answer for answer in answers if answer.status_code != 200]
    assert 0 < len(refused) <= 40
    assert all(refused_as_unavailable(answer) and "limit of 70" in answer.json()["error"] for answer in refused)
    wait_until(lambda: idle(triton))


def test_unloading_ends_the_engine_process_and_loading_starts_another(triton: RunningTriton) -> None:
    def control(verb: str) -> None:
        answer = httpx.post(f"{triton.url}/v2/repository/models/{STREAM}/{verb}", json={}, timeout=60)
        assert answer.status_code == 200, answer.text

    before = triton.worker_pids()
    assert len(before) == 1
    control("unload")
    wait_until(lambda: triton.worker_pids() == [], seconds=30)
    gone = generate(triton, PLAIN, text_input="Hello")
    assert refused_as_unavailable(gone) and "engine process" in gone.json()["error"]
    client = grpcclient.InferenceServerClient(f"127.0.0.1:{triton.grpc}")
    with client, pytest.raises(Exception, match=r"UNAVAILABLE.*engine process"):
        client.infer(PLAIN, [tensor("text_input", "BYTES", [b"Hello"])])
    control("load")
    answers = [generate(triton, model, text_input="Hello", **GREEDY) for model in (STREAM, PLAIN)]
    assert {answer.status_code for answer in answers} == {200}
    assert triton.worker_pids() != before


def test_a_killed_engine_process_is_an_error_until_the_model_is_reloaded(triton: RunningTriton) -> None:
    (pid,) = triton.worker_pids()
    with ThreadPoolExecutor(2) as pool:
        fields = {"text_input": "Hello", "sampling_param_max_tokens": 3000, "sampling_param_ignore_eos": True}
        waiting = [pool.submit(generate, triton, model, **fields) for model in (STREAM, PLAIN)]
        time.sleep(1.0)
        os.kill(pid, signal.SIGKILL)
        for answer in waiting:
            assert refused_as_unavailable(answer.result()) and "engine process" in answer.result().json()["error"]
    assert refused_as_unavailable(generate(triton, STREAM, text_input="Hello"))
    for verb in ("unload", "load"):
        httpx.post(f"{triton.url}/v2/repository/models/{STREAM}/{verb}", json={}, timeout=60).raise_for_status()
    wait_until(lambda: generate(triton, STREAM, text_input="Hello").status_code == 200, seconds=30)


def test_an_engine_that_cannot_load_fails_the_models_load_with_a_reason(triton: RunningTriton) -> None:
    folder: Path = triton.repository  # type: ignore[attr-defined]
    broken = folder / "broken"
    shutil.copytree(folder / STREAM, broken)
    config = (broken / "config.pbtxt").read_text(encoding="utf-8")
    config = re.sub(r'(key: "engine_dir" value \{ string_value: )"[^"]*"', rf'\1"{folder}/nothing"', config)
    (broken / "config.pbtxt").write_text(config.replace(f'name: "{STREAM}"', 'name: "broken"'), encoding="utf-8")
    refused = httpx.post(f"{triton.url}/v2/repository/models/broken/load", json={}, timeout=60)
    assert refused.status_code >= 400 and "ended with code 2 while loading" in refused.json()["error"]
    assert "manifest.json: cannot be read" in triton.log.read_text(errors="replace")
    assert generate(triton, PLAIN, text_input="Hello").status_code == 200


def test_engine_metrics_are_among_tritons(triton: RunningTriton) -> None:
    wait_until(lambda: triton.metric("glm_mtp_engine_up") == 1)
    time.sleep(1.5)  # numbers of earlier requests come at most a second late
    before = triton.metric("glm_mtp_output_tokens")
    assert generate(triton, PLAIN, text_input="Hello", sampling_param_max_tokens=9, sampling_param_ignore_eos=True)
    wait_until(lambda: triton.metric("glm_mtp_output_tokens") == before + 9)


def test_the_examples_run(triton: RunningTriton) -> None:
    folder: Path = triton.repository  # type: ignore[attr-defined]
    script = [sys.executable, str(folder / "client_grpc.py"), f"127.0.0.1:{triton.grpc}", "Hello!"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "What can I do for you?" in done.stdout and "acceptance rate" in done.stdout
    environment = {**os.environ, "TRITON_URL": triton.url}
    shell = subprocess.run(
        ["sh", str(folder / "client_http.sh")], capture_output=True, text=True, timeout=60, env=environment
    )
    lines = [line for line in shell.stdout.splitlines() if line]
    assert shell.returncode == 0 and '"error"' not in shell.stdout, shell.stdout
    assert "text_output" in lines[0] and "finish_reason" in lines[1] and lines[2].startswith("data: ")
