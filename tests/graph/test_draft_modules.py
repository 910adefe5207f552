"""Several MTP modules: step j runs module j mod m, each with its own caches and list, against a float64 oracle a module."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from graph_oracle import DraftOracle
from graph_reference import TINY, StepDriver, graph_weights, transformers_model

import glm_mtp_export.graph.unified as unified_module
from glm_mtp_export.config import SpeculationConfig
from glm_mtp_export.errors import ConfigError
from glm_mtp_export.graph.unified import UnifiedStep

THREE, VALID = replace(TINY, num_nextn_predict_layers=3), 310


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    """TINY's trunk with three MTP modules that differ, the last with an embedding and a head of its own."""
    found = graph_weights(transformers_model(THREE), THREE)
    generator = torch.Generator().manual_seed(9)
    for name in ("embed", "lm_head"):
        found[f"draft.layers.2.{name}"] = torch.randn(320, 64, generator=generator, dtype=torch.float64)
    return found


def tokens(count: int, seed: int = 3) -> list[int]:
    return torch.randint(0, VALID, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def expected_drafts(
    weights: dict[str, torch.Tensor], shifted: list[int], hidden: np.ndarray, num_modules: int, count: int
) -> list[int]:
    """The rule in loops: every module over all rows, fed by the one before; then step j with module j mod m."""
    arrays = {name: value.numpy() for name, value in weights.items()}
    modules = [DraftOracle(THREE, arrays, VALID, m) for m in range(num_modules)]
    for m, module in enumerate(modules):
        module.shared = module.shared | {n: module.w[n] for n in ("embed", "lm_head") if n in module.w}
        assert (m == 2) == ("embed" in module.w)
    last = len(shifted) - 1
    states, lists, carried = list(hidden), [], np.empty(0)
    for module in modules:
        inputs = [module.joined(token, h) for token, h in zip(shifted, states, strict=True)]
        module.extend(shifted, np.array(states), 0)
        normed = [x / np.sqrt((x * x).mean() + THREE.rms_norm_eps) * module.w["input_norm"] for x in inputs]
        chosen = [module.selection(row, position) for position, row in enumerate(normed)]
        states = [module.layer(x, p, s) for p, (x, s) in enumerate(zip(inputs, chosen, strict=True))]
        lists.append(chosen[last])
        if not carried.size:
            carried = states[last]
    proposals = [modules[0].argmax(carried)]
    while len(proposals) < count:
        step = len(proposals)
        m = step % num_modules
        carried = modules[m].layer(modules[m].joined(proposals[-1], carried), last + step, lists[m])
        proposals.append(modules[m].argmax(carried))
    return proposals


@pytest.mark.parametrize("k", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("length", [5, 30])
def test_step_j_runs_module_j_mod_m(weights, monkeypatch, length, k):
    states: list[torch.Tensor] = []
    original = unified_module.target_hidden
    monkeypatch.setattr(unified_module, "target_hidden", lambda *args: states.append(original(*args)) or states[-1])
    prompt = tokens(length)
    out = StepDriver(THREE, SpeculationConfig(k), weights).call({1: prompt}, {})
    shifted = [*prompt[1:], int(out["next_tokens"][0])]
    expected = expected_drafts(weights, shifted, states[0].numpy(), min(k, 3), k)
    assert out["next_draft_tokens"][0].tolist() == expected


def test_zeroing_module_1_changes_the_second_draft_and_not_the_first(weights):
    prompt, changed = tokens(30), dict(weights)
    changed["draft.layers.1.eh_proj"] = torch.zeros_like(weights["draft.layers.1.eh_proj"])
    before, after = (StepDriver(THREE, SpeculationConfig(2), w).call({0: prompt}, {}) for w in (weights, changed))
    drafts, other = before["next_draft_tokens"][0], after["next_draft_tokens"][0]
    assert drafts[0] == other[0] and drafts[1] != other[1]
    for name, pool in before.items():
        if name.endswith("_out"):
            assert torch.equal(pool.nan_to_num(), after[name].nan_to_num()) == (
                ".1_out" not in name or "target" in name
            )


@pytest.mark.parametrize("accepted", [0, 2, 5])
def test_caches_of_all_modules_after_acceptance_are_those_of_a_prefill(weights, accepted):
    prompt, speculation = tokens(61), SpeculationConfig(5)
    future = StepDriver(THREE, SpeculationConfig(0), weights).generate(0, prompt, 8)
    driver, fresh = (StepDriver(THREE, speculation, weights) for _ in range(2))
    driver.call({0: prompt}, {})
    drafts = [*future[1 : 1 + accepted], *((t + 1) % VALID for t in future[1 + accepted : 6])]
    out = driver.call({0: future[:1]}, {0: drafts})
    assert int(out["num_accepted"][0]) == accepted
    text = [*prompt, *future[: accepted + 1]]
    again = fresh.call({0: text}, {})
    assert torch.equal(out["next_draft_tokens"], again["next_draft_tokens"])
    for name in driver.pools:
        rows, others = (d.pools[name][:, d.table[0].long()].flatten(1, 2)[:, : len(text)] for d in (driver, fresh))
        torch.testing.assert_close(rows, others, rtol=0, atol=1e-9)


@pytest.mark.parametrize("chunk", [1, 7])
def test_chunks_of_a_prompt_do_not_change_the_drafts_of_any_module(weights, chunk):
    prompt = tokens(23)
    expected = StepDriver(THREE, SpeculationConfig(7), weights).call({0: prompt}, {})["next_draft_tokens"]
    cut = StepDriver(THREE, SpeculationConfig(7), weights)
    for start in range(0, 23, chunk):
        end = min(start + chunk, 23)
        border = torch.tensor([prompt[end] if end < 23 else -1], dtype=torch.int32)
        out = cut.call({0: prompt[start:end]}, {}, next_prompt_token=border)
    assert torch.equal(out["next_draft_tokens"], expected)


@pytest.mark.parametrize("k", [1, 4, 7])
def test_greedy_ids_are_those_without_drafts(weights, k):
    for seed in range(3):
        prompt = tokens(7 + 20 * seed, seed)
        plain = StepDriver(THREE, SpeculationConfig(0), weights).generate(0, prompt, 30)
        assert StepDriver(THREE, SpeculationConfig(k), weights).generate(0, prompt, 30) == plain


def test_modules_that_select_at_every_step_are_refused():
    config = replace(THREE, index_share_for_mtp_iteration=False)
    with pytest.raises(
        ConfigError, match=r"positions that only other modules have written.*--num-speculative-tokens 1"
    ):
        UnifiedStep(config, SpeculationConfig(2), VALID)
    assert UnifiedStep(config, SpeculationConfig(1), VALID)
