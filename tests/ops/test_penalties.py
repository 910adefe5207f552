"""Penalties with the history of each slot counted out in plain lists."""

from __future__ import annotations

import numpy as np
import pytest
from comparison import U32, assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx_case import reference, run


def penalties_oracle(
    logits: np.ndarray,
    drafts: list[list[int]],
    presence: list[float],
    frequency: list[float],
    repetition: list[float],
    outputs: list[list[int]],
    prompts: list[list[int]],
    bias: np.ndarray,
    num_slots: int,
) -> np.ndarray:
    """Bias, repetition over prompt and output, frequency and presence over the output, which for slot j ends at draft j-1."""
    adjusted = logits.astype(np.float64)
    for b in range(len(outputs)):
        for slot in range(num_slots):
            history = outputs[b] + drafts[b][:slot]
            row = adjusted[b * num_slots + slot]
            for token in range(len(row)):
                row[token] += float(bias[b, token])
                count = history.count(token)
                if count or token in prompts[b]:
                    row[token] = row[token] / repetition[b] if row[token] > 0 else row[token] * repetition[b]
                row[token] -= frequency[b] * count + (presence[b] if count else 0.0)
    return adjusted


def check(
    rng: np.random.Generator, batch: int, num_slots: int, vocab: int, *, drafts: list[list[int]] | None = None
) -> None:
    drafts = drafts or rng.integers(0, vocab, (batch, max(num_slots - 1, 1))).tolist()
    outputs = [rng.integers(0, vocab, rng.integers(0, 6)).tolist() for _ in range(batch)]
    prompts = [rng.integers(0, vocab, rng.integers(0, 6)).tolist() for _ in range(batch)]
    logits = rng.integers(-4, 5, (batch * num_slots, vocab)).astype(np.float32)
    logits[:, -1] = -np.inf
    presence, frequency = (rng.integers(-2, 3, batch) / 2 for _ in range(2))
    repetition = rng.choice([0.5, 1.0, 1.3, 2.0], batch).astype(np.float32)
    bias = rng.integers(-2, 3, (batch, vocab)).astype(np.float32)
    counts = np.array([[history.count(v) for v in range(vocab)] for history in outputs], np.int32)
    mask = np.array([[int(v in prompt) for v in range(vocab)] for prompt in prompts], np.int32)
    expected = penalties_oracle(
        logits, drafts, presence.tolist(), frequency.tolist(), repetition.tolist(), outputs, prompts, bias, num_slots
    )
    scalars = [v.astype(np.float32) for v in (presence, frequency, repetition)]
    arrays = [logits, np.array(drafts, np.int32), *scalars, counts, mask, bias]
    for call in (run, reference):
        assert_close(call("GlmPenalties", arrays, num_slots=num_slots)[0], expected, 4 * U32 * 32)


@pytest.mark.parametrize("num_slots", [1, 2, 4])
def test_every_slot_counts_the_drafts_before_it(num_slots: int) -> None:
    check(np.random.default_rng(num_slots), 3, num_slots, 9)


def test_a_draft_outside_the_vocabulary_is_no_history() -> None:
    check(np.random.default_rng(5), 2, 4, 9, drafts=[[-1, 9, 3], [2**20, 2, 2]])


def test_neutral_penalties_change_nothing() -> None:
    logits = np.array([[1.5, -2.5, -np.inf, np.nan]], np.float32)
    off = [np.zeros(1, np.float32), np.zeros(1, np.float32), np.ones(1, np.float32)]
    used = np.ones((1, 4), np.int32)
    arrays = [logits, np.zeros((1, 1), np.int32), *off, used, used, np.zeros((1, 4), np.float32)]
    for call in (run, reference):
        np.testing.assert_array_equal(call("GlmPenalties", arrays, num_slots=1)[0], logits)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.sampled_from([1, 4]), st.integers(2, 9))
def test_any_history(seed: int, batch: int, num_slots: int, vocab: int) -> None:
    check(np.random.default_rng(seed), batch, num_slots, vocab)
