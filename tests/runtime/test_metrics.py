"""Counting rules that no engine run shows by itself."""

from __future__ import annotations

import logging

import pytest

from glm_mtp_export.runtime.metrics import DEAD_DRAFT_ROUNDS, EngineStatistics, Histogram


def test_histogram_counts_up_to_and_including_its_bounds() -> None:
    histogram = Histogram()
    for seconds in (0.001, 0.0011, 0.5, 100.0):
        histogram.observe(seconds)
    cumulative = dict(histogram.cumulative)
    assert (cumulative["0.001"], cumulative["0.0025"], cumulative["0.5"], cumulative["60.0"]) == (1, 2, 3, 3)
    assert cumulative["+Inf"] == 4 and histogram.total == pytest.approx(100.5021)


def test_dead_draft_warns_again_only_after_it_was_alive(caplog: pytest.LogCaptureFixture) -> None:
    statistics = EngineStatistics(3)

    def rounds(num_accepted: int) -> None:
        for _ in range(DEAD_DRAFT_ROUNDS):
            statistics.count_round(1 + num_accepted, 3, num_accepted)

    with caplog.at_level(logging.WARNING):
        for num_accepted, dead, warnings in ((0, True, 1), (0, True, 1), (2, False, 1), (0, True, 2)):
            rounds(num_accepted)
            assert statistics.draft_is_dead == dead and caplog.text.count("draft is dead") == warnings


def test_rates_before_and_after_the_first_round() -> None:
    statistics = EngineStatistics(2)
    assert statistics.tokens_per_call == 0.0 and statistics.acceptance_rates == (0.0, 0.0)
    statistics.count_round(2, 2, 1)
    statistics.count_round(1, 0, 0)
    assert statistics.tokens_per_call == 1.5 and statistics.acceptance_rates == (1.0, 0.0)
