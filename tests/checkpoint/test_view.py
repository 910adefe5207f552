"""Every tensor is accounted for: names, stand-ins, stray and missing tensors, recipes against disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glm_mtp_export.checkpoint import CheckpointView, materialise, weight_plan
from glm_mtp_export.checkpoint.index import INDEX_NAME
from glm_mtp_export.checkpoint.synthetic import Tensor, write_safetensors, write_synthetic
from glm_mtp_export.errors import CheckpointError

Edit = Callable[[dict[str, Tensor]], None]


def opened(directory: Path, edit: Edit | None = None, **options: Any) -> CheckpointView:
    return CheckpointView.open(write_synthetic(directory, edit=edit, **options))


def portable(view: CheckpointView, with_draft: bool = True) -> dict[str, bytes]:
    return {e.name: materialise(view, e).tobytes() for e in weight_plan(view, "portable", None, with_draft)}


def dropping(*names: str) -> Edit:
    def edit(tensors: dict[str, Tensor]) -> None:
        for name in names:
            del tensors[name]

    return edit


def copying(pairs: dict[str, str], change: bool = False) -> Edit:
    def edit(tensors: dict[str, Tensor]) -> None:
        for new, old in pairs.items():
            bits = tensors[old].bits.copy()
            if change:
                bits.reshape(-1)[-1] ^= 1
            tensors[new] = Tensor(tensors[old].dtype, tensors[old].shape, bits)

    return edit


COPIES = {
    "model.layers.6.embed_tokens.weight": "model.embed_tokens.weight",
    "model.layers.6.shared_head.head.weight": "lm_head.weight",
}


def test_draft_shares_embedding_and_head_with_or_without_copies(tmp_path: Path) -> None:
    without, with_copies = opened(tmp_path / "a"), opened(tmp_path / "b", copying(COPIES))
    assert portable(without) == portable(with_copies)
    assert not with_copies.draft_owns(0, "embed_tokens") and with_copies.notices == ()


def test_draft_copies_that_differ_are_its_own(tmp_path: Path) -> None:
    view = opened(tmp_path, copying(COPIES, change=True))
    assert view.draft_owns(0, "embed_tokens") and view.draft_owns(0, "shared_head.head")
    assert sum("the MTP layer uses its own" in n for n in view.notices) == 2
    weights = portable(view)
    assert weights["draft.layers.0.embed"] != weights["target.embed"]
    assert len(weights["draft.layers.0.lm_head"]) == len(weights["target.lm_head"])


@pytest.mark.parametrize(
    "name", ["model.layers.2.self_attn.indexer.wk.weight", "model.layers.0.self_attn.o_proj.weight"]
)
def test_missing_target_tensor_refuses_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=f"missing: {name.removesuffix('.weight')}\\. Run"):
        opened(tmp_path, dropping(name))


def test_missing_indexer_tensor_of_the_mtp_layer_refuses_only_the_draft(tmp_path: Path) -> None:
    view = opened(tmp_path, dropping("model.layers.6.self_attn.indexer.k_norm.bias"))
    assert not view.has_draft
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.6\.self_attn\.indexer\.k_norm\.bias"):
        weight_plan(view, "portable", None, with_draft=True)
    assert portable(view, with_draft=False).keys() >= {"target.layers.5.moe.w2"}


def test_stray_indexers_in_shared_layers_are_unused_with_one_notice(tmp_path: Path) -> None:
    parts = ("wq_b.weight", "wk.weight", "weights_proj.weight", "k_norm.weight", "k_norm.bias")
    pairs = {
        f"model.layers.{i}.self_attn.indexer.{p}": f"model.layers.2.self_attn.indexer.{p}"
        for i in (3, 4, 5)
        for p in parts
    }
    view = opened(tmp_path / "stray", copying(pairs))
    assert portable(view) == portable(opened(tmp_path / "plain"))
    (notice,) = view.notices
    assert "15 indexer tensors in shared layers 3-5 are unused" in notice


@pytest.mark.parametrize("trunk", [4, 8, 12])
def test_mtp_layer_owns_one_indexer_at_any_depth(tmp_path: Path, trunk: int) -> None:
    view = opened(tmp_path, num_hidden_layers=trunk)
    names = [e.name for e in weight_plan(view, "portable", None, True)]
    assert [n for n in names if n.startswith("draft.") and n.endswith("wq_b")] == ["draft.layers.0.indexer.wq_b"]
    assert len([n for n in names if n.startswith("target.") and n.endswith("wq_b")]) == len(view.config.full_layers)


def test_mtp_layer_is_sparse_behind_a_dense_trunk(tmp_path: Path) -> None:
    view = opened(tmp_path, num_hidden_layers=2, first_k_dense_replace=3)
    names = portable(view)
    assert "target.layers.1.mlp.down" in names and "draft.layers.0.moe.w2" in names


def test_several_mtp_modules_get_their_own_weights(tmp_path: Path) -> None:
    view = opened(tmp_path, num_nextn_predict_layers=3)
    weights = portable(view)
    assert len({weights[f"draft.layers.{m}.eh_proj"] for m in range(3)}) == 3


def test_kv_scales_are_dropped_and_recorded_in_trunk_and_mtp_layer(tmp_path: Path) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        for layer in range(7):
            scale = np.array([0.5 + 0.1 * layer], np.float32)
            tensors[f"model.layers.{layer}.self_attn.k_proj.k_scale"] = Tensor("F32", (1,), scale)

    view = opened(tmp_path, edit, layout="nvfp4")
    assert list(view.kv_scales.values()) == [pytest.approx(0.5 + 0.1 * layer) for layer in range(7)]
    assert sum("7 scales of a quantised key/value cache" in n for n in view.notices) == 1


@pytest.mark.parametrize(
    "name",
    ["self_attn.k_scale", "self_attn.v_proj.v_scale", "self_attn.attn.k_scale", "self_attn.kv_scale", "attn.k_scale"],
)
def test_every_name_of_a_kv_scale_is_known(tmp_path: Path, name: str) -> None:
    full = f"model.layers.6.{name}"
    view = opened(tmp_path, lambda t: t.update({full: Tensor("F32", (), np.array(2.0, np.float32))}))
    assert view.kv_scales == {full: 2.0}


def test_mtp_layer_in_a_file_outside_the_index_is_found_with_one_notice(tmp_path: Path) -> None:
    moved: dict[str, Tensor] = {}

    def edit(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if n.startswith("model.layers.6.")]:
            moved[name] = tensors.pop(name)

    write_synthetic(tmp_path, edit=edit)
    write_safetensors(tmp_path / "mtp.safetensors", moved)
    view = CheckpointView.open(tmp_path)
    assert view.has_draft and view.num_draft_tensors == len(moved)
    (notice,) = view.notices
    assert "mtp.safetensors: 47 MTP tensors" in notice
    assert portable(view) == portable(opened(tmp_path / "whole"))


def test_mtp_layer_in_a_folder_of_its_own_is_taken_and_its_trunk_is_not(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "trunk", with_draft=False)
    other = write_synthetic(tmp_path / "other", seed=1, layout="fp8", quantised_draft=True, block=(128, 128))
    view = CheckpointView.open(tmp_path / "trunk", other)
    assert view.has_draft and view.num_draft_tensors == CheckpointView.open(other).num_draft_tensors
    assert view.notices == (f"{other}: {view.num_draft_tensors} MTP tensors of this folder are used",)
    found, trunk, draft = (
        portable(view),
        portable(CheckpointView.open(tmp_path / "trunk"), False),
        portable(CheckpointView.open(other)),
    )
    assert found == {name: (draft if name.startswith("draft.") else trunk)[name] for name in found}
    assert found["target.embed"] != draft["target.embed"]


def test_mtp_layer_of_the_checkpoint_itself_comes_first(tmp_path: Path) -> None:
    whole, other = write_synthetic(tmp_path / "whole"), write_synthetic(tmp_path / "other", seed=1)
    with pytest.raises(CheckpointError, match=r"other: holds no MTP tensors that the checkpoint lacks"):
        CheckpointView.open(whole, other)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"empty: needs \.safetensors files, found none"):
        CheckpointView.open(whole, tmp_path / "empty")


def test_promised_mtp_layer_that_is_absent_refuses_and_the_target_alone_works(tmp_path: Path) -> None:
    view = opened(tmp_path, with_draft=False)
    assert not view.has_draft
    with pytest.raises(CheckpointError, match=r"config.json says 1 MTP layer, layer 6 is not in any file.*--num-spec"):
        weight_plan(view, "portable", None, with_draft=True)
    assert not any(name.startswith("draft.") for name in portable(view, with_draft=False))


def test_config_without_mtp_modules_refuses_a_draft(tmp_path: Path) -> None:
    view = opened(tmp_path, num_nextn_predict_layers=0)
    assert not view.has_draft and view.draft_problems == ()
    with pytest.raises(CheckpointError, match="num_nextn_predict_layers is 0"):
        weight_plan(view, "portable", None, with_draft=True)


def test_renamed_expert_refuses_with_both_names(tmp_path: Path) -> None:
    old, new = (f"model.layers.1.mlp.experts.3.{p}.weight" for p in ("up_proj", "w3_proj"))
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path, lambda t: t.update({new: t.pop(old)}))
    assert f"unknown tensors: {new}" in str(caught.value)
    assert "missing: model.layers.1.mlp.experts.3.up_proj" in str(caught.value)


def test_unknown_tensor_of_the_mtp_layer_keeps_the_target_usable(tmp_path: Path) -> None:
    view = opened(tmp_path, copying({"model.layers.6.extra.weight": "model.norm.weight"}))
    assert not view.has_draft and view.unknown == ("model.layers.6.extra.weight",)


@pytest.mark.parametrize("packed", [False, True])
def test_layers_of_a_truncated_config_are_ignored_with_a_notice(tmp_path: Path, packed: bool) -> None:
    write_synthetic(tmp_path, packed=packed)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "num_hidden_layers": 4, "num_nextn_predict_layers": 0}))
    view = CheckpointView.open(tmp_path)
    assert "layers 4-6 lie behind the trunk" in view.notices[0]
    assert "target.layers.3.moe.w2" in portable(view, with_draft=False)


def test_tied_head_uses_the_embedding(tmp_path: Path) -> None:
    tied = opened(tmp_path / "tied", tie_word_embeddings=True)
    weights = portable(tied)
    assert weights["target.lm_head"] == weights["target.embed"]
    plan = {e.name: e for e in weight_plan(tied, "portable", None, True)}
    assert plan["target.lm_head"].sources == plan["target.embed"].sources
    with pytest.raises(CheckpointError, match="missing: lm_head"):
        opened(tmp_path / "untied", dropping("lm_head.weight"))


def test_tied_flag_with_another_head_on_disk_uses_the_tensor(tmp_path: Path) -> None:
    write_synthetic(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "tie_word_embeddings": True}))
    view = CheckpointView.open(tmp_path)
    assert "lm_head.weight differs from the embedding" in view.notices[0]
    weights = portable(view)
    assert weights["target.lm_head"] != weights["target.embed"]


def test_absent_shared_head_norm_is_the_final_norm(tmp_path: Path) -> None:
    view = opened(tmp_path, dropping("model.layers.6.shared_head.norm.weight"))
    weights = portable(view)
    assert weights["draft.layers.0.shared_head_norm"] == weights["target.norm"]
    assert "final norm stands in" in view.notices[0]


# Recipe against disk


def unquantised(module: str) -> Edit:
    """FP8 module -> bf16 without a scale."""

    def edit(tensors: dict[str, Tensor]) -> None:
        del tensors[f"{module}.weight_scale_inv"]
        shape = tensors[f"{module}.weight"].shape
        tensors[f"{module}.weight"] = Tensor("BF16", shape, np.ones(shape, np.uint16))

    return edit


def test_excluded_name_that_does_not_exist_costs_one_notice(tmp_path: Path) -> None:
    """The release lists `indexers_proj`; the tensor is `indexer.weights_proj`, bf16, and not in the list."""
    view = opened(tmp_path, layout="fp8")
    assert view.config.quantization is not None
    assert "model.layers.0.self_attn.indexers_proj" in view.config.quantization["modules_to_not_convert"]
    assert view.precision("model.layers.0.self_attn.indexer.weights_proj") == "bfloat16"
    (notice,) = view.notices
    assert "weights_proj" in notice and "read as stored" in notice


def test_unlisted_bf16_module_loads_with_a_warning_that_names_it(tmp_path: Path) -> None:
    module = "model.layers.3.self_attn.o_proj"
    view = opened(tmp_path, unquantised(module), layout="fp8")
    assert view.precision(module) == "bfloat16"
    (notice,) = view.notices
    assert module in notice


def test_excluded_module_that_is_quantised_is_read_as_stored(tmp_path: Path) -> None:
    view = opened(
        tmp_path,
        layout="fp8",
        edit_config=lambda raw: raw["quantization_config"]["modules_to_not_convert"].append("model.layers.3"),
    )
    assert view.precision("model.layers.3.self_attn.o_proj") == "fp8_block"
    assert any("excludes modules that are stored quantised" in n and "layers.3" in n for n in view.notices)


@pytest.mark.parametrize(
    ("layout", "edit", "message"),
    [
        ("fp8", dropping("model.layers.3.self_attn.o_proj.weight_scale_inv"), "o_proj.weight is FP8 without"),
        ("nvfp4", dropping("model.layers.3.mlp.experts.0.up_proj.weight_scale_2"), "weight_scale_2 is missing"),
        ("nvfp4", dropping("model.layers.3.mlp.experts.0.up_proj.weight_scale"), "weight_scale is missing"),
        ("fp8", dropping("model.layers.3.self_attn.o_proj.weight"), "has no weight beside it"),
        (
            "bf16",
            lambda t: t.update({"lm_head.weight_scale": Tensor("F32", (), np.array(1, np.float32))}),
            "lm_head.weight is bfloat16, but lm_head.weight_scale lies beside it",
        ),
        (
            "fp8",
            copying({"model.layers.0.self_attn.o_proj.weight_scale": "model.layers.0.self_attn.o_proj.weight_scale_inv"}),
            "is fp8_block, but .*o_proj.weight_scale lies beside it",
        ),
        ("bf16", copying({"lm_head": "lm_head.weight"}), "unknown tensors: lm_head"),
        (
            "bf16",
            lambda t: t.update({"lm_head.weight": Tensor("I8", (320, 64), np.zeros((320, 64), np.int8))}),
            "lm_head.weight is I8, expected bf16",
        ),
        (
            "bf16",
            lambda t: t.update({"model.norm.weight": Tensor("BF16", (63,), np.zeros(63, np.uint16))}),
            r"model.norm.weight is \[63\], expected \[64\]",
        ),
        (
            "bf16",
            lambda t: t.update(
                {"lm_head.weight_packed": Tensor("I32", (1,), np.zeros(1, np.int32)), "x": t.pop("lm_head.weight")}
            ),
            "int4/int8 groups",
        ),
        (
            "fp8",
            lambda t: t.update(
                {"model.layers.0.self_attn.o_proj.weight_scale_inv": Tensor("F32", (3, 4), np.ones((3, 4), np.float32))}
            ),
            r"weight_scale_inv is \[3, 4\], expected \[4, 4\] = ceil",
        ),
        (
            "nvfp4",
            lambda t: t.update(
                {
                    "model.layers.3.mlp.experts.0.up_proj.weight_scale": Tensor(
                        "F8_E8M0", (32, 2), np.zeros((32, 2), np.uint8)
                    )
                }
            ),
            "no MXFP4",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_proven_refuses(tmp_path: Path, layout: str, edit: Edit, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        opened(tmp_path, edit, layout=layout)


def test_all_findings_come_together(tmp_path: Path) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        dropping("model.layers.3.self_attn.o_proj.weight_scale_inv", "model.norm.weight")(tensors)
        tensors["foo"] = Tensor("F32", (1,), np.zeros(1, np.float32))

    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path, edit, layout="fp8")
    text = str(caught.value)
    assert "unknown tensors: foo" in text and "FP8 without" in text and "missing: model.norm" in text
    assert "missing: model.layers.3" not in text


def test_integer_groups_refuse_by_name(tmp_path: Path) -> None:
    def edit_config(raw: dict[str, Any]) -> None:
        weights = {"num_bits": 4, "type": "int", "group_size": 128}
        raw["quantization_config"]["config_groups"]["group_0"]["weights"] = weights

    write_synthetic(tmp_path, layout="ct-nvfp4", edit_config=edit_config)
    with pytest.raises(Exception, match="int4 weights: not supported"):
        CheckpointView.open(tmp_path)


@pytest.mark.parametrize("dtype", ["dtype", "torch_dtype", None])
def test_weights_decide_the_dtype(tmp_path: Path, dtype: str | None) -> None:
    def edit_config(raw: dict[str, Any]) -> None:
        value = raw.pop("dtype")
        raw.update({dtype: value} if dtype else {})

    assert opened(tmp_path / "a", edit_config=edit_config).notices == ()


def test_dtype_that_contradicts_the_weights_is_one_notice(tmp_path: Path) -> None:
    view = opened(tmp_path, edit_config=lambda raw: raw.update(dtype="float16"))
    assert view.notices == ("config.json says dtype float16, the weights are bfloat16; they win",)


def test_rounded_router_bias_is_noticed(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    view = opened(tmp_path, lambda t: t.update({name: Tensor("BF16", (8,), np.ones(8, np.uint16))}))
    assert "1 router biases are stored in bfloat16" in view.notices[0]


def test_index_is_optional(tmp_path: Path) -> None:
    view = opened(tmp_path / "a", with_index=False)
    assert not (tmp_path / "a" / INDEX_NAME).exists()
    assert portable(view) == portable(opened(tmp_path / "b"))
