"""The thinking phase over prompt and output."""

from __future__ import annotations

import random

import pytest

from glm_mtp_export.runtime.thinking import ThinkingIds, ThinkingPhase

_IDS = ThinkingIds.of({"think": 100, "think_end": 101, "tool_call": 102})


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ([], False),
        ([1, 2], False),
        ([1, 100], True),
        ([100, 5, 101], False),
        ([100, 101, 100], True),
        ([100, 5, 102], False),
        ([101, 100, 6], True),
    ],
)
def test_the_last_marker_of_the_prompt_wins(prompt: list[int], is_open: bool) -> None:
    phase = ThinkingPhase(_IDS, prompt)
    assert phase.is_open == is_open and phase.num_tokens == 0


def test_tokens_count_between_the_markers_only() -> None:
    phase = ThinkingPhase(_IDS)
    counts = []
    for token in (1, 100, 2, 100, 3, 101, 4, 100, 5):
        phase.advance(token)
        counts.append((phase.is_open, phase.num_tokens))
    assert [c for c in counts if c[0]] == [(True, 0), (True, 1), (True, 2), (True, 3), (True, 0), (True, 1)]


def test_a_block_at_once_equals_one_by_one() -> None:
    rng = random.Random(3)
    for _ in range(300):
        one, block = ThinkingPhase(_IDS, [100]), ThinkingPhase(_IDS, [100])
        for _ in range(5):
            tokens = [rng.choice([1, 2, 3, 4, 5, 100, 101, 102]) for _ in range(rng.randint(0, 4))]
            copy = block.copy()
            for token in tokens:
                one.advance(token)
            copy.advance_all(tokens)
            block.advance_all(tokens)
            assert (one.is_open, one.num_tokens) == (block.is_open, block.num_tokens) == (copy.is_open, copy.num_tokens)


def test_no_markers_no_phase() -> None:
    phase = ThinkingPhase(ThinkingIds(), [100, 101])
    phase.advance_all([100, 1])
    assert not phase.is_open
