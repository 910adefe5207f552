from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_mtp_export.errors import RequestError
from glm_mtp_export.runtime.detokenizer import IncrementalDetokenizer, held_suffix_length
from glm_mtp_export.runtime.tokenizer import Tokenizer

Blocks = Callable[[Sequence[int], int], list[list[int]]]


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One id per byte: the alphabet of a byte-level vocabulary."""
    single = {tokenizer.token_bytes(i): i for i in range(len(tokenizer)) if len(tokenizer.token_bytes(i)) == 1}
    return [single[bytes([b])] for b in data]


def streamed(tokenizer: Tokenizer, pieces: Sequence[Sequence[int]], **options: object) -> tuple[str, int | None]:
    """All text and the number of ids kept (None: no stop string)."""
    stream = IncrementalDetokenizer(tokenizer, **options)  # type: ignore[arg-type]
    text, count = "", 0
    for piece in pieces:
        chunk = stream.push(piece)
        text += chunk.text
        if chunk.stop_index is not None:
            return text, count + chunk.stop_index + 1
        count += len(piece)
    return text + stream.finish(), None


def test_no_half_character_is_sent(tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, "a🎉数b".encode())
    stream = IncrementalDetokenizer(tokenizer)
    assert [stream.push([i]).text for i in ids] == ["a", "", "", "", "🎉", "", "", "数", "b"]
    assert stream.finish() == ""


def test_split_at_every_place_gives_the_whole_text(tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, b"x\xf0\x9f\x8e\x89 \xe6\x95\xb0 y")
    for at in range(len(ids) + 1):
        assert streamed(tokenizer, [ids[:at], ids[at:]]) == ("x🎉 数 y", None)


def test_broken_bytes_become_replacement_characters_only_at_the_end(tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, b"ok\xf0\x9f")
    stream = IncrementalDetokenizer(tokenizer)
    assert stream.push(ids).text == "ok"
    assert stream.finish() == "�"


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_chunks_concatenate_to_the_decoded_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=24))
    size = data.draw(st.integers(1, 5))
    skip = data.draw(st.booleans())
    pieces = [ids[i : i + size] for i in range(0, len(ids), size)]
    text, _ = streamed(tokenizer, pieces, skip_special_tokens=skip)
    assert text == tokenizer.decode(ids, skip_ids=tokenizer.hidden_ids(skip))
    # a stop string that is absent changes nothing
    text, kept = streamed(tokenizer, pieces, skip_special_tokens=skip, stop=["\x00\x01never"])
    assert (text, kept) == (tokenizer.decode(ids, skip_ids=tokenizer.hidden_ids(skip)), None)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 100])
def test_stop_string_across_tokens_and_blocks(
    tokenizer: Tokenizer, in_blocks: Blocks, size: int, include: bool
) -> None:
    ids = byte_ids(tokenizer, b"xab...tail")
    result = streamed(tokenizer, in_blocks(ids, size), stop=["ab"], include_stop_str_in_output=include)
    assert result == ("xab" if include else "x", 3)


def test_stop_string_inside_one_token_cuts_the_rest_of_it(tokenizer: Tokenizer) -> None:
    token = next(i for i in range(len(tokenizer)) if tokenizer.token_bytes(i) == b"the")
    tail = tokenizer.encode("more")
    assert streamed(tokenizer, [[token, *tail]], stop=["h"]) == ("t", 1)
    assert streamed(tokenizer, [[token, *tail]], stop=["h"], include_stop_str_in_output=True) == ("th", 1)


def test_prefix_of_a_stop_string_is_held_then_released(tokenizer: Tokenizer) -> None:
    stream = IncrementalDetokenizer(tokenizer, stop=["abc", "bd"])
    assert stream.push(byte_ids(tokenizer, b"xab")).text == "x"
    assert stream.push(byte_ids(tokenizer, b"x")).text == "abx"
    assert stream.push(byte_ids(tokenizer, b"ab")).text == ""
    chunk = stream.push(byte_ids(tokenizer, b"dzz"))
    assert (chunk.text, chunk.stop_index, chunk.stop_string) == ("a", 0, "bd")
    assert stream.finish() == ""
    with pytest.raises(RuntimeError):
        stream.push([1])


def test_held_text_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    assert streamed(tokenizer, [byte_ids(tokenizer, b"xab")], stop=["abc"]) == ("xab", None)


def oracle(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """End of the match that ends first (of those ending together the longest), by plain search."""
    for end in range(1, len(text) + 1):
        ended = [s for s in stops if text[:end].endswith(s)]
        if ended:
            return end, max(ended, key=len)
    return None


@settings(max_examples=400, deadline=None)
@given(
    text=st.text(alphabet="ab🎉", max_size=14),
    stops=st.lists(st.text(alphabet="ab🎉", min_size=1, max_size=4), min_size=1, max_size=3),
    size=st.integers(1, 4),
)
def test_stop_result_does_not_depend_on_blocks(tokenizer: Tokenizer, text: str, stops: list[str], size: int) -> None:
    ids = byte_ids(tokenizer, text.encode())
    pieces = [ids[i : i + size] for i in range(0, len(ids), size)]
    expected = oracle(text, stops)
    got = streamed(tokenizer, pieces, stop=stops)
    if expected is None:
        assert got == (text, None)
    else:
        end, match = expected
        assert got == (text[: end - len(match)], len(text[:end].encode()))


def test_min_tokens_text_is_no_part_of_a_match(tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, b"ababab")
    assert streamed(tokenizer, [ids], stop=["ab"], min_tokens=3) == ("abab", 6)


def test_special_tokens_are_invisible_to_stop_strings_and_markers_are_not(tokenizer: Tokenizer) -> None:
    ids = [*byte_ids(tokenizer, b"a"), tokenizer.require_id("<|user|>"), *byte_ids(tokenizer, b"b")]
    assert streamed(tokenizer, [ids], stop=["ab"]) == ("", 3)
    assert streamed(tokenizer, [ids], stop=["ab"], skip_special_tokens=False) == ("a<|user|>b", None)
    call = [tokenizer.require_id("<tool_call>"), *byte_ids(tokenizer, b"f"), tokenizer.require_id("</tool_call>")]
    assert streamed(tokenizer, [call]) == ("<tool_call>f</tool_call>", None)


def test_empty_stop_string_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="empty string"):
        IncrementalDetokenizer(tokenizer, stop=["a", ""])


def test_held_suffix_is_the_longest_proper_prefix() -> None:
    assert held_suffix_length("a <tool", ["<tool_call>"]) == 5
    assert held_suffix_length("</thi", ["<tool_call>", "</think>"]) == 5
    assert held_suffix_length("<tool_call>", ["<tool_call>"]) == 0
    assert held_suffix_length("aab", ["aabaac"]) == 3
    assert held_suffix_length("", ["x"]) == 0 and held_suffix_length("abc", []) == 0
