"""The engine over the exported graph of the small synthetic checkpoint, NaN in every cache slot that must not be read.

Drafts are replaced by the known continuation with an error pattern, so that every number of accepted drafts occurs.
"""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from real_graph import PROFILE, Artifacts, poisoned_engine

from glm_mtp_export.artifact import PAGE_SIZE, Manifest
from glm_mtp_export.engine.onnxruntime import build
from glm_mtp_export.errors import EngineError
from glm_mtp_export.runtime.engine import Engine
from glm_mtp_export.runtime.request import Completion, Request
from glm_mtp_export.runtime.runtime import Runtime
from glm_mtp_export.runtime.sampling import SamplingParams
from glm_mtp_export.runtime.scheduler import SchedulerConfig
from glm_mtp_export.runtime.sessions.onnxruntime import OnnxRuntimeSession

_K = 3
# Around a page (64), a chunk (48) and index_topk (8).
_LENGTHS = (1, 7, 8, 9, 47, 49, 63, 64, 65, 100, 130)
_GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


Requests = dict[str, tuple[tuple[int, ...], SamplingParams]]


def _random_requests(seed: int, count: int) -> Requests:
    rng = random.Random(seed)
    prefix = [rng.randrange(5, 300) for _ in range(140)]
    requests = {}
    for i in range(count):
        length = rng.choice(_LENGTHS)
        prompt = (prefix[: rng.choice([0, 64, 65, 128])] + [rng.randrange(5, 300) for _ in range(length)])[:180]
        requests[f"r{i}"] = (
            tuple(prompt),
            SamplingParams(
                temperature=rng.choice([0.0, 0.6, 1.0]),
                top_p=rng.choice([1.0, 0.8]),
                top_k=rng.choice([0, 20]),
                min_p=rng.choice([0.0, 0.02]),
                frequency_penalty=rng.choice([0.0, 0.6]),
                repetition_penalty=rng.choice([1.0, 1.2]),
                max_tokens=rng.choice([1, 2, 5, 20]),
                seed=rng.getrandbits(62),
                stop_token_ids=tuple(rng.sample(range(300), rng.choice([0, 15]))),
                logprobs=rng.choice([None, 2]),
            ),
        )
    return requests


def _plain_results(artifacts: Artifacts, requests: Requests) -> dict[str, Completion]:
    """K = 0, one request at a time, no sharing, no chunks."""
    config = SchedulerConfig(1, 512, 512, enable_prefix_sharing=False)
    engine = Engine(artifacts.session(0), None, config)
    done = {}
    for name, (prompt, params) in requests.items():
        engine.add_request(Request(name, prompt, params))
        while engine.has_work:
            done |= {d.request_id: d.completion for d in engine.step() if d.completion is not None}
    return done


def _force_drafts(engine: Engine, truth: dict[str, tuple[int, ...]], rng: random.Random) -> None:
    for sequence in engine.scheduler.running:
        ids = truth[sequence.request.request_id]
        if sequence.drafts:
            known = list(ids[sequence.num_output : sequence.num_output + _K])
            drafts = (known + sequence.drafts)[:_K]
            if rng.random() < 0.7:
                wrong = rng.randrange(_K)
                drafts[wrong] = (drafts[wrong] + 1) % 300
            sequence.drafts = drafts


@pytest.mark.parametrize("seed", [1, 2])
def test_random_mixes_equal_plain_decoding(artifacts: Artifacts, seed: int) -> None:
    requests = _random_requests(seed, 24)
    plain = _plain_results(artifacts, requests)
    config = SchedulerConfig(
        max_batch_size=6, max_num_batched_tokens=64, max_chunk_tokens=48, enable_adaptive_drafts=False
    )
    engine, rng = poisoned_engine(artifacts.session(_K), config), random.Random(seed)
    truth = {name: c.token_ids for name, c in plain.items()}
    waiting, done = list(requests), {}
    while waiting or engine.has_work:
        for _ in range(min(rng.choice([0, 0, 1, 4]), len(waiting))):
            name = waiting.pop(0)
            engine.add_request(Request(name, *requests[name]))
        _force_drafts(engine, truth, rng)
        done |= {d.request_id: d.completion for d in engine.step() if d.completion is not None}
    engine.audit()
    assert engine.allocator.num_free == engine.allocator.num_pages
    for name, expected in plain.items():
        found = done[name]
        assert (found.token_ids, found.finish_reason) == (expected.token_ids, expected.finish_reason), requests[name]
        if expected.logprobs is not None:
            assert found.logprobs is not None
            for a, b in zip(found.logprobs, expected.logprobs, strict=True):
                # Sums of up to 64 products in float32, in another order: 64 roundings of 6e-8 on values below 8.
                assert a.logprob == pytest.approx(b.logprob, abs=64 * 6e-8 * 8)
    accepted = engine.statistics.accepted
    assert min(accepted) > 5 and accepted[0] < engine.statistics.drafted[0], "every count of accepted drafts occurs"
    assert engine.statistics.num_cached_tokens > 0 and engine.statistics.num_preemptions >= 0


