"""Exclusion lists in every spelling."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm_mtp_export.checkpoint.recipe import parse_recipe, pattern_matcher
from glm_mtp_export.errors import ConfigError

LAYERS = [f"model.layers.{i}" for i in range(12)]
MODULES = ["lm_head", *(f"{p}.{m}" for p in LAYERS for m in ("mlp.gate", "mlp.gate_proj", "self_attn.o_proj"))]


def excluded(*patterns: str) -> set[str]:
    matches = pattern_matcher(patterns)
    return {module for module in MODULES if matches(module)}


def test_regex_glob_and_name_in_one_list() -> None:
    found = excluded(r"re:.*mlp\.gate$", "model.layers.1.*", "lm_head")
    assert found == {"lm_head", *(f"{p}.mlp.gate" for p in LAYERS)} | {
        m for m in MODULES if m.startswith("model.layers.1.")
    }
    assert "model.layers.0.mlp.gate_proj" not in found and "model.layers.10.self_attn.o_proj" not in found


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("model.layers.1", {m for m in MODULES if m.startswith("model.layers.1.")}),
        ("model.layers.1.", {m for m in MODULES if m.startswith("model.layers.1.")}),
        ("model.layers.1*", {m for m in MODULES if m.startswith("model.layers.1")}),
        ("*.self_attn", {f"{p}.self_attn.o_proj" for p in LAYERS}),
        ("mlp.gate", {f"{p}.mlp.gate" for p in LAYERS}),
        ("o_proj", {f"{p}.self_attn.o_proj" for p in LAYERS}),
        ("model.layers.3.mlp.gate.weight", {"model.layers.3.mlp.gate"}),
        ("re:lm_head", {"lm_head"}),
        ("re:layers", set()),
        ("model.layers.?.mlp.gate_proj", {f"{p}.mlp.gate_proj" for p in LAYERS[:10]}),
        ("", set()),
        ("proj", set()),
    ],
)
def test_one_pattern(pattern: str, expected: set[str]) -> None:
    assert excluded(pattern) == expected


@given(st.sampled_from(MODULES), st.sampled_from(MODULES))
def test_a_name_covers_itself_and_nothing_else_of_the_same_depth(name: str, module: str) -> None:
    assert pattern_matcher([name])(module) == (name == module)


@given(st.lists(st.text("mlp.gate*?re:[]\\(0123", max_size=12), max_size=5))
def test_any_list_matches_or_refuses(patterns: list[str]) -> None:
    try:
        matches = pattern_matcher(patterns)
    except ConfigError as error:
        assert "regular expression" in str(error)
        return
    assert all(matches(module) in (True, False) for module in MODULES)


def test_block_size_of_both_dialects() -> None:
    assert parse_recipe({"quant_method": "fp8", "weight_block_size": [32, 64]}, "c").block == (32, 64)
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 16]}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    assert parse_recipe({"quant_method": "compressed-tensors", "config_groups": groups}, "c").block == (16, 16)
    assert parse_recipe({"quant_method": "fp8"}, "c").block == (128, 128)


def test_targets_limit_what_a_recipe_covers() -> None:
    groups = {"group_0": {"targets": ["re:.*self_attn.*"], "weights": {"num_bits": 8, "type": "float"}}}
    recipe = parse_recipe(
        {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["model.layers.0"]}, "c"
    )
    covered = {m for m in MODULES if recipe.covers(m)}
    assert covered == {f"{p}.self_attn.o_proj" for p in LAYERS[1:]}


def test_separate_modelopt_file() -> None:
    recipe = parse_recipe({"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}, "c")
    assert recipe.method == "modelopt" and not recipe.covers("lm_head") and recipe.covers("model.layers.0.mlp.gate")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"quant_method": 3}, "quant_method is 3"),
        ({"weight_block_size": [128, 128]}, "quant_method is None"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size is \[128\]"),
        ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, "not a list of names"),
        ({"quant_method": "modelopt", "ignore": ["re:("]}, "not a regular expression"),
    ],
)
def test_bad_recipes_refuse(raw: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_recipe(raw, "config.json")
