"""Who runs in which call."""

from __future__ import annotations

import pytest

from glm_mtp_export.errors import OptionError
from glm_mtp_export.runtime.drafting import DraftPolicy, updated_acceptance
from glm_mtp_export.runtime.paging import PageAllocator
from glm_mtp_export.runtime.request import Request
from glm_mtp_export.runtime.sampling import SamplingParams
from glm_mtp_export.runtime.scheduler import Scheduler, SchedulerConfig
from glm_mtp_export.runtime.sequence import Sequence
from glm_mtp_export.runtime.thinking import ThinkingIds, ThinkingPhase

_K = 3


class _Host:
    """Plays the engine: each final row commits one token and gets K drafts."""

    def __init__(self, num_pages: int, **options: int) -> None:
        self.scheduler = Scheduler(SchedulerConfig(**options), PageAllocator(num_pages), _K)  # type: ignore[arg-type]
        self.sequences: dict[str, Sequence] = {}

    def add(self, name: str, num_prompt: int, priority: int = 0, max_output: int = 1000) -> Sequence:
        arrival = len(self.sequences)
        prompt = tuple(1000 * arrival + i for i in range(num_prompt))
        request = Request(name, prompt, SamplingParams(), priority)
        phase = ThinkingPhase(ThinkingIds())
        sequence = Sequence(request, 0, arrival, max_output, 0, frozenset(), phase)
        self.sequences[name] = sequence
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> dict[str, tuple[int, int]]:
        """One call; (tokens, drafts) by request."""
        rows = self.scheduler.schedule()
        for row in rows:
            final = row.is_final
            row.sequence.cache_length += row.num_tokens
            if final:
                row.sequence.token_ids.append(7)
                row.sequence.drafts = [1] * _K
        self.scheduler.allocator.audit([s.pages for s in self.sequences.values()])
        return {row.sequence.request.request_id: (row.num_tokens, row.num_drafts) for row in rows}


def test_decode_rows_keep_their_drafts_beside_prefill_chunks() -> None:
    host = _Host(100, max_batch_size=4, max_num_batched_tokens=32)
    host.add("a", 5)
    assert host.step() == {"a": (5, 0)}
    host.add("b", 50)
    assert host.step() == {"a": (1, 3), "b": (28, 0)}
    assert host.step() == {"a": (1, 3), "b": (22, 0)}
    assert host.step() == {"a": (1, 3), "b": (1, 3)}


def test_everyone_gets_a_token_before_anyone_gets_drafts_and_prefill_keeps_a_quarter() -> None:
    host = _Host(100, max_batch_size=8, max_num_batched_tokens=8)
    for name in "abcd":
        host.add(name, 2)
    host.step()
    assert host.step() == {"a": (1, 3), "b": (1, 1), "c": (1, 0), "d": (1, 0)}
    host.add("long", 100)
    assert host.step() == {"a": (1, 2), "b": (1, 0), "c": (1, 0), "d": (1, 0), "long": (2, 0)}


def test_drafts_never_exceed_what_the_answer_may_still_use() -> None:
    host = _Host(10)
    host.add("a", 3, max_output=4)
    host.step()
    assert [host.step()["a"] for _ in range(3)] == [(1, 2), (1, 1), (1, 0)]


def test_nobody_overtakes_the_first_that_does_not_fit() -> None:
    host = _Host(5, max_batch_size=4)
    host.add("runs", 100)
    host.step()
    host.add("too big for now", 250)
    host.add("small", 3)
    assert set(host.step()) == {"runs"}
    host.scheduler.remove(host.sequences["runs"])
    assert set(host.step()) == {"too big for now", "small"}


def test_priority_goes_before_arrival() -> None:
    host = _Host(100, max_batch_size=1)
    host.add("late", 3, priority=1)
    host.add("soon", 3, priority=0)
    assert set(host.step()) == {"soon"}
    host.scheduler.remove(host.sequences["soon"])
    assert set(host.step()) == {"late"}


def test_pages_running_out_preempts_the_worst_rank_and_it_comes_back() -> None:
    host = _Host(4, max_batch_size=4)
    host.add("old", 120)
    host.add("new", 100)
    host.step()
    while host.scheduler.num_preemptions == 0:
        steps = host.step()
    # "old" needed its third page at position 128 - drafts and draft loop, with four in use.
    assert set(steps) == {"old"} and not host.sequences["new"].pages and host.scheduler.num_waiting == 1
    num_tokens = len(host.sequences["new"].token_ids)
    host.scheduler.remove(host.sequences["old"])
    assert host.step() == {"new": (num_tokens, 0)}, "recomputed from the first token, drafts dropped"
    assert host.sequences["new"].num_preemptions == 1


def test_drafts_are_given_up_before_anyone_is_preempted() -> None:
    host = _Host(2, max_batch_size=2)
    a = host.add("a", 60)
    host.add("b", 2)
    host.step()
    # Row 60, three drafts, two slots of the draft loop: position 65 would need a second page for a.
    assert host.step() == {"a": (1, 0), "b": (1, 3)}
    assert len(a.pages) == 1 and host.scheduler.num_preemptions == 0


def test_total_context_cap_holds_rows_back_without_losing_them() -> None:
    host = _Host(100, max_batch_size=4, max_total_context=150)
    host.add("a", 70)
    host.add("b", 70)
    host.add("c", 70)
    assert set(host.step()) == {"a", "b"}
    for _ in range(40):
        steps = host.step()
        total = sum(s.cache_length for s in (host.sequences["a"], host.sequences["b"]))
    assert set(steps) == {"a"} and total > 100, "b sits out while a's context leaves no room"
    host.scheduler.remove(host.sequences["a"])
    assert "b" in host.step()


def test_config_that_would_starve_rows_is_refused() -> None:
    with pytest.raises(OptionError, match="max_num_batched_tokens is 4, expected at least max_batch_size 8"):
        SchedulerConfig(max_batch_size=8, max_num_batched_tokens=4)
    with pytest.raises(OptionError, match="max_batch_size is 0"):
        SchedulerConfig(max_batch_size=0)


def test_adaptive_drafting_follows_the_estimate() -> None:
    host = _Host(10)
    sequence = host.add("a", 3)
    sequence.drafts = [1] * 7
    adaptive, fixed = DraftPolicy(7, adaptive=True), DraftPolicy(7, adaptive=False)
    found = []
    for sequence.acceptance in (1.0, 0.72, 0.5, 0.2, 0.0):
        found.append(adaptive.wanted_drafts(sequence))
        assert fixed.wanted_drafts(sequence) == 7
    # 0.72**7 = 0.1003, 0.5**3 = 0.125, 0.2**2 = 0.04: at least one draft is always tried.
    assert found == [7, 7, 3, 1, 1]
    assert updated_acceptance(0.5, 3, 3) > updated_acceptance(0.5, 3, 1) > updated_acceptance(0.5, 3, 0)
