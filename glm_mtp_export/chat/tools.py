"""Tool calls in GLM's markup (`glm45` / `glm47`): finds them in the text after reasoning, a piece at a time.

    call := <tool_call> name ( <arg_key> key </arg_key> <arg_value> value </arg_value> )* </tool_call>

In: text in pieces of any size and the tools of the request (for argument types). Out: content text and whole calls.
Same result for every way of cutting the text.

Rules:
- A call is delivered whole, at its end tag: name, unique id, index 0, 1, ..., arguments as a JSON object (maybe `{}`).
- White space is allowed between the tags and around the name; anything else between key and value: the text is no call.
- White space before a call, after the last one and between calls belongs to the markup. After a call it is kept where
  it parts two texts.
- A value is verbatim and ends at the first `</arg_value>` that a following `<arg_key>` or `</tool_call>` confirms, so
  markup inside a value (`<tool_call>`, `</think>`, even a lone `</arg_value>`) stays part of it.
- A `<tool_call>` that does not begin a call is text, delivered as soon as that is certain ("<tool box>", "<tool_call>
  is a tag"). A call still unfinished at the end is text too: nothing is lost, and nothing incomplete is executed.
- A key given twice: the last value counts. A tool the request did not offer is delivered like any other.
- Markers count by their text: one spelled with ordinary tokens is a marker too.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from glm_mtp_export.chat.argument_types import argument_json, argument_schema
from glm_mtp_export.chat.reasoning import TOOL_CALL, WHITESPACE
from glm_mtp_export.runtime.detokenizer import held_suffix_length

__all__ = ["ToolCall", "ToolCallParser", "ToolPiece", "new_call_id", "parameters_by_name"]

_CALL_END, _KEY, _KEY_END = "</tool_call>", "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"
_NAME = re.compile(r"[^\s<>{}\"]+")
_AFTER_VALUE = re.compile(rf"[{WHITESPACE}]*")


@dataclass(frozen=True)
class ToolCall:
    """One call of an answer. `arguments` is the text of a JSON object."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ToolPiece:
    """What became certain: `content` is text outside calls."""

    content: str = ""
    calls: tuple[ToolCall, ...] = ()


def new_call_id() -> str:
    """An id no other call has, in the form OpenAI uses."""
    return f"call_{uuid.uuid4().hex[:24]}"


