"""What GlmAccept accepts: blocks of drafts, relaxed acceptance while thinking, broken rows."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from acceptance_calls import both, check, inputs
from comparison import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_sampling import Relaxed, Sampling, draw, ranked, uniform

NAN, INF = math.nan, math.inf


@st.composite
def requests(draw_: st.DrawFn) -> tuple[np.ndarray, list[list[int]], list[Sampling], Relaxed, int]:
    num_slots = draw_(st.sampled_from([1, 2, 4, 6]))
    batch, vocab = draw_(st.integers(1, 4)), 12
    rng = np.random.default_rng(draw_(st.integers(0, 2**32 - 1)))
    logits = rng.standard_normal((batch * num_slots, vocab)) * draw_(st.sampled_from([0.5, 2.0, 6.0]))
    if draw_(st.booleans()):
        logits = np.round(logits)  # many equal logits
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    logits[:, 0] = 0.0
    samplings, drafts = [], []
    for b in range(batch):
        count = int(rng.integers(0, num_slots))
        likely = [ranked(list(logits[b * num_slots + j]))[int(rng.integers(0, 3))] for j in range(count)]
        drafts.append(likely)
        samplings.append(
            Sampling(
                temperature=float(rng.choice([0.0, 0.7, 1.0])),
                top_k=int(rng.choice([0, 1, 2, 5])),
                top_p=float(rng.choice([0.3, 0.9, 1.0])),
                min_p=float(rng.choice([0.0, 0.15])),
                seed=int(rng.integers(-(2**63), 2**63 - 1)),
                sample_offset=int(rng.integers(0, 2**20)),
                in_thinking_phase=bool(rng.integers(0, 2)),
            )
        )
    relaxed = Relaxed(draw_(st.sampled_from([0, 1, 3, 10, 50])), draw_(st.sampled_from([0.0, 0.3, 1.0])), (3, 7))
    return logits, drafts, samplings, relaxed, num_slots


@settings(max_examples=150, deadline=None)
@given(requests())
def test_any_block(case: tuple[np.ndarray, list[list[int]], list[Sampling], Relaxed, int]) -> None:
    check(*case)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("wrong", range(4))
def test_the_first_wrong_draft_ends_the_block(temperature: float, wrong: int) -> None:
    rng = np.random.default_rng(wrong)
    logits = rng.standard_normal((4, 20)).astype(np.float32)
    sampling = Sampling(temperature=temperature, seed=3, sample_offset=8)
    samples = [draw(row.tolist(), sampling, uniform(3, 8 + j))[0] for j, row in enumerate(logits)]
    drafts = [s if j != wrong else (s + 1) % 20 for j, s in enumerate(samples[:3])]
    for num_accepted, next_tokens, committed in both(inputs(logits, [drafts], [sampling], Relaxed(), 4), Relaxed(), 4):
        assert num_accepted.tolist() == [wrong]
        assert next_tokens.tolist() == [samples[wrong]]
        assert committed[0].tolist() == samples


def test_committed_text_with_drafts_is_the_text_without_them() -> None:
    """Slot j alone, as an undrafted call at output position offset + j, gives what the block gives."""
    rng = np.random.default_rng(5)
    logits = rng.standard_normal((30 * 4, 25)).astype(np.float32)
    samplings = [Sampling(temperature=0.9, top_p=0.9, seed=100 + b, sample_offset=7 * b) for b in range(30)]
    drafts = rng.integers(0, 25, (30, 3)).tolist()
    for (num_accepted, _next, committed), call in zip(
        both(inputs(logits, drafts, samplings, Relaxed(), 4), Relaxed(), 4), (0, 1), strict=True
    ):
        for slot in range(4):
            later = [dataclasses.replace(s, sample_offset=s.sample_offset + slot) for s in samplings]
            alone = both(inputs(logits[slot::4], [[]] * 30, later, Relaxed(), 1), Relaxed(), 1)[call][1]
            assert_same(committed[:, slot], alone, f"slot {slot}")
        assert (num_accepted <= 3).all()


def test_a_request_is_the_same_in_every_batch() -> None:
    rng = np.random.default_rng(6)
    logits = rng.standard_normal((4 * 4, 25)).astype(np.float32)
    samplings = [Sampling(temperature=t, seed=s) for t, s in ((0.0, 1), (1.0, 7), (0.0, 7), (1.0, 7))]
    drafts = [[1, 2], [3], [], [4, 5, 6]]
    together = both(inputs(logits, drafts, samplings, Relaxed(), 4), Relaxed(), 4)
    for b in range(4):
        alone = both(
            inputs(logits[4 * b : 4 * b + 4], drafts[b : b + 1], samplings[b : b + 1], Relaxed(), 4), Relaxed(), 4
        )
        for whole, single in zip(together, alone, strict=True):
            assert [part[b].tolist() for part in whole] == [part[0].tolist() for part in single]


# --- relaxed acceptance ---------------------------------------------------------------------------------------------

END = 9
THINK = Sampling(temperature=1.0, seed=11, in_thinking_phase=True)
PEAKED = [math.log(p) for p in (0.75, 0.125, 0.0625, 0.0625)]


def verdicts(rows: list[list[float]], drafts: list[int], sampling: Sampling, relaxed: Relaxed) -> tuple[int, list[int]]:
    num_slots = len(drafts) + 1
    results = both(inputs(np.array(rows, np.float32), [drafts], [sampling], relaxed, num_slots), relaxed, num_slots)
    assert [r.tolist() for r in results[0]] == [r.tolist() for r in results[1]]
    return int(results[0][0][0]), results[0][2][0].tolist()


def flat_but(vocab: int, best: int) -> list[float]:
    row = [-30.0] * vocab
    row[best] = 0.0
    return row


@pytest.mark.parametrize(
    ("row", "draft", "delta", "accepted"),
    [
        ([0.0, 0.0, -INF, -INF], 1, 0.0, 1),  # p = p1 - 0, exactly
        ([0.0, -INF, -INF, -INF], 1, 1.0, 1),  # p = 0 = p1 - 1, exactly
        ([0.0, 0.0, -INF, -INF], 2, 0.5, 1),  # p = 0 = 0.5 - 0.5, exactly
        ([0.0, 0.0, -INF, -INF], 2, 0.4999999, 0),
        ([math.log(3.0), 0.0, -INF, -INF], 1, 0.5 + 1e-6, 1),  # 0.75 and 0.25, each right to 1e-7
        ([math.log(3.0), 0.0, -INF, -INF], 1, 0.5 - 1e-6, 0),
    ],
)
def test_the_border_p1_minus_delta_accepts(row: list[float], draft: int, delta: float, accepted: int) -> None:
    for seed in range(20):
        sampling = dataclasses.replace(THINK, seed=seed)
        assert verdicts([row, row], [draft], sampling, Relaxed(10, delta))[0] == accepted


def test_rank_limits_what_delta_allows_and_ties_rank_by_id() -> None:
    row = [1.0, 0.0, 0.0, 0.0, -1.0]
    assert [verdicts([row, row], [d], THINK, Relaxed(3, 1.0))[0] for d in range(5)] == [1, 1, 1, 0, 0]


def test_a_relaxed_rejection_recovers_the_argmax() -> None:
    row = [0.0, 3.0, 2.9, 2.8]
    for seed in range(30):
        count, committed = verdicts([row, row], [0], dataclasses.replace(THINK, seed=seed), Relaxed(3, 0.6))
        assert (count, committed[0]) == (0, 1)


def test_the_probabilities_are_untempered_and_untruncated() -> None:
    """At temperature 100 and top_k 1 the relaxed verdict is still that of the plain softmax."""
    row = [math.log(3.0), 0.0, -INF, -INF]
    hot = dataclasses.replace(THINK, temperature=100.0)
    cut = dataclasses.replace(THINK, top_k=1, top_p=0.1, min_p=0.9)
    for sampling in (hot, cut):
        assert verdicts([row, row], [1], sampling, Relaxed(10, 0.51))[0] == 1
        assert verdicts([row, row], [1], sampling, Relaxed(10, 0.49))[0] == 0


def not_sampling(token: int, row: list[float], slot: int) -> Sampling:
    """THINK with the first seed whose draw in this slot is another token."""
    candidates = (dataclasses.replace(THINK, seed=seed) for seed in range(50))
    return next(s for s in candidates if draw(row, s, uniform(s.seed, slot))[0] != token)


def test_the_end_marker_inside_a_block_is_strict_and_so_is_all_after_it() -> None:
    """Block [x, end, y, z]: x is judged relaxed; the end, y and z have to equal their samples."""
    rows = [flat_but(12, best) for best in (1, END, 5, 6, 7)]
    rows[0][2] = rows[0][1] - 0.1  # x = 2 is near the best, and the sampler would never be asked
    assert verdicts(rows, [2, END, 5, 6], THINK, Relaxed(2, 0.6, (END, 10))) == (4, [2, END, 5, 6, 7])
    for slot, near in ((2, 4), (3, 4)):
        drafts = [2, END, 5, 6]
        drafts[slot] = near
        rows[slot][near] = -0.1  # within delta of the best: relaxed would accept it
        sampling = not_sampling(near, rows[slot], slot)
        count, committed = verdicts(rows, drafts, sampling, Relaxed(2, 0.6, (END, 10)))
        assert (count, committed[slot]) == (slot, (5, 6)[slot - 2])
        rows[slot][near] = -30.0
    rows[1] = flat_but(12, 3)
    rows[1][END] = -0.1
    strict = not_sampling(END, rows[1], 1)
    assert verdicts(rows, [2, END, 5, 6], strict, Relaxed(2, 0.6, (END, 10)))[0] == 1


@pytest.mark.parametrize(
    ("sampling", "relaxed"),
    [
        (dataclasses.replace(THINK, in_thinking_phase=False), Relaxed(10, 1.0)),
        (dataclasses.replace(THINK, temperature=0.0), Relaxed(10, 1.0)),
        (THINK, Relaxed(0, 1.0)),
    ],
)
def test_outside_thinking_at_temperature_0_and_switched_off_it_is_strict(sampling: Sampling, relaxed: Relaxed) -> None:
    row = flat_but(4, 2)
    assert verdicts([row, row], [1], sampling, relaxed) == (0, [2, 2])


def test_the_bonus_slot_is_sampled_even_while_thinking() -> None:
    samplings = [dataclasses.replace(THINK, seed=s) for s in range(200)]
    rows = np.tile(np.array(PEAKED, np.float32), (400, 1))
    for _count, _next, committed in both(inputs(rows, [[0]] * 200, samplings, Relaxed(10), 2), Relaxed(10), 2):
        assert set(committed[:, 0].tolist()) == {0}
        assert set(committed[:, 1].tolist()) == {0, 1, 2, 3}


def test_nan_in_a_used_row_fails_its_request_only() -> None:
    rng = np.random.default_rng(8)
    logits = rng.standard_normal((4 * 3, 10)).astype(np.float32)
    clean = both(inputs(logits, [[1], [2, 3], []], [THINK] * 3, Relaxed(), 4), Relaxed(), 4)
    logits[1 * 4 + 2, 4] = NAN  # a row that request 1 uses
    logits[0 * 4 + 2, 4] = NAN  # rows past the drafts of requests 0 and 2
    logits[2 * 4 + 1, 4] = NAN
    for (num_accepted, next_tokens, committed), before in zip(
        both(inputs(logits, [[1], [2, 3], []], [THINK] * 3, Relaxed(), 4), Relaxed(), 4), clean, strict=True
    ):
        assert (num_accepted[1], next_tokens[1], committed[1].tolist()) == (0, -1, [0] * 4)
        for b in (0, 2):
            assert [part[b].tolist() for part in (num_accepted, next_tokens, committed)] == [
                p[b].tolist() for p in before
            ]


def test_rows_of_minus_infinity_and_drafts_outside_the_vocabulary_stay_legal() -> None:
    logits = np.full((2, 6), -INF, np.float32)
    logits[1] = 0.0
    for draft in (-1, 6, 2**31 - 1):
        for num_accepted, next_tokens, _committed in both(
            inputs(logits, [[draft]], [THINK], Relaxed(3), 2), Relaxed(3), 2
        ):
            assert num_accepted.tolist() == [0]
            assert 0 <= int(next_tokens[0]) < 6
