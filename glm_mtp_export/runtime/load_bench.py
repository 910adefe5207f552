"""`glm-mtp bench serve`: a Poisson stream of requests against a loaded runtime, and what the clients saw.

In: a runtime and `LoadOptions`. Out: a `LoadReport` with time to first token, time per output token, gaps between deltas,
throughput and goodput: the rate of requests that met both goals. Arrival times and prompts follow from the seed. A request that
the runtime refuses or fails counts as failed and never as fast. Times are measured where a client would: at the delta's callback.

A delta carries every token of a block, so gaps between deltas are not times per token; both are given.
"""

from __future__ import annotations

import dataclasses
import json
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glm_mtp_export.errors import GlmMtpError, OptionError
from glm_mtp_export.pictures import new_figure
from glm_mtp_export.runtime.request import Delta
from glm_mtp_export.runtime.runtime import Prompt, Runtime
from glm_mtp_export.runtime.sampling import SamplingParams

__all__ = ["LoadOptions", "LoadReport", "RequestTimes", "read_prompts", "run_load"]

_PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class LoadOptions:
    """`rate` in requests a second. Without `prompts`, random ids of `prompt_tokens` (least, most) are sent."""

    rate: float = 2.0
    num_requests: int = 50
    prompts: tuple[str, ...] = ()
    prompt_tokens: tuple[int, int] = (16, 128)
    max_tokens: int = 64
    temperature: float = 0.0
    speculative: bool = True
    first_token_goal: float = 1.0  # seconds
    per_token_goal: float = 0.1  # seconds
    seed: int = 0

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {getattr(self, name)}, expected above 0"
            for name in ("rate", "num_requests", "max_tokens", "first_token_goal", "per_token_goal")
            if not getattr(self, name) > 0
        ]
        least, most = self.prompt_tokens
        if not 1 <= least <= most:
            problems.append(f"prompt_tokens is {least}..{most}, expected 1 or more, least first")
        if problems:
            raise OptionError(f"{'; '.join(problems)}.")