def parameters_by_name(tools: Iterable[Mapping[str, Any]] | None) -> dict[str, Mapping[str, Any]]:
    """Argument schemas by tool name, from OpenAI's `tools` list or from bare function descriptions."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools or ():
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            found[function["name"]] = function.get("parameters") or {}
    return found


class ToolCallParser:
    """One answer. `feed` text in order, then `finish` once."""

    def __init__(
        self, tools: Iterable[Mapping[str, Any]] | None = None, *, make_id: Callable[[], str] = new_call_id
    ) -> None:
        self._parameters = parameters_by_name(tools)
        self._make_id = make_id
        self._held = ""
        self._call: _CallScanner | None = None  # scans `_held` from a <tool_call> on
        self._num_calls = 0
        self._after_call = False  # nothing but white space since the last call
        self._sent_content = False

    def feed(self, text: str) -> ToolPiece:
        """Take the next piece."""
        self._held += text
        content: list[str] = []
        calls: list[ToolCall] = []
        while self._advance(content, calls):
            pass
        return ToolPiece("".join(content), tuple(calls))

    def finish(self) -> ToolPiece:
        """The rest: an unfinished call is text, white space after the last call is not."""
        rest, self._held, self._call = self._held, "", None
        return ToolPiece(content="" if self._after_call and not rest.strip(WHITESPACE) else rest)

    def _advance(self, content: list[str], calls: list[ToolCall]) -> bool:
        """One decision; False when more text is needed."""
        if self._call is None:
            return self._pass_content(content)
        verdict = self._call.scan(self._held)
        if verdict is _Verdict.UNDECIDED:
            return False
        scanner, self._call = self._call, None
        start = len(self._held) - len(self._held.lstrip(WHITESPACE))  # white space held before the tag
        if verdict is _Verdict.NO_CALL:
            content.append(self._take(start + len(TOOL_CALL)))
            self._after_call, self._sent_content = False, True
            return True
        self._take(scanner.position)
        calls.append(self._delivered(scanner))
        self._after_call = True
        return True

    def _pass_content(self, content: list[str]) -> bool:
        """Release text before the next `<tool_call>`, or all of it but what may belong to one."""
        if self._after_call and not self._sent_content:
            self._held = self._held.lstrip(WHITESPACE)
        at = self._held.find(TOOL_CALL)
        if at < 0:
            at = len(self._held) - held_suffix_length(self._held, (TOOL_CALL,))
        text = self._held[:at].rstrip(WHITESPACE)
        if text:
            self._after_call, self._sent_content = False, True
        content.append(self._take(len(text)))
        if not self._held.lstrip(WHITESPACE).startswith(TOOL_CALL):
            return False
        self._call = _CallScanner(self._held.index(TOOL_CALL) + len(TOOL_CALL))
        return True

    def _delivered(self, scanner: _CallScanner) -> ToolCall:
        parameters = self._parameters.get(scanner.name)
        values = {
            key: argument_json(text, argument_schema(parameters, key), parameters) for key, text in scanner.arguments
        }
        members = (f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in values.items())
        call = ToolCall(self._num_calls, self._make_id(), scanner.name, "{" + ", ".join(members) + "}")
        self._num_calls += 1
        return call

    def _take(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        return taken


class _Verdict(Enum):
    UNDECIDED = 0
    CALL = 1
    NO_CALL = 2


class _CallScanner:
    """Reads one call out of a growing text, never looking at a character twice but for a tag's length."""

    def __init__(self, start: int) -> None:
        self.position = start  # everything before is understood
        self.name = ""
        self.arguments: list[tuple[str, str]] = []
        self._key = ""
        self._searched = start  # no end of the current value begins before
        self._step: Callable[[str], _Verdict | None] = self._read_name

    def scan(self, text: str) -> _Verdict:
        """Go on in `text`, which begins with all of what earlier calls saw."""
        while True:
            verdict = self._step(text)
            if verdict is not None:
                return verdict

    def _read_name(self, text: str) -> _Verdict | None:
        at = text.find("<", self.position)
        name = (text[self.position :] if at < 0 else text[self.position : at]).strip(WHITESPACE)
        if name and not _NAME.fullmatch(name):
            return _Verdict.NO_CALL
        if at < 0:
            return _Verdict.UNDECIDED
        if not name:
            return _Verdict.NO_CALL
        self.name = name
        self.position = at
        return self._read_key_or_end(text)

    def _read_key_or_end(self, text: str) -> _Verdict | None:
        rest = text[self.position : self.position + len(_CALL_END)]
        if rest.startswith(_CALL_END):
            self.position += len(_CALL_END)
            return _Verdict.CALL
        if rest.startswith(_KEY):
            self.position += len(_KEY)
            self._step = self._read_key
            return None
        if _CALL_END.startswith(rest) or _KEY.startswith(rest):
            self._step = self._read_key_or_end
            return _Verdict.UNDECIDED
        return _Verdict.NO_CALL

    def _read_key(self, text: str) -> _Verdict | None:
        at = text.find("<", self.position)
        if at < 0:
            return _Verdict.UNDECIDED
        rest = text[at : at + len(_KEY_END)]
        if rest != _KEY_END:
            return _Verdict.UNDECIDED if _KEY_END.startswith(rest) else _Verdict.NO_CALL
        self._key = text[self.position : at].strip(WHITESPACE)
        self.position = at + len(_KEY_END)
        self._step = self._read_value_tag
        return None if self._key else _Verdict.NO_CALL

    def _read_value_tag(self, text: str) -> _Verdict | None:
        self.position = _end_of_space(text, self.position)
        rest = text[self.position : self.position + len(_VALUE)]
        if rest != _VALUE:
            return _Verdict.UNDECIDED if _VALUE.startswith(rest) else _Verdict.NO_CALL
        self.position += len(_VALUE)
        self._searched = self.position
        self._step = self._read_value
        return None

    def _read_value(self, text: str) -> _Verdict | None:
        while (at := text.find(_VALUE_END, self._searched)) >= 0:
            after = _end_of_space(text, at + len(_VALUE_END))
            rest = text[after : after + len(_CALL_END)]
            if rest.startswith((_KEY, _CALL_END)):
                self.arguments.append((self._key, text[self.position : at]))
                self.position = after
                self._step = self._read_key_or_end
                return None
            if _KEY.startswith(rest) or _CALL_END.startswith(rest):
                self._searched = at
                return _Verdict.UNDECIDED
            self._searched = at + 1
        self._searched = max(self._searched, len(text) - len(_VALUE_END) + 1)
        return _Verdict.UNDECIDED


def _end_of_space(text: str, start: int) -> int:
    match = _AFTER_VALUE.match(text, start)
    assert match is not None  # the pattern matches the empty string
    return match.end()
