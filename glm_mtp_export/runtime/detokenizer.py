"""Ids to text, a few at a time: whole characters only, stop strings, and where in the ids the text ends.

In: the ids a step committed. Out: text that is safe to send. Chunks concatenate to the text of all ids decoded at once,
byte for byte; an incomplete UTF-8 sequence is held until complete and becomes U+FFFD only at the end.

Stop strings are looked for character by character in the visible text, so the result is the same for every way of
cutting the ids into blocks. The match that *ends* first wins, of those ending together the longest. The chunk names
the index of the token whose bytes completed it, for the caller to cut ids, log-probabilities and caches there.

What may go wrong: an empty stop string raises `RequestError`; feeding after a match or after `finish` is a caller's
bug and raises RuntimeError.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from glm_mtp_export.errors import RequestError
from glm_mtp_export.runtime.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer", "TextChunk", "held_suffix_length"]


@dataclass(frozen=True)
class TextChunk:
    """What one block of ids added."""

    text: str
    stop_index: int | None = None  # index into the pushed ids of the token that completed the match; later ids are void
    stop_string: str | None = None

    @property
    def stopped(self) -> bool:
        """True when a stop string was found; the answer ends here."""
        return self.stop_index is not None


def held_suffix_length(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of `text` that could still grow into one of `markers` (a proper prefix of it)."""
    beginnings, longest = _beginnings(tuple(markers))
    for length in range(min(longest, len(text)), 0, -1):
        if text[-length:] in beginnings:
            return length
    return 0


@lru_cache(maxsize=1024)
def _beginnings(markers: tuple[str, ...]) -> tuple[frozenset[str], int]:
    """All proper prefixes of the markers, and the length of the longest."""
    prefixes = frozenset(marker[:end] for marker in markers for end in range(1, len(marker)))
    return prefixes, max(map(len, prefixes), default=0)


class IncrementalDetokenizer:
    """The text of one request. `min_tokens`: text of the first so many ids is never part of a stop match."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        if any(not s for s in stop):
            raise RequestError("stop has an empty string, which would match everywhere. Remove it.")
        self._tokenizer = tokenizer
        self._hidden = tokenizer.hidden_ids(skip_special_tokens)
        self._stop = tuple(stop)
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._pending = ""  # characters not sent yet: they may be the beginning of a stop string
        self._num_ids = 0
        self._done = False

    def push(self, ids: Sequence[int]) -> TextChunk:
        """Take the next ids in order, return the text that became certain."""
        if self._done:
            raise RuntimeError("push after the end of the text")
        if self._num_ids >= self._min_tokens or not self._stop:
            text = self._text_without_match(ids)
            if text is not None:
                return TextChunk(text)
        sent: list[str] = []
        for index, token_id in enumerate(ids):
            self._num_ids += 1
            if token_id in self._hidden:
                continue
            text = self._utf8.decode(self._tokenizer.token_bytes(token_id))
            match = self._append(text, sent)
            if match is not None:
                self._done = True
                return TextChunk("".join(sent), index, match)
        return TextChunk("".join(sent))

    def _text_without_match(self, ids: Sequence[int]) -> str | None:
        """The usual case, a block at a time: the certain text, or None, with nothing changed, if a stop string is in
        it."""
        token_bytes, hidden = self._tokenizer.token_bytes, self._hidden
        state = self._utf8.getstate() if self._stop else None
        text = self._pending + self._utf8.decode(b"".join([token_bytes(i) for i in ids if i not in hidden]))
        if state is not None:
            for stop in self._stop:
                if stop in text:
                    self._utf8.setstate(state)
                    return None
            keep = held_suffix_length(text, self._stop)
            self._pending = text[len(text) - keep :]
            text = text[: len(text) - keep]
        self._num_ids += len(ids)
        return text

    def finish(self) -> str:
        """The rest: held characters that turned out not to be a stop string, and U+FFFD for a broken last character."""
        if self._done:
            return ""
        self._done = True
        # Bytes that stay incomplete are no text a stop string could match before the end; nothing is searched here.
        return self._pending + self._utf8.decode(b"", final=True)

    def _append(self, text: str, sent: list[str]) -> str | None:
        """Add one token's characters; what is certain goes to `sent`. Returns the stop string that matched, if any."""
        if not self._stop:
            sent.append(text)
            return None
        if self._num_ids <= self._min_tokens:
            # No match may begin here, so nothing has to be held.
            sent.append(text)
            return None
        for character in text:
            self._pending += character
            ended = [s for s in self._stop if self._pending.endswith(s)]
            if ended:
                match = max(ended, key=len)
                sent.append(self._pending if self._include_stop else self._pending[: -len(match)])
                self._pending = ""
                return match
            keep = held_suffix_length(self._pending, self._stop)
            sent.append(self._pending[: len(self._pending) - keep])
            self._pending = self._pending[len(self._pending) - keep :]
        return None
