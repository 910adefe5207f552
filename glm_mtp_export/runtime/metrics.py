"""What the engine counted: acceptance per position, tokens per call, queue and pages; and how to read it from outside.

`EngineStatistics` is plain numbers, always there. `prometheus_registry` shows the same numbers to a Prometheus scraper
when the package prometheus-client is installed. Tokens and drafts cut away behind a stop are counted nowhere.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from glm_mtp_export.errors import MissingDependencyError

__all__ = ["DEAD_DRAFT_BELOW", "DEAD_DRAFT_ROUNDS", "EngineStatistics", "Gauges", "Histogram", "prometheus_registry"]

_log = logging.getLogger(__name__)

DEAD_DRAFT_BELOW = 0.05
"""First-draft acceptance below which drafting only costs time."""
DEAD_DRAFT_ROUNDS = 200
"""Verified first drafts in a row over which that is judged."""


_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds


@dataclass
class Histogram:
    """Times by upper bound in seconds, as Prometheus counts them."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(_BUCKETS) + 1))
    total: float = 0.0

    def observe(self, seconds: float) -> None:
        """Count one time."""
        self.counts[bisect_left(_BUCKETS, seconds)] += 1
        self.total += seconds

    @property
    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, observations at most that)."""
        bounds = [*map(str, _BUCKETS), "+Inf"]
        return list(zip(bounds, accumulate(map(float, self.counts)), strict=True))


@dataclass
class EngineStatistics:
    """Counters since the engine was made. `drafted[j]` / `accepted[j]` count draft position j over all verifying
    rows."""

    num_speculative_tokens: int
    num_calls: int = 0
    num_prefill_tokens: int = 0
    num_rounds: int = 0  # rows that emitted, over all calls
    num_output_tokens: int = 0
    num_finished: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0, "error": 0})
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_void_rows: int = 0  # launched ahead for sequences that took another way
    step_seconds: float = 0.0
    model_seconds: float = 0.0  # the host waited for the step graph
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    draft_is_dead: bool = False
    step_time: Histogram = field(default_factory=Histogram)
    time_to_first_token: Histogram = field(default_factory=Histogram)
    time_per_output_token: Histogram = field(default_factory=Histogram)  # of a sequence, first token to last
    _window_drafted: int = 0
    _window_accepted: int = 0

    def __post_init__(self) -> None:
        self.drafted = [0] * self.num_speculative_tokens
        self.accepted = [0] * self.num_speculative_tokens

    @property
    def tokens_per_call(self) -> float:
        """Mean tokens a request gains in a call that samples for it; 1.0 without drafts, at most K + 1."""
        return self.num_output_tokens / self.num_rounds if self.num_rounds else 0.0

    @property
    def acceptance_rates(self) -> tuple[float, ...]:
        """Share of verified drafts that were accepted, by position."""
        return tuple(a / d if d else 0.0 for a, d in zip(self.accepted, self.drafted, strict=True))

    @property
    def host_seconds(self) -> float:
        """Time spent outside the model."""
        return self.step_seconds - self.model_seconds

    def count_round(self, num_tokens: int, num_drafted: int, num_accepted: int) -> None:
        """One row of one call: tokens emitted, drafts verified and accepted, all after truncation."""
        self.num_rounds += 1
        self.num_output_tokens += num_tokens
        for j in range(num_drafted):
            self.drafted[j] += 1
        for j in range(num_accepted):
            self.accepted[j] += 1
        if num_drafted:
            self._window_drafted += 1
            self._window_accepted += num_accepted > 0
            if self._window_drafted >= DEAD_DRAFT_ROUNDS:
                self._judge_window()

    def _judge_window(self) -> None:
        rate = self._window_accepted / self._window_drafted
        dead = rate < DEAD_DRAFT_BELOW
        if dead and not self.draft_is_dead:
            _log.warning(
                "draft is dead: %.1f %% of the first drafts accepted over %d rounds (expected above %.0f %%). "
                "Output is right but slower than without speculation; run 'glm-mtp verify', or send speculative=False.",
                100 * rate,
                self._window_drafted,
                100 * DEAD_DRAFT_BELOW,
            )
        self.draft_is_dead = dead
        self._window_drafted = self._window_accepted = 0


@dataclass(frozen=True)
class Gauges:
    """State of this moment."""

    num_waiting: int
    num_running: int
    num_pages: int
    num_pages_held: int
    num_pages_idle: int


def prometheus_registry(statistics: EngineStatistics, gauges: Callable[[], Gauges]) -> Any:
    """A `prometheus_client.CollectorRegistry` that reads the engine's numbers whenever it is scraped."""
    try:
        from prometheus_client import CollectorRegistry
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
        from prometheus_client.registry import Collector
    except ImportError as error:
        raise MissingDependencyError(
            f"metrics need prometheus-client ({error}). Install it: pip install 'glm-mtp-export[serve]'."
        ) from error

    class EngineCollector(Collector):
        def collect(self) -> Iterator[Any]:
            for name, text, value in _counters(statistics):
                yield CounterMetricFamily(f"glm_mtp_{name}", text, value=value)
            for name, text, values in (
                ("drafted_tokens", "drafts verified, by position", statistics.drafted),
                ("accepted_tokens", "drafts accepted, by position", statistics.accepted),
            ):
                family = CounterMetricFamily(f"glm_mtp_{name}", text, labels=["position"])
                for position, count in enumerate(values):
                    family.add_metric([str(position)], count)
                yield family
            finished = CounterMetricFamily("glm_mtp_finished_sequences", "sequences ended", labels=["reason"])
            for reason, count in statistics.num_finished.items():
                finished.add_metric([reason], count)
            yield finished
            for name, text, histogram in (
                ("step_time_seconds", "time of one step", statistics.step_time),
                ("time_to_first_token_seconds", "from arrival to the first token", statistics.time_to_first_token),
                ("time_per_output_token_seconds", "mean over a sequence", statistics.time_per_output_token),
            ):
                shape = HistogramMetricFamily(f"glm_mtp_{name}", text)
                shape.add_metric([], histogram.cumulative, histogram.total)
                yield shape
            now = gauges()
            for name, text, value in (
                ("waiting_sequences", "sequences not admitted yet", now.num_waiting),
                ("running_sequences", "sequences in the batch", now.num_running),
                ("pages", "pages of the cache pools", now.num_pages),
                ("pages_held", "pages held by running sequences", now.num_pages_held),
                ("pages_idle", "pages kept for reuse only", now.num_pages_idle),
                ("draft_is_dead", "1 while hardly any first draft is accepted", int(statistics.draft_is_dead)),
            ):
                yield GaugeMetricFamily(f"glm_mtp_{name}", text, value=value)

    registry = CollectorRegistry()
    registry.register(EngineCollector())
    return registry


def _counters(statistics: EngineStatistics) -> tuple[tuple[str, str, float], ...]:
    return (
        ("calls", "calls of the step graph", statistics.num_calls),
        ("prefill_tokens", "prompt and recomputed tokens fed", statistics.num_prefill_tokens),
        ("rounds", "rows that emitted tokens", statistics.num_rounds),
        ("output_tokens", "tokens emitted", statistics.num_output_tokens),
        ("preemptions", "sequences that lost their pages", statistics.num_preemptions),
        ("cached_tokens", "prompt tokens served from shared pages", statistics.num_cached_tokens),
        ("void_rows", "rows launched ahead that counted for nothing", statistics.num_void_rows),
        ("step_seconds", "time in steps", statistics.step_seconds),
        ("model_seconds", "time the host waited for the step graph", statistics.model_seconds),
    )
