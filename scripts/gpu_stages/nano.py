"""The embedded model on the card, in three weight formats, against the portable dialect on the CPU.

    nano.py oracle WORK          answers of the portable artifact, the margin of every token, rows of its caches
    nano.py build WORK DTYPE     export and build an engine; needs no card
    nano.py engine WORK DTYPE    build if need be, run on the card, compare; prints a JSON line at the end

Compared: greedy ids of held-out exams and where they part first, the margin of the oracle's two likeliest tokens there,
task accuracy, the four caches layer by layer, acceptance over a thousand tokens, and the time of a decode call.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from nano.chats import TASKS  # noqa: E402
from nano.evaluate import exams  # noqa: E402

from glm_mtp_export.artifact import Manifest  # noqa: E402
from glm_mtp_export.config import SpeculationConfig  # noqa: E402
from glm_mtp_export.demo import nano_checkpoint  # noqa: E402
from glm_mtp_export.engine.profile import load_profile  # noqa: E402
from glm_mtp_export.engine_manifest import EngineManifest  # noqa: E402
from glm_mtp_export.export import ExportOptions, export_checkpoint  # noqa: E402
from glm_mtp_export.runtime import Runtime, SamplingParams  # noqa: E402
from glm_mtp_export.runtime.session import StepInputs  # noqa: E402
from gpu_stages.artifacts import at_home, built  # noqa: E402
from gpu_stages.caches import feed_tokens, layer_errors, reference_rows  # noqa: E402

NUM_DRAFTS = 3
EXAMS_PER_TASK, EXAM_SEED, MAX_TOKENS = 6, 20_000, 160
LONG_TOKENS = 1000
CACHE_TOKENS, CACHE_PAGES = 200, [7, 3, 11, 5]
CACHE_DTYPES = {"bfloat16": "bfloat16", "float8_e4m3fn": "float8_e4m3fn", "float4_e2m1fnx2": "float8_e4m3fn"}
TIMED_BATCHES, TIMED_CONTEXT, TIMED_CALLS = (1, 4, 16), 512, 60


def questions() -> list[Any]:
    """The exams of every run, in a fixed order."""
    return [exam for task in TASKS for exam in exams(task, EXAMS_PER_TASK, 512, EXAM_SEED)]


def answers(runtime: Runtime, logprobs: int | None) -> list[Any]:
    """Greedy answers to all exams in one batch."""
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, logprobs=logprobs)
    return [r.completions[0] for r in runtime.generate([exam.prompt for exam in questions()], params)]


def think_end(manifest: Manifest) -> int:
    """Id of the token that closes the thinking phase."""
    return manifest.thinking_token_ids["think_end"]


def right(outputs: list[list[int]], end: int) -> float:
    """Percent of exams whose ids after the thinking phase are the wanted ones."""

    def tail(ids: list[int]) -> list[int]:
        return ids[len(ids) - ids[::-1].index(end) :] if end in ids else ids

    pairs = zip(questions(), outputs, strict=True)
    return 100 * statistics.mean(tail(output) == tail(exam.answer) for exam, output in pairs)


def tokens_per_call(runtime: Runtime) -> list[int]:
    """Tokens that each call of one long answer committed."""
    params = SamplingParams(temperature=0.0, max_tokens=LONG_TOKENS, ignore_eos=True)
    return [len(d.token_ids) for d in runtime.stream(questions()[0].prompt, params) if d.token_ids]


def cache_tokens() -> list[int]:
    """The ids that fill the caches for comparison."""
    exam = max(questions(), key=lambda e: len(e.prompt))
    return (exam.prompt + exam.answer)[:CACHE_TOKENS]


def oracle(work: Path) -> None:
    """Write reference.npz, then oracle.json: cache rows, ids and margins of the portable artifact."""
    speculation = SpeculationConfig(num_speculative_tokens=NUM_DRAFTS, num_logprobs=2)
    artifact = work / "portable"
    manifest = export_checkpoint(nano_checkpoint(), artifact, ExportOptions(speculation=speculation))
    with Runtime.load(artifact, profile=load_profile("nano-cpu")) as runtime:
        feed_tokens(runtime.session, cache_tokens(), CACHE_PAGES)
        rows = reference_rows(runtime.session, len(cache_tokens()) - 1, CACHE_PAGES)
        np.savez(work / "reference.npz", **rows)
        found = answers(runtime, 2)
        long_calls = tokens_per_call(runtime)
    margins = [[p.top[0][1] - p.top[1][1] if len(p.top) > 1 else None for p in c.logprobs] for c in found]
    outputs = [list(c.token_ids) for c in found]
    report = {"ids": outputs, "margins": margins, "right": right(outputs, think_end(manifest)), "long": long_calls}
    (work / "oracle.json").write_text(json.dumps(report), encoding="utf-8")


def first_differences(expected: dict[str, Any], outputs: list[list[int]]) -> list[dict[str, Any]]:
    """For each exam that parts from the oracle: where, and how close the oracle's two likeliest tokens were there."""
    found = []
    for index, (wanted, got) in enumerate(zip(expected["ids"], outputs, strict=True)):
        if wanted != got:
            place = next(
                (i for i, (a, b) in enumerate(zip(wanted, got, strict=False)) if a != b), min(len(wanted), len(got))
            )
            margins = expected["margins"][index]
            found.append({"exam": index, "position": place, "margin": margins[place] if place < len(margins) else None})
    return found


