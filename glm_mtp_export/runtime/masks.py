"""The bitmask of a call: which tokens each verified slot of each request may take.

Slot j follows the first j drafts, so its mask is made from the state after them: the grammar's, and the output
position's for min_tokens. Bit v % 32 of word v // 32 is 1 when token v is allowed. When a grammar leaves only what
min_tokens or a ban forbids, the grammar wins, since an empty row could not be sampled.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm_mtp_export.runtime.sampling import Capabilities
from glm_mtp_export.runtime.scheduler import ScheduledRow
from glm_mtp_export.runtime.session import Int32

__all__ = ["TokenMasks", "constant", "is_restricted", "token_words"]


def token_words(token_ids: Iterable[int], num_words: int) -> Int32:
    """A mask row [num_words] with exactly these tokens set."""
    words = np.zeros(num_words, dtype=np.uint32)
    for token in token_ids:
        words[token >> 5] |= np.uint32(1 << (token & 31))
    return words.view(np.int32)


@lru_cache(maxsize=256)
def constant(shape: tuple[int, ...], value: int, dtype: type[Any] = np.int32) -> NDArray[Any]:
    """A read-only array that takes the memory of one value, the same object for the same arguments."""
    return np.broadcast_to(np.asarray(value, dtype=dtype), shape)


def is_restricted(row: ScheduledRow) -> bool:
    """True when some token may be forbidden to the sample of this row."""
    sequence = row.sequence
    restricted = sequence.grammar is not None or sequence.banned or sequence.num_output < sequence.params.min_tokens
    return bool(row.is_final and not row.is_void and restricted)


class TokenMasks:
    """Builds [B, K+1, words] masks; all ones for requests without restrictions."""

    def __init__(self, capabilities: Capabilities) -> None:
        self._num_slots = capabilities.num_speculative_tokens + 1
        self._num_words = -(-capabilities.vocab_size // 32)
        self._words_of = lru_cache(maxsize=256)(self._words)

    def _words(self, token_ids: frozenset[int]) -> Int32:
        return token_words(token_ids, self._num_words)

    def bitmask(self, rows: Items[ScheduledRow]) -> Int32:
        """Masks of one call. Without restrictions it is the same read-only array every time, which a session may keep."""
        shape = (len(rows), self._num_slots, self._num_words)
        restricted = [b for b, row in enumerate(rows) if is_restricted(row)]
        if not restricted:
            return constant(shape, -1)
        mask = np.full(shape, -1, dtype=np.int32)
        for b in restricted:
            self._restrict(mask[b], rows[b])
        return mask

    def _restrict(self, slots: Int32, row: ScheduledRow) -> None:
        sequence = row.sequence
        drafts = sequence.drafts[: row.num_drafts]
        if sequence.grammar is not None:
            sequence.grammar.fill(slots, drafts)
        position = sequence.num_output
        for j in range(row.num_drafts + 1):
            forbidden = sequence.banned
            if position + j < sequence.params.min_tokens:
                forbidden = forbidden | sequence.stop_ids
            if forbidden:
                allowed = slots[j] & ~self._words_of(forbidden)
                if allowed.any():
                    slots[j] = allowed
