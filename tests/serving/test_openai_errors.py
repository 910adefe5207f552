"""What cannot be served: the right status, OpenAI's error body, and a server that goes on."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from typing import Any

import httpx
import openai
import pytest
from server_process import RunningServer, wait_until

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.fixture(autouse=True)
def stays_healthy(shared_server: RunningServer) -> Any:
    yield
    assert shared_server.get("/health").status_code == 200
    wait_until(shared_server.is_idle)


def refused(response: httpx.Response, status: int, part: str) -> None:
    error = response.json()["error"]
    assert (response.status_code, set(error)) == (status, {"message", "type", "param", "code"})
    assert "\n" not in error["message"] and "[" not in (error["param"] or ""), error
    assert part in error["message"], error["message"]


BAD_CHATS: list[tuple[dict[str, Any], int, str]] = [
    ({}, 400, "messages: Field required"),
    ({"messages": []}, 400, "messages"),
    ({"messages": "hi"}, 400, "messages"),
    ({"messages": USER, "mesages": 1}, 400, "mesages: unknown field. Did you mean 'messages'?"),
    ({"messages": USER, "temperature": "hot"}, 400, "temperature"),
    ({"messages": USER, "temperature": -1}, 400, "temperature"),
    ({"messages": USER, "zzz": 1}, 400, "zzz: unknown field. Leave it out; GET /openapi.json lists all fields"),
    ({"messages": USER, "stream_options": {"stream": 1}}, 400, "stream_options.stream: unknown field. Leave it out"),
    ({"messages": USER, "temperature": "0.5"}, 400, "temperature: expected a number"),
    ({"messages": USER, "n": True}, 400, "n: expected a number"),
    ({"messages": USER, "max_tokens": 5, "max_completion_tokens": 6}, 400, "They mean the same: send one of them"),
    ({"messages": USER, "stop": ["x"] * 65}, 400, "stop: expected one text, or a list of at most 64 texts"),
    ({"messages": USER, "tool_choice": "f"}, 400, "tool_choice: expected 'none', 'auto', 'required', or {"),
    ({"messages": [{"role": "user", "content": 5}]}, 400, "messages.0.content: expected text, or a list of text parts"),
    ({"messages": USER, "top_p": 0}, 400, "top_p"),
    ({"messages": USER, "n": 0}, 400, "n: "),
    ({"messages": USER, "seed": 2**70}, 400, "seed"),
    ({"messages": USER, "stop": [""]}, 400, "stop has an empty string"),
    ({"messages": USER, "model": "gpt-4"}, 404, "'gpt-4' is not served here"),
    ({"messages": USER, "max_tokens": 10**6}, 400, "context limit"),
    ({"messages": [{"role": "user", "content": "x" * 9000}]}, 400, "The prompt has"),
    ({"messages": [{"role": "king", "content": "x"}]}, 400, "role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "reads text only"),
    ({"messages": [{"role": "user", "content": "a\ud800"}]}, 400, "not valid Unicode"),
    ({"messages": USER, "top_logprobs": 2}, 400, "top_logprobs needs logprobs"),
    ({"messages": USER, "logprobs": True, "top_logprobs": 9}, 400, "logprobs is 9, compiled in: 3"),
    ({"messages": USER, "stream_options": {"include_usage": True}}, 400, "stream_options needs stream"),
    ({"messages": USER, "tools": [TOOL, TOOL]}, 400, "given more than once"),
    ({"messages": USER, "tool_choice": "required"}, 400, "needs tools"),
    ({"messages": USER, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, 400, "'g'"),
    ({"messages": USER, "tools": [TOOL], "tool_choice": "required"}, 400, "structured_output needs"),
    ({"messages": USER, "response_format": {"type": "json_object"}}, 400, "structured_output needs"),
    ({"messages": USER, "response_format": {"type": "json_schema"}}, 400, "needs the field 'json_schema'"),
    ({"messages": USER, "response_format": {"type": "yaml"}}, 400, "response_format"),
    ({"messages": USER, "presence_penalty": 1.0}, 400, "presence_penalty"),
    ({"messages": USER, "logit_bias": {"a": 1}}, 400, "key 'a' is no token id"),
    ({"messages": USER, "logit_bias": {"5": 1}}, 400, "logit_bias"),
    ({"messages": USER, "chat_template_kwargs": {"messages": []}}, 400, "cannot be set"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        400,
        "is not JSON",
    ),
]


@pytest.mark.parametrize("row", range(len(BAD_CHATS)))
@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_that_cannot_be_served(shared_server: RunningServer, row: int, stream: bool) -> None:
    body, status, part = BAD_CHATS[row]
    if stream and "stream_options" in body:
        return
    content = json.dumps({**body, "stream": stream})
    headers = {"content-type": "application/json"}
    refused(shared_server.client.post(shared_server.url + CHAT, content=content, headers=headers), status, part)


BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt"),
    ({"prompt": ""}, "The prompt is empty"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [1, 999]}, "999 is outside the vocabulary"),
    ({"prompt": [-1]}, "prompt: expected text, token ids, or a list of at most 128 of either"),
    ({"prompt": ["a", 1]}, "prompt: expected text, token ids"),
    ({"prompt": [True]}, "prompt: expected text, token ids"),
    ({"prompt": ["a"] * 1000}, "prompt"),
    ({"prompt": "a", "suffix": "b"}, "suffix is not supported"),
    ({"prompt": "a", "best_of": 3}, "best_of other than n"),
    ({"prompt": "a", "echo": True, "logprobs": 1}, "echo with logprobs"),
    ({"prompt": ["a", ""]}, "The prompt is empty"),
]


@pytest.mark.parametrize("row", range(len(BAD_COMPLETIONS)))
def test_a_completion_that_cannot_be_served(shared_server: RunningServer, row: int) -> None:
    body, part = BAD_COMPLETIONS[row]
    refused(shared_server.post(PLAIN, body), 400, part)


RAW: list[tuple[bytes, int, str]] = [
    (b"", 400, "body"),
    (b"{", 400, "body: not JSON at character 1"),
    (b"[1]", 400, "body"),
    (b"null", 400, "body"),
    (b'"x"', 400, "body"),
    (b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}', 400, "not valid UTF-8 (byte 43)"),
    (b'{"messages": [{"role": "user", "content": "hi"}], "temperature": NaN}', 400, "temperature"),
    (
        b'{"messages": [{"role": "user", "content": "hi"}], "metadata": ' + b'{"a":' * 100 + b"1" + b"}" * 101,
        400,
        "deeper",
    ),
    (b"[" * 100_000, 400, "nests deeper than 64"),
    (b'{"messages": [{"role": "user", "content": "' + b"x" * 10_000_000 + b'"}]}', 413, "larger than 8388608 bytes"),
    (b'{"messages": [{"role": "user", "content": "hi"}], "seed": ' + b"9" * 5000 + b"}", 400, "body"),
    (b'{"\\ud800": 1}', 400, "unicode string"),
]


@pytest.mark.parametrize("row", range(len(RAW)))
def test_a_body_that_is_no_request(shared_server: RunningServer, row: int) -> None:
    content, status, part = RAW[row]
    headers = {"content-type": "application/json"}
    refused(shared_server.client.post(shared_server.url + CHAT, content=content, headers=headers), status, part)


def test_a_chunked_body_is_limited_as_well(shared_server: RunningServer) -> None:
    def pieces() -> Any:
        for _ in range(20):
            yield b" " * (1 << 20)

    refused(httpx.post(shared_server.url + CHAT, content=pieces(), timeout=30), 413, "larger than")


def test_a_client_that_sends_all_before_it_reads_is_told_why(shared_server: RunningServer) -> None:
    """As most do: a connection closed with unread bytes would be reset under its hands."""
    body = b'{"x": "' + bytes(64 << 20) + b'"}'
    connection = http.client.HTTPConnection("127.0.0.1", shared_server.port, timeout=30)
    with contextlib.closing(connection):
        connection.request("POST", CHAT, body, {"content-type": "application/json"})
        response = connection.getresponse()
        assert response.status == 413 and b"larger than 8388608 bytes" in response.read()


def test_other_content_types_paths_and_methods(shared_server: RunningServer) -> None:
    form = httpx.post(shared_server.url + CHAT, data={"messages": "hi"})
    refused(form, 400, "content-type is application/x-www-form-urlencoded, expected application/json")
    refused(shared_server.get("/v1/nothing"), 404, "GET /v1/nothing: Not Found. GET /openapi.json lists what is served")
    refused(shared_server.get(CHAT), 405, f"GET {CHAT}: Method Not Allowed")
    refused(shared_server.get("/v1/models/gpt-4"), 404, "'gpt-4' is not served here")


def test_errors_in_the_official_client(shared_server: RunningServer) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        shared_server.openai.chat.completions.create(model="nano", messages=USER, temperature=-2)  # type: ignore[arg-type]
    with pytest.raises(openai.NotFoundError, match="not served here"):
        shared_server.openai.chat.completions.create(model="gpt-4", messages=USER)  # type: ignore[arg-type]


def test_a_body_that_never_arrives(serve: Any) -> None:
    server = serve(read_seconds=0.3)
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n"
        connection.sendall(head.encode() + b'{"mess')
        assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")
    assert server.get("/health").status_code == 200


def test_models_health_metrics(shared_server: RunningServer) -> None:
    assert [model.id for model in shared_server.openai.models.list()] == ["nano"]
    assert shared_server.openai.models.retrieve("nano").id == "nano"
    assert shared_server.get("/health").json()["status"] == "ready"
    before = _counter(shared_server, "glm_mtp_output_tokens_total")
    shared_server.post(PLAIN, {"prompt": "endless", "max_tokens": 7})
    assert _counter(shared_server, "glm_mtp_output_tokens_total") == before + 7


def test_responses_are_counted_by_path_and_status(shared_server: RunningServer) -> None:
    names = [
        f'glm_mtp_http_responses_total{{path="{path}",status="{status}"}}'
        for path, status in ((PLAIN, 200), (PLAIN, 400), ("other", 404))
    ]
    shared_server.post(PLAIN, {"prompt": "x", "max_tokens": 1})
    shared_server.post(PLAIN, {"prompt": ""})
    shared_server.get("/any/thing")
    before = [_counter(shared_server, name) for name in names]
    shared_server.post(PLAIN, {"prompt": "x", "max_tokens": 1})
    shared_server.post(PLAIN, {"prompt": ""})
    shared_server.get("/any/other/thing")
    assert [_counter(shared_server, name) for name in names] == [count + 1 for count in before]


def test_a_bug_is_answered_without_its_details_and_counted(
    shared_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(num_sequences: int) -> None:
        raise ZeroDivisionError("secret")

    name = f'glm_mtp_http_responses_total{{path="{PLAIN}",status="500"}}'
    with monkeypatch.context() as patch:
        patch.setattr(shared_server.app.state.front, "check_size", fail)
        refused(shared_server.post(PLAIN, {"prompt": "x"}), 500, "The server met an unexpected error; its log has")
        before = _counter(shared_server, name)
        for stream in (False, True):
            assert "secret" not in shared_server.post(PLAIN, {"prompt": "x", "stream": stream}).text
    assert _counter(shared_server, name) == before + 2


def _counter(server: RunningServer, name: str) -> float:
    lines = server.get("/metrics").text.splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(name + " ")))
