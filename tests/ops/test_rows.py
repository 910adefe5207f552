"""GlmStepRows and GlmShiftRows: plain loops over requests, exact, for ragged batches with any mix of draft counts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from comparison import assert_same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx_case import reference, run

STEP_OUTPUTS = ("row_token_ids", "positions", "row_requests", "logit_rows")
SHIFT_OUTPUTS = ("shifted", "last_rows", "next_positions", "request_ids")


@dataclass(frozen=True)
class Batch:
    """Requests of one call: new committed tokens, drafts to verify, cached positions; and rows of padding after them."""

    new_tokens: tuple[tuple[int, ...], ...]
    drafts: tuple[tuple[int, ...], ...]
    cache_lengths: tuple[int, ...]
    num_padding: int
    num_slots: int

    def inputs(self) -> list[np.ndarray]:
        ids: list[int] = []
        offsets = [0]
        for new, drafts in zip(self.new_tokens, self.drafts, strict=True):
            ids += [*new, *[-7] * len(drafts)]  # placeholder rows hold anything
            offsets.append(len(ids))
        ids += [-9] * self.num_padding
        width = max(self.num_slots - 1, 1)
        table = np.full((len(self.drafts), width), 12345, np.int32)  # stale drafts beyond num_drafts
        for row, drafts in zip(table, self.drafts, strict=True):
            row[: len(drafts)] = drafts
        counts = [len(d) for d in self.drafts]
        flat = [np.array(v, np.int32) for v in (ids, offsets, counts, self.cache_lengths)]
        return [flat[0], flat[1], flat[2], table, flat[3]]


def step_rows_oracle(batch: Batch) -> list[list[int]]:
    ids, positions, requests, logit_rows = [], [], [], []
    for b, (new, drafts) in enumerate(zip(batch.new_tokens, batch.drafts, strict=True)):
        first = len(ids)
        for i, token in enumerate([*new, *drafts]):
            ids.append(token)
            positions.append(batch.cache_lengths[b] + i)
            requests.append(b)
        for j in range(batch.num_slots):
            logit_rows.append(first + len(new) - 1 + min(j, len(drafts)))
    padding = batch.num_padding
    return [ids + [0] * padding, positions + [0] * padding, requests + [-1] * padding, logit_rows]


def shift_rows_oracle(batch: Batch, accepted: list[int], committed: np.ndarray, forced: list[int]) -> list[list[int]]:
    shifted, last_rows, next_positions = [], [], []
    for b, (new, drafts) in enumerate(zip(batch.new_tokens, batch.drafts, strict=True)):
        last_rows.append(len(shifted) + len(new) - 1 + accepted[b])
        next_positions.append(batch.cache_lengths[b] + len(new) + accepted[b])
        shifted += new[1:]
        if not drafts and forced[b] >= 0:
            shifted.append(forced[b])
        else:
            shifted += [int(committed[b, j]) for j in range(len(drafts) + 1)]
    return [shifted + [0] * batch.num_padding, last_rows, next_positions, list(range(len(batch.drafts)))]


def check(
    name: str, arrays: list[np.ndarray], expected: list[list[int]], labels: tuple[str, ...], **attributes: int
) -> None:
    for outputs in (run(name, arrays, **attributes), reference(name, arrays, **attributes)):
        for label, actual, wanted in zip(labels, outputs, expected, strict=True):
            assert actual.dtype == np.int32
            assert_same(actual, np.array(wanted, np.int32), label)


def check_step(batch: Batch) -> None:
    check("GlmStepRows", batch.inputs(), step_rows_oracle(batch), STEP_OUTPUTS, num_slots=batch.num_slots)


def check_shift(batch: Batch, accepted: list[int], committed: np.ndarray, forced: list[int]) -> None:
    row_ids = np.array(step_rows_oracle(batch)[0], np.int32)
    _ids, offsets, counts, _table, lengths = batch.inputs()
    arrays = [row_ids, offsets, counts, np.array(accepted, np.int32), committed, np.array(forced, np.int32), lengths]
    check("GlmShiftRows", arrays, shift_rows_oracle(batch, accepted, committed, forced), SHIFT_OUTPUTS)


TINY = [
    Batch(((5, 6, 7), (8,), (9,)), ((1, 2), (), (3, 4, 5)), (10, 0, 63), 2, 4),
    Batch(((5,),), ((),), (0,), 0, 1),
    Batch(((5,), (6, 7)), ((), ()), (3, 2**20 - 4), 3, 1),
    Batch(((5,),), ((1, 2, 3, 4, 5, 6, 7),), (2**20 - 9,), 0, 8),
]


@pytest.mark.parametrize("batch", TINY)
def test_tiny_batches(batch: Batch) -> None:
    check_step(batch)
    committed = np.arange(len(batch.drafts) * batch.num_slots, dtype=np.int32).reshape(-1, batch.num_slots) + 40
    check_shift(batch, [len(d) for d in batch.drafts], committed, [-1] * len(batch.drafts))


def test_the_worked_example_of_one_accepted_draft() -> None:
    """c = 10, one new token t, drafts x y, samples x z w: one accepted, the draft embeds x z w, draft step 1 sits at 12."""
    t, x, y, z, w = 100, 1, 2, 3, 4
    batch = Batch(((t,),), ((x, y),), (10,), 0, 3)
    arrays = [
        np.array([t, x, y], np.int32),
        *(np.array(v, np.int32) for v in ([0, 3], [2], [1], [[x, z, w]], [-1], [10])),
    ]
    shifted, last_rows, next_positions, request_ids = run("GlmShiftRows", arrays)
    assert (shifted.tolist(), last_rows.tolist(), next_positions.tolist()) == ([x, z, w], [1], [12])
    assert request_ids.tolist() == [0]
    assert step_rows_oracle(batch)[1] == [10, 11, 12]


def test_a_prompt_chunk_takes_its_true_next_token_and_a_request_with_drafts_does_not() -> None:
    batch = Batch(((5, 6), (7,)), ((), (1,)), (0, 4), 0, 2)
    check_shift(batch, [0, 1], np.array([[50, 0], [1, 60]], np.int32), [77, 88])
    row_ids = np.array([5, 6, 7, 1], np.int32)
    _ids, offsets, counts, _table, lengths = batch.inputs()
    committed = np.array([[50, 0], [1, 60]], np.int32)
    forced = np.array([77, 88], np.int32)
    shifted = run("GlmShiftRows", [row_ids, offsets, counts, np.array([0, 1], np.int32), committed, forced, lengths])[0]
    assert shifted.tolist() == [6, 77, 1, 60]


def test_a_request_that_failed_still_embeds_a_legal_id() -> None:
    """committed of a request with NaN holds no id to look up an embedding with; a negative one must not leave the op."""
    arrays = [np.array(v, np.int32) for v in ([5, 6], [0, 2], [1], [0], [[-1, -1]], [-1], [3])]
    for outputs in (run("GlmShiftRows", arrays), reference("GlmShiftRows", arrays)):
        assert outputs[0].tolist() == [0, 0]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    num_slots = draw(st.sampled_from([1, 2, 4, 8]))
    token = st.integers(0, 154879)
    requests = draw(
        st.lists(
            st.tuples(
                st.lists(token, min_size=1, max_size=5).map(tuple),
                st.lists(token, max_size=num_slots - 1).map(tuple),
                st.integers(0, 2**20 - 16),
            ),
            min_size=1,
            max_size=5,
        )
    )
    new, drafts, lengths = (tuple(column) for column in zip(*requests, strict=True))
    return Batch(new, drafts, lengths, draw(st.integers(0, 3)), num_slots)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(batches(), st.data())
def test_any_ragged_batch(batch: Batch, data: st.DataObject) -> None:
    check_step(batch)
    accepted = [data.draw(st.integers(0, len(drafts))) for drafts in batch.drafts]
    forced = [data.draw(st.integers(-1, 5)) for _ in batch.drafts]
    seed = data.draw(st.integers(0, 2**31))
    committed = np.random.default_rng(seed).integers(0, 154880, (len(accepted), batch.num_slots)).astype(np.int32)
    check_shift(batch, accepted, committed, forced)
