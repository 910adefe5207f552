"""Is the model thinking? The phase follows the committed ids alone: the prompt's first, then the output's, token by
token.

`<think>` opens the phase; `</think>` and `<tool_call>` close it. The last marker wins. The marker that closes is
itself no thinking token; the one that opens is none either, so a budget counts what lies between. A second `<think>`
counts like any other token, or a model could repeat it to escape its budget.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

__all__ = ["ThinkingIds", "ThinkingPhase"]


@dataclass(frozen=True)
class ThinkingIds:
    """Ids of the markers, as the tokenizer has them; None where it has none."""

    begin: int | None = None
    end: int | None = None
    tool_call: int | None = None

    @classmethod
    def of(cls, token_ids: Mapping[str, int]) -> ThinkingIds:
        """From the manifest's `thinking_token_ids`."""
        return cls(token_ids.get("think"), token_ids.get("think_end"), token_ids.get("tool_call"))

    @cached_property
    def markers(self) -> frozenset[int]:
        """Every id that changes the phase."""
        return frozenset(i for i in (self.begin, self.end, self.tool_call) if i is not None)


class ThinkingPhase:
    """Phase of one sequence after its committed tokens. `num_tokens`: output tokens spent in the open phase."""

    __slots__ = ("_ids", "_markers", "is_open", "num_tokens")

    def __init__(self, ids: ThinkingIds, prompt: Iterable[int] = ()) -> None:
        self._ids = ids
        self.is_open = False
        self.num_tokens = 0
        self._markers = markers = ids.markers
        for token in prompt:
            if token in markers:
                self.is_open = token == ids.begin

    def advance(self, token: int) -> None:
        """Take one committed output token."""
        ids = self._ids
        if token == ids.begin and not self.is_open:
            self.is_open, self.num_tokens = True, 0
        elif token == ids.end or token == ids.tool_call:
            self.is_open = False
        elif self.is_open:
            self.num_tokens += 1

    def advance_all(self, tokens: Collection[int]) -> None:
        """Take several committed output tokens in order."""
        if self._markers.isdisjoint(tokens):
            self.num_tokens += len(tokens) if self.is_open else 0
        else:
            for token in tokens:
                self.advance(token)

    def copy(self) -> ThinkingPhase:
        """An independent phase in the same state, to look ahead over drafts."""
        other = ThinkingPhase(self._ids)
        other.is_open, other.num_tokens = self.is_open, self.num_tokens
        return other
