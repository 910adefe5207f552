"""The engine over the toy model: what ends an answer, what each request may ask, what must not show in the text."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace

import oracle
import pytest
from fake_model import END_THINK, EOS, THINK, TOOL_CALL, VOCAB, fake_manifest, hashed_errors
from harness import TOKENIZER, Bench, bench

from glm_mtp_export.errors import RequestError
from glm_mtp_export.runtime.histories import dense_rows
from glm_mtp_export.runtime.sampling import SamplingParams
from glm_mtp_export.runtime.scheduler import SchedulerConfig
from glm_mtp_export.runtime.session import StepInputs, StepOutputs

_PROMPT = [11, 22, 33, 44, 55]
_GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


def _always(position: int, step: int) -> bool:
    return True


def _one(params: SamplingParams, prompt: list[int] = _PROMPT, **options: object) -> Bench:
    b = bench(**options)  # type: ignore[arg-type]
    b.add("r", prompt, params)
    b.run()
    b.check_empty()
    return b


# ---- where an answer ends


@pytest.mark.parametrize("lead", range(4))
@pytest.mark.parametrize("errors", ["perfect", "some", "dead"])
def test_output_ends_at_the_first_stop_id_wherever_it_lands_in_a_block(lead: int, errors: str) -> None:
    prompt = _PROMPT + [7] * lead
    ids, _reason, _logprobs = oracle.generate(prompt, _GREEDY, 0, 20)
    fifth = next(i for i in range(4, 20) if ids[i] not in ids[:i])
    pattern = {"perfect": hashed_errors(0, 0), "some": hashed_errors(40, 1), "dead": _always}[errors]
    b = _one(replace(_GREEDY, stop_token_ids=(ids[fifth],)), prompt, draft_errors=pattern)
    done = b.completions["r", 0]
    assert list(done.token_ids) == ids[: fifth + 1]
    assert (done.finish_reason, done.stop_reason) == ("stop", ids[fifth])
    assert done.text == TOKENIZER.decode(ids[:fifth]), "the stop id is part of the ids, not of the text"
    assert b.engine.statistics.num_output_tokens == fifth + 1


def test_a_drafted_stop_id_that_is_rejected_ends_nothing() -> None:
    ids, _reason, _logprobs = oracle.generate(_PROMPT, _GREEDY, 0, 20)
    # Corrupted drafts are the right id plus one: declare such a wrong proposal a stop id.
    stop = next(t + 1 for t in ids[2:] if (t + 1) % 256 not in ids and t < 255)
    b = _one(replace(_GREEDY, stop_token_ids=(stop,)), draft_errors=_always)
    assert b.ids("r") == ids and b.completions["r", 0].finish_reason == "length"


def test_statistics_count_what_was_emitted() -> None:
    """Drafts [a, b, stop, d], all matching: three emitted, three accepted."""
    ids, _reason, _logprobs = oracle.generate(_PROMPT, _GREEDY, 0, 8)
    assert len(set(ids[:4])) == 4
    b = _one(replace(_GREEDY, stop_token_ids=(ids[3],)), num_drafts=4)
    statistics = b.completions["r", 0].statistics
    assert b.ids("r") == ids[:4]
    assert (statistics.num_calls, statistics.num_drafted, statistics.num_accepted) == (2, 3, 3)
    assert b.engine.statistics.accepted == [1, 1, 1, 0] and b.engine.statistics.drafted == [1, 1, 1, 0]
    assert b.engine.statistics.tokens_per_call == 2.0


@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
@pytest.mark.parametrize("chunk", [1, 2, 5, 512])
def test_prefill_counts_every_prompt_token_once_and_what_is_computed_again(chunk: int, ahead: bool) -> None:
    config = SchedulerConfig(max_chunk_tokens=chunk, enable_prefix_sharing=False)
    b = bench(3, 64, hashed_errors(30, 1), config, launch_ahead=ahead)
    for length in (1, 2, 3, 64, 65):
        b.add(f"r{length}", range(length), replace(_GREEDY, max_tokens=9))
    b.run()
    assert b.engine.statistics.num_prefill_tokens == 1 + 2 + 3 + 64 + 65
    forced = bench(3, launch_ahead=ahead)
    forced.add("r", [5, THINK], replace(_GREEDY, max_tokens=9, thinking_budget=1))
    forced.run()
    assert forced.engine.statistics.num_prefill_tokens == 2 + 1  # the position before </think> is fed again


@pytest.mark.parametrize("max_tokens", range(10))
def test_max_tokens_is_exact(max_tokens: int) -> None:
    ids, _reason, _logprobs = oracle.generate(_PROMPT, _GREEDY, 0, 20)
    b = _one(replace(_GREEDY, max_tokens=max_tokens))
    assert b.ids("r") == ids[:max_tokens]
    assert b.completions["r", 0].finish_reason == "length"
    assert b.engine.statistics.num_output_tokens == max_tokens
    if max_tokens == 0:
        assert not b.session.calls, "an empty answer needs no call"


def test_rejected_drafts_cost_no_tokens() -> None:
    assert len(_one(replace(_GREEDY, max_tokens=9), draft_errors=_always).ids("r")) == 9


@pytest.mark.parametrize("num_drafts", [0, 1, 3, 7])
def test_stop_strings_across_tokens_and_blocks(num_drafts: int) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=60, ignore_eos=True)
    whole = _one(params, num_drafts=0).completions["r", 0]
    # Three bytes in a row of printable text somewhere inside: a stop string over several tokens.
    ids = list(whole.token_ids)
    at = next(i for i in range(8, 50) if all(32 < t < 127 for t in ids[i : i + 2]))
    stop = bytes(ids[at : at + 2]).decode()
    done = _one(replace(params, stop=(stop,)), num_drafts=num_drafts).completions["r", 0]
    assert list(done.token_ids) == ids[: at + 2] and done.stop_reason == stop and done.finish_reason == "stop"
    assert done.text == TOKENIZER.decode(ids[:at])
    kept = _one(replace(params, stop=(stop,), include_stop_str_in_output=True), num_drafts=num_drafts)
    assert kept.completions["r", 0].text == TOKENIZER.decode(ids[: at + 2])


def test_min_tokens_masks_the_stop_ids_exactly_so_long() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30, min_tokens=10, logit_bias={EOS: 100.0})
    for num_drafts in (0, 3, 7):
        ids = _one(params, num_drafts=num_drafts).ids("r")
        assert len(ids) == 11 and EOS not in ids[:10] and ids[10] == EOS


def test_frequency_penalty_counts_every_token_of_a_block() -> None:
    # A bias that would repeat one of three ids for ever: the penalty makes them take turns.
    params = replace(_GREEDY, max_tokens=40, frequency_penalty=0.5, logit_bias={65: 30.0, 66: 30.0, 67: 30.0})
    plain = _one(params, num_drafts=0).ids("r")
    assert plain == _one(params, num_drafts=3).ids("r") == oracle.generate(_PROMPT, params, 0, 40)[0]
    assert set(plain) == {65, 66, 67} and max(map(plain.count, set(plain))) < 34


@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize("num_drafts", [0, 3, 7])
def test_thinking_budget_closes_at_the_exact_token(budget: int, num_drafts: int) -> None:
    params = replace(_GREEDY, thinking_budget=budget, logprobs=0)
    b = _one(params, [*_PROMPT, THINK], num_drafts=num_drafts)
    ids, _reason, logprobs = oracle.generate([*_PROMPT, THINK], params, 0, 20)
    assert ids[budget] == END_THINK and ids.count(END_THINK) == 1
    assert b.ids("r") == ids
    found = b.completions["r", 0].logprobs
    assert found is not None and [e.logprob is None for e in found] == [p is None for p in logprobs]
    assert b.session.num_draft_cache_errors == 0, "the draft entry before the forced token must be made again"


def test_thinking_phase_follows_the_last_marker() -> None:
    for tail, closes in (([THINK], True), ([THINK, 5, END_THINK], False), ([THINK, TOOL_CALL], False), ([5], False)):
        ids = _one(replace(_GREEDY, thinking_budget=3), [*_PROMPT, *tail]).ids("r")
        assert (ids[3] == END_THINK) == closes


def test_thinking_flag_of_each_call_follows_the_committed_ids() -> None:
    b = bench(num_drafts=0)
    seen = []
    b.session.before_run = lambda inputs: seen.append(bool(inputs.in_thinking_phase[0]))
    b.add("r", [*_PROMPT, THINK], replace(_GREEDY, thinking_budget=2, max_tokens=6))
    b.run()
    # The call that commits the budget's last token still thinks; the token itself is put there by the host.
    assert seen == [True, True, True, False, False, False]


def test_constant_inputs_are_the_same_arrays_while_nobody_uses_them() -> None:
    b = bench()
    seen = []

    def note(inputs: StepInputs) -> None:
        assert inputs.history_ids is not None and inputs.bias_ids is not None
        assert not inputs.history_ids.size and not inputs.bias_ids.size
        seen.append([inputs.token_bitmask, *dense_rows(inputs, VOCAB).values()])

    b.session.before_run = note
    b.add("r", _PROMPT, _GREEDY)
    b.run()
    for arrays in seen[1:]:
        assert all(a is first for a, first in zip(arrays, seen[0], strict=True))
    assert not any(array.flags.writeable for array in seen[0])


# ---- what must not show


def test_greedy_rows_beside_sampled_rows_equal_their_solo_runs() -> None:
    rows = [replace(_GREEDY, temperature=t, seed=7) for t in (0.0, 1.0, 0.0, 1.0)]
    b = bench()
    for i, params in enumerate(rows):
        b.add(f"r{i}", [*_PROMPT, i], params)
    b.run()
    for i, params in enumerate(rows):
        solo = bench()
        solo.add("solo", [*_PROMPT, i], params)
        solo.run()
        assert b.ids(f"r{i}") == solo.ids("solo")


def test_seeds() -> None:
    params = replace(_GREEDY, temperature=1.0, seed=7)
    assert _one(params).ids("r") == _one(params).ids("r") != _one(replace(params, seed=8)).ids("r")
    assert _one(replace(params, seed=None)).ids("r") != _one(replace(params, seed=None)).ids("r")


def test_n_sequences_use_consecutive_seeds_and_share_the_prompt() -> None:
    prompt = [i % 251 for i in range(150)]
    params = replace(_GREEDY, temperature=1.0, n=3, seed=2**63 - 2)
    b = _one(params, prompt)
    for index, seed in enumerate((2**63 - 2, 2**63 - 1, -(2**63))):
        assert b.ids("r", index) == oracle.generate(prompt, params, seed, 20)[0]
    assert [b.completions["r", i].statistics.num_cached_tokens for i in range(3)] == [0, 128, 128]


def test_prefill_and_decode_share_a_call_and_nobody_loses_drafts() -> None:
    b = bench(config=SchedulerConfig(max_num_batched_tokens=64, max_chunk_tokens=32))
    b.add("decoding", _PROMPT, replace(_GREEDY, max_tokens=60))
    b.step()
    b.add("prefilling", range(100), _GREEDY)
    b.step()
    b.step()
    assert b.session.calls[1] == ((4, 3), (32, 0)) and b.session.calls[2] == ((4, 3), (32, 0))
    b.run()


def test_a_decode_row_feeds_one_token_and_its_drafts() -> None:
    b = _one(_GREEDY, draft_errors=hashed_errors(50, 2))
    assert all(rows - drafts == 1 for ((rows, drafts),) in b.session.calls[1:])


@pytest.mark.parametrize("chunk", [1, 5, 8, 23, 64])
def test_first_drafts_do_not_depend_on_the_chunk_size(chunk: int) -> None:
    prompt = [3 * i % 256 for i in range(23)]
    b = bench(config=SchedulerConfig(max_chunk_tokens=chunk))
    b.add("r", prompt, _GREEDY)
    while not b.deltas:
        b.step()
    drafts = b.engine.scheduler.running[0].drafts
    ids, _reason, _logprobs = oracle.generate(prompt, _GREEDY, 0, 4)
    assert drafts == ids[1:4] and b.session.num_draft_cache_errors == 0


def test_a_warm_prefix_gives_the_drafts_of_a_cold_run() -> None:
    shared = [5 * i % 256 for i in range(128)]
    b = bench()
    b.add("first", [*shared, 1], _GREEDY)
    b.run()
    for name, tail, cached in (("same next token", [1, 2], 128), ("other next token", [9, 2], 64)):
        b.add(name, [*shared, *tail], _GREEDY)
        b.run()
        done = b.completions[name, 0]
        assert done.statistics.num_cached_tokens == cached, "the page's last draft entry embeds the token after it"
        assert list(done.token_ids) == oracle.generate([*shared, *tail], _GREEDY, 0, 20)[0]
        assert done.statistics.num_accepted == done.statistics.num_drafted
    assert b.session.num_draft_cache_errors == 0


def test_output_pages_serve_the_next_turn() -> None:
    b = bench()
    b.add("turn 1", _PROMPT, replace(_GREEDY, max_tokens=100))
    b.run()
    following = [*_PROMPT, *b.ids("turn 1"), 1, 2, 3]
    b.add("turn 2", following, _GREEDY)
    b.run()
    assert b.completions["turn 2", 0].statistics.num_cached_tokens == 64
    assert b.ids("turn 2") == oracle.generate(following, _GREEDY, 0, 20)[0]
    assert b.session.num_draft_cache_errors == 0


def test_a_reused_slot_starts_without_the_drafts_of_its_former_owner() -> None:
    b = bench(num_pages=4)
    b.add("a", _PROMPT, replace(_GREEDY, max_tokens=100))
    for _ in range(5):
        b.step()
    b.engine.abort("a")
    b.add("b", [9, 8, 7], _GREEDY)
    b.step()
    assert b.session.calls[-1] == ((3, 0),)
    b.run()
    assert b.completions["a", 0].finish_reason == "abort"
    assert b.ids("b") == oracle.generate([9, 8, 7], _GREEDY, 0, 20)[0]
    b.check_empty()


def test_lengths_do_not_drift_over_300_rejections() -> None:
    b = bench(draft_errors=_always)
    b.add("r", _PROMPT, replace(_GREEDY, max_tokens=300))
    while b.engine.has_work:
        b.step()
        for sequence in b.engine.scheduler.running:
            assert sequence.cache_length == len(sequence.token_ids) - 1
    assert b.session.num_draft_cache_errors == 0


def test_acceptance_does_not_decay_over_a_long_answer() -> None:
    """One draft in five is wrong everywhere alike; a draft cache that drifts would be wrong more often each round."""
    config = SchedulerConfig(enable_adaptive_drafts=False)
    b = bench(draft_errors=hashed_errors(20, 3), config=config)
    b.add("r", _PROMPT, replace(_GREEDY, max_tokens=1000))
    lengths = []
    while b.engine.has_work:
        b.step()
        lengths += [sequence.num_output for sequence in b.engine.scheduler.running]
    assert b.session.num_draft_cache_errors == 0
    gains = [(start, end - start) for start, end in itertools.pairwise(lengths)]
    early = [gain for start, gain in gains if start < 200]
    late = [gain for start, gain in gains if start >= 800]
    assert min(len(early), len(late)) > 50
    # Of 3 drafts at 0.8 each, 1 + 0.8 + 0.64 + 0.512 tokens a round; of 68 rounds, within three deviations of their mean (0.15).
    for part in (early, late):
        assert sum(part) / len(part) == pytest.approx(2.952, abs=0.45)


def test_rounds_without_drafts_still_fill_the_draft_caches() -> None:
    b = bench()
    b.add("r", _PROMPT, replace(_GREEDY, max_tokens=60))
    for num_drafts in (0, 3, 0, 0, 3, 3):
        if num_drafts == 0 and b.engine.scheduler.running:
            b.engine.scheduler.running[0].drafts = []
        b.step()
    assert [drafts for ((_rows, drafts),) in b.session.calls] == [0, 3, 0, 0, 3, 3]
    assert b.session.num_draft_cache_errors == 0
    assert b.engine.statistics.accepted == b.engine.statistics.drafted == [3, 3, 3]


def test_every_batch_size_after_any_other() -> None:
    b = bench()
    for size in (4, 3, 2, 1, 0, 3):
        for i in range(size):
            b.add(f"{size}.{i}", [*_PROMPT, i], _GREEDY)
        b.run()
        b.check_empty()
        for i in range(size):
            assert b.ids(f"{size}.{i}") == oracle.generate([*_PROMPT, i], _GREEDY, 0, 20)[0]
    assert b.engine.step() == []


def test_speculative_false_verifies_no_draft_beside_others_that_do() -> None:
    b = bench()
    b.add("off", _PROMPT, replace(_GREEDY, speculative=False))
    b.add("on", [1, 2], _GREEDY)
    sizes = []
    while b.engine.has_work:
        sizes += [len(d.token_ids) for d in b.step() if d.request_id == "off"]
    assert sizes == [1] * 20
    assert b.completions["on", 0].statistics.num_accepted > 0


def test_adaptive_drafts_verify_fewer_when_few_are_accepted() -> None:
    def drafted(adaptive: bool) -> int:
        b = _one(
            replace(_GREEDY, max_tokens=200),
            draft_errors=hashed_errors(95, 1),
            config=SchedulerConfig(enable_adaptive_drafts=adaptive),
            num_drafts=7,
        )
        return b.engine.statistics.drafted[6]

    assert drafted(True) < drafted(False) / 3


# ---- refusals and failures


def test_context_limit_is_refused_before_prefill() -> None:
    b = bench(manifest=fake_manifest(3, max_position_embeddings=64))
    with pytest.raises(RequestError, match=r"64 tokens, the context limit is 64 .*max_position_embeddings 64"):
        b.add("long prompt", range(64), SamplingParams(max_tokens=1))
    with pytest.raises(RequestError, match=r"Prompt 61 \+ max_tokens 4 = 65 tokens.*Lower max_tokens to 3"):
        b.add("too many", range(61), SamplingParams(max_tokens=4))
    with pytest.raises(RequestError, match=r"Prompt 61 \+ min_tokens 4 = 65 tokens.*Lower min_tokens to 3"):
        b.add("too many at least", range(61), SamplingParams(min_tokens=4))
    with pytest.raises(RequestError, match=r"65 tokens, the context limit is 64 .*a prompt of at most 64 tokens"):
        b.add("no answer wanted", range(65), SamplingParams(max_tokens=0))
    b.add("no answer", range(64), SamplingParams(max_tokens=0))
    b.add("fits", range(60), replace(_GREEDY, max_tokens=4))
    b.add("open end", range(60), replace(_GREEDY, max_tokens=None))
    b.run()
    assert len(b.ids("fits")) == 4 and len(b.ids("open end")) == 4
    assert bench(num_pages=3).engine.context_limit.reason == "the page pool of 3 pages of 64 positions"


def test_the_longest_possible_request_fits_the_pool() -> None:
    b = bench(num_pages=3, num_drafts=7)
    room = b.engine.context_limit.length - len(_PROMPT)
    assert b.engine.context_limit.length == 3 * 64 - 6 + 1
    b.add("r", _PROMPT, replace(_GREEDY, max_tokens=room))
    b.run()
    assert len(b.ids("r")) == room


@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
def test_nan_ends_its_request_alone_and_its_pages_are_not_shared(caplog: pytest.LogCaptureFixture, ahead: bool) -> None:
    b = bench(nan_tokens=frozenset([200]), config=SchedulerConfig(max_chunk_tokens=70), launch_ahead=ahead)
    bad = [i % 100 for i in range(100)] + [200] + [i % 100 for i in range(100)]
    b.add("good", _PROMPT, replace(_GREEDY, logit_bias={200: -100.0}))
    b.add("bad", bad, _GREEDY)
    with caplog.at_level(logging.ERROR):
        b.run()
    done = b.completions["bad", 0]
    assert (done.finish_reason, done.token_ids) == ("error", ()) and "NaN" in (done.error or "")
    assert "bad" in caplog.text
    assert b.completions["good", 0].finish_reason == "length"
    b.check_empty()
    b.session.nan_tokens = frozenset()
    b.add("again", bad, _GREEDY)
    b.run()
    assert b.completions["again", 0].statistics.num_cached_tokens == 0


@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
@pytest.mark.parametrize(("token", "num_accepted"), [(288, 0), (-7, 0), (5, 4), (5, -1)])
def test_results_out_of_range_end_their_request_alone(token: int, num_accepted: int, ahead: bool) -> None:
    b = bench(launch_ahead=ahead)
    b.add("good", [1, 2], _GREEDY)
    b.add("bad", _PROMPT, _GREEDY)
    b.step()
    honest = b.session.run

    def run(inputs: StepInputs) -> StepOutputs:
        outputs = honest(inputs)
        if inputs.num_requests == 2:
            outputs.next_tokens[1], outputs.num_accepted[1] = token, num_accepted
        return outputs

    b.session.run = run  # type: ignore[method-assign]
    b.run()
    done = b.completions["bad", 0]
    assert done.finish_reason == "error" and f"token id {token} and {num_accepted} of 3 drafts" in (done.error or "")
    assert b.ids("good") == oracle.generate([1, 2], _GREEDY, 0, 20)[0]
    b.check_empty()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "empty"), ([1, 999], "token id 999 is outside the vocabulary of 288"), ([-1], "token id -1")],
)
def test_unusable_prompts_are_refused(prompt: list[int], message: str) -> None:
    b = bench()
    with pytest.raises(RequestError, match=message):
        b.add("r", prompt, _GREEDY)
    b.check_empty()


def test_request_ids_are_unique_while_they_run() -> None:
    b = bench()
    b.add("r", _PROMPT, _GREEDY)
    with pytest.raises(RequestError, match="'r' is in use"):
        b.add("r", _PROMPT, _GREEDY)
    b.run()
    b.add("r", _PROMPT, _GREEDY)
    b.run()


def test_abort_of_all_sequences_in_every_state() -> None:
    b = bench(num_pages=4, config=SchedulerConfig(max_batch_size=1, max_num_batched_tokens=8))
    b.add("group", range(40), replace(_GREEDY, n=3))
    b.add("waiting", _PROMPT, _GREEDY)
    b.step()
    b.engine.abort("waiting")
    b.engine.abort("group")
    b.engine.abort("unknown")
    b.run()
    assert {c.finish_reason for c in b.completions.values()} == {"abort"} and len(b.completions) == 4
    b.check_empty()


def test_dead_draft_is_reported_once_and_the_text_is_right(caplog: pytest.LogCaptureFixture) -> None:
    params = replace(_GREEDY, max_tokens=500)
    with caplog.at_level(logging.WARNING):
        b = _one(params, draft_errors=_always)
    assert b.engine.statistics.draft_is_dead and caplog.text.count("draft is dead") == 1
    assert b.ids("r") == oracle.generate(_PROMPT, params, 0, 500)[0]
    assert not _one(params).engine.statistics.draft_is_dead


def test_logprobs_equal_decoding_without_drafts() -> None:
    params = replace(_GREEDY, temperature=1.0, seed=1, logprobs=3)
    for prompt in (_PROMPT, [1]):
        plain, fast = (_one(params, prompt, num_drafts=k).completions["r", 0].logprobs for k in (0, 3))
        assert plain == fast and plain is not None and len(plain) == 20
        assert all(len(entry.top) == 3 and entry.top[0][1] >= entry.top[1][1] for entry in plain)
