"""Config spellings, precedence and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm_mtp_export.checkpoint.layouts import GLM_5_2_CONFIG, T6_CONFIG
from glm_mtp_export.config import DENSE, FULL, SHARED, SPARSE, ModelConfig, load_config, parse_config
from glm_mtp_export.errors import ConfigError


def parse(*drop: str, **changes: Any) -> ModelConfig:
    raw = {key: value for key, value in {**T6_CONFIG, **changes}.items() if key not in drop}
    return parse_config(raw, "config.json")


def full_layers(layers: int, *drop: str, **changes: Any) -> tuple[int, ...]:
    return parse(*drop, num_hidden_layers=layers, **changes).full_layers


def test_t6_has_the_documented_layers() -> None:
    config = parse()
    assert config.full_layers == (0, 1, 2)
    assert config.mlp_layer_types == (DENSE,) + (SPARSE,) * 5
    assert config.notices == ()
    assert (config.qk_head_dim, config.mla_width, config.attention_scale) == (24, 40, 24**-0.5)


# Indexer schedule


def test_schedule_from_frequency_and_offset() -> None:
    assert full_layers(78) == (0, 1, 2, *range(6, 75, 4))
    assert len(full_layers(78)) == 21
    assert full_layers(12) == (0, 1, 2, 6, 10)
    assert full_layers(8, index_topk_freq=2, index_skip_topk_offset=2) == (0, 1, 3, 5, 7)
    assert full_layers(6, "index_topk_freq", "index_skip_topk_offset") == (0, 1, 2, 3, 4, 5)


def test_list_wins_over_formula_with_one_notice_naming_the_layer() -> None:
    config = parse(indexer_types=[FULL, FULL, SHARED, FULL, SHARED, SHARED])
    assert config.full_layers == (0, 1, 3)
    (notice,) = config.notices
    assert "disagree first at layer 2" in notice and "indexer_types" in notice


def test_pattern_equals_list() -> None:
    words = [FULL, FULL, SHARED, FULL, SHARED, SHARED]
    drop = ("index_topk_freq", "index_skip_topk_offset")
    assert parse(*drop, index_topk_pattern="FFSFSS") == parse(*drop, indexer_types=words)
    assert parse(*drop, index_topk_pattern=words) == parse(*drop, indexer_types=words)
    assert parse(index_topk_pattern="FFSFSS", indexer_types=[FULL] * 6).full_layers == (0, 1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [("SFFFFF", "no earlier full layer"), ("FFS", "6 letters F or S"), ("FFXFSS", "6 letters F or S")],
)
def test_bad_patterns_refuse(pattern: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse("index_topk_freq", "index_skip_topk_offset", index_topk_pattern=pattern)


def test_lists_of_a_truncated_model_are_cut_and_short_ones_refuse() -> None:
    config = parse(num_hidden_layers=4, indexer_types=[FULL] * 3 + [SHARED] * 3, mlp_layer_types=[DENSE] + [SPARSE] * 5)
    assert config.indexer_types == (FULL, FULL, FULL, SHARED)
    assert len(config.notices) == 2
    with pytest.raises(ConfigError, match=r"indexer_types is 'a list of 5', expected 6 words"):
        parse(indexer_types=[FULL] * 5)


# Sizes, rotary embedding, ids


@pytest.mark.parametrize("head_dim", [16, 8, 999])
def test_head_dim_is_never_used(head_dim: int) -> None:
    assert parse(head_dim=head_dim) == parse()


def test_rope_spelled_three_ways() -> None:
    new = parse()
    old = parse("rope_parameters", rope_theta=8000000.0, rope_scaling=None)
    nested = parse("rope_parameters", rope_theta=8000000, rope_scaling={"type": "default"})
    assert new == old == nested
    assert new.rope_theta == 8e6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": None}, "rope_theta is missing"),
        ({"rope_parameters": {"rope_theta": 8e6, "rope_type": "yarn"}}, "rope_type is 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.rope_type is 'linear'"),
        ({"rope_theta": 10000}, "rope_theta is 10000.0, expected 8000000.0"),
        ({"rope_parameters": {"rope_theta": "8e6"}}, "rope_theta is '8e6'"),
    ],
)
def test_rope_that_cannot_be_proven_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(**changes)


def test_stop_ids_are_the_union_with_generation_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**T6_CONFIG, "eos_token_id": [307, 309]}))
    assert load_config(tmp_path).eos_token_ids == (307, 309)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 300}')
    assert load_config(tmp_path).eos_token_ids == (307, 309, 300)
    assert parse(eos_token_id=300).eos_token_ids == (300,)


@pytest.mark.parametrize("index_topk", [1, 7, 8, 64, 2048])
def test_any_index_topk_is_accepted(index_topk: int) -> None:
    assert parse(index_topk=index_topk).index_topk == index_topk


def test_dtype_under_either_name() -> None:
    assert parse().dtype == "bfloat16"
    assert parse("dtype", torch_dtype="torch.bfloat16").dtype == "bfloat16"
    assert parse("dtype").dtype is None
    config = parse(torch_dtype="float16")
    assert config.dtype == "bfloat16" and "the weights decide" in config.notices[0]


def test_expert_count_aliases_agree_or_refuse() -> None:
    assert parse("n_routed_experts", num_experts=8) == parse(num_experts=8) == parse(moe_router_dtype="float32")
    with pytest.raises(ConfigError, match="num_experts is 9, expected 8"):
        parse(num_experts=9)


def test_grouped_routing_is_kept_or_refused() -> None:
    config = parse(n_group=4, topk_group=2)
    assert (config.n_group, config.topk_group) == (4, 2)
    with pytest.raises(ConfigError, match="n_group is 3, expected a divisor"):
        parse(n_group=3)
    with pytest.raises(ConfigError, match="topk_group is 5"):
        parse(n_group=4, topk_group=5)
    with pytest.raises(ConfigError, match="at most 2, the experts of topk_group groups"):
        parse(n_group=4, topk_group=1, num_experts_per_tok=3)


def test_dense_layers_in_truncated_models() -> None:
    assert parse(num_hidden_layers=2, first_k_dense_replace=3).mlp_layer_types == (DENSE, DENSE)
    listed = parse(mlp_layer_types=[DENSE, DENSE] + [SPARSE] * 4)
    assert listed.mlp_layer_types == (DENSE, DENSE) + (SPARSE,) * 4
    assert "disagree from layer 1 on" in listed.notices[0]


# The family: GLM-5 and 5.1 have every layer full and a shorter context; 5.3 is laid out as 5.2


@pytest.mark.parametrize(
    ("changes", "num_full"),
    [
        ({"index_topk_freq": None, "index_skip_topk_offset": None, "indexer_types": None, "rope_theta": 1000000}, 78),
        ({}, 21),
        ({"moe_router_dtype": "float32", "num_experts": 256, "bos_token_id": 0, "mlp_bias": False}, 21),
        ({"layer_types": ["deepseek_sparse_attention"] * 78}, 21),
        ({"index_topk_pattern": None, "ep_size": 1, "pretraining_tp": 1, "transformers_version": "5.12.0"}, 21),
    ],
)
def test_configs_of_the_family(changes: dict[str, Any], num_full: int) -> None:
    raw = GLM_5_2_CONFIG | changes
    if "rope_theta" in changes:
        raw |= {"rope_parameters": None, "max_position_embeddings": 202752}
    config = parse_config(raw, "config.json")
    assert len(config.full_layers) == num_full and config.notices == ()
    assert config.mlp_layer_types.count(DENSE) == 3 and config.qk_head_dim == 256 and config.mla_width == 576
    assert config.rope_theta == (1e6 if num_full == 78 else 8e6)


# Unknown and wrong


def test_unknown_keys_are_reported_once() -> None:
    (notice,) = parse(foo=1, bar=2).notices
    assert notice.endswith("bar, foo")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index_topk": "2048"}, "index_topk is '2048', expected an integer of 1 to"),
        ({"num_hidden_layers": "6"}, "num_hidden_layers is '6'"),
        ({"num_hidden_layers": 10**9}, "expected an integer of 1 to 1024"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf"),
        ({"routed_scaling_factor": 10**400}, r"routed_scaling_factor is 10{79}\.\.\., expected"),
        ({"model_type": "x" * 1000}, r"model_type is 'x{79}\.\.\., expected"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
        ({"model_type": "glm5_next"}, "not the Flash models"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax', expected 'sigmoid'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"layer_types": ["full_attention"] * 6}, r"layer_types\[0\] is 'full_attention'"),
        ({"qk_rope_head_dim": 7}, "even number"),
        ({"index_head_dim": 4}, "at least qk_rope_head_dim"),
        ({"num_experts_per_tok": 9}, "at most n_routed_experts"),
        ({"eos_token_id": [320]}, "ids below vocab_size"),
        ({"eos_token_id": "300"}, "eos_token_id is '300'"),
        ({"indexer_types": [FULL] * 5 + ["half"]}, r"indexer_types\[5\] is 'half'"),
    ],
)
def test_known_keys_of_the_wrong_kind_refuse(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(**changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not valid JSON"), ("[1]", "expected an object"), ("\xff", "config.json"), ("", "not valid")],
)
def test_damaged_config_files_refuse(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path)


def test_absent_config_refuses(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 400) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@given(
    st.dictionaries(
        st.sampled_from([*sorted(T6_CONFIG), "indexer_types", "rope_scaling", "quantization_config"]), _JSON
    )
)
def test_any_value_of_any_key_parses_or_refuses_by_name(changes: dict[str, Any]) -> None:
    try:
        config = parse(**changes)
    except ConfigError as error:
        assert str(error).startswith("config.json")
        return
    assert config.full_layers[0] == 0
    assert len(config.indexer_types) == len(config.mlp_layer_types) == config.num_hidden_layers


@given(st.integers(1, 100), st.integers(1, 8), st.integers(0, 8))
def test_schedule_formula(layers: int, freq: int, offset: int) -> None:
    expected = [i for i in range(layers) if i < offset or (i - offset + 1) % freq == 0]
    if 0 in expected:
        assert list(full_layers(layers, index_topk_freq=freq, index_skip_topk_offset=offset)) == expected
    else:
        with pytest.raises(ConfigError, match="no earlier full layer"):
            full_layers(layers, index_topk_freq=freq, index_skip_topk_offset=offset)
