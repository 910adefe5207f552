"""Which rows go into the next call: continuous batching of prefill, chunked prefill and decode rows in one step.

In: waiting and running sequences, an allocator, limits. Out: `ScheduledRow`s with their pages already allocated.

Rules, in order:
1. Rank is (priority, arrival); lower goes first. Nobody overtakes within a priority: admission stops at the first
   waiting sequence that does not fit. A lower rank can starve only behind a stream of better priorities; equal ones
   cannot.
2. Every running decode row gets its token before any drafts; drafts get what the row budget leaves, after a quarter of
   it is kept for prefill while someone prefills or waits. Drafts never take more rows than the answer may still have
   tokens.
3. Prefill gets the remaining rows in rank order, in chunks.
4. Pages are taken in rank order. When none are left, the drafts of the row are given up first, then the running
   sequence of worst rank loses its pages and waits again (recompute). The best-ranked one always advances, so there is
   no deadlock: a request that would not fit alone is refused on arrival.
5. Admission needs pages for all tokens of the sequence, not only its first chunk, and never happens in a call that
   preempted.
6. The sum of the contexts of a call stays below `max_total_context`; rows beyond it sit the call out.
7. While a call is in flight, the next one is planned for what that call leaves at least and with pages for what it leaves at
   most. A sequence that surely ends in it gets no row. Nothing is preempted for a guess: short of pages, there is no plan until
   the call's results are known.
"""

from __future__ import annotations

import heapq
from bisect import insort
from dataclasses import dataclass

from glm_mtp_export.artifact import PAGE_SIZE
from glm_mtp_export.errors import OptionError
from glm_mtp_export.runtime.drafting import DraftPolicy
from glm_mtp_export.runtime.paging import PageAllocator, page_count, slots_needed
from glm_mtp_export.runtime.sequence import Sequence

__all__ = ["UNLIMITED_CONTEXT", "ScheduledRow", "Scheduler", "SchedulerConfig"]

UNLIMITED_CONTEXT = 1 << 31  # more positions than any pool holds
_DECODE_ROWS = 2  # a decode row feeds one token, or two after the host replaced a sampled one


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a call. `max_num_batched_tokens` counts rows, drafts included; contexts count positions."""

    max_batch_size: int = 64
    max_num_batched_tokens: int = 2048
    max_chunk_tokens: int = 2048
    max_total_context: int = UNLIMITED_CONTEXT
    enable_prefix_sharing: bool = True
    enable_adaptive_drafts: bool = True

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_num_batched_tokens", "max_chunk_tokens", "max_total_context"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} is {getattr(self, name)}, expected 1 or more.")
        if self.max_num_batched_tokens < self.max_batch_size:
            raise OptionError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, expected at least max_batch_size "
                f"{self.max_batch_size}, or some decode rows would never run. Raise one or lower the other."
            )


@dataclass(slots=True)
class ScheduledRow:
    """One request of the next call: `num_tokens` committed tokens to feed, then `num_drafts` drafts to verify.

    `is_final`: the call reaches the sequence's last token, so that its sample counts. `place` is the row's index in its
    call, `follows` that of the row it continues in the call before, -1 when the host knows its tokens. A void row runs and
    counts for nothing: its sequence took another way after the row was launched. The call in flight leaves `start` valid
    positions at least and `most_start` at most; they are one without such a call.
    """

    sequence: Sequence
    num_tokens: int
    num_drafts: int
    is_final: bool
    start: int
    most_start: int
    follows: int
    place: int = -1
    is_void: bool = False

    @classmethod
    def of(cls, sequence: Sequence, num_tokens: int) -> ScheduledRow:
        """A row without drafts that feeds the next `num_tokens` tokens."""
        flight = sequence.in_flight
        follows = flight.place if flight is not None and flight.is_final else -1
        is_final = num_tokens == sequence.planned_uncached
        return cls(sequence, num_tokens, 0, is_final, sequence.planned_length, sequence.most_length, follows)

    @property
    def context(self) -> int:
        """Positions the row reads and writes at most, the draft loop's not counted."""
        return self.most_start + self.num_tokens + self.num_drafts


