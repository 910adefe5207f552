"""The embedded model on the card with calls launched ahead, against the same calls one after the other.

    ahead.py build WORK      export with everything compiled in and build an engine; needs no card
    ahead.py engine WORK     build if need be, run on the card, compare; prints a JSON line at the end

Compared, exactly: every result of chains of calls in which requests come and go, go on from unread results, and get their grammar
masks late, penalties and biases; and whole answers of the runtime, half of them after a grammar, a quarter with penalties. Timed: a
decode call run and waited for, launched ahead, and launched ahead with a mask that comes late or with penalties; and the answers.
"""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests" / "runtime" / "sessions")]

from decode_chain import EVERYTHING, DecodeChain  # noqa: E402

from glm_mtp_export.artifact import Manifest  # noqa: E402
from glm_mtp_export.engine_manifest import EngineManifest  # noqa: E402
from glm_mtp_export.runtime import Runtime, SamplingParams  # noqa: E402
from glm_mtp_export.runtime.ahead import HostAheadSession  # noqa: E402
from glm_mtp_export.runtime.histories import bias_fields, history_fields  # noqa: E402
from glm_mtp_export.runtime.masks import constant  # noqa: E402
from glm_mtp_export.runtime.sampling import StructuredOutput  # noqa: E402
from glm_mtp_export.runtime.session import StepInputs, StepOutputs  # noqa: E402
from glm_mtp_export.runtime.sessions.tensorrt import TensorRtSession  # noqa: E402
from gpu_stages.artifacts import at_home, built  # noqa: E402

ARTIFACT = "ahead"
NUM_CHAINS = 40
PATTERN, NUM_ANSWERS, ANSWER_TOKENS = "[a-z]{3,9}( [a-z]{3,9}){11}", 32, 96
BATCHES, CONTEXT, NUM_CALLS = (1, 4, 16), 512, 100


def build(work: Path) -> EngineManifest:
    """Export and build the engine, unless it is there."""
    return built(work / ARTIFACT, "bfloat16", "bfloat16", EVERYTHING)


def difference(found: StepOutputs, expected: StepOutputs) -> str:
    """The first result that is not equal bit by bit; "" if all are."""
    for name in StepOutputs.__dataclass_fields__:
        one, other = getattr(found, name), getattr(expected, name)
        if other is not None and not np.array_equal(one, other, equal_nan=one.dtype == np.float32):
            return f"{name} is {one.tolist()}, one after the other {other.tolist()}"
    return ""


def chains(session: TensorRtSession, manifest: Manifest) -> dict[str, Any]:
    """Chains on one session, ahead and in order. Markers are ids that the model says: its own, else phases hardly change."""
    vocabulary, markers = manifest.config.vocab_size, manifest.thinking_token_ids
    ids = (markers["think"], markers["think_end"])
    problems, num_tokens, num_accepted = [], 0, 0
    for seed in range(NUM_CHAINS):
        expected = DecodeChain(HostAheadSession(session), seed, ids, vocabulary).run()
        found = DecodeChain(session, seed, ids, vocabulary).run()
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            if words := difference(one, other):
                problems.append(f"chain {seed}, call {place}: {words}")
                break
        num_tokens += sum(int(o.num_accepted.sum()) + len(o.num_accepted) for o in expected)
        num_accepted += sum(int(o.num_accepted.sum()) for o in expected)
    return {"chains": NUM_CHAINS, "tokens": num_tokens, "accepted": num_accepted, "problems": problems}


