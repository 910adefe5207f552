"""How many of the K compiled drafts a decode row verifies in the next call. Never changes the text, only what it costs.

A draft whose chance of being reached and accepted is small is not worth its row: with a running acceptance estimate a,
draft j (from 0) is kept while a ** (j + 1) is at least `MIN_GAIN`. One draft is always verified, so that the estimate
can recover.
"""

from __future__ import annotations

from glm_mtp_export.runtime.sequence import Sequence

__all__ = ["MIN_GAIN", "DraftPolicy", "updated_acceptance"]

MIN_GAIN = 0.1  # below this an extra row of the target is taken to cost more than the token it may save
_WEIGHT = 0.1  # of the newest draft in the running estimate


class DraftPolicy:
    """Draft counts for decode rows."""

    def __init__(self, num_speculative_tokens: int, adaptive: bool) -> None:
        self._num_speculative_tokens = num_speculative_tokens
        self._adaptive = adaptive and num_speculative_tokens > 1

    def wanted_drafts(self, sequence: Sequence) -> int:
        """Drafts worth verifying in the next call: at most those proposed, and at most what the answer may still use beside
        the sure token."""
        proposed = len(sequence.drafts)
        if sequence.is_continued:
            proposed = self._num_speculative_tokens if sequence.params.speculative else 0
        count = min(proposed, sequence.max_output - sequence.planned_output - 1)
        if self._adaptive and count > 1:
            gain = sequence.acceptance
            for j in range(1, count):
                gain *= sequence.acceptance
                if gain < MIN_GAIN:
                    return j
        return count


def updated_acceptance(estimate: float, num_evaluated: int, num_accepted: int) -> float:
    """The estimate after a call in which `num_accepted` drafts passed and, if fewer than evaluated, one failed."""
    for j in range(min(num_accepted + 1, num_evaluated)):
        estimate += _WEIGHT * ((1.0 if j < num_accepted else 0.0) - estimate)
    return estimate