class Scheduler:
    """Queues and limits. `num_speculative_tokens` is the compiled K, `max_length` the longest prompt plus output."""

    def __init__(
        self,
        config: SchedulerConfig,
        allocator: PageAllocator,
        num_speculative_tokens: int,
        max_length: int = UNLIMITED_CONTEXT,
    ) -> None:
        self.config = config
        self.allocator = allocator
        self.num_speculative_tokens = num_speculative_tokens
        self.max_length = max_length
        self._drafting = DraftPolicy(num_speculative_tokens, config.enable_adaptive_drafts)
        self.running: list[Sequence] = []  # sorted by rank
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        """Sequences not admitted yet."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """True while any sequence waits or runs."""
        return bool(self.running or self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a new or preempted sequence."""
        heapq.heappush(self._waiting, (sequence.rank, sequence))

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out of queue or batch and give its pages back."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self._waiting = [entry for entry in self._waiting if entry[1] is not sequence]
            heapq.heapify(self._waiting)
        self.allocator.release(sequence.drop_pages())

    def schedule(self) -> list[ScheduledRow] | None:
        """Rows of the next call in rank order. With no call in flight it is empty only when nothing waits and nothing runs;
        with one, None means that its results are needed first."""
        rows, num_rows = self._planned_rows()
        found = self._with_pages(rows)
        if found is None:
            return None
        rows, preempted = found
        if not preempted:
            budget = self.config.max_num_batched_tokens - num_rows
            self._admit(rows, budget)
        for place, row in enumerate(rows):
            row.place = place
        return rows

    def _planned_rows(self) -> tuple[list[ScheduledRow], int]:
        budget = self.config.max_num_batched_tokens
        plans: dict[int, ScheduledRow] = {}
        prefilling = []
        for sequence in self.running:
            if sequence.is_continued and not self._may_continue(sequence):
                continue
            uncached = sequence.planned_uncached
            if uncached <= _DECODE_ROWS:
                num_tokens = min(uncached, max(budget - len(self.running), 1))
                plans[sequence.arrival] = ScheduledRow.of(sequence, num_tokens)
                budget -= num_tokens
            else:
                prefilling.append(sequence)
        kept = self.config.max_num_batched_tokens // 4 if prefilling or self._waiting else 0
        spare = budget - kept
        for row in plans.values():
            if spare <= 0:
                break
            row.num_drafts = min(self._wanted_drafts(row.sequence), spare) if row.is_final else 0
            spare -= row.num_drafts
            budget -= row.num_drafts
        for sequence in prefilling:
            if budget <= 0:
                break
            num_tokens = min(sequence.planned_uncached, budget, self.config.max_chunk_tokens)
            plans[sequence.arrival] = ScheduledRow.of(sequence, num_tokens)
            budget -= num_tokens
        rows = list(plans.values())
        if prefilling:
            rows.sort(key=lambda row: row.sequence.rank)
        return rows, self.config.max_num_batched_tokens - budget

    def _may_continue(self, sequence: Sequence) -> bool:
        """False when the sequence surely ends in the call in flight, or might pass its longest length in one more."""
        return sequence.planned_output < sequence.max_output and sequence.most_length + 1 < self.max_length

    def _wanted_drafts(self, sequence: Sequence) -> int:
        wanted = self._drafting.wanted_drafts(sequence)
        if sequence.is_continued:
            wanted = min(wanted, self.max_length - 2 - sequence.most_length)
        return wanted

    def _with_pages(self, rows: list[ScheduledRow]) -> tuple[list[ScheduledRow], bool] | None:
        """Give each row its pages in rank order; preempt from the worst rank where the pool is short. None instead when a call
        is in flight."""
        may_preempt = all(sequence.in_flight is None for sequence in self.running)
        kept: list[ScheduledRow] = []
        preempted: set[int] = set()
        context = 0
        for row in rows:
            sequence = row.sequence
            if sequence.arrival in preempted:
                continue
            if kept and context + row.context > self.config.max_total_context:
                continue
            while not self._grow(row):
                if row.num_drafts:
                    row.num_drafts = 0
                    continue
                if not may_preempt:
                    return None
                victim = self.running[-1]
                self._preempt(victim)
                preempted.add(victim.arrival)
                if victim is sequence:
                    break
            if sequence.arrival in preempted:
                continue
            context += row.context
            kept.append(row)
        return kept, bool(preempted)

    def _grow(self, row: ScheduledRow) -> bool:
        sequence = row.sequence
        slots = slots_needed(row.most_start, row.num_tokens, row.num_drafts, self.num_speculative_tokens)
        missing = -(-slots // PAGE_SIZE) - len(sequence.pages)
        if missing > 0:
            if missing > self.allocator.num_free:
                return False
            sequence.add_pages(self.allocator.allocate(missing))
        return True

    def _preempt(self, victim: Sequence) -> None:
        self.running.remove(victim)
        self.allocator.release(victim.drop_pages())
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self.add(victim)

    def _admit(self, rows: list[ScheduledRow], budget: int) -> None:
        context = sum(row.context for row in rows)
        while self._waiting and budget > 0 and len(self.running) < self.config.max_batch_size:
            sequence = self._waiting[0][1]
            num_tokens = len(sequence.token_ids)
            if rows and context + num_tokens > self.config.max_total_context:
                break
            shared: list[int] = []
            if self.config.enable_prefix_sharing:
                shared = self.allocator.shared_pages(sequence.update_page_keys())
            needed = page_count(slots_needed(0, num_tokens, 0, self.num_speculative_tokens)) - len(shared)
            if needed > self.allocator.num_free - sum(map(self.allocator.is_idle, shared)):
                break
            heapq.heappop(self._waiting)
            self.allocator.retain(shared)
            sequence.add_pages(shared)
            sequence.add_pages(self.allocator.allocate(needed))
            sequence.cache_length = len(shared) * PAGE_SIZE
            sequence.num_registered = len(shared)
            if sequence.num_cached_tokens < 0:
                sequence.num_cached_tokens = sequence.cache_length
            insort(self.running, sequence, key=lambda s: s.rank)
            row = ScheduledRow.of(sequence, min(sequence.num_uncached, budget, self.config.max_chunk_tokens))
            rows.append(row)
            budget -= row.num_tokens
            context += num_tokens
