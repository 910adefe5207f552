"""Logits of chosen rows and the draft's argmax."""

from __future__ import annotations

import math

import numpy as np
import pytest
from comparison import assert_close, assert_same, rounding
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx_case import reference, run


def logits_oracle(x: np.ndarray, weight: np.ndarray, valid_vocab: int) -> tuple[np.ndarray, np.ndarray]:
    out = np.full((len(x), len(weight)), -np.inf)
    magnitude = np.zeros(out.shape)
    for row in range(len(x)):
        for token in range(valid_vocab):
            terms = x[row].astype(np.float64) * weight[token].astype(np.float64)
            out[row, token], magnitude[row, token] = math.fsum(terms), math.fsum(np.abs(terms))
    return out, magnitude


def argmax_oracle(logits: np.ndarray) -> list[int]:
    """Lowest id of the largest value; NaN never wins, nothing but NaN gives 0."""
    best = []
    for row in logits:
        winner = 0
        for token, value in enumerate(row):
            if not math.isnan(value) and (math.isnan(row[winner]) or value > row[winner]):
                winner = token
        best.append(winner)
    return best


@pytest.mark.parametrize("valid_vocab", [33, 30, 1])
def test_rows_are_gathered_and_padding_is_masked(valid_vocab: int) -> None:
    rng = np.random.default_rng(valid_vocab)
    x, weight = rng.standard_normal((6, 16)).astype(np.float32), rng.standard_normal((33, 16)).astype(np.float32)
    weight[valid_vocab:] = np.nan  # whatever the checkpoint's padding holds
    rows = np.array([5, 0, 0, 3], np.int32)
    expected, magnitude = logits_oracle(x[rows], weight, valid_vocab)
    for outputs in (run, reference):
        found = outputs("GlmHeadLogits", [x, rows, weight], valid_vocab=valid_vocab)[0]
        assert_close(found, expected, rounding(magnitude))


@pytest.mark.parametrize("valid_vocab", [33, 30, 1])
def test_argmax_ignores_padding(valid_vocab: int) -> None:
    rng = np.random.default_rng(7)
    x, weight = rng.integers(-3, 4, (40, 16)).astype(np.float32), rng.integers(-3, 4, (33, 16)).astype(np.float32)
    weight[valid_vocab:] *= 100
    expected = np.array(argmax_oracle(logits_oracle(x, weight, valid_vocab)[0]), np.int32)
    for outputs in (run, reference):
        assert_same(outputs("GlmHeadArgmax", [x, weight], valid_vocab=valid_vocab)[0], expected)


def test_equal_logits_give_the_lowest_id() -> None:
    x, weight = np.ones((1, 4), np.float32), np.ones((9, 4), np.float32)
    weight[:3] = 0
    for outputs in (run, reference):
        assert outputs("GlmHeadArgmax", [x, weight], valid_vocab=9)[0].tolist() == [3]


def test_nan_never_wins_and_a_nan_row_stays_alone() -> None:
    x, weight = np.ones((3, 4), np.float32), np.ones((9, 4), np.float32)
    weight[2], weight[5] = np.nan, 2
    x[1] = np.nan
    for outputs in (run, reference):
        assert outputs("GlmHeadArgmax", [x, weight], valid_vocab=9)[0].tolist() == [5, 0, 5]
        logits = outputs("GlmHeadLogits", [x, np.array([0, 1, 2], np.int32), weight], valid_vocab=9)[0]
        assert np.isnan(logits[1]).all()
        assert np.isnan(logits[[0, 2]]).sum() == 2


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 33))
def test_argmax_with_many_ties(seed: int, valid_vocab: int) -> None:
    rng = np.random.default_rng(seed)
    x, weight = rng.integers(-1, 2, (4, 4)).astype(np.float32), rng.integers(-1, 2, (33, 4)).astype(np.float32)
    expected = np.array(argmax_oracle(logits_oracle(x, weight, valid_vocab)[0]), np.int32)
    assert_same(run("GlmHeadArgmax", [x, weight], valid_vocab=valid_vocab)[0], expected)
