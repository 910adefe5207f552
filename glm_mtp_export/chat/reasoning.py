"""Where thinking ends: splits an answer's text into reasoning and the rest, a piece at a time.

In: text of an answer in pieces of any size, and whether the prompt left thinking open. Out: reasoning text and the text
after it (content and tool calls, for `tools.ToolCallParser`). Same result for every way of cutting the text.

Rules (output grammar `reasoning? content? call*`):
- The start state comes from the prompt's own ids (`prompt_opens_thinking`), never from a flag.
- Reasoning ends at the first `</think>`, or before a `<tool_call>`.
- An answer that itself begins with `<think>` thinks; the tag is not repeated when the prompt had it already.
- No `</think>` at the end: after finish reason "length" all is reasoning. After "stop" the model answered inside the
  block; the text is then content. Since a stream has delivered it as reasoning by then and nothing is ever taken back,
  both fields carry it, streamed or not.
- Markers count by their text: one spelled with ordinary tokens is a marker too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from glm_mtp_export.runtime.detokenizer import held_suffix_length
from glm_mtp_export.runtime.tokenizer import Tokenizer

__all__ = [
    "THINK",
    "THINK_END",
    "TOOL_CALL",
    "WHITESPACE",
    "ReasoningParser",
    "ReasoningPiece",
    "prompt_opens_thinking",
]

THINK, THINK_END, TOOL_CALL = "<think>", "</think>", "<tool_call>"
WHITESPACE = " \t\r\n"


def prompt_opens_thinking(prompt_ids: Sequence[int], tokenizer: Tokenizer) -> bool:
    """True when the answer starts inside a thinking block: the last marker since the last turn opened is `<think>`."""
    think, think_end = tokenizer.id_of(THINK), tokenizer.id_of(THINK_END)
    if think is None:
        return False
    for token_id in reversed(prompt_ids):
        if token_id == think:
            return True
        if token_id == think_end or token_id in tokenizer.role_ids:
            return False
    return False


@dataclass(frozen=True)
class ReasoningPiece:
    """Text that became certain: `reasoning` comes before `rest`."""

    reasoning: str = ""
    rest: str = ""


class ReasoningParser:
    """One answer. `feed` text in order, then `finish` once."""

    def __init__(self, *, starts_in_thinking: bool) -> None:
        self._in_thinking = starts_in_thinking
        self._at_start = True  # nothing but whitespace seen: a `<think>` may follow
        self._held = ""
        self._reasoning: list[str] = []  # all of it, for an answer that never closes the block

    @property
    def in_thinking(self) -> bool:
        """True while the text fed so far ends inside the thinking block."""
        return self._in_thinking

    def feed(self, text: str) -> ReasoningPiece:
        """Take the next piece of the answer."""
        self._held += text
        if self._at_start and not self._pass_start():
            return ReasoningPiece()
        if not self._in_thinking:
            return ReasoningPiece(rest=self._take(len(self._held)))
        end = self._end_of_reasoning()
        if end is None:
            keep = held_suffix_length(self._held, (THINK_END, TOOL_CALL))
            return ReasoningPiece(reasoning=self._take_reasoning(len(self._held) - keep))
        reasoning = self._take_reasoning(end)
        self._in_thinking = False
        if self._held.startswith(THINK_END):
            self._take(len(THINK_END))
        return ReasoningPiece(reasoning=reasoning, rest=self._take(len(self._held)))

    def finish(self, finish_reason: str | None) -> ReasoningPiece:
        """The rest, and the rule for a block that was never closed. `finish_reason` is OpenAI's."""
        if not self._in_thinking:
            return ReasoningPiece(rest=self._take(len(self._held)))
        last = self._take_reasoning(len(self._held))
        answered_inside = finish_reason == "stop"
        return ReasoningPiece(reasoning=last, rest="".join(self._reasoning) if answered_inside else "")

    def _pass_start(self) -> bool:
        """Handle a leading `<think>`. False while more text is needed to know whether there is one."""
        stripped = self._held.lstrip(WHITESPACE)
        if stripped.startswith(THINK):
            self._held = stripped[len(THINK) :]
            self._in_thinking = True
        elif THINK.startswith(stripped):
            return False
        self._at_start = False
        return True

    def _end_of_reasoning(self) -> int | None:
        found = [at for at in (self._held.find(THINK_END), self._held.find(TOOL_CALL)) if at >= 0]
        return min(found, default=None)

    def _take(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        return taken

    def _take_reasoning(self, count: int) -> str:
        taken = self._take(count)
        self._reasoning.append(taken)
        return taken
