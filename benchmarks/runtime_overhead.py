"""Host time per step: the engine with a stubbed model that accepts drafts at random, all rows decoding.

    python benchmarks/runtime_overhead.py --batch 64 --drafts 3

Prints one row a workload: median and 95th percentile of the time a step spends outside the model, over steps with a full batch.
The bound is 1000 us at batch 64 on a two-core machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "runtime"))

from fake_model import byte_tokenizer, fake_manifest

from glm_mtp_export.artifact import Manifest
from glm_mtp_export.runtime.engine import Engine
from glm_mtp_export.runtime.request import Request
from glm_mtp_export.runtime.sampling import SamplingParams
from glm_mtp_export.runtime.scheduler import SchedulerConfig
from glm_mtp_export.runtime.session import StepInputs, StepOutputs

BOUND_US = 1000.0


class StubSession:
    """Answers at once; each draft is accepted with chance 0.7."""

    def __init__(self, manifest: Manifest, num_pages: int) -> None:
        self.manifest = manifest
        self.num_pages = num_pages
        self._rng = np.random.default_rng(0)

    def run(self, inputs: StepInputs) -> StepOutputs:
        b, k = inputs.num_requests, self.manifest.speculation.num_speculative_tokens
        passed = np.cumprod(self._rng.random((b, k)) < 0.7, axis=1).sum(axis=1)
        accepted = np.minimum(passed, inputs.num_drafts).astype(np.int32)
        tokens = self._rng.integers(97, 123, (b, k + 1), dtype=np.int32)
        return StepOutputs(accepted, tokens[:, 0].copy(), tokens[:, 1:].copy())

    def close(self) -> None:
        """Nothing is held."""


def host_times_us(batch: int, num_drafts: int, params: SamplingParams, stream: bool, num_steps: int) -> list[float]:
    """Microseconds outside the model of each step while all `batch` requests decode."""
    manifest = fake_manifest(
        num_drafts, structured=False, penalties=False, num_logprobs=-1, max_position_embeddings=1 << 20
    )
    engine = Engine(
        StubSession(manifest, num_pages=64 * batch),
        byte_tokenizer(),
        SchedulerConfig(max_batch_size=batch, max_num_batched_tokens=batch * 64),
    )
    prompt = tuple(range(32, 96))
    for i in range(batch):
        engine.add_request(Request(f"r{i}", (*prompt, i % 256), replace(params, seed=i), stream=stream))
    while engine.scheduler.num_waiting or any(s.num_uncached > 1 for s in engine.scheduler.running):
        engine.step()
    times = []
    for _ in range(num_steps):
        before = engine.statistics.host_seconds
        engine.step()
        times.append((engine.statistics.host_seconds - before) * 1e6)
    if len(engine.scheduler.running) != batch:
        raise RuntimeError("requests ended during the measurement; lower --steps")
    return times


def main() -> int:
    """Print the table; exit code 1 when a workload is over the bound."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args()
    most = 4 * options.steps * (options.drafts + 1)
    greedy = SamplingParams(temperature=0.0, max_tokens=min(most, 4000), ignore_eos=True)
    workloads = {
        "greedy, whole text at the end": (greedy, False),
        "greedy, streamed": (greedy, True),
        "stop strings, streamed": (replace(greedy, stop=("\n\nUser:", "###")), True),
        "sampled, thinking budget": (replace(greedy, temperature=0.8, top_p=0.9, thinking_budget=100), True),
    }
    over = False
    print(f"batch {options.batch} | K {options.drafts} | {options.steps} steps")
    for name, (params, stream) in workloads.items():
        times = host_times_us(options.batch, options.drafts, params, stream, options.steps)
        median, tail = statistics.median(times), statistics.quantiles(times, n=20)[-1]
        over |= median > BOUND_US
        print(f"{name:32} | median {median:7.1f} us | p95 {tail:7.1f} us | bound {BOUND_US:.0f} us")
    return int(over)


if __name__ == "__main__":
    sys.exit(main())
