"""Random mixes of requests against the plain-loop oracle: ids, reasons and log-probabilities equal, no page lost.

Sampled text is compared too: draws are keyed by output position, so speculation, batching, chunking, sharing and
preemption must not change a single id.
"""

from __future__ import annotations

import gc
import random
from dataclasses import replace

import oracle
import pytest
from fake_model import END_THINK, THINK, hashed_errors
from harness import Bench, bench

from glm_mtp_export.runtime.sampling import SamplingParams, StructuredOutput
from glm_mtp_export.runtime.scheduler import SchedulerConfig

# Around a page (64), two pages, a chunk (48) and index_topk of the toy config (64).
_LENGTHS = (1, 2, 5, 47, 48, 49, 63, 64, 65, 96, 127, 128, 129, 200)


def _random_params(rng: random.Random, max_tokens: int, penalised: float = 1.0) -> SamplingParams:
    """`penalised`: share of requests that may draw penalties, with which a call is not launched ahead."""
    chance = rng.random
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.5, 1.0, 1.7]),
        top_p=rng.choice([1.0, 0.9, 0.4]),
        top_k=rng.choice([0, -1, 1, 7, 40]),
        min_p=rng.choice([0.0, 0.0, 0.05, 0.3]),
        presence_penalty=rng.choice([0.0, 0.0, 1.5]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.7]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        logit_bias={rng.randrange(256): rng.choice([-100.0, 4.0, -2.5]) for _ in range(rng.choice([0, 0, 3]))},
        min_tokens=rng.randint(0, max_tokens) if chance() < 0.2 else 0,
        max_tokens=max_tokens,
        stop=tuple(chr(rng.randrange(97, 123)) + rng.choice(["", "", "e"]) for _ in range(rng.choice([0, 0, 4]))),
        stop_token_ids=tuple(rng.sample(range(256), rng.choice([0, 0, 12]))),
        ignore_eos=chance() < 0.3,
        seed=rng.getrandbits(63) - 2**62,
        logprobs=rng.choice([None, 0, 2]),
        thinking_budget=rng.randint(0, 6) if chance() < 0.2 else None,
        speculative=chance() < 0.85,
    )
    if chance() < penalised:
        return params
    return replace(params, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0)


def _random_prompt(rng: random.Random, prefixes: list[list[int]]) -> list[int]:
    length = rng.choice(_LENGTHS)
    prompt = [rng.randrange(256) for _ in range(length)]
    if rng.random() < 0.5:
        prefix = rng.choice(prefixes)
        prompt = (prefix[: rng.choice([63, 64, 65, 128, 150])] + prompt)[: max(length, 70)]
    if rng.random() < 0.3:
        prompt[-1] = rng.choice([THINK, END_THINK])
    return prompt


def _run_mix(
    seed: int,
    num_requests: int,
    num_drafts: int,
    num_pages: int,
    config: SchedulerConfig,
    abort_chance: float,
    ahead: bool = False,
) -> tuple[Bench, dict[str, tuple[list[int], SamplingParams]]]:
    rng = random.Random(seed)
    b = bench(num_drafts, num_pages, hashed_errors(rng.choice([0, 20, 60, 100]), seed), config, launch_ahead=ahead)
    penalised = 0.05 if ahead else 1.0
    prefixes = [[rng.randrange(256) for _ in range(150)] for _ in range(3)]
    requests: dict[str, tuple[list[int], SamplingParams]] = {}
    while len(requests) < num_requests or b.engine.has_work:
        for _ in range(min(rng.choice([0, 0, 0, 1, 8]), num_requests - len(requests))):
            name = f"r{len(requests)}"
            requests[name] = (
                _random_prompt(rng, prefixes),
                _random_params(rng, rng.choice([1, 2, 3, 9, 25, 70]), penalised),
            )
            b.add(name, *requests[name], priority=rng.choice([0, 0, 1]), stream=rng.random() < 0.5)
        if requests and rng.random() < abort_chance:
            b.engine.abort(f"r{rng.randrange(len(requests))}")
        b.step()
        if rng.random() < 0.05:
            b.engine.audit()
    b.check_empty()
    return b, requests


def _assert_equals_oracle(b: Bench, requests: dict[str, tuple[list[int], SamplingParams]]) -> None:
    for name, (prompt, params) in requests.items():
        assert params.seed is not None and params.max_tokens is not None
        ids, reason, logprobs = oracle.generate(prompt, params, params.seed, params.max_tokens)
        done = b.completions[name, 0]
        if done.finish_reason == "abort":
            assert list(done.token_ids) == ids[: len(done.token_ids)], (name, params)
        else:
            assert (list(done.token_ids), done.finish_reason) == (ids, reason), (name, params)
        if params.logprobs is not None:
            assert done.logprobs is not None
            assert [entry.token_id for entry in done.logprobs] == list(done.token_ids)
            for entry, expected in zip(done.logprobs, logprobs, strict=False):
                # float32 against float64: one rounding of a value below 16
                assert entry.logprob == (None if expected is None else pytest.approx(expected, abs=1e-6)), (
                    name,
                    params,
                )
        text = "".join(d.text for d in b.deltas[name, 0])
        assert text == done.text, (name, params)


