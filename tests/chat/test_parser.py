"""The whole way: ids -> text -> reasoning, content, calls; the same for every cut and every block size."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_mtp_export.chat.parser import ChatAnswer, ChatParser, parse_answer
from glm_mtp_export.chat.reasoning import prompt_opens_thinking
from glm_mtp_export.runtime.detokenizer import IncrementalDetokenizer
from glm_mtp_export.runtime.tokenizer import Tokenizer

Cuts = Callable[[str], Iterator[list[str]]]
Blocks = Callable[[Sequence[int], int], list[list[int]]]

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": "get_weather", "parameters": {"properties": {"city": {"type": "string"}}}},
    },
    {"type": "function", "function": {"name": "list_boxes", "parameters": {}}},
]
CALL = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Köln 🎉</arg_value></tool_call>"
ANSWERS = {
    "plain": "the answer",
    "thinking": "the question</think>\nthe 数 answer",
    "call": "I should call</think>Let me see.\n" + CALL,
    "call ends thinking": "I should call" + CALL,
    "two calls": "</think>" + CALL + CALL,
    "no arguments": "x</think><tool_call>list_boxes</tool_call>",
    "unfinished": "x</think>see <tool_call>get_weather<arg_key>ci",
    "false starts": "a <tool box> </thin</think>b <tool box>",
}


def ids_by_make() -> Callable[[], str]:
    numbers = itertools.count()
    return lambda: f"call{next(numbers)}"


def stream(pieces: list[str], *, finish: str, thinking: bool, tools: list[dict[str, Any]] | None = TOOLS) -> ChatAnswer:
    parser = ChatParser(starts_in_thinking=thinking, tools=tools, make_id=ids_by_make())
    deltas = [parser.feed(piece) for piece in pieces] + [parser.finish(finish)]
    return ChatAnswer(
        "".join(d.reasoning for d in deltas),
        "".join(d.content for d in deltas),
        tuple(c for d in deltas for c in d.tool_calls),
        parser.finish_reason(finish),
    )


@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("name", ANSWERS)
def test_streamed_equals_whole_for_every_cut(name: str, thinking: bool, finish: str, cuts: Cuts) -> None:
    text = ANSWERS[name]
    whole = parse_answer(text, finish_reason=finish, starts_in_thinking=thinking, tools=TOOLS, make_id=ids_by_make())
    for pieces in cuts(text):
        assert stream(pieces, finish=finish, thinking=thinking) == whole, pieces


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("spelling", ["ids", "ordinary tokens"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ANSWERS)
def test_blocks_of_ids_skipped_specials_and_spelled_markers_give_one_result(
    tokenizer: Tokenizer, in_blocks: Blocks, name: str, size: int, spelling: str, skip: bool
) -> None:
    text = ANSWERS[name]
    single = {tokenizer.token_bytes(i): i for i in range(len(tokenizer)) if len(tokenizer.token_bytes(i)) == 1}
    ids = tokenizer.encode(text) if spelling == "ids" else [single[bytes([b])] for b in text.encode()]
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    pieces = [detokenizer.push(block).text for block in in_blocks(ids, size)] + [detokenizer.finish()]
    whole = parse_answer(text, finish_reason="stop", starts_in_thinking=True, tools=TOOLS, make_id=ids_by_make())
    assert stream(pieces, finish="stop", thinking=True) == whole


FRAGMENTS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
]


@settings(max_examples=600, deadline=None)
@given(
    text=st.lists(st.sampled_from([*FRAGMENTS, "f", "k", "数", " ", "\n", "<", "</", "<t"]), max_size=16).map("".join),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=6),
    thinking=st.booleans(),
    finish=st.sampled_from(["stop", "length"]),
)
def test_any_soup_of_markers_parses_the_same_in_any_pieces(
    text: str, sizes: list[int], thinking: bool, finish: str
) -> None:
    pieces, at = [], 0
    for size in itertools.cycle(sizes):
        if at >= len(text):
            break
        pieces.append(text[at : at + size])
        at += size
    whole = parse_answer(text, finish_reason=finish, starts_in_thinking=thinking, tools=TOOLS, make_id=ids_by_make())
    assert stream(pieces, finish=finish, thinking=thinking) == whole


def test_expected_answers() -> None:
    def parsed(name: str, **options: Any) -> tuple[str, str, list[tuple[str, str]], str | None]:
        options = {"finish": "stop", "thinking": True, **options}
        answer = stream([ANSWERS[name]], **options)
        calls = [(c.name, c.arguments) for c in answer.tool_calls]
        return answer.reasoning, answer.content, calls, answer.finish_reason

    koeln = ("get_weather", '{"city": "Köln 🎉"}')
    assert parsed("thinking") == ("the question", "\nthe 数 answer", [], "stop")
    assert parsed("call") == ("I should call", "Let me see.", [koeln], "tool_calls")
    assert parsed("call ends thinking") == ("I should call", "", [koeln], "tool_calls")
    assert parsed("two calls") == ("", "", [koeln, koeln], "tool_calls")
    assert parsed("no arguments") == ("x", "", [("list_boxes", "{}")], "tool_calls")
    assert parsed("unfinished", finish="length") == ("x", "see <tool_call>get_weather<arg_key>ci", [], "length")
    assert parsed("plain", thinking=False) == ("", "the answer", [], "stop")
    assert parsed("false starts") == ("a <tool box> </thin", "b <tool box>", [], "stop")


def test_thinking_left_open() -> None:
    stopped = stream(["the ", "answer"], finish="stop", thinking=True)
    assert (stopped.content, stopped.reasoning) == ("the answer", "the answer")
    cut = stream(["the ", "answer"], finish="length", thinking=True)
    assert (cut.content, cut.reasoning) == ("", "the answer")


def test_without_tools_a_call_is_content() -> None:
    answer = stream(["x</think>" + CALL], finish="stop", thinking=True, tools=None)
    assert (answer.content, answer.tool_calls, answer.finish_reason) == (CALL, (), "stop")


def test_start_state_from_rendered_prompts(tokenizer: Tokenizer) -> None:
    results = []
    for end in ("<think>", "<think></think>", ""):
        prompt = tokenizer.encode("[gMASK]<sop><|user|>q<|assistant|>" + end)
        answer = stream(["a b"], finish="length", thinking=prompt_opens_thinking(prompt, tokenizer))
        results.append((answer.reasoning, answer.content))
    assert results == [("a b", ""), ("", "a b"), ("", "a b")]
