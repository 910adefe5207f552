"""GlmMaskLogits and GlmTokenLogprobs: grammar bits, and log-probabilities of what was committed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from comparison import U32, assert_close, assert_same
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx_case import reference, run
from oracle_sampling import ranked


def bitmask(allowed: list[set[int]], vocab: int) -> np.ndarray:
    """Rows of little-endian words: bit v % 32 of word v // 32 is set for allowed ids."""
    words = np.zeros((len(allowed), -(-vocab // 32)), np.uint32)
    for row, ids in enumerate(allowed):
        for token in ids:
            words[row, token // 32] |= np.uint32(1 << (token % 32))
    return words.view(np.int32)


def check_mask(logits: np.ndarray, allowed: list[set[int]], num_slots: int, mask: np.ndarray | None = None) -> None:
    vocab = logits.shape[1]
    expected = logits.copy()
    for row, ids in enumerate(allowed):
        for token in range(vocab):
            if ids and token not in ids and not math.isnan(logits[row, token]):
                expected[row, token] = -np.inf
    mask = bitmask(allowed, vocab) if mask is None else mask
    for call in (run, reference):
        # Neither body waits: a turn that never comes changes nothing.
        turn, ready = np.array([2], np.int32), np.array([1], np.int32)
        found = call("GlmMaskLogits", [logits, mask.reshape(-1, num_slots, mask.shape[1]), turn, ready])[0]
        assert_same(found.view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 64, 70])
def test_each_single_bit(vocab: int) -> None:
    """Bit 31 makes its word negative; the last word may be partial."""
    logits = np.random.default_rng(vocab).standard_normal((vocab, vocab)).astype(np.float32)
    check_mask(logits, [{token} for token in range(vocab)], 1)


def test_a_row_that_forbids_everything_is_left_as_it_is() -> None:
    logits = np.arange(120, dtype=np.float32).reshape(3, 40)
    check_mask(logits, [set(), {39}, {0, 31, 32}], 3)


def test_bits_beyond_the_vocabulary_allow_nothing() -> None:
    """A row whose only set bits lie past the vocabulary forbids everything."""
    logits = np.arange(70, dtype=np.float32).reshape(2, 35)
    mask = np.array([[0, -8], [1, -8]], np.int32)  # -8 has bits 3 to 31: ids 35 to 63
    check_mask(logits, [set(), {0}], 2, mask)


def test_nan_is_not_hidden_by_a_mask() -> None:
    logits = np.zeros((1, 40), np.float32)
    logits[0, 5] = np.nan
    check_mask(logits, [{7}], 1)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 100), st.sampled_from([1, 4]))
def test_any_mask(seed: int, vocab: int, num_slots: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((2 * num_slots, vocab)).astype(np.float32)
    density = rng.random()
    check_mask(logits, [set(np.flatnonzero(rng.random(vocab) < density).tolist()) for _ in logits], num_slots)


def logprobs_oracle(logits: np.ndarray) -> np.ndarray:
    out = np.zeros(logits.shape)
    for row, values in enumerate(logits.astype(np.float64)):
        top = max(values)
        out[row] = values - top - math.log(math.fsum(math.exp(v - top) for v in values))
    return out


@pytest.mark.parametrize("top_n", [0, 1, 5, 50, 64])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_log_probabilities(top_n: int, scale: float) -> None:
    rng = np.random.default_rng(top_n)
    logits = (rng.standard_normal((6, 50)) * scale).astype(np.float32)
    logits[:, 7] = -np.inf
    logits[:, 20] = logits[:, 11]
    committed = rng.integers(0, 50, (2, 3)).astype(np.int32)
    committed[0, 0] = 7
    every = logprobs_oracle(logits).reshape(2, 3, 50)
    limit = 8 * U32 + 4 * U32 * (float(np.abs(logits[np.isfinite(logits)]).max()) * 2 + 8)
    for call in (run, reference):
        logprobs, top_ids, top_logprobs = call("GlmTokenLogprobs", [logits, committed], top_n=top_n)
        assert_close(
            logprobs, np.take_along_axis(every, committed[..., None].astype(int), 2)[..., 0], limit, "logprobs"
        )
        if top_n == 0:
            assert (top_ids == -1).all() and not top_logprobs.any() and top_ids.shape == (2, 3, 1)
            continue
        order = np.array([ranked(row.tolist()) for row in logits], np.int32).reshape(2, 3, 50)
        missing = max(top_n - 50, 0)
        wanted = np.pad(order, ((0, 0), (0, 0), (0, missing)), constant_values=-1)[..., :top_n]
        assert_same(top_ids, wanted, "top_ids")
        values = np.pad(
            np.take_along_axis(every, order.astype(int), 2), ((0, 0), (0, 0), (0, missing)), constant_values=-np.inf
        )
        assert_close(top_logprobs, values[..., :top_n], limit, "top_logprobs")


def test_different_logits_never_tie_in_the_list() -> None:
    """Beside a logit of 100, 0 and 1e-7 have the same log-probability in float32; the list still follows the logits."""
    logits = np.array([[0.0, 1e-7, 100.0]], np.float32)
    for call in (run, reference):
        _logprob, ids, logprobs = call("GlmTokenLogprobs", [logits, np.zeros((1, 1), np.int32)], top_n=3)
        assert logprobs[0, 0, 1] == logprobs[0, 0, 2]
        assert ids.tolist() == [[[2, 1, 0]]]


def test_a_nan_row_gives_nan_and_leaves_the_others_alone() -> None:
    logits = np.zeros((2, 4), np.float32)
    logits[0, 1] = np.nan
    for call in (run, reference):
        logprobs, _ids, _top = call("GlmTokenLogprobs", [logits, np.array([[2, 2]], np.int32)], top_n=1)
        assert np.isnan(logprobs[0, 0])
        assert_close(logprobs[0, 1], np.array(-math.log(4)), 4 * U32)