def decode_inputs(manifest: Manifest, batch: int, num_pages: int) -> StepInputs:
    """A decode call with every draft, nothing asked for."""
    speculation, vocabulary = manifest.speculation, manifest.config.vocab_size
    slots, columns = speculation.num_slots, -(-(CONTEXT + 4 * speculation.num_slots) // 64)
    generator = np.random.default_rng(batch)
    pages = generator.permutation(num_pages)[: batch * columns].reshape(batch, columns)
    one, zeros = np.ones(batch, np.float32), np.zeros(batch, np.int32)
    return StepInputs(
        token_ids=generator.integers(0, 256, batch * slots).astype(np.int32),
        row_offsets=np.arange(batch + 1, dtype=np.int32) * slots, num_drafts=zeros + speculation.num_speculative_tokens,
        draft_tokens=generator.integers(0, 256, (batch, slots - 1)).astype(np.int32), cache_lengths=zeros + CONTEXT,
        block_table=pages.astype(np.int32), next_prompt_token=zeros - 1, temperature=0 * one, top_k=zeros, top_p=one,
        min_p=0 * one, seed=zeros.astype(np.int64), sample_offset=zeros, in_thinking_phase=zeros.astype(np.bool_),
        relaxed_delta=np.zeros(1, np.float32), token_bitmask=constant((batch, slots, -(-vocabulary // 32)), -1),
        presence_penalty=0 * one, frequency_penalty=0 * one, repetition_penalty=one,
    )  # fmt: skip


def penalised(inputs: StepInputs) -> StepInputs:
    """The same with penalties for every request, over a history of as many tokens as its context."""
    batch, generator = inputs.num_requests, np.random.default_rng(1)
    ids = [generator.integers(0, 256, CONTEXT + 1).astype(np.int32) for _ in range(batch)]
    penalty = np.full(batch, 0.1, np.float32)
    return dataclasses.replace(
        inputs, presence_penalty=penalty, frequency_penalty=penalty, repetition_penalty=1 + penalty,
        **history_fields(ids, [CONTEXT // 2] * batch), **bias_fields([{5: 1.0}] * batch),
    )  # fmt: skip


def run_ms(session: TensorRtSession, inputs: StepInputs) -> float:
    """Milliseconds of a call that is waited for."""
    begin = time.perf_counter()
    session.run(inputs)
    return 1e3 * (time.perf_counter() - begin)


def ahead_ms(session: TensorRtSession, inputs: StepInputs, is_late: bool) -> list[float]:
    """Milliseconds between the results of calls of which each goes on from the one before."""
    follows = np.arange(inputs.num_requests, dtype=np.int32)
    mask = np.array(inputs.token_bitmask)
    given = dataclasses.replace(inputs, token_bitmask=None) if is_late else inputs
    session.launch(inputs)
    times, last = [], time.perf_counter()
    for _ in range(NUM_CALLS):
        session.launch(given, follows)
        session.collect()
        if is_late:
            session.supply_bitmask(mask)
        now = time.perf_counter()
        times.append(1e3 * (now - last))
        last = now
    session.collect()
    return times


def times(session: TensorRtSession, manifest: Manifest) -> list[dict[str, Any]]:
    """Medians by batch."""
    rows = []
    for batch in BATCHES:
        inputs = decode_inputs(manifest, batch, session.num_pages)
        alone = [run_ms(session, inputs) for _ in range(NUM_CALLS)]
        found = {"run": alone, "ahead": ahead_ms(session, inputs, False), "late_mask": ahead_ms(session, inputs, True)}
        found["penalties"] = ahead_ms(session, penalised(inputs), False)
        medians = {f"{name}_ms": round(statistics.median(values[5:]), 4) for name, values in found.items()}
        rows.append({"batch": batch, "context": CONTEXT, **medians})
    return rows


def answers(artifact: Path, backend: str, launch_ahead: bool) -> tuple[list[Any], float]:
    """Ids and text of sampled answers in one batch, every second one after the grammar, every fourth with penalties, and the
    seconds they took."""
    params = [
        SamplingParams(
            temperature=0.7, seed=i, max_tokens=ANSWER_TOKENS, ignore_eos=i % 2 == 0,
            **({"frequency_penalty": 0.4, "repetition_penalty": 1.1, "logit_bias": {101: 2.0}} if i % 4 == 0 else {}),
            structured_output=StructuredOutput(regex=PATTERN) if i % 2 else None,
        )
        for i in range(NUM_ANSWERS)
    ]  # fmt: skip
    prompts = [[40 + i, *range(60, 90 + i)] for i in range(NUM_ANSWERS)]
    with Runtime.load(artifact, backend, launch_ahead=launch_ahead) as runtime:
        runtime.generate(prompts, params)  # captures what will be replayed, fills the prefix cache
        begin = time.perf_counter()
        found = [r.completions[0] for r in runtime.generate(prompts, params)]
        return [(c.token_ids, c.text, c.finish_reason) for c in found], time.perf_counter() - begin


def compared_answers(artifact: Path, backend: str) -> dict[str, Any]:
    """Ahead and not; a text that its grammar does not allow is a problem too, unless it was cut off."""
    (found, ahead), (expected, in_order) = (answers(artifact, backend, launch) for launch in (True, False))
    problems = [
        f"answer {i}: {a}, in order {b}" for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b
    ]
    for i, (_, text, reason) in enumerate(found):
        if i % 2 and reason == "stop" and not re.fullmatch(PATTERN, text):
            problems.append(f"answer {i} breaks its grammar: {text!r}")
    tokens = sum(len(ids) for ids, _, _ in found)
    rates = {"ahead": round(tokens / ahead), "in_order": round(tokens / in_order)}
    return {"answers": len(found), "answer_tokens": tokens, "tokens_per_second": rates, "answer_problems": problems}


def engine(work: Path) -> dict[str, Any]:
    """Everything."""
    made = build(work)
    artifact, profile = work / ARTIFACT, made.profile
    manifest = at_home(artifact)
    session = TensorRtSession.load(artifact, manifest, profile)
    try:
        found = {**chains(session, manifest), "rows": times(session, manifest)}
        # The card must let go of a call whose mask never comes.
        session.launch(dataclasses.replace(decode_inputs(manifest, 4, session.num_pages), token_bitmask=None))
    finally:
        begin = time.perf_counter()
        session.close()
    found["close_seconds"] = round(time.perf_counter() - begin, 3)
    found |= compared_answers(artifact, profile.backend)
    found["problems"] += found.pop("answer_problems")
    return {**found, "toolchain": dict(made.toolchain)}


def main() -> None:
    """Run one of the programs of the module docstring."""
    command, work = sys.argv[1], Path(sys.argv[2])
    work.mkdir(parents=True, exist_ok=True)
    if command == "build":
        print(build(work).to_json())
        return
    found = engine(work)
    print(json.dumps(found))
    sys.exit(1 if found["problems"] else 0)


if __name__ == "__main__":
    main()
