"""The server over the real, trained nano engine: right answers through the official client, equal to the runtime's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from server_process import RunningServer, wait_until

from glm_mtp_export.runtime.runtime import Runtime
from glm_mtp_export.runtime.sampling import SamplingParams

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {
        "type": "function",
        "function": {
            "name": "set_timer",
            "parameters": {"type": "object", "properties": {"minutes": {"type": "integer"}}, "required": ["minutes"]},
        },
    },
]


@pytest.fixture(scope="module")
def server(nano_artifact: Path) -> Iterator[RunningServer]:
    running = RunningServer(nano_artifact, Runtime.load(nano_artifact))
    yield running
    wait_until(running.is_idle)
    running.stop()


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def chat(server: RunningServer, messages: list[dict[str, Any]], **options: Any) -> Any:
    return server.openai.chat.completions.create(model="nano", messages=messages, temperature=0.0, **options)


def test_a_sum_with_its_steps_in_the_reasoning(server: RunningServer) -> None:
    answer = chat(server, user("What is 4321 + 879?"))
    message = answer.choices[0].message
    assert message.content == "5200" and message.reasoning_content.startswith("1+9+0=10, ")
    assert answer.usage.completion_tokens_details.reasoning_tokens > 10
    assert answer.usage.speculation["accepted_draft_tokens"] > 10


@pytest.mark.parametrize("thinking", [True, False])
def test_streamed_tool_call_then_result_then_answer(server: RunningServer, thinking: bool) -> None:
    options: dict[str, Any] = {"tools": TOOLS, "extra_body": {"enable_thinking": thinking}}
    messages = user("What is the weather in Bado?")
    calls, finish = [], None
    for chunk in chat(server, messages, stream=True, **options):
        for choice in chunk.choices:
            calls += choice.delta.tool_calls or []
            finish = choice.finish_reason or finish
    assert finish == "tool_calls" and len(calls) == 1
    assert (calls[0].function.name, json.loads(calls[0].function.arguments)) == ("get_weather", {"city": "Bado"})
    called = {"id": calls[0].id, "type": "function", "function": calls[0].function.model_dump()}
    messages.append({"role": "assistant", "content": None, "tool_calls": [called]})
    messages.append({"role": "tool", "tool_call_id": calls[0].id, "content": '{"sky": "rainy"}'})
    text = "".join(
        choice.delta.content or ""
        for chunk in chat(server, messages, stream=True, **options)
        for choice in chunk.choices
    )
    assert text == "The weather in Bado is rainy."


def test_an_integer_argument_is_an_integer(server: RunningServer) -> None:
    (call,) = chat(server, user("Set a timer for 25 minutes."), tools=TOOLS).choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("set_timer", '{"minutes": 25}')


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "set_timer"}}])
def test_a_forced_tool_choice_calls_a_tool(server: RunningServer, choice: Any, thinking: bool) -> None:
    extra = {"enable_thinking": thinking}
    answer = chat(server, user("Hello!"), tools=TOOLS, tool_choice=choice, max_tokens=200, extra_body=extra)
    calls = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls" and len(calls) >= 1
    names = {"set_timer"} if isinstance(choice, dict) else {"set_timer", "get_weather"}
    assert {call.function.name for call in calls} <= names
    for call in calls:
        assert isinstance(json.loads(call.function.arguments), dict)


def test_one_call_at_most_on_request(server: RunningServer) -> None:
    answer = chat(server, user("What is the weather in Bado?"), tools=TOOLS, parallel_tool_calls=False, max_tokens=200)
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Bado"}')


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("parallel", [None, False])
def test_a_response_format_leaves_the_way_to_tools_open(
    server: RunningServer, thinking: bool, parallel: bool | None
) -> None:
    """As OpenAI has it: the answer is a call, or content of that format."""
    properties = {"age": {"type": "integer"}, "city": {"type": "string"}}
    schema = {"type": "object", "properties": properties, "required": ["age", "city"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    options: dict[str, Any] = {"tools": TOOLS, "max_tokens": 200, "extra_body": {"enable_thinking": thinking}}
    if parallel is not None:
        options["parallel_tool_calls"] = parallel
    called = chat(server, user("What is the weather in Bado?"), response_format=wanted, **options).choices[0]
    (call,) = called.message.tool_calls
    assert (called.finish_reason, json.loads(call.function.arguments)) == ("tool_calls", {"city": "Bado"})
    asked = user("Write JSON with age = 12, city = Bado.")
    told = chat(server, asked, response_format=wanted, **options).choices[0]
    assert told.finish_reason == "stop" and not told.message.tool_calls
    found = json.loads(told.message.content)
    assert set(found) == {"age", "city"} and found["age"] == 12
    for format_ in (
        {"type": "json_object"},
        {"type": "regex", "pattern": "[0-9]{1,3}"},
        {"type": "choice", "choice": ["yes", "no"]},
        {"type": "grammar", "grammar": 'root ::= "a" | "b"'},
    ):
        options["extra_body"] = {"enable_thinking": thinking, "response_format": format_}
        called = chat(server, user("What is the weather in Bado?"), **options).choices[0]
        assert [c.function.name for c in called.message.tool_calls or ()] == ["get_weather"], format_
    with pytest.raises(openai.BadRequestError, match="cannot be combined with a forced tool_choice"):
        chat(server, user("Hello!"), response_format=wanted, tools=TOOLS, tool_choice="required")
    schema["properties"] = {"city": {"type": "string", "pattern": "^a", "maxLength": 3}}
    with pytest.raises(openai.BadRequestError, match="cannot be enforced"):
        chat(server, asked, response_format=wanted, **options | {"extra_body": {}})


def test_response_format(server: RunningServer) -> None:
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer"}, "city": {"type": "string", "maxLength": 12}},
        "required": ["age", "city"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = chat(server, user("Write JSON with age = 12, city = Bado."), response_format=wanted)
    assert json.loads(answer.choices[0].message.content) == {"age": 12, "city": "Bado"}
    forced = chat(server, user("Hello!"), response_format=wanted, max_tokens=100)
    assert set(json.loads(forced.choices[0].message.content)) == {"age", "city"}
    schema["properties"]["city"] |= {"pattern": "^[a-z]+$"}  # beside a length no grammar holds it
    with pytest.raises(
        openai.BadRequestError, match=r"cannot be enforced: schema\.properties\.city: maxLength beside pattern"
    ):
        chat(server, user("Hello!"), response_format=wanted)
    loose = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": False}}
    found = json.loads(chat(server, user("Hello!"), response_format=loose, max_tokens=100).choices[0].message.content)
    assert set(found) == {"age", "city"} and found["city"].islower()
    extra = {"response_format": {"type": "choice", "choice": ["yes", "no"]}}
    chosen = chat(server, user("Hello!"), extra_body=extra)
    assert chosen.choices[0].message.content in ("yes", "no")


def test_an_impossible_schema_is_the_requests_fault(server: RunningServer) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    refused = server.post("/v1/chat/completions", {"messages": user("Hello!"), "response_format": wanted})
    assert refused.status_code == 400 and "cannot be compiled" in refused.json()["error"]["message"]


def test_a_schema_that_would_take_long_to_compile_is_refused(server: RunningServer) -> None:
    schema = {"enum": [f"value {i}" for i in range(20_000)]}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    refused = server.post("/v1/chat/completions", {"messages": user("Hello!"), "response_format": wanted})
    assert refused.status_code == 400 and "at most 65536 are taken" in refused.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_completions_are_the_runtimes(server: RunningServer, stream: bool) -> None:
    prompts = [f"What is {i} + {2 * i}?" for i in range(1, 9)]
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=24)
    expected = [result.text for result in server.runtime.generate(prompts, params)]

    def ask(prompt: str) -> str:
        options: dict[str, Any] = {"prompt": prompt, "temperature": 0.8, "top_p": 0.9, "seed": 3, "max_tokens": 24}
        found = server.openai.completions.create(model="nano", stream=stream, **options)
        return "".join(c.choices[0].text for c in found) if stream else found.choices[0].text

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, prompts)) == expected


def test_after_cancelled_streams_answers_are_those_of_a_fresh_engine(
    server: RunningServer, nano_artifact: Path
) -> None:
    for text in ("What is 4321 + 879?", "Hello!", "What is 17 + 25?"):
        with chat(server, user(text), stream=True, extra_body={"ignore_eos": True}, max_tokens=1000) as chunks:
            for _ in range(2):
                next(iter(chunks))
    wait_until(server.is_idle)
    prompts = [f"What is {i} + 58?" for i in range(6)]
    params = SamplingParams(temperature=0.0, max_tokens=24)
    with Runtime.load(nano_artifact) as fresh:
        expected = [result.text for result in fresh.generate(prompts, params)]
    body = {"prompt": prompts, "temperature": 0.0, "max_tokens": 24}
    assert [c["text"] for c in server.post("/v1/completions", body).json()["choices"]] == expected


def test_log_probabilities_are_those_of_the_emitted_tokens(server: RunningServer) -> None:
    answer = chat(server, user("Hello!"), logprobs=True, top_logprobs=2)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    assert all(entry.logprob == entry.top_logprobs[0].logprob <= 0 for entry in entries)  # greedy: the likeliest
    assert "".join(entry.token for entry in entries).endswith("Hello! What can I do for you?<|user|>")


def test_defaults_come_from_the_checkpoint(server: RunningServer) -> None:
    """generation_config.json says top_p 0.95 at temperature 1: the server's default equals asking for it."""
    body = {"prompt": "Hello", "seed": 5, "max_tokens": 30}
    asked = {**body, "temperature": 1.0, "top_p": 0.95}
    texts = [server.post("/v1/completions", b).json()["choices"][0]["text"] for b in (body, asked)]
    assert texts[0] == texts[1]
