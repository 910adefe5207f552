from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_mtp_export.chat.tools import ToolCallParser, new_call_id

Cuts = Callable[[str], Iterator[list[str]]]
Calls = list[tuple[str, dict[str, Any]]]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TOOLS = [tool("get_weather", city={"type": "string"}, days={"type": "integer"}), tool("list_boxes")]


def parse(pieces: list[str], tools: list[dict[str, Any]] = TOOLS) -> tuple[str, Calls]:
    numbers = itertools.count()
    parser = ToolCallParser(tools, make_id=lambda: f"id{next(numbers)}")
    found = [parser.feed(piece) for piece in pieces]
    found.append(parser.finish())
    calls = [call for f in found for call in f.calls]
    assert [call.index for call in calls] == list(range(len(calls)))
    assert [call.id for call in calls] == [f"id{i}" for i in range(len(calls))]
    return "".join(f.content for f in found), [(c.name, json.loads(c.arguments)) for c in calls]


WEATHER = (
    "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Köln</arg_value>"
    "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>"
)
WEATHER_CALL = ("get_weather", {"city": "Köln", "days": 2})
OLD_STYLE = (
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
)

CASES: dict[str, tuple[str, str, Calls]] = {
    "no arguments": ("<tool_call>list_boxes</tool_call>", "", [("list_boxes", {})]),
    "arguments": (WEATHER, "", [WEATHER_CALL]),
    "name on its own line": (OLD_STYLE, "", [WEATHER_CALL]),
    "text before": ("Let me see.\n" + WEATHER, "Let me see.", [WEATHER_CALL]),
    "two calls": (WEATHER + "<tool_call>list_boxes</tool_call>", "", [WEATHER_CALL, ("list_boxes", {})]),
    "two calls on two lines": (WEATHER + "\n" + WEATHER + "\n", "", [WEATHER_CALL, WEATHER_CALL]),
    "text between and after": (WEATHER + "\nand \n" + WEATHER + " done ", "and done ", [WEATHER_CALL, WEATHER_CALL]),
    "white space between calls after text": ("a " + WEATHER + "\n" + WEATHER + "\n", "a", [WEATHER_CALL, WEATHER_CALL]),
    "false start": ("a <tool box> b", "a <tool box> b", []),
    "tag in a sentence": ("the <tool_call> tag, then " + WEATHER, "the <tool_call> tag, then", [WEATHER_CALL]),
    "tag before a call": ("<tool_call>" + WEATHER, "<tool_call>", [WEATHER_CALL]),
    "empty name": ("<tool_call></tool_call>x", "<tool_call></tool_call>x", []),
    "junk after the key": (
        "<tool_call>f<arg_key>k</arg_key>junk</tool_call>",
        "<tool_call>f<arg_key>k</arg_key>junk</tool_call>",
        [],
    ),
    "unfinished name": ("x <tool_call>list_bo", "x <tool_call>list_bo", []),
    "unfinished value": (WEATHER[:-20], WEATHER[:-20], []),
    "unfinished value quoting a call": (
        "<tool_call>f<arg_key>k</arg_key><arg_value>use <tool_call>g</tool_call> here",
        "<tool_call>f<arg_key>k</arg_key><arg_value>use <tool_call>g</tool_call> here",
        [],
    ),
    "unfinished second call": (WEATHER + "\n<tool_call>list", "<tool_call>list", [WEATHER_CALL]),
    "markup in a value": (
        "<tool_call>f<arg_key>t</arg_key><arg_value><tool_call>g</tool_call> </think> "
        "<b>x</b> </arg_value> y\n</arg_value></tool_call>",
        "",
        [("f", {"t": "<tool_call>g</tool_call> </think> <b>x</b> </arg_value> y\n"})],
    ),
    "key twice": (
        "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>a</arg_key><arg_value>2</arg_value></tool_call>",
        "",
        [("f", {"a": 2})],
    ),
    "empty value": ("<tool_call>f<arg_key>a</arg_key><arg_value></arg_value></tool_call>", "", [("f", {"a": ""})]),
    "white space only": (" \n ", " \n ", []),
    "text only": ("just text\n", "just text\n", []),
}


@pytest.mark.parametrize("name", CASES)
def test_same_result_for_every_cut(name: str, cuts: Cuts) -> None:
    text, content, calls = CASES[name]
    for pieces in cuts(text):
        assert parse(pieces) == (content, calls), pieces