def cache_errors(work: Path, session: Any) -> dict[str, list[float]]:
    """The four caches against the portable session's after the same calls."""
    feed_tokens(session, cache_tokens(), CACHE_PAGES)
    with np.load(work / "reference.npz") as reference:
        return layer_errors(reference, session, len(cache_tokens()) - 1, CACHE_PAGES)


def decode_rows(session: Any, dtype: str) -> list[dict[str, Any]]:
    """Median time of a decode call with every draft, host and copies included."""
    slots, columns = NUM_DRAFTS + 1, -(-(TIMED_CONTEXT + 2 * NUM_DRAFTS + 2) // 64)
    rows = []
    for batch in TIMED_BATCHES:
        generator = np.random.default_rng(batch)
        pages = generator.permutation(session.num_pages)[: batch * columns].reshape(batch, columns)
        inputs = StepInputs(
            token_ids=generator.integers(0, 256, batch * slots).astype(np.int32),
            row_offsets=np.arange(batch + 1, dtype=np.int32) * slots,
            num_drafts=np.full(batch, NUM_DRAFTS, dtype=np.int32),
            draft_tokens=generator.integers(0, 256, (batch, NUM_DRAFTS)).astype(np.int32),
            cache_lengths=np.full(batch, TIMED_CONTEXT, dtype=np.int32),
            block_table=pages.astype(np.int32),
            next_prompt_token=np.full(batch, -1, dtype=np.int32),
            temperature=np.zeros(batch, dtype=np.float32),
            top_k=np.zeros(batch, dtype=np.int32),
            top_p=np.ones(batch, dtype=np.float32),
            min_p=np.zeros(batch, dtype=np.float32),
            seed=np.zeros(batch, dtype=np.int64),
            sample_offset=np.zeros(batch, dtype=np.int32),
            in_thinking_phase=np.zeros(batch, dtype=np.bool_),
        )
        times, first = [], None
        for _ in range(TIMED_CALLS + 5):
            begin = time.perf_counter()
            outputs = session.run(inputs)
            times.append(1e3 * (time.perf_counter() - begin))
            first = first if first is not None else outputs
            if not np.array_equal(first.next_draft_tokens, outputs.next_draft_tokens):
                raise SystemExit(f"{dtype}, batch {batch}: equal calls gave different drafts")
        timed = sorted(times[5:])
        rows.append(
            {
                "model": "glm52-nano",
                "batch": batch,
                "step_ms": round(statistics.median(timed), 4),
                "step_ms_p90": round(timed[int(0.9 * len(timed))], 4),
                "dtype": dtype,
                "context": TIMED_CONTEXT,
                "num_speculative_tokens": NUM_DRAFTS,
            }
        )
    return rows


def build(work: Path, dtype: str) -> EngineManifest:
    """Export and build the engine of one weight format, unless it is there."""
    speculation = SpeculationConfig(num_speculative_tokens=NUM_DRAFTS)
    return built(work / dtype, dtype, CACHE_DTYPES[dtype], speculation)


def engine(work: Path, dtype: str) -> dict[str, Any]:
    """Everything about one weight format."""
    made = build(work, dtype)
    artifact, profile = work / dtype, made.profile
    manifest = at_home(artifact)
    begin = time.perf_counter()
    expected = wait_for_oracle(work)
    with Runtime.load(artifact, backend=profile.backend, profile=profile) as runtime:
        load_seconds = time.perf_counter() - begin
        errors = cache_errors(work, runtime.session)
        rows = decode_rows(runtime.session, dtype)
        begin = time.perf_counter()
        found = answers(runtime, None)
        seconds = time.perf_counter() - begin
        long_calls = tokens_per_call(runtime)
        num_graphs = runtime.session.num_graphs  # type: ignore[attr-defined]
    outputs = [list(c.token_ids) for c in found]
    third = len(long_calls) // 3
    return {
        "dtype": dtype,
        "cache_dtype": CACHE_DTYPES[dtype],
        "plugin_layers": made.num_plugin_layers,
        "toolchain": dict(made.toolchain),
        "load_seconds": round(load_seconds, 2),
        "exams": len(outputs),
        "differences": first_differences(expected, outputs),
        "right_percent": right(outputs, think_end(manifest)),
        "oracle_right_percent": expected["right"],
        "tokens_per_second": round(sum(map(len, outputs)) / seconds, 1),
        "cache_errors": errors,
        "long_tokens": sum(long_calls),
        "long_tokens_per_call": [statistics.mean(part) for part in (long_calls[:third], long_calls[-third:])],
        "oracle_long_tokens_per_call": statistics.mean(expected["long"]),
        "cuda_graphs": num_graphs,
        "rows": rows,
    }


def wait_for_oracle(work: Path) -> dict[str, Any]:
    """The oracle runs beside the plugin build; here it should be done."""
    for _ in range(600):
        if (work / "oracle.json").is_file():
            time.sleep(0.2)
            return dict(json.loads((work / "oracle.json").read_text(encoding="utf-8")))
        time.sleep(0.5)
    raise SystemExit("the oracle did not finish in 300 s; see oracle.log")


def main() -> None:
    """Run one of the programs of the module docstring."""
    command, work = sys.argv[1], Path(sys.argv[2])
    if command == "oracle":
        oracle(work)
    elif command == "build":
        build(work, sys.argv[3])
    else:
        print(json.dumps(engine(work, sys.argv[3])))


if __name__ == "__main__":
    main()