@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
@pytest.mark.parametrize("num_drafts", [0, 1, 2, 3, 5, 7])
def test_random_mixes_equal_the_oracle(num_drafts: int, ahead: bool) -> None:
    config = SchedulerConfig(max_batch_size=6, max_num_batched_tokens=64, max_chunk_tokens=48, max_total_context=700)
    b, requests = _run_mix(200 + num_drafts, 150, num_drafts, 7, config, abort_chance=0.06, ahead=ahead)
    _assert_equals_oracle(b, requests)
    assert b.session.num_draft_cache_errors == 0
    reasons = {c.finish_reason for c in b.completions.values()}
    assert {"stop", "length", "abort"} <= reasons, "the mix must reach every ending"
    assert b.engine.statistics.num_cached_tokens > 0 and b.engine.scheduler.num_preemptions > 0


def test_sharing_chunking_and_adaptive_drafts_do_not_show() -> None:
    variants = [
        SchedulerConfig(enable_prefix_sharing=sharing, enable_adaptive_drafts=adaptive, max_chunk_tokens=chunk)
        for sharing, adaptive, chunk in ((True, True, 7), (False, True, 64), (True, False, 2048))
    ]
    outputs = []
    for config in variants:
        b, _requests = _run_mix(7, 40, 3, 64, config, abort_chance=0.0)
        outputs.append({key: (c.token_ids, c.text, c.finish_reason) for key, c in b.completions.items()})
    assert outputs[0] == outputs[1] == outputs[2]


_GRAMMARS = (
    StructuredOutput(choice=("yes", "no", "perhaps")),
    StructuredOutput(regex=r"[ab]{2,12}(c|dd)"),
    StructuredOutput(
        json_schema='{"type": "array", "items": {"type": "boolean"}, "maxItems": 4}', any_whitespace=False
    ),
)


@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
def test_random_mixes_with_grammars_equal_decoding_one_by_one(ahead: bool) -> None:
    rng = random.Random(11)
    requests = {}
    for i in range(60):
        structure = rng.choice((None, *_GRAMMARS))
        params = _random_params(rng, rng.choice([3, 20, 60]), 0.05 if ahead else 1.0)
        if structure is not None:
            params = replace(params, structured_output=structure, ignore_eos=False, stop=())
        requests[f"r{i}"] = [rng.randrange(256) for _ in range(rng.choice(_LENGTHS))], params
    plain = bench(0, 64, config=SchedulerConfig(1, 512, 512, enable_prefix_sharing=False))
    for name, request in requests.items():
        plain.add(name, *request)
        plain.run()
    mixed = bench(5, 8, hashed_errors(30, 2), SchedulerConfig(6, 64, 48), launch_ahead=ahead)
    for name, request in requests.items():
        mixed.add(name, *request)
    mixed.run()
    mixed.check_empty()
    for name in requests:
        expected, found = plain.completions[name, 0], mixed.completions[name, 0]
        assert (found.token_ids, found.text, found.finish_reason) == (
            expected.token_ids,
            expected.text,
            expected.finish_reason,
        ), requests[name]


def _soak(num_requests: int, ahead: bool = False) -> None:
    config = SchedulerConfig(max_batch_size=8, max_num_batched_tokens=96, max_chunk_tokens=64)
    rng = random.Random(5)
    b = bench(3, 12, hashed_errors(30, 5), config, poison=False, launch_ahead=ahead)
    prefix = [rng.randrange(256) for _ in range(100)]
    started, sizes = 0, []
    while started < num_requests or b.engine.has_work:
        while started < num_requests and b.engine.num_requests < 12:
            prompt = prefix[: rng.choice([0, 64, 70])] + [rng.randrange(256) for _ in range(rng.randint(1, 60))]
            params = SamplingParams(temperature=0.0, max_tokens=rng.randint(1, 40), stop=("zz", "q"))
            b.add(f"r{started}", prompt, params, stream=False)
            started += 1
            if started % (num_requests // 4) == 0:
                gc.collect()
                b.completions.clear()
                b.deltas.clear()
                b.session.calls.clear()
                sizes.append(len(gc.get_objects()))
        if rng.random() < 0.03:
            b.engine.abort(f"r{rng.randrange(started)}")
        b.step()
    b.check_empty()
    assert sum(b.engine.statistics.num_finished.values()) == num_requests
    # Live at every quarter: at most 12 requests. One object kept for each request gone by would show from here on.
    assert max(sizes[1:]) - min(sizes[1:]) < num_requests // 4, sizes


@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
def test_soak_of_500_requests_through_12_pages(ahead: bool) -> None:
    _soak(500, ahead)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
def test_soak_of_10000_requests_through_12_pages(ahead: bool) -> None:
    _soak(10_000, ahead)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_many_random_mixes_equal_the_oracle(seed: int) -> None:
    config = SchedulerConfig(max_batch_size=8, max_num_batched_tokens=80, max_chunk_tokens=48)
    b, requests = _run_mix(1000 + seed, 100, seed % 8, 20, config, abort_chance=0.06, ahead=seed % 2 == 1)
    _assert_equals_oracle(b, requests)
    assert b.session.num_draft_cache_errors == 0