def test_nothing_of_a_call_is_sent_before_its_end_tag() -> None:
    text = "<tool_call>list_boxes</tool_call>"
    parser = ToolCallParser(TOOLS)
    for character in text[:-1]:
        piece = parser.feed(character)
        assert piece.content == "" and piece.calls == ()
    (call,) = parser.feed(text[-1]).calls
    assert (call.name, call.arguments) == ("list_boxes", "{}")


def test_a_false_start_is_sent_once_it_cannot_be_a_marker() -> None:
    parser = ToolCallParser(TOOLS)
    assert parser.feed("a <tool").content == "a"
    assert parser.feed(" box>").content == " <tool box>"


def test_a_sentence_about_the_tag_is_sent_at_its_second_word() -> None:
    parser = ToolCallParser(TOOLS)
    assert parser.feed("<tool_call> tag").content == ""
    assert parser.feed(" i").content == "<tool_call> tag i"


def test_ids_are_unique() -> None:
    ids = {new_call_id() for _ in range(1000)}
    assert len(ids) == 1000 and all(i.startswith("call_") for i in ids)


def test_a_long_value_in_small_pieces_costs_linear_time() -> None:
    parser = ToolCallParser(TOOLS)
    parser.feed("<tool_call>f<arg_key>k</arg_key><arg_value>")
    for _ in range(20_000):
        parser.feed("a b </arg_value> ")
    (call,) = parser.feed("</arg_value></tool_call>").calls
    assert len(json.loads(call.arguments)["k"]) == 20_000 * 17


# ---- call -> text -> call

NAMES = st.text(alphabet="abcXYZ_-.09:/", min_size=1, max_size=12)
KEYS = st.text(alphabet="abcÄ_0 ", min_size=1, max_size=8).map(str.strip).filter(bool)
STRINGS = st.text(alphabet=st.characters(codec="utf-8"), max_size=20) | st.lists(
    st.sampled_from(
        [
            "<tool_call>",
            "</tool_call>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</think>",
            " ",
            "\n",
            "x",
            '{"a": 1}',
        ]
    ),
    max_size=6,
).map("".join)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | STRINGS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
JSON_TYPE = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}


def written(name: str, arguments: Mapping[str, Any], newline: str) -> str:
    """A call as GLM's template prints it: strings bare, everything else JSON without ASCII escapes."""
    texts = {k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for k, v in arguments.items()}
    pairs = "".join(f"<arg_key>{k}</arg_key>{newline}<arg_value>{v}</arg_value>{newline}" for k, v in texts.items())
    return f"<tool_call>{name}{newline}{pairs}</tool_call>"


def unambiguous(value: Any) -> bool:
    return not isinstance(value, str) or not any(
        f"</arg_value>{end}" in "".join(value.split()) for end in ("<arg_key>", "</tool_call>")
    )


@settings(max_examples=300, deadline=None)
@given(
    calls=st.lists(
        st.tuples(NAMES, st.dictionaries(KEYS, JSON_VALUES.filter(unambiguous), max_size=3)), min_size=1, max_size=3
    ),
    newline=st.sampled_from(["", "\n"]),
    size=st.integers(1, 9),
    text=st.text(alphabet="ab <>/\n", max_size=8),
)
def test_call_to_text_to_call(calls: Calls, newline: str, size: int, text: str) -> None:
    tools = []
    for name, arguments in calls:
        types = {k: {"type": JSON_TYPE[type(v)]} for k, v in arguments.items()}
        tools.append(tool(name, **types))
    # One name may come twice with other types: the parser sees one schema a name, so give each call its own.
    renamed = [(f"{name}{i}", arguments) for i, (name, arguments) in enumerate(calls)]
    for i, entry in enumerate(tools):
        entry["function"]["name"] = renamed[i][0]
    whole = text + newline.join(written(name, arguments, newline) for name, arguments in renamed)
    pieces = [whole[i : i + size] for i in range(0, len(whole), size)]
    assert parse(pieces, tools) == (text.rstrip(" \t\r\n"), renamed)


@settings(max_examples=500, deadline=None)
@given(
    text=st.lists(
        st.sampled_from(
            [
                "<tool_call>",
                "</tool_call>",
                "<arg_key>",
                "</arg_key>",
                "<arg_value>",
                "</arg_value>",
                "f",
                " ",
                "\n",
                "<",
                "k k",
                "</arg",
            ]
        ),
        max_size=14,
    ).map("".join),
    size=st.integers(1, 5),
)
def test_any_markup_soup_gives_one_result_and_loses_no_text(text: str, size: int) -> None:
    whole = parse([text])
    assert parse([text[i : i + size] for i in range(0, len(text), size)]) == whole
    if not whole[1]:
        assert whole[0] == text
