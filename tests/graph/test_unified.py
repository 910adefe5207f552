"""The whole step: drafts against a float64 oracle, acceptance of every length, caches after it, chunks, batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from graph_oracle import DraftOracle
from graph_reference import TINY, StepDriver, graph_weights, transformers_model

import glm_mtp_export.graph.attention as attention_module
import glm_mtp_export.graph.unified as unified_module
from glm_mtp_export.artifact import PAGE_SIZE
from glm_mtp_export.config import SpeculationConfig

VALID = 310


def tokens(count: int, seed: int = 3) -> list[int]:
    return torch.randint(0, VALID, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def cached(driver: StepDriver, family: str, request: int, length: int) -> torch.Tensor:
    """Valid rows of all layers of a cache family: [layers, length, width]."""
    pools = torch.cat([pool for name, pool in driver.pools.items() if name.partition(".")[0] == family])
    return pools[:, driver.table[request].long()].flatten(1, 2)[:, :length]


def plain_ids(weights, prompt: list[int], count: int) -> list[int]:
    """Greedy ids of the target alone."""
    return StepDriver(TINY, SpeculationConfig(0), weights).generate(0, prompt, count)


def hidden_states(monkeypatch) -> list[torch.Tensor]:
    states: list[torch.Tensor] = []
    original = unified_module.target_hidden

    def recorded(*args):
        states.append(original(*args))
        return states[-1]

    monkeypatch.setattr(unified_module, "target_hidden", recorded)
    return states


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("length", [5, 30, 70])
def test_drafts_equal_a_float64_implementation(tiny_weights, monkeypatch, length, share):
    config = replace(TINY, index_share_for_mtp_iteration=share)
    states, prompt = hidden_states(monkeypatch), tokens(length)
    driver = StepDriver(config, SpeculationConfig(5), tiny_weights)
    out = driver.call({1: prompt}, {})
    following = int(out["next_tokens"][0])
    oracle = DraftOracle(config, {k: v.numpy() for k, v in tiny_weights.items()}, VALID)
    hidden = states[0].numpy()
    oracle.extend([*prompt[1:], following], hidden, 0)
    assert out["next_draft_tokens"][0].tolist() == oracle.drafts(following, hidden[-1], length - 1, 5)


def test_carrying_the_raw_state_would_change_the_drafts(tiny_weights, monkeypatch):
    prompt = tokens(40)
    expected = StepDriver(TINY, SpeculationConfig(4), tiny_weights).call({0: prompt}, {})["next_draft_tokens"]
    weights = dict(tiny_weights)
    weights["draft.layers.0.shared_head_norm"] = torch.ones_like(weights["draft.layers.0.shared_head_norm"])
    weights["target.lm_head"] = tiny_weights["target.lm_head"]
    other = StepDriver(TINY, SpeculationConfig(4), weights).call({0: prompt}, {})["next_draft_tokens"]
    assert not torch.equal(expected, other)


def test_embedding_half_comes_first_in_eh_proj(tiny_weights):
    weights = dict(tiny_weights)
    weights["draft.layers.0.eh_proj"] = weights["draft.layers.0.eh_proj"].clone()
    weights["draft.layers.0.eh_proj"][:, TINY.hidden_size :] = 0
    driver = StepDriver(TINY, SpeculationConfig(1), weights)
    first = driver.call({0: tokens(1)}, {})["next_draft_tokens"]
    weights["target.norm"] = torch.flip(weights["target.norm"], [0]) * -1.7
    changed = StepDriver(TINY, SpeculationConfig(1), weights)
    second = changed.call({0: tokens(1)}, {}, next_prompt_token=torch.tensor([9], dtype=torch.int32))
    third = StepDriver(
        TINY, SpeculationConfig(1), tiny_weights | {"draft.layers.0.eh_proj": weights["draft.layers.0.eh_proj"]}
    )
    again = third.call({0: tokens(1)}, {}, next_prompt_token=torch.tensor([9], dtype=torch.int32))
    assert torch.equal(second["next_draft_tokens"], again["next_draft_tokens"])
    assert first.shape == (1, 1)


@pytest.mark.parametrize("k", [1, 3, 7])
def test_greedy_ids_do_not_depend_on_the_number_of_drafts(tiny_weights, k):
    for seed in range(6):
        prompt = tokens(5 + 9 * seed, seed)
        driver = StepDriver(TINY, SpeculationConfig(k), tiny_weights)
        assert driver.generate(seed % 4, prompt, 40) == plain_ids(tiny_weights, prompt, 40)


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_every_acceptance_leaves_all_caches_as_a_fresh_prefill_would(tiny_weights, accepted):
    prompt = tokens(61)  # rows of the verify call cross a page border
    future = plain_ids(tiny_weights, prompt, 8)
    driver = StepDriver(TINY, SpeculationConfig(3), tiny_weights)
    driver.call({0: prompt}, {})
    wrong = [(t + 1) % VALID for t in future]
    drafts = [*future[1 : 1 + accepted], *wrong[1 + accepted : 4]]
    out = driver.call({0: future[:1]}, {0: drafts})
    assert int(out["num_accepted"][0]) == accepted
    assert int(out["next_tokens"][0]) == future[accepted + 1]
    text = [*prompt, *future[: accepted + 1]]
    assert int(driver.lengths[0]) == len(text)
    fresh = StepDriver(TINY, SpeculationConfig(3), tiny_weights)
    fresh_out = fresh.call({0: text}, {})
    for family in ("target_mla", "target_indexer", "draft_mla", "draft_indexer"):
        torch.testing.assert_close(
            cached(driver, family, 0, len(text)), cached(fresh, family, 0, len(text)), rtol=0, atol=1e-9
        )
    assert torch.equal(out["next_draft_tokens"], fresh_out["next_draft_tokens"])


def test_a_mixed_batch_equals_each_request_alone(tiny_weights):
    prompts = [tokens(n, n) for n in (12, 33, 70, 20)]
    futures = [plain_ids(tiny_weights, p, 8) for p in prompts]
    alone = []
    for index, (prompt, future) in enumerate(zip(prompts, futures, strict=True)):
        driver = StepDriver(TINY, SpeculationConfig(3), tiny_weights)
        driver.call({index: prompt}, {})
        right = index if index < 4 else 3
        drafts = [*future[1 : 1 + right], *[(t + 1) % VALID for t in future[1 + right : 4]]]
        alone.append((driver.call({index: future[:1]}, {index: drafts}), drafts))
    together = StepDriver(TINY, SpeculationConfig(3), tiny_weights)
    together.call(dict(enumerate(prompts)), {})
    out = together.call({i: f[:1] for i, f in enumerate(futures)}, {i: d for i, (_, d) in enumerate(alone)})
    for index, (single, _) in enumerate(alone):
        for name in ("num_accepted", "next_tokens", "next_draft_tokens"):
            assert torch.equal(out[name][index], single[name][0]), (index, name)


def test_prefill_decode_and_shorter_verification_share_a_call(tiny_weights):
    driver = StepDriver(TINY, SpeculationConfig(3), tiny_weights)
    first, second, third = tokens(20, 1), tokens(30, 2), tokens(25, 4)
    futures = {0: plain_ids(tiny_weights, first, 8), 1: plain_ids(tiny_weights, second, 8)}
    driver.call({0: first, 1: second}, {})
    out = driver.call({0: futures[0][:1], 1: futures[1][:1], 2: third}, {0: futures[0][1:4], 1: futures[1][1:2]})
    assert out["num_accepted"].tolist() == [3, 1, 0]
    assert out["next_tokens"].tolist() == [futures[0][4], futures[1][2], plain_ids(tiny_weights, third, 1)[0]]


@pytest.mark.parametrize("chunk", [1, 5, 8, 23])
def test_chunks_of_a_prompt_do_not_change_draft_caches_or_drafts(tiny_weights, chunk):
    prompt = tokens(23)
    whole, cut = (StepDriver(TINY, SpeculationConfig(3), tiny_weights) for _ in range(2))
    expected = whole.call({0: prompt}, {})
    for start in range(0, 23, chunk):
        end = min(start + chunk, 23)
        border = torch.tensor([prompt[end] if end < 23 else -1], dtype=torch.int32)
        out = cut.call({0: prompt[start:end]}, {}, next_prompt_token=border)
    assert torch.equal(out["next_draft_tokens"], expected["next_draft_tokens"])
    for family in ("draft_mla", "draft_indexer", "target_mla", "target_indexer"):
        torch.testing.assert_close(cached(cut, family, 0, 23), cached(whole, family, 0, 23), rtol=0, atol=1e-10)


@pytest.mark.parametrize("share", [True, False])
def test_the_drafts_indexer_runs_once_or_at_every_step(tiny_weights, monkeypatch, share):
    runs: list[str] = []
    original = attention_module.selected

    def counted(config, weights, normed, latent, rows, caches, family, slot):
        runs.append(family)
        return original(config, weights, normed, latent, rows, caches, family, slot)

    monkeypatch.setattr(attention_module, "selected", counted)
    config = replace(TINY, index_share_for_mtp_iteration=share)
    StepDriver(config, SpeculationConfig(3), tiny_weights).call({0: tokens(30)}, {})
    assert runs.count("target_indexer") == len(TINY.full_layers)
    assert runs.count("draft_indexer") == (1 if share else 3)


def test_the_reused_list_is_that_of_the_last_accepted_row(tiny_weights, monkeypatch):
    prompts = [tokens(40, s) for s in (1, 2, 3)]
    futures = [plain_ids(tiny_weights, p, 6) for p in prompts]
    driver = StepDriver(TINY, SpeculationConfig(3), tiny_weights)
    driver.call(dict(enumerate(prompts)), {})
    lists: list[tuple[torch.Tensor, torch.Tensor]] = []
    original = attention_module.ops.mla_attention

    def recorded(q, latent, norm, w_uk, w_uv, selection, *rest):
        lists.append(selection)
        return original(q, latent, norm, w_uk, w_uv, selection, *rest)

    monkeypatch.setattr(attention_module.ops, "mla_attention", recorded)
    drafts = {}
    for index, right in enumerate((0, 1, 3)):
        future = futures[index]
        drafts[index] = [*future[1 : 1 + right], *[(t + 1) % VALID for t in future[1 + right : 4]]]
    out = driver.call({i: f[:1] for i, f in enumerate(futures)}, drafts)
    assert out["num_accepted"].tolist() == [0, 1, 3]
    extend, *later = lists[TINY.num_hidden_layers :]
    for selection in later:
        assert torch.equal(selection, extend[[0, 4 + 1, 8 + 3]])


def test_a_nan_ends_its_own_request_only(tiny_weights):
    weights = dict(tiny_weights)
    weights["target.embed"] = weights["target.embed"].clone()
    weights["target.embed"][17] = torch.nan
    clean, broken = [t for t in tokens(30) if t != 17], [*tokens(10, 8), 17, *tokens(19, 9)]
    expected = StepDriver(TINY, SpeculationConfig(3), tiny_weights).call({0: clean}, {})
    out = StepDriver(TINY, SpeculationConfig(3), weights).call({0: clean, 1: broken}, {})
    assert int(out["next_tokens"][1]) == -1 and int(out["num_accepted"][1]) == 0
    assert int(out["next_tokens"][0]) == int(expected["next_tokens"][0])
    assert torch.equal(out["next_draft_tokens"][0], expected["next_draft_tokens"][0])
    assert ((out["next_draft_tokens"] >= 0) & (out["next_draft_tokens"] < VALID)).all()


def test_ids_beyond_the_tokenizer_are_never_produced(tiny_weights):
    weights = dict(tiny_weights)
    weights["target.lm_head"] = weights["target.lm_head"].clone()
    weights["target.lm_head"][VALID:] *= 50
    driver = StepDriver(TINY, SpeculationConfig(3), weights)
    assert max(driver.generate(0, tokens(20), 20)) < VALID
    assert int(driver.call({1: tokens(20)}, {})["next_draft_tokens"].max()) < VALID


def test_position_zero_is_embedded_like_any_other(tiny_weights):
    prompt = tokens(1)
    driver = StepDriver(TINY, SpeculationConfig(1), tiny_weights)
    base = driver.call({0: prompt}, {}, next_prompt_token=torch.tensor([5], dtype=torch.int32))
    rows = cached(driver, "draft_mla", 0, 1).clone()
    driver = StepDriver(TINY, SpeculationConfig(1), tiny_weights)
    driver.call({0: prompt}, {}, next_prompt_token=torch.tensor([6], dtype=torch.int32))
    assert base["next_draft_tokens"].shape == (1, 1)
    assert not torch.equal(rows, cached(driver, "draft_mla", 0, 1))


def test_long_contexts_cross_many_pages(tiny_weights):
    prompt = tokens(3 * PAGE_SIZE - 2)
    driver = StepDriver(TINY, SpeculationConfig(3), tiny_weights, max_context=512)
    plain = StepDriver(TINY, SpeculationConfig(0), tiny_weights, max_context=512)
    assert driver.generate(0, prompt, 20) == plain.generate(0, prompt, 20)


def test_relaxed_acceptance_shifts_the_draft_it_accepted(tiny_weights):
    """An accepted draft that is not the sample must be the token the draft layer embeds, and leave no trace of another."""
    prompt = tokens(40)
    speculation = SpeculationConfig(3, use_relaxed_acceptance_for_thinking=True, relaxed_topk=VALID, relaxed_delta=1.0)
    thinking = {"in_thinking_phase": torch.tensor([True]), "temperature": torch.tensor([1.0])}
    driver = StepDriver(TINY, speculation, tiny_weights)
    first = int(driver.call({0: prompt}, {}, **thinking)["next_tokens"][0])
    drafts = tokens(3, 77)
    out = driver.call({0: [first]}, {0: drafts}, **thinking)
    assert int(out["num_accepted"][0]) == 3
    text = [*prompt, first, *drafts]
    fresh = StepDriver(TINY, speculation, tiny_weights)
    fresh.call({0: text}, {}, **thinking)
    for family in ("draft_mla", "draft_indexer"):
        torch.testing.assert_close(
            cached(driver, family, 0, len(text) - 1), cached(fresh, family, 0, len(text) - 1), rtol=0, atol=1e-9
        )


@pytest.mark.parametrize("topk", [1, 7, 64, 2048])
def test_odd_widths_of_the_selection_work(topk):
    config = replace(TINY, index_topk=topk)
    weights = graph_weights(transformers_model(config), config)
    prompt = tokens(50)
    drafted = StepDriver(config, SpeculationConfig(2), weights).generate(0, prompt, 12)
    assert drafted == StepDriver(config, SpeculationConfig(0), weights).generate(0, prompt, 12)
