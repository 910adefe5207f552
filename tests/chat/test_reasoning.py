from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from glm_mtp_export.chat.reasoning import ReasoningParser, prompt_opens_thinking
from glm_mtp_export.runtime.tokenizer import Tokenizer

Cuts = Callable[[str], Iterator[list[str]]]


def split(pieces: list[str], *, thinking: bool, finish: str = "stop") -> tuple[str, str]:
    parser = ReasoningParser(starts_in_thinking=thinking)
    found = [parser.feed(piece) for piece in pieces]
    found.append(parser.finish(finish))
    return "".join(f.reasoning for f in found), "".join(f.rest for f in found)


CASES = {
    "closed": ("think hard</think>answer", True, "stop", "think hard", "answer"),
    "white space stays": ("\na \n</think>\n\n b\n", True, "stop", "\na \n", "\n\n b\n"),
    "closed at once": ("</think>answer", True, "stop", "", "answer"),
    "ended by a call": ("need it<tool_call>f</tool_call>", True, "stop", "need it", "<tool_call>f</tool_call>"),
    "tag repeated": ("<think>a</think>b", True, "stop", "a", "b"),
    "opened by the answer": ("\n<think>a</think>b", False, "stop", "a", "b"),
    "not opened": ("plain </think> text", False, "stop", "", "plain </think> text"),
    "false starts": (
        "a < b </thin </thinker <tool box></think>x",
        True,
        "stop",
        "a < b </thin </thinker <tool box>",
        "x",
    ),
    "second block is text": ("a</think>b<think>c</think>d", True, "stop", "a", "b<think>c</think>d"),
    "left open, cut by length": ("still think", True, "length", "still think", ""),
    "left open, answered inside": ("the answer", True, "stop", "the answer", "the answer"),
    "left open in a marker": ("x</thi", True, "length", "x</thi", ""),
    "white space only": (" \n", True, "length", " \n", ""),
    "white space only, no thinking": (" <thi", False, "stop", "", " <thi"),
    "empty": ("", True, "stop", "", ""),
}


@pytest.mark.parametrize("name", CASES)
def test_same_split_for_every_cut(name: str, cuts: Cuts) -> None:
    text, thinking, finish, reasoning, rest = CASES[name]
    for pieces in cuts(text):
        assert split(pieces, thinking=thinking, finish=finish) == (reasoning, rest), pieces


def test_no_prefix_of_a_marker_leaks_into_the_stream() -> None:
    parser = ReasoningParser(starts_in_thinking=True)
    sent = "".join(parser.feed(c).reasoning for c in "ab</think")
    assert sent == "ab"
    assert parser.feed(">c").rest == "c"


def test_reasoning_is_sent_as_it_comes() -> None:
    parser = ReasoningParser(starts_in_thinking=True)
    assert [parser.feed(c).reasoning for c in "abc"] == ["a", "b", "c"]
    assert parser.in_thinking
    parser.feed("</think>")
    assert not parser.in_thinking


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("<|user|>q<|assistant|><think>", True),
        ("<|user|>q<|assistant|><think></think>", False),
        ("<|user|>q<|assistant|>", False),
        ("<|user|>q<|assistant|><think></think>a<|user|>r<|assistant|><think>", True),
        ("<|user|>what does <think> mean?<|assistant|>", False),
        ("plain text", False),
        ("", False),
    ],
)
def test_start_state_comes_from_the_prompt_ids(tokenizer: Tokenizer, prompt: str, expected: bool) -> None:
    assert prompt_opens_thinking(tokenizer.encode(prompt), tokenizer) is expected


def test_same_output_after_three_prompts(tokenizer: Tokenizer) -> None:
    results = []
    for end in ("<think>", "<think></think>", ""):
        ids = tokenizer.encode("<|user|>q<|assistant|>" + end)
        results.append(split(["text"], thinking=prompt_opens_thinking(ids, tokenizer), finish="length"))
    assert results == [("text", ""), ("", "text"), ("", "text")]
