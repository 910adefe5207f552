"""One running answer on the host: its tokens, its pages, its drafts, and what is known about it.

A request with n > 1 is n sequences that share prompt pages. The caches hold `cache_length` valid positions of
`token_ids`; the tokens after them have to be fed. With nothing but the last token to feed, a sequence decodes; with
more it prefills, which is also how a preempted one comes back. All changes go through the engine and the scheduler, in
one thread.

While a call runs, the next one may be planned: `in_flight` is the row of this sequence in the call whose results are
not known, and the `planned_` values are what it leaves at least; `most_length` is what it leaves at most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from glm_mtp_export.runtime.detokenizer import IncrementalDetokenizer
from glm_mtp_export.runtime.paging import extend_page_keys
from glm_mtp_export.runtime.request import Completion, FinishReason, Request, SequenceStatistics, TokenLogprob
from glm_mtp_export.runtime.session import Int32
from glm_mtp_export.runtime.thinking import ThinkingPhase

if TYPE_CHECKING:
    from glm_mtp_export.runtime.scheduler import ScheduledRow
    from glm_mtp_export.runtime.structured import GrammarState

__all__ = ["Sequence"]


class Sequence:
    """Mutable state of one sequence."""

    def __init__(
        self,
        request: Request,
        index: int,
        arrival: int,
        max_output: int,
        seed: int,
        stop_ids: frozenset[int],
        phase: ThinkingPhase,
    ) -> None:
        self.request = request
        self.params = request.params
        self.index = index
        self.arrival = arrival
        self.rank = (request.priority, arrival)
        self.max_output = max_output
        self.seed = seed
        self.stop_ids = stop_ids
        self.banned = frozenset(request.params.banned_token_ids)
        self.phase = phase
        self.token_ids: list[int] = list(request.prompt_token_ids)
        self.num_prompt = len(self.token_ids)
        self.cache_length = 0
        self.drafts: list[int] = []
        self.in_flight: ScheduledRow | None = None
        self.pages: list[int] = []
        self.page_row = np.zeros(16, dtype=np.int32)
        self.page_keys: list[bytes] = []
        self.num_registered = 0
        self.acceptance = 1.0  # running estimate, per draft
        self.detokenizer: IncrementalDetokenizer | None = None
        self.text_parts: list[str] = []
        self.grammar: GrammarState | None = None
        self.logprobs: list[TokenLogprob] | None = None if self.params.logprobs is None else []
        self._known_ids = np.zeros(0, dtype=np.int32)  # grown as needed, the first _num_known of it are token_ids
        self._num_known = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.num_calls = self.num_drafted = self.num_accepted = 0
        self.num_cached_tokens = -1  # set at first admission
        self.num_preemptions = 0
        self.arrival_time = 0.0
        self.first_token_time: float | None = None
        self.last_token_time = 0.0

    @property
    def key(self) -> tuple[str, int]:
        """Identity: request id and index."""
        return self.request.request_id, self.index

    @property
    def num_output(self) -> int:
        """Output tokens committed so far."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_uncached(self) -> int:
        """Tokens that still have to be fed."""
        return len(self.token_ids) - self.cache_length

    @property
    def is_continued(self) -> bool:
        """True when the call in flight ends with a sample of this sequence, which the next call feeds unseen."""
        return self.in_flight is not None and self.in_flight.is_final

    @property
    def planned_length(self) -> int:
        """Valid positions after the call in flight if it accepts no draft."""
        return self.cache_length + (self.in_flight.num_tokens if self.in_flight is not None else 0)

    @property
    def most_length(self) -> int:
        """Valid positions after the call in flight if it accepts every draft."""
        return self.planned_length + (self.in_flight.num_drafts if self.in_flight is not None else 0)

    @property
    def planned_uncached(self) -> int:
        """Tokens to feed after the call in flight; its sample, seen or not, is one of them."""
        return 1 if self.is_continued else len(self.token_ids) - self.planned_length

    @property
    def planned_output(self) -> int:
        """Output tokens after the call in flight if it accepts no draft."""
        return self.num_output + self.is_continued

    @property
    def output_ids(self) -> list[int]:
        """The committed output."""
        return self.token_ids[self.num_prompt :]

    def known_ids(self) -> Int32:
        """`token_ids` as an array; only those since the last call are converted. Valid until the next call."""
        start, end = self._num_known, len(self.token_ids)
        if end > len(self._known_ids):
            grown = np.zeros(max(end, 2 * len(self._known_ids)), dtype=np.int32)
            grown[:start] = self._known_ids[:start]
            self._known_ids = grown
        self._known_ids[start:end] = self.token_ids[start:end]
        self._num_known = end
        return self._known_ids[:end]

    @property
    def is_finished(self) -> bool:
        """True once a reason to end is known."""
        return self.finish_reason is not None

    def add_pages(self, pages: list[int]) -> None:
        """Append pages to the table."""
        start, end = len(self.pages), len(self.pages) + len(pages)
        if end > len(self.page_row):
            row = np.zeros(max(end, 2 * len(self.page_row)), dtype=np.int32)
            row[:start] = self.page_row[:start]
            self.page_row = row
        self.page_row[start:end] = pages
        self.pages.extend(pages)

    def drop_pages(self) -> list[int]:
        """Empty the table and forget what was cached; returns the pages for the allocator."""
        pages, self.pages = self.pages, []
        self.cache_length = self.num_registered = 0
        self.drafts = []
        return pages

    def update_page_keys(self) -> list[bytes]:
        """Keys of all pages the committed tokens determine."""
        extend_page_keys(self.page_keys, self.token_ids)
        return self.page_keys

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None, error: str | None = None) -> None:
        """Set why the sequence ends."""
        self.finish_reason, self.stop_reason, self.error = reason, stop_reason, error

    def statistics(self) -> SequenceStatistics:
        """Counts so far."""
        first, last = self.first_token_time, self.last_token_time
        return SequenceStatistics(
            self.num_calls,
            self.num_drafted,
            self.num_accepted,
            max(self.num_cached_tokens, 0),
            self.num_preemptions,
            None if first is None else first - self.arrival_time,
            max(last - self.arrival_time, 0.0),
        )

    def completion(self, text: str) -> Completion:
        """The finished answer as a record."""
        if self.finish_reason is None:
            raise RuntimeError(f"sequence {self.key} is not finished")
        logprobs = None if self.logprobs is None else tuple(self.logprobs)
        return Completion(
            self.index,
            tuple(self.output_ids),
            text,
            self.finish_reason,
            self.stop_reason,
            logprobs,
            self.error,
            self.statistics(),
        )
