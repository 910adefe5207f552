"""Chat completions through the official client: text, thinking, tools, streams, counts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from scripted_model import Script
from server_process import RunningServer, wait_until

CALL = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Köln 🎉</arg_value></tool_call>"
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
SCRIPT = Script(
    {
        "hello": "say 数 hi</think>Hello 🎉 there",
        "weather?": "need the tool</think>Let me see.\n" + CALL,
        "twice?": "ok</think>" + CALL + CALL,
        "22 degrees": "I know</think>It is 22 degrees.",
        "open": "the answer without an end",
        "stop here": "ok</think>one two END three",
    }
)


@pytest.fixture(scope="module")
def server(folder: Any) -> Iterator[RunningServer]:
    from scripted_model import make_runtime

    running = RunningServer(folder, make_runtime(folder, SCRIPT))
    yield running
    running.stop()


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def streamed(server: RunningServer, **options: Any) -> dict[str, Any]:
    """A streamed answer put together as a client would."""
    found: dict[str, Any] = {"reasoning": "", "content": "", "calls": [], "finish": None, "usage": None, "chunks": 0}
    found["logprobs"] = []
    for chunk in server.openai.chat.completions.create(model="nano", stream=True, **options):
        found["chunks"] += 1
        if chunk.usage:
            found["usage"] = chunk.usage
        for choice in chunk.choices:
            found["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            found["content"] += choice.delta.content or ""
            found["calls"] += choice.delta.tool_calls or []
            found["finish"] = choice.finish_reason or found["finish"]
            found["logprobs"] += (choice.logprobs.content or []) if choice.logprobs else []
    return found


def test_answer_with_thinking(server: RunningServer) -> None:
    answer = server.openai.chat.completions.create(model="nano", messages=user("hello"))
    message = answer.choices[0].message
    assert message.content == "Hello 🎉 there"
    assert message.reasoning_content == "say 数 hi"  # type: ignore[attr-defined]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    # ids are bytes: the answer's text, one id for </think>, one for the stop id
    num_thinking = len("say 数 hi".encode())
    assert answer.usage.completion_tokens_details.reasoning_tokens == num_thinking
    assert answer.usage.completion_tokens == num_thinking + 1 + len("Hello 🎉 there".encode()) + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@pytest.mark.parametrize("text", ["hello", "weather?", "twice?", "open", "stop here"])
def test_streamed_equals_whole(server: RunningServer, text: str) -> None:
    options: dict[str, Any] = {"messages": user(text), "tools": TOOLS, "logprobs": True, "top_logprobs": 2}
    options |= {"stop": ["END"]}
    whole = server.openai.chat.completions.create(model="nano", **options)
    parts = streamed(server, stream_options={"include_usage": True}, **options)
    message = whole.choices[0].message
    assert parts["reasoning"] == (message.reasoning_content or "")  # type: ignore[attr-defined]
    assert parts["content"] == (message.content or "")
    assert parts["finish"] == whole.choices[0].finish_reason
    called = [(c.function.name, c.function.arguments) for c in message.tool_calls or []]
    assert [(c.function.name, c.function.arguments) for c in parts["calls"]] == called
    assert [c.index for c in parts["calls"]] == list(range(len(called)))
    assert parts["usage"].completion_tokens == whole.usage.completion_tokens
    assert whole.choices[0].logprobs is not None
    assert parts["logprobs"] == whole.choices[0].logprobs.content
    assert len(parts["logprobs"]) == whole.usage.completion_tokens


def test_a_call_then_its_result_then_the_answer(server: RunningServer) -> None:
    messages = user("weather?")
    first = server.openai.chat.completions.create(model="nano", messages=messages, tools=TOOLS)
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Köln 🎉"} and message.content == "Let me see."
    messages += [message.model_dump(exclude_none=True)]
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "22 degrees"}]
    second = server.openai.chat.completions.create(model="nano", messages=messages, tools=TOOLS)
    assert second.choices[0].message.content == "It is 22 degrees."
    assert second.choices[0].finish_reason == "stop"


def test_two_calls_have_their_own_ids(server: RunningServer) -> None:
    calls = streamed(server, messages=user("twice?"), tools=TOOLS)["calls"]
    assert len({call.id for call in calls}) == 2 and [call.index for call in calls] == [0, 1]


def test_a_template_variable_of_any_name_is_taken(shared_server: RunningServer) -> None:
    for name in ("self", "prompt", "a b", "loop"):
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "chat_template_kwargs": {name: 1}}
        assert shared_server.post("/v1/chat/completions", body).status_code == 200, name


def test_tool_choice_none_shows_the_model_no_tools(server: RunningServer) -> None:
    answer = server.openai.chat.completions.create(
        model="nano", messages=user("hello"), tools=TOOLS, tool_choice="none"
    )
    alone = server.openai.chat.completions.create(model="nano", messages=user("hello"))
    assert answer.usage.prompt_tokens == alone.usage.prompt_tokens


def test_thinking_off_comes_from_the_prompt(server: RunningServer) -> None:
    for extra in ({"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}):
        answer = server.openai.chat.completions.create(model="nano", messages=user("open"), extra_body=extra)
        assert answer.choices[0].message.content == "the answer without an end"
        assert answer.choices[0].message.reasoning_content is None  # type: ignore[attr-defined]


def test_thinking_left_open(server: RunningServer) -> None:
    stopped = server.openai.chat.completions.create(model="nano", messages=user("open"))
    assert stopped.choices[0].message.content == "the answer without an end"
    cut = server.openai.chat.completions.create(model="nano", messages=user("open"), max_tokens=10)
    assert cut.choices[0].finish_reason == "length"
    assert (cut.choices[0].message.content, cut.usage.completion_tokens) == ("", 10)
    assert cut.choices[0].message.reasoning_content == "the answer"  # type: ignore[attr-defined]


def test_stop_string_cuts_text_and_counts(server: RunningServer) -> None:
    answer = server.openai.chat.completions.create(model="nano", messages=user("stop here"), stop="END")
    assert answer.choices[0].message.content == "one two "
    assert answer.usage.completion_tokens == 2 + 1 + len("one two END")
    assert answer.choices[0].stop_reason == "END"  # type: ignore[attr-defined]


def test_n_choices(server: RunningServer) -> None:
    answer = server.openai.chat.completions.create(model="nano", messages=user("hello"), n=3)
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert {c.message.content for c in answer.choices} == {"Hello 🎉 there"}
    indices = set()
    texts = ["", "", ""]
    for chunk in server.openai.chat.completions.create(model="nano", messages=user("hello"), n=3, stream=True):
        for choice in chunk.choices:
            indices.add(choice.index)
            texts[choice.index] += choice.delta.content or ""
    assert indices == {0, 1, 2} and set(texts) == {"Hello 🎉 there"}


def test_no_piece_of_a_stream_holds_half_a_character(server: RunningServer) -> None:
    for chunk in server.openai.chat.completions.create(model="nano", messages=user("hello"), stream=True):
        for choice in chunk.choices:
            assert "�" not in (choice.delta.content or "")


def test_token_ids_on_request(server: RunningServer) -> None:
    body = {"messages": user("hello"), "return_token_ids": True}
    whole = server.post("/v1/chat/completions", body).json()
    choice = whole["choices"][0]
    assert len(choice["token_ids"]) == whole["usage"]["completion_tokens"]
    tokenizer = server.runtime.tokenizer
    assert tokenizer is not None
    assert tokenizer.decode(choice["prompt_token_ids"]) == "[gMASK]<sop><|user|>hello<|assistant|><think>"


def test_text_parts_are_text(server: RunningServer) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}]
    answer = server.openai.chat.completions.create(model="nano", messages=parts)
    assert answer.choices[0].message.content == "Hello 🎉 there"


def test_nothing_is_left_behind(server: RunningServer) -> None:
    wait_until(server.is_idle)


def test_answer_lost_to_bad_logits_is_an_error_and_the_server_lives(serve: Callable[..., RunningServer]) -> None:
    server = serve(Script({"hello": "ok</think>" + "x" * 100}, nan_after_calls=3))
    refused = server.post("/v1/chat/completions", {"messages": user("hello")})
    assert refused.status_code == 500 and "NaN" in refused.json()["error"]["message"]
    assert server.get("/health").status_code == 200
    wait_until(server.is_idle)