def _cached_rows(session: OnnxRuntimeSession, pages: list[int], length: int) -> dict[str, np.ndarray]:
    """Valid entries of every pool by name, [length, width]."""
    rows = np.array([pages[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in range(length)])
    result = {}
    for cache in session.manifest.caches:
        content = session.read_cache(cache.name)
        result[cache.name] = content.reshape(-1, content.shape[-1])[rows].copy()
    return result


def _run_to(
    engine: Engine, prompt: tuple[int, ...], length: int, accept: int | None, truth: tuple[int, ...]
) -> list[int]:
    """Decode until `length` positions are cached, accepting `accept` drafts each round; gives back the pages."""
    engine.add_request(Request("r", prompt, replace(_GREEDY, max_tokens=60)))
    while True:
        engine.step()
        (sequence,) = engine.scheduler.running
        if sequence.cache_length >= length:
            return sequence.pages
        if accept is not None and sequence.drafts:
            known = list(truth[sequence.num_output : sequence.num_output + _K])
            sequence.drafts = known[:accept] + [(t + 1) % 300 for t in known[accept:]]


@pytest.mark.parametrize("accept", range(_K + 1))
def test_all_caches_equal_a_fresh_prefill_after_every_acceptance_count(artifacts: Artifacts, accept: int) -> None:
    prompt = tuple(range(20, 70))
    plain = _plain_results(artifacts, {"r": (prompt, replace(_GREEDY, max_tokens=60))})["r"].token_ids
    session = artifacts.session(_K)
    config = SchedulerConfig(1, 64, enable_adaptive_drafts=False)
    pages = _run_to(Engine(session, None, config), prompt, 90, accept, plain)
    found = _cached_rows(session, pages, 90)
    fresh = artifacts.session(_K)
    # One token more than is compared: the last draft entry embeds it.
    fresh_pages = _run_to(Engine(fresh, None, SchedulerConfig(1, 256)), prompt + plain[:41], 91, None, plain)
    expected = _cached_rows(fresh, fresh_pages, 90)
    for name in expected:
        # Six layers of float32 sums in another order; entries are of order 1.
        np.testing.assert_allclose(found[name], expected[name], atol=3e-5, rtol=0, err_msg=name)


@pytest.mark.parametrize("chunk", [1, 5, 8])
def test_caches_after_prefill_do_not_depend_on_the_chunk_size(artifacts: Artifacts, chunk: int) -> None:
    prompt = tuple(range(30, 53))
    rows, drafts = [], []
    for size in (23, chunk):
        session = artifacts.session(_K)
        engine = Engine(session, None, SchedulerConfig(1, 64, max_chunk_tokens=size))
        pages = _run_to(engine, prompt, 23, None, ())
        rows.append(_cached_rows(session, pages, 23))
        drafts.append(engine.scheduler.running[0].drafts)
    assert drafts[0] == drafts[1]
    for name in rows[0]:
        np.testing.assert_allclose(rows[1][name], rows[0][name], atol=3e-5, rtol=0, err_msg=name)


def test_warm_prefix_drafts_equal_a_cold_run(artifacts: Artifacts) -> None:
    prefix, tail = tuple(range(10, 138)), (7, 8, 9)
    drafts = []
    for warm in (False, True):
        engine = Engine(artifacts.session(_K), None, SchedulerConfig(4, 256))
        if warm:
            engine.add_request(Request("before", (*prefix, 99), _GREEDY))
            while engine.has_work:
                engine.step()
        engine.add_request(Request("r", (*prefix, *tail), _GREEDY))
        engine.step()
        (sequence,) = engine.scheduler.running
        drafts.append((sequence.drafts, sequence.output_ids))
        assert sequence.num_cached_tokens == (64 if warm else 0)
    assert drafts[0] == drafts[1]


def test_load_uses_the_profile_of_the_engine_built_and_refuses_one_of_another_graph(
    artifacts: Artifacts, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(artifacts.artifact(_K), tmp_path / "artifact"))
    with Runtime.load(path) as runtime:
        assert runtime.engine.config.max_batch_size == 16, "the default profile"
    build(path, PROFILE)
    with Runtime.load(path) as runtime:
        assert (runtime.session.num_pages, runtime.engine.config.max_batch_size) == (PROFILE.num_pages, 8)
        result = runtime.generate([10, 11, 12], _GREEDY)[0]
        assert result.token_ids == _plain_results(artifacts, {"r": ((10, 11, 12), _GREEDY)})["r"].token_ids
    with Runtime.load(path, profile=replace(PROFILE, max_total_context=600)) as runtime:
        assert runtime.engine.scheduler.config.max_total_context == 600
    record = path / "engine" / "onnxruntime" / "engine.json"
    digest = Manifest.load(path).files["step.onnx"].sha256
    record.write_text(record.read_text().replace(digest, "0" * 64))
    with pytest.raises(EngineError, match=r"built from another step\.onnx.*--profile test"):
        Runtime.load(path)


def test_nan_in_a_weight_row_ends_only_the_request_that_uses_it(artifacts: Artifacts, tmp_path: Path) -> None:
    from real_graph import artifact_with_nan_token

    session = artifact_with_nan_token(artifacts, tmp_path, num_drafts=_K, token=77)
    engine = Engine(session, None, SchedulerConfig(4, 64))
    good, bad = tuple(range(10, 30)), (*range(10, 20), 77, *range(20, 30))
    for name, prompt in (("good", good), ("bad", bad)):
        engine.add_request(Request(name, prompt, _GREEDY))
    done = {}
    while engine.has_work:
        done |= {d.request_id: d.completion for d in engine.step() if d.completion is not None}
    assert done["bad"].finish_reason == "error" and "NaN" in (done["bad"].error or "")
    assert done["good"].finish_reason == "length"
    assert done["good"].token_ids == _plain_results(artifacts, {"r": (good, _GREEDY)})["r"].token_ids
