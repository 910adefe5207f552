"""Clients that leave, stop reading or are too many; engines that fail; servers that stop."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from scripted_model import Script
from server_process import RunningServer, wait_until

Serve = Callable[..., RunningServer]
CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"


def raw_request(server: RunningServer, path: str, body: dict[str, Any]) -> socket.socket:
    """A connection with the request sent and nothing read."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_frees_slot_and_pages(serve: Serve, stream: bool) -> None:
    server = serve(Script(step_seconds=0.01))
    connection = raw_request(server, PLAIN, {"prompt": "endless", "max_tokens": 5000, "stream": stream})
    wait_until(lambda: server.runtime.gauges().num_running == 1)
    connection.close()
    wait_until(server.is_idle, seconds=3)
    assert server.runtime.statistics.num_output_tokens < 4000
    assert server.runtime.statistics.num_finished["abort"] == 1


def test_a_client_that_leaves_while_waiting_in_the_queue(serve: Serve) -> None:
    server = serve(Script(step_seconds=0.01, max_batch_size=1))
    first = raw_request(server, PLAIN, {"prompt": "endless", "max_tokens": 5000, "stream": True})
    wait_until(lambda: server.runtime.gauges().num_running == 1)
    second = raw_request(server, PLAIN, {"prompt": "endless", "max_tokens": 5000, "stream": True})
    wait_until(lambda: server.runtime.gauges().num_waiting == 1)
    second.close()
    wait_until(lambda: server.runtime.gauges().num_waiting == 0, seconds=3)
    first.close()
    wait_until(server.is_idle, seconds=3)


def test_the_next_request_after_a_cancelled_one_is_as_on_a_fresh_server(serve: Serve) -> None:
    script = Script({"once": " upon a time"}, step_seconds=0.005, max_batch_size=1)
    server = serve(script)
    with server.openai.completions.create(model="nano", prompt="endless", max_tokens=1000, stream=True) as chunks:
        for _, chunk in zip(range(2), chunks, strict=False):
            assert chunk.choices[0].text
    wait_until(server.is_idle, seconds=3)
    answer = server.openai.completions.create(model="nano", prompt="once", max_tokens=50)
    assert answer.choices[0].text == " upon a time"


def test_a_client_that_stops_reading_is_dropped(serve: Serve) -> None:
    server = serve(Script(), write_seconds=0.5)
    body = {"prompt": ["endless"] * 32, "max_tokens": 2000, "stream": True, "logprobs": 3}
    connection = raw_request(server, PLAIN, body)
    wait_until(lambda: server.runtime.statistics.num_calls > 0)
    # 64,000 tokens with log-probabilities are far more than socket buffers take; nobody reads them
    wait_until(server.is_idle, seconds=30)
    assert server.get("/health").status_code == 200
    connection.close()


def test_too_many_requests_are_told_so_at_once(serve: Serve) -> None:
    server = serve(Script(step_seconds=0.01), max_sequences=2)
    held = [raw_request(server, PLAIN, {"prompt": "endless", "max_tokens": 5000, "stream": True}) for _ in range(2)]
    wait_until(lambda: server.app.state.front.num_sequences == 2)
    for body in ({"prompt": "x"}, {"prompt": "x", "stream": True}):
        refused = server.post(PLAIN, body)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "the limit of 2" in refused.json()["error"]["message"]
    with pytest.raises(openai.RateLimitError):
        server.openai.completions.create(model="nano", prompt="x")
    for body in ({"prompt": "x", "n": 3}, {"prompt": ["x"] * 3, "stream": True}):  # trying again would not help
        refused = server.post(PLAIN, body)
        assert (refused.status_code, refused.headers.get("retry-after")) == (400, None)
        assert "asks for 3 sequences at once (prompts times n), at most 2" in refused.json()["error"]["message"]
    for connection in held:
        connection.close()
    wait_until(server.is_idle, seconds=3)
    assert server.post(PLAIN, {"prompt": "x", "n": 2}).status_code == 200


def test_one_refused_prompt_cancels_its_siblings(serve: Serve) -> None:
    server = serve(Script(step_seconds=0.01))
    assert server.post(PLAIN, {"prompt": ["endless", [9999]], "max_tokens": 5000}).status_code == 400
    wait_until(server.is_idle, seconds=3)