@dataclass
class RequestTimes:
    """One request as its client saw it; times in seconds of one clock."""

    arrival: float
    first: float | None = None
    last: float | None = None
    num_tokens: int = 0
    gaps: list[float] = field(default_factory=list)
    failure: str | None = None

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first delta."""
        return None if self.first is None else self.first - self.arrival

    @property
    def time_per_output_token(self) -> float | None:
        """Mean seconds a token after the first."""
        if self.first is None or self.last is None or self.num_tokens < 2:
            return None
        return (self.last - self.first) / (self.num_tokens - 1)


@dataclass(frozen=True)
class LoadReport:
    """Times of every request, and what follows from them."""

    options: LoadOptions
    requests: tuple[RequestTimes, ...]
    seconds: float
    tokens_per_call: float

    @property
    def num_failed(self) -> int:
        """Requests without a proper end."""
        return sum(r.failure is not None for r in self.requests)

    @property
    def output_tokens_per_second(self) -> float:
        """Throughput of the whole run."""
        return sum(r.num_tokens for r in self.requests) / self.seconds

    @property
    def goodput(self) -> float:
        """Requests a second that met both goals."""
        return sum(map(self.met_goals, self.requests)) / self.seconds

    def met_goals(self, times: RequestTimes) -> bool:
        """First token and time per token within the goals. An answer of one token has no time per token to miss."""
        first, each = times.time_to_first_token, times.time_per_output_token
        if times.failure is not None or first is None or first > self.options.first_token_goal:
            return False
        return each is None or each <= self.options.per_token_goal

    def percentiles(self) -> dict[str, dict[str, float]]:
        """Name -> p50, p90, p99 in seconds."""
        series = {
            "time_to_first_token": [t for r in self.requests if (t := r.time_to_first_token) is not None],
            "time_per_output_token": [t for r in self.requests if (t := r.time_per_output_token) is not None],
            "inter_delta_latency": [gap for r in self.requests for gap in r.gaps],
        }
        return {
            name: {f"p{p}": _percentile(sorted(values), p) for p in _PERCENTILES}
            for name, values in series.items()
            if values
        }

    def to_json(self) -> str:
        """Everything that `text` shows, and the options."""
        return json.dumps(
            {"options": dataclasses.asdict(self.options), **self._totals(), **self.percentiles()}, indent=1
        )

    def text(self) -> str:
        """A table for people."""
        lines = [
            f"{name:27} {value:10d}" if isinstance(value, int) else f"{name:27} {value:10.3f}"
            for name, value in self._totals().items()
        ]
        lines.append(f"{'milliseconds':27} " + " ".join(f"{f'p{p}':>10}" for p in _PERCENTILES))
        for name, values in self.percentiles().items():
            lines.append(f"{name:27} " + " ".join(f"{1e3 * value:10.1f}" for value in values.values()))
        failures = [r.failure for r in self.requests if r.failure is not None]
        return "\n".join([*lines, *(f"first failure: {why}" for why in failures[:1])])

    def plot(self, path: Path) -> None:
        """Write one picture: the distributions, and time to first token over the run."""
        figure = new_figure(figsize=(12, 4), layout="constrained")
        first, each, over_time = figure.subplots(1, 3)
        options = self.options
        to_first = [t for r in self.requests if (t := r.time_to_first_token) is not None]
        per_token = [t for r in self.requests if (t := r.time_per_output_token) is not None]
        _plot_shares(first, to_first, options.first_token_goal, "time to first token, s")
        _plot_shares(each, per_token, options.per_token_goal, "time per output token, s")
        self._plot_run(over_time)
        failed = f", {self.num_failed} failed" if self.num_failed else ""
        figure.suptitle(
            f"{len(self.requests)} requests{failed}: {options.rate:g} arrive a second, "
            f"{self.goodput:.2f} a second meet both goals; "
            f"{self.output_tokens_per_second:.0f} tokens/s, {self.tokens_per_call:.2f} tokens a call"
        )
        figure.savefig(path)

    def _plot_run(self, axes: Any) -> None:
        """One mark a request: when it came and how long its first token took."""
        start = min(r.arrival for r in self.requests)
        for met, mark, label in ((True, "o", "met both goals"), (False, "x", "missed a goal")):
            chosen = [r for r in self.requests if r.time_to_first_token is not None and self.met_goals(r) == met]
            if chosen:
                axes.plot(
                    [r.arrival - start for r in chosen], [r.time_to_first_token for r in chosen], mark, label=label
                )
                axes.legend(fontsize="small")
        axes.set(title="The run", xlabel="time of arrival, s", ylabel="time to first token, s", ylim=(0, None))

    def _totals(self) -> dict[str, float]:
        return {
            "requests": len(self.requests),
            "failed": self.num_failed,
            "seconds": self.seconds,
            "requests_per_second": len(self.requests) / self.seconds,
            "output_tokens_per_second": self.output_tokens_per_second,
            "goodput_requests_per_second": self.goodput,
            "tokens_per_call": self.tokens_per_call,
        }


def read_prompts(path: Path) -> tuple[str, ...]:
    """The lines of a file that are not empty; OptionError where there are none, or where they are no UTF-8."""
    try:
        lines = tuple(filter(None, path.read_text(encoding="utf-8").splitlines()))
    except UnicodeDecodeError as error:
        raise OptionError(f"--prompts {path}: not valid UTF-8 (byte {error.start}). Save it as UTF-8.") from error
    if not lines:
        raise OptionError(f"--prompts {path}: holds no prompt. Write one a line, or leave the option out.")
    return lines


def run_load(runtime: Runtime, options: LoadOptions) -> LoadReport:
    """Send the requests at their times and wait for all of them."""
    rng = random.Random(options.seed)
    prompts = [_prompt(runtime, options, rng) for _ in range(options.num_requests)]
    before = runtime.statistics.num_output_tokens, runtime.statistics.num_rounds
    handles, times = [], []
    start = time.perf_counter()
    due = start
    for prompt in prompts:
        due += rng.expovariate(options.rate)
        time.sleep(max(due - time.perf_counter(), 0.0))
        # A client behind a slow submit has waited since its time was due.
        times.append(RequestTimes(arrival=due))
        params = SamplingParams(
            temperature=options.temperature,
            max_tokens=options.max_tokens,
            seed=len(times),
            speculative=options.speculative,
        )
        receiver = _Receiver(times[-1])
        try:
            runtime.submit(prompt, params, on_delta=receiver.take)
            handles.append(receiver)
        except GlmMtpError as error:
            times[-1].failure = str(error)
    for receiver in handles:
        receiver.ended.wait()
    seconds = time.perf_counter() - start
    rounds = runtime.statistics.num_rounds - before[1]
    tokens = runtime.statistics.num_output_tokens - before[0]
    return LoadReport(options, tuple(times), seconds, tokens / rounds if rounds else 0.0)


class _Receiver:
    """Notes when deltas come."""

    def __init__(self, times: RequestTimes) -> None:
        self._times = times
        self.ended = threading.Event()

    def take(self, delta: Delta) -> None:
        now, times = time.perf_counter(), self._times
        if delta.token_ids:
            if times.last is None:
                times.first = now
            else:
                times.gaps.append(now - times.last)
            times.last = now
            times.num_tokens += len(delta.token_ids)
        if delta.completion is not None:
            if delta.completion.finish_reason in ("error", "abort"):
                times.failure = delta.completion.error or delta.completion.finish_reason
            self.ended.set()


def _prompt(runtime: Runtime, options: LoadOptions, rng: random.Random) -> Prompt:
    if options.prompts:
        return rng.choice(options.prompts)
    # Ids of the tokenizer only: padded rows of the vocabulary mean nothing to the model.
    return [rng.randrange(runtime.manifest.tokenizer_size) for _ in range(rng.randint(*options.prompt_tokens))]


def _plot_shares(axes: Any, values: Sequence[float], goal: float, label: str) -> None:
    """The share of requests that were at most that slow, with percentiles and the goal."""
    axes.axvline(goal, linestyle="--", color="black", label=f"goal: {goal:g} s")
    if values:
        axes.ecdf(values)
        for percent, color in zip(_PERCENTILES, ("tab:green", "tab:orange", "tab:red"), strict=True):
            value = _percentile(sorted(values), percent)
            axes.plot(value, percent / 100, "o", color=color, label=f"p{percent}: {value:.3g} s")
    axes.set(title="Requests that were this fast", xlabel=label, ylabel="share of requests", xlim=(0, None))
    axes.legend(loc="lower right", fontsize="small")


def _percentile(ordered: Sequence[float], percent: int) -> float:
    """Nearest rank."""
    return ordered[max(-(-len(ordered) * percent // 100), 1) - 1]
