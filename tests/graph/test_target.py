"""The target against transformers' own GlmMoeDsaForCausalLM: hidden states, logits and selections, in float64 and float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from graph_reference import TINY, StepDriver, graph_weights, transformers_model

import glm_mtp_export.graph.attention as attention_module
import glm_mtp_export.graph.unified as unified_module
from glm_mtp_export.config import SpeculationConfig

# transformers keeps softmax, norms and index scores in float32 even in a float64 model: 2^-24 relative, six layers deep.
FLOAT64_TOLERANCE = 1e-5


class Spy:
    """Records the target's hidden states and the selection lists of a call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hidden: list[torch.Tensor] = []
        self.selections: list[torch.Tensor] = []
        target, chosen = unified_module.target_hidden, attention_module.selected

        def hidden(*args):
            self.hidden.append(target(*args))
            return self.hidden[-1]

        def selected(*args):
            self.selections.append(chosen(*args))
            return self.selections[-1]

        monkeypatch.setattr(unified_module, "target_hidden", hidden)
        monkeypatch.setattr(attention_module, "selected", selected)


def tokens(count: int, seed: int = 3) -> list[int]:
    return torch.randint(0, 310, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def reference_states(model, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model.model(torch.tensor([ids])).last_hidden_state[0]


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 63, 64, 65, 130])
def test_prefill_equals_transformers_below_at_and_far_above_index_topk(tiny_model, tiny_weights, monkeypatch, length):
    spy, ids = Spy(monkeypatch), tokens(length)
    StepDriver(TINY, SpeculationConfig(3), tiny_weights).call({0: ids}, {})
    torch.testing.assert_close(
        spy.hidden[0], reference_states(tiny_model, ids), rtol=FLOAT64_TOLERANCE, atol=FLOAT64_TOLERANCE
    )


@pytest.mark.parametrize("past", [0, 5, 8, 40, 62])
def test_rows_of_a_verify_call_equal_a_prefill_of_the_whole_text(tiny_model, tiny_weights, monkeypatch, past):
    spy, ids = Spy(monkeypatch), tokens(past + 6)
    driver = StepDriver(TINY, SpeculationConfig(3), tiny_weights)
    if past:
        driver.call({2: ids[:past]}, {})
    driver.call({2: ids[past : past + 3]}, {2: ids[past + 3 :]})
    expected = reference_states(tiny_model, ids)[past:]
    torch.testing.assert_close(spy.hidden[-1], expected, rtol=FLOAT64_TOLERANCE, atol=FLOAT64_TOLERANCE)


def test_selected_sets_equal_transformers(tiny_model, tiny_weights, monkeypatch):
    spy, ids = Spy(monkeypatch), tokens(60)
    captured: list[torch.Tensor] = []
    for layer in tiny_model.model.layers:
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.register_forward_hook(lambda module, args, out: captured.append(out))
    StepDriver(TINY, SpeculationConfig(0), tiny_weights).call({0: ids}, {})
    reference_states(tiny_model, ids)
    assert len(captured) == len(spy.selections) == len(TINY.full_layers)
    for found, expected in zip(spy.selections, captured, strict=True):
        expected = expected[0] if isinstance(expected, tuple) else expected
        for row, (a, b) in enumerate(zip(found.tolist(), expected[0].tolist(), strict=True)):
            assert {p for p in a if p >= 0} == {p for p in b if p <= row}


def test_shared_layers_use_the_list_of_the_last_full_layer(tiny_weights, monkeypatch):
    lists: list[torch.Tensor] = []
    original = attention_module.ops.mla_attention

    def recorded(q, latent, norm, w_uk, w_uv, selection, *rest):
        lists.append(selection)
        return original(q, latent, norm, w_uk, w_uv, selection, *rest)

    monkeypatch.setattr(attention_module.ops, "mla_attention", recorded)
    StepDriver(TINY, SpeculationConfig(0), tiny_weights).call({0: tokens(40)}, {})
    assert all(torch.equal(lists[2], lists[layer]) for layer in (3, 4, 5))
    assert not torch.equal(lists[1], lists[2])


def test_float32_states_are_within_a_few_roundings_of_transformers(monkeypatch):
    model = transformers_model(TINY, dtype=torch.float32)
    spy, ids = Spy(monkeypatch), tokens(100)
    StepDriver(TINY, SpeculationConfig(0), graph_weights(model, TINY)).call({0: ids}, {})
    expected = reference_states(model, ids)
    relative = (spy.hidden[0] - expected).norm() / expected.norm()
    assert relative < 1e-5  # the project's bound for float32 against float32


def test_index_topk_at_least_the_context_is_dense_attention(tiny_model, tiny_weights, monkeypatch):
    ids, spy = tokens(20), Spy(monkeypatch)
    for topk in (20, 32, 64):
        StepDriver(replace(TINY, index_topk=topk), SpeculationConfig(0), tiny_weights).call({0: ids}, {})
    StepDriver(replace(TINY, index_topk=4), SpeculationConfig(0), tiny_weights).call({0: ids}, {})
    a, b, c, sparse = spy.hidden
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    torch.testing.assert_close(a, c, rtol=0, atol=1e-12)
    assert not torch.allclose(a, sparse, atol=1e-3)


@pytest.mark.parametrize("flipped", [False, True])
def test_index_rope_layout_matters_only_above_index_topk(tiny_model, tiny_weights, monkeypatch, flipped):
    config = replace(TINY, indexer_rope_interleave=not flipped)
    ids, spy = tokens(40), Spy(monkeypatch)
    StepDriver(config, SpeculationConfig(0), tiny_weights).call({0: ids}, {})
    expected = reference_states(tiny_model, ids)
    equal = torch.isclose(spy.hidden[0], expected, rtol=1e-4, atol=1e-4).all(1)
    assert equal[: TINY.index_topk].all()
    assert bool(equal.all()) is not flipped


@pytest.mark.parametrize("groups", [(2, 1), (4, 2)])
def test_grouped_routing_equals_transformers(monkeypatch, groups):
    config = replace(TINY, n_group=groups[0], topk_group=groups[1])
    model = transformers_model(config)
    spy, ids = Spy(monkeypatch), tokens(30)
    StepDriver(config, SpeculationConfig(0), graph_weights(model, config)).call({0: ids}, {})
    torch.testing.assert_close(
        spy.hidden[0], reference_states(model, ids), rtol=FLOAT64_TOLERANCE, atol=FLOAT64_TOLERANCE
    )