def test_time_limit(serve: Serve) -> None:
    server = serve(Script(step_seconds=0.02), request_seconds=0.3)
    late = server.post(PLAIN, {"prompt": "endless", "max_tokens": 5000})
    assert late.status_code == 504 and "longer than 0.3 s" in late.json()["error"]["message"]
    chunks = server.openai.completions.create(model="nano", prompt="endless", max_tokens=5000, stream=True)
    with chunks, pytest.raises(openai.APIError, match=r"longer than 0\.3 s"):
        list(chunks)
    wait_until(server.is_idle, seconds=3)


def test_a_failing_engine_ends_every_request_and_health_says_so(serve: Serve) -> None:
    server = serve(Script(step_seconds=0.01, fail_after_calls=30))
    with ThreadPoolExecutor(8) as pool:
        bodies = [{"prompt": "endless", "max_tokens": 5000, "stream": i % 2 == 0} for i in range(8)]
        answers = list(pool.map(lambda body: server.post(PLAIN, body), bodies))
    for body, answer in zip(bodies, answers, strict=True):
        if body["stream"]:
            assert '"service_unavailable_error"' in answer.text and answer.text.endswith("data: [DONE]\n\n")
        else:
            assert answer.status_code == 503
    assert server.get("/health").status_code == 503
    refused = server.post(PLAIN, {"prompt": "x"})
    assert refused.status_code == 503 and refused.headers["retry-after"] == "1"


def test_stopping_lets_running_requests_finish(serve: Serve) -> None:
    server = serve(Script({"once": " upon" + " a time" * 20}, step_seconds=0.01), drain_seconds=10.0)
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(server.post(PLAIN, {"prompt": "once", "max_tokens": 500})))
    asking.start()
    wait_until(lambda: server.runtime.gauges().num_running == 1)
    server.stop(keep_client=True)
    asking.join()
    assert answers[0].status_code == 200 and answers[0].json()["choices"][0]["text"] == " upon" + " a time" * 20


@pytest.mark.parametrize("is_forced", [False, True], ids=["", "second signal"])
def test_stopping_tells_requests_that_outlast_it(
    serve: Serve, caplog: pytest.LogCaptureFixture, is_forced: bool
) -> None:
    server = serve(Script(step_seconds=0.02), drain_seconds=30.0 if is_forced else 0.3)
    with ThreadPoolExecutor(8) as pool:
        bodies = [{"prompt": "endless", "max_tokens": 8000, "stream": i % 2 == 0} for i in range(8)]
        answers = [pool.submit(server.post, PLAIN, body) for body in bodies]
        wait_until(lambda: server.app.state.front.num_sequences == 8)
        began = time.monotonic()
        server.stop(keep_client=True, is_forced=is_forced)
        assert 0.1 <= time.monotonic() - began < 4
    for body, answer in zip(bodies, answers, strict=True):
        response = answer.result()
        if body["stream"]:
            assert response.text.endswith("data: [DONE]\n\n")
            error = json.loads(response.text.split("data: ")[-2])["error"]
            assert error["code"] == "503"  # text, as /openapi.json says
        else:
            assert response.status_code == 503
            error = response.json()["error"]
        assert error["type"] == "service_unavailable_error"
        assert error["message"] == "The server was stopped before the request ended."
    assert "Cancel" not in caplog.text and "Traceback" not in caplog.text


def test_sixty_four_clients_at_once_get_their_own_answers(serve: Serve) -> None:
    answers = {f"q{i:02d}": f" answer number {i} 数" * (1 + i % 7) for i in range(64)}
    server = serve(Script(answers))
    client = server.openai

    def ask(prompt: str) -> str:
        if int(prompt[1:]) % 2:
            return client.completions.create(model="nano", prompt=prompt, max_tokens=400).choices[0].text
        chunks = client.completions.create(model="nano", prompt=prompt, max_tokens=400, stream=True)
        return "".join(chunk.choices[0].text for chunk in chunks)

    with ThreadPoolExecutor(64) as pool:
        found = dict(zip(answers, pool.map(ask, answers), strict=True))
    assert found == answers
    wait_until(server.is_idle)


