"""An answer's text to what a chat client receives: reasoning, content and tool calls, streamed or at once.

In: text with its markers (see `tokenizer.MARKERS`), in pieces of any size. Out: `ChatDelta`s whose concatenation is the
`ChatAnswer` of the whole text, for every way of cutting it. The rules are in `reasoning` and `tools`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from glm_mtp_export.chat.reasoning import ReasoningParser, ReasoningPiece
from glm_mtp_export.chat.tools import ToolCall, ToolCallParser, new_call_id

__all__ = ["ChatAnswer", "ChatDelta", "ChatParser", "parse_answer"]


@dataclass(frozen=True)
class ChatDelta:
    """What one piece of text added; reasoning comes before content, content before calls of the same delta."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.tool_calls)


@dataclass(frozen=True)
class ChatAnswer:
    """A whole answer. `finish_reason` is "tool_calls" when the model stopped after calling."""

    reasoning: str
    content: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str | None


class ChatParser:
    """One answer. Without `tools` no call is looked for: `<tool_call>` is content then, though it ends reasoning."""

    def __init__(
        self,
        *,
        starts_in_thinking: bool,
        tools: Iterable[Mapping[str, Any]] | None = None,
        make_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._reasoning = ReasoningParser(starts_in_thinking=starts_in_thinking)
        offered = list(tools or ())
        self._tools = ToolCallParser(offered, make_id=make_id) if offered else None
        self._num_calls = 0

    def feed(self, text: str) -> ChatDelta:
        """Take the next piece of the answer."""
        return self._after_reasoning(self._reasoning.feed(text))

    def finish(self, finish_reason: str | None) -> ChatDelta:
        """The rest of the answer; call once. `finish_reason`: "stop", "length", or another word of the runtime."""
        last = self._after_reasoning(self._reasoning.finish(finish_reason))
        if self._tools is None:
            return last
        rest = self._tools.finish()
        return ChatDelta(last.reasoning, last.content + rest.content, last.tool_calls + rest.calls)

    def finish_reason(self, finish_reason: str | None) -> str | None:
        """The reason a client is told: "tool_calls" instead of "stop" when calls were delivered."""
        return "tool_calls" if finish_reason == "stop" and self._num_calls else finish_reason

    def _after_reasoning(self, piece: ReasoningPiece) -> ChatDelta:
        if self._tools is None:
            return ChatDelta(piece.reasoning, piece.rest)
        found = self._tools.feed(piece.rest)
        self._num_calls += len(found.calls)
        return ChatDelta(piece.reasoning, found.content, found.calls)


def parse_answer(
    text: str,
    *,
    finish_reason: str | None,
    starts_in_thinking: bool,
    tools: Iterable[Mapping[str, Any]] | None = None,
    make_id: Callable[[], str] = new_call_id,
) -> ChatAnswer:
    """Parse a whole answer; the same as feeding it in pieces."""
    parser = ChatParser(starts_in_thinking=starts_in_thinking, tools=tools, make_id=make_id)
    first, last = parser.feed(text), parser.finish(finish_reason)
    return ChatAnswer(
        reasoning=first.reasoning + last.reasoning,
        content=first.content + last.content,
        tool_calls=first.tool_calls + last.tool_calls,
        finish_reason=parser.finish_reason(finish_reason),
    )
