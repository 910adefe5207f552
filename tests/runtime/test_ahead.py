"""Calls launched before the results of the one before are known: what they hand on, in which order things happen, what is void."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import oracle
import pytest
from fake_model import END_THINK, THINK, TOOL_CALL, fake_manifest
from harness import Bench, bench

from glm_mtp_export.runtime.ahead import HostAheadSession, carried, followed
from glm_mtp_export.runtime.histories import history_fields
from glm_mtp_export.runtime.sampling import SamplingParams, StructuredOutput
from glm_mtp_export.runtime.session import Int32, StepInputs, StepOutputs
from glm_mtp_export.runtime.thinking import ThinkingIds

_GREEDY = SamplingParams(temperature=0.0, max_tokens=20, seed=0)
_PROMPT = list(range(40, 57))
_IDS = ThinkingIds(THINK, END_THINK, TOOL_CALL)


def _i32(*values: int) -> Int32:
    return np.array(values, dtype=np.int32)


def _inputs(token_ids: list[int], offsets: list[int], num_drafts: list[int], is_open: list[bool]) -> StepInputs:
    size = len(num_drafts)
    zeros, ones = np.zeros(size, np.float32), np.ones(size, np.float32)
    return StepInputs(
        token_ids=_i32(*token_ids),
        row_offsets=_i32(*offsets),
        num_drafts=_i32(*num_drafts),
        draft_tokens=np.arange(3 * size, dtype=np.int32).reshape(size, 3) + 10,
        cache_lengths=_i32(*(100 * (b + 1) for b in range(size))),
        block_table=np.zeros((size, 8), np.int32),
        next_prompt_token=np.full(size, -1, np.int32),
        temperature=zeros,
        top_k=_i32(*[0] * size),
        top_p=ones,
        min_p=zeros,
        seed=np.zeros(size, np.int64),
        sample_offset=_i32(*(7 * (b + 1) for b in range(size))),
        in_thinking_phase=np.array(is_open),
    )


def test_a_row_takes_over_what_the_row_it_continues_found() -> None:
    before = _inputs([5, 0, 0, 0, 6, 0], [0, 4, 6], [3, 1], [False, False])
    outputs = StepOutputs(_i32(2, 0), _i32(77, 88), np.array([[1, 2, 3], [4, 5, 6]], np.int32))
    after = _inputs([0, 0, 9, 9, 9, 0, 0], [0, 2, 5, 7], [1, 0, 1], [False, True, False])
    found = followed(after, _i32(1, -1, 0), carried(before, outputs, _IDS))
    assert found.token_ids.tolist() == [88, 0, 9, 9, 9, 77, 0]
    assert found.draft_tokens.tolist() == [[4, 5, 6], [13, 14, 15], [1, 2, 3]]
    assert found.cache_lengths.tolist() == [100, 200, 302]
    assert found.sample_offset.tolist() == [7, 14, 23]
    assert found.in_thinking_phase.tolist() == [False, True, False]
    assert after.token_ids.tolist() == [0, 0, 9, 9, 9, 0, 0], "the inputs given stay as they are"


@pytest.mark.parametrize(
    ("is_open", "drafts", "num_accepted", "token", "expected"),
    [
        (True, [1, 2, 3], 3, 4, True),
        (True, [1, END_THINK, 3], 1, 4, True),  # the marker was not accepted
        (True, [1, END_THINK, 3], 2, 4, False),
        (True, [1, 2, 3], 0, TOOL_CALL, False),
        (False, [THINK, 2, 3], 1, 4, True),
        (False, [THINK, END_THINK, 3], 3, 4, False),
        (False, [END_THINK, THINK, 3], 3, 4, True),
    ],
)
def test_the_phase_follows_the_committed_tokens(
    is_open: bool, drafts: list[int], num_accepted: int, token: int, expected: bool
) -> None:
    before = replace(_inputs([5, 0, 0, 0], [0, 4], [3], [is_open]), draft_tokens=np.array([drafts], np.int32))
    outputs = StepOutputs(_i32(num_accepted), _i32(token), np.zeros((1, 3), np.int32))
    assert carried(before, outputs, _IDS).in_thinking_phase.tolist() == [expected]


def test_results_out_of_range_hand_on_something_in_range() -> None:
    before = _inputs([5, 0, 0, 6], [0, 3, 4], [2, 0], [False, False])
    carry = carried(before, StepOutputs(_i32(9, -3), _i32(-1, 4), np.zeros((2, 3), np.int32)), _IDS)
    found = followed(_inputs([9, 9], [0, 1, 2], [0, 0], [False, False]), _i32(0, 1), carry)
    assert found.token_ids.tolist() == [0, 4] and found.cache_lengths.tolist() == [102, 200]


class _Recorder(HostAheadSession):
    """Writes down what the engine asks for."""

    def __init__(self, session: object) -> None:
        super().__init__(session)  # type: ignore[arg-type]
        self.events: list[str] = []

    def launch(self, inputs: StepInputs, follows: Int32 | None = None) -> None:
        self.events.append("launch" if follows is None else "follow")
        super().launch(inputs, follows)

    def supply_bitmask(self, token_bitmask: Int32) -> None:
        self.events.append("mask")
        super().supply_bitmask(token_bitmask)

    def collect(self) -> StepOutputs:
        self.events.append("collect")
        return super().collect()


def _recorded(**options: object) -> tuple[Bench, _Recorder]:
    b = bench(launch_ahead=True, **options)  # type: ignore[arg-type]
    recorder = _Recorder(b.session)
    b.engine._queue = recorder
    return b, recorder


def test_the_next_call_is_launched_before_the_results_of_the_last_are_read() -> None:
    b, recorder = _recorded()
    b.add("r", _PROMPT, replace(_GREEDY, max_tokens=40))
    b.run()
    assert recorder.events[:5] == ["launch", "follow", "collect", "follow", "collect"]
    assert b.ids("r") == oracle.generate(_PROMPT, _GREEDY, 0, 40)[0]
    b.check_empty()


def test_a_mask_that_depends_on_unseen_tokens_is_supplied_while_its_call_runs() -> None:
    b, recorder = _recorded()
    params = replace(_GREEDY, structured_output=StructuredOutput(regex="[ab]{30}"), max_tokens=40)
    b.add("r", _PROMPT, params)
    b.run()
    assert recorder.events[:7] == ["launch", "follow", "collect", "mask", "follow", "collect", "mask"]
    assert len(b.completions["r", 0].text) == 30 and set(b.completions["r", 0].text) <= {"a", "b"}


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_penalties_count_tokens_that_the_host_has_not_seen(num_drafts: int) -> None:
    """Two tokens that would take turns for ever but for their counts; every call that is late by one would show."""
    b, recorder = _recorded(num_drafts=num_drafts)
    params = replace(_GREEDY, max_tokens=40, frequency_penalty=1.0, logit_bias={65: 20.0, 66: 20.0, 67: 19.0})
    b.add("r", _PROMPT, params)
    b.run()
    assert recorder.events[:3] == ["launch", "follow", "collect"]
    assert b.ids("r") == oracle.generate(_PROMPT, params, 0, 40)[0]
    assert len(set(b.ids("r"))) > 2


def test_committed_tokens_join_the_histories_that_there_are() -> None:
    before = _inputs([5, 0, 0, 0, 6, 0], [0, 4, 6], [3, 1], [False, False])
    outputs = StepOutputs(_i32(2, 0), _i32(77, -1), np.array([[1, 2, 3], [4, 5, 6]], np.int32))
    carry = carried(before, outputs, _IDS)
    assert carry.committed_tokens.tolist() == [[10, 11, 77, -1], [-1, -1, -1, -1]]
    after = _inputs([0, 0, 9, 0], [0, 1, 2, 4], [0, 0, 0], [False] * 3)
    after = replace(after, **history_fields([_i32(), _i32(8, 9), _i32(3)], [0, 1, 1]))
    found = followed(after, _i32(0, 0, 1), carry)
    assert found.history_ids is not None and found.history_offsets is not None
    assert found.history_ids.tolist() == [8, 9, 10, 11, 77, 3]
    assert found.history_offsets.tolist() == [0, 0, 5, 6]


def test_a_request_admitted_meanwhile_shares_the_call_with_rows_that_follow() -> None:
    b, _recorder = _recorded()
    b.add("one", _PROMPT, replace(_GREEDY, max_tokens=60))
    b.step()
    b.add("two", _PROMPT[::-1], _GREEDY)
    b.run()
    assert b.ids("one") == oracle.generate(_PROMPT, _GREEDY, 0, 60)[0]
    assert b.ids("two") == oracle.generate(_PROMPT[::-1], _GREEDY, 0, 20)[0]
    b.check_empty()


def test_an_abort_makes_the_row_in_flight_void_and_frees_its_pages_at_once() -> None:
    b, _recorder = _recorded()
    b.add("gone", _PROMPT, replace(_GREEDY, max_tokens=200))
    b.add("stays", _PROMPT[3:], _GREEDY)
    for _ in range(3):
        b.step()
    held = b.engine.allocator.num_held
    b.engine.abort("gone")
    assert b.engine.allocator.num_held < held
    assert [row.is_void for row in b.engine._in_flight.rows] == [True, False]
    b.step()
    assert b.engine.statistics.num_void_rows == 1
    b.run()
    assert b.completions["gone", 0].finish_reason == "abort"
    assert b.ids("stays") == oracle.generate(_PROMPT[3:], _GREEDY, 0, 20)[0]
    b.check_empty()


def test_no_row_is_planned_for_a_sequence_that_surely_ends() -> None:
    b, recorder = _recorded()
    b.add("r", _PROMPT, replace(_GREEDY, max_tokens=1))
    b.run()
    assert recorder.events == ["launch", "collect"]


def test_the_context_limit_holds_for_calls_that_guess() -> None:
    manifest = fake_manifest(3, max_position_embeddings=64)
    b = bench(manifest=manifest, num_pages=3, launch_ahead=True)
    b.add("r", _PROMPT, replace(_GREEDY, max_tokens=None, ignore_eos=True))
    b.run()
    assert len(b.ids("r")) == 64 - len(_PROMPT)
    assert b.ids("r") == oracle.generate(_PROMPT, replace(_GREEDY, ignore_eos=True), 0, 64 - len(_PROMPT))[0]


def test_more_than_two_calls_in_flight_are_a_bug() -> None:
    session = HostAheadSession(bench().session)
    inputs = _inputs([5], [0, 1], [0], [False])
    session.launch(inputs)
    session.launch(inputs)
    with pytest.raises(RuntimeError, match="2 calls are in flight"):
        session.launch(inputs)