def test_a_silent_stream_is_kept_open_with_comments(serve: Serve) -> None:
    answer = "ok</think><tool_call>f<arg_key>k</arg_key><arg_value>" + "x" * 60 + "</arg_value></tool_call>"
    server = serve(Script({"call": answer}, step_seconds=0.03), ping_seconds=0.1)
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    body = {"messages": [{"role": "user", "content": "call"}], "tools": tools, "stream": True}
    with httpx.stream("POST", f"{server.url}{CHAT}", json=body, timeout=30) as response:
        lines = list(response.iter_lines())
    assert lines.count(": ping") >= 2 and lines[-2:] == ["data: [DONE]", ""]
    chunks = server.openai.chat.completions.create(model="nano", messages=body["messages"], tools=tools, stream=True)
    calls = [call for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or []]
    assert len(calls) == 1 and len(json.loads(calls[0].function.arguments)["k"]) == 60


def test_three_hundred_clients_with_random_departures(serve: Serve) -> None:
    answers = {f"q{i:03d}": f" answer {i} " * (1 + i % 9) for i in range(100)}
    server = serve(Script(answers, step_seconds=0.002, num_pages=200), max_sequences=400)
    generator = random.Random(11)
    plans = [
        (prompt, generator.choice(("whole", "stream", "leave early", "leave late")))
        for prompt in answers
        for _ in "abc"
    ]

    def visit(plan: tuple[str, str]) -> None:
        prompt, how = plan
        body = {"prompt": prompt, "max_tokens": 400, "stream": how != "whole"}
        if how == "whole":
            assert server.post(PLAIN, body).json()["choices"][0]["text"] == answers[prompt]
            return
        with server.client.stream("POST", server.url + PLAIN, json=body) as response:
            text = ""
            for i, line in enumerate(response.iter_lines()):
                if (how == "leave early" and i == 0) or (how == "leave late" and i == 7):
                    return
                if line.startswith("data: {"):
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            assert how != "stream" or text == answers[prompt]

    with ThreadPoolExecutor(48) as pool:
        list(pool.map(visit, plans))
    wait_until(server.is_idle)
    server.runtime.engine.audit()


def test_clients_that_arrive_during_a_step_all_join_the_next(serve: Serve) -> None:
    server = serve(Script(step_seconds=0.3))
    with ThreadPoolExecutor(32) as pool:
        list(pool.map(lambda i: server.post(PLAIN, {"prompt": f"p{i}", "max_tokens": 1}), range(32)))
    # the first call may have one or a few of them, and arrivals may straddle one more
    assert server.runtime.statistics.num_calls <= 4


def test_a_slow_reader_gets_everything(serve: Serve) -> None:
    server = serve(Script({"once": "x" * 400}))
    text = ""
    for i, chunk in enumerate(
        server.openai.completions.create(model="nano", prompt="once", max_tokens=500, stream=True)
    ):
        text += chunk.choices[0].text
        if i < 10:
            time.sleep(0.02)
    assert text == "x" * 400


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_client_that_leaves_while_its_request_is_being_submitted(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, stream: bool, moment: str
) -> None:
    """The engine takes requests between two steps; who leaves until then must not be generated for until the end."""
    server = serve(Script(step_seconds=0.002))
    front, owner = (server.app.state.front,) * 2 if moment == "before" else (server.app.state.front, server.runtime)
    submit, entered, go_on, submitted = owner.submit, threading.Event(), threading.Event(), threading.Event()

    def slow_submit(*args: Any, **options: Any) -> Any:
        entered.set()
        assert go_on.wait(10)
        handle = submit(*args, **options)
        submitted.set()
        return handle

    monkeypatch.setattr(owner, "submit", slow_submit)
    connection = raw_request(server, PLAIN, {"prompt": "endless", "max_tokens": 8000, "stream": stream})
    assert entered.wait(10)
    aborted, abort = threading.Event(), front.abort
    monkeypatch.setattr(front, "abort", lambda request_id: (abort(request_id), aborted.set()))
    connection.close()
    assert aborted.wait(10)
    go_on.set()
    assert submitted.wait(10)
    wait_until(server.is_idle, seconds=3)
    assert server.runtime.statistics.num_output_tokens < 2000
