"""How released checkpoints lay a model out: tensor names, types, shapes and the recipe in config.json, for each stored
format.

In: a `ModelConfig` and one of FORMATS. Out: what a checkpoint of it holds, tensor by tensor. The counts and bytes that
follow for GLM-5.2 equal the published ones of its bf16, FP8 and NVFP4 releases.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from glm_mtp_export.checkpoint.index import layer_number
from glm_mtp_export.checkpoint.names import ModuleSpec, draft_modules, trunk_modules
from glm_mtp_export.checkpoint.numeric import NVFP4_GROUP
from glm_mtp_export.config import ModelConfig

__all__ = [
    "FORMATS",
    "GLM_5_2_CONFIG",
    "RELEASES",
    "T6_CONFIG",
    "Release",
    "module_format",
    "quantisation_config",
    "stored_tensors",
]

T6_CONFIG: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "dtype": "bfloat16",
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 24,
    "v_head_dim": 16,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    "rope_interleave": True,
    "indexer_rope_interleave": True,
    "max_position_embeddings": 1024,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 8,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "index_share_for_mtp_iteration": True,
    "tie_word_embeddings": False,
    "eos_token_id": [300, 307, 309],
    "pad_token_id": 300,
}
GLM_5_2_CONFIG: dict[str, Any] = T6_CONFIG | {
    "vocab_size": 154880,
    "hidden_size": 6144,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 192,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "qk_head_dim": 256,
    "v_head_dim": 256,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "indexer_types": ["full" if max(i - 2, 0) % 4 == 0 else "shared" for i in range(78)],
    "max_position_embeddings": 1048576,
    "eos_token_id": [154820, 154827, 154829],
    "pad_token_id": 154820,
}
# A slice has the real widths, but two layers,
# eight
# experts and a short vocabulary.
_SLICE: dict[str, Any] = GLM_5_2_CONFIG | {
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "indexer_types": ["full", "full"],
    "n_routed_experts": 8,
    "vocab_size": 8192,
    "eos_token_id": [8000],
    "pad_token_id": 8000,
}


@dataclass(frozen=True)
class Release:
    """A made-up checkpoint with a name: its config, format, number of shards and FP8 block."""

    config: Mapping[str, Any]
    layout: str
    num_shards: int
    block: tuple[int, int] = (128, 128)


RELEASES: dict[str, Release] = {
    "glm-5.2-bf16": Release(GLM_5_2_CONFIG, "bf16", 282),
    "glm-5.2-fp8": Release(GLM_5_2_CONFIG, "fp8", 141),
    "glm-5.2-nvfp4": Release(GLM_5_2_CONFIG, "nvfp4", 47),
    "glm-5.2-slice-bf16": Release(_SLICE, "bf16", 1),
    "glm-5.2-slice-fp8": Release(_SLICE, "fp8", 1),
    "glm-5.2-slice-nvfp4": Release(_SLICE, "nvfp4", 1),
    "t6": Release(T6_CONFIG, "bf16", 2),
    "t6-fp8": Release(T6_CONFIG, "fp8", 2, (16, 16)),
    "t6-nvfp4": Release(T6_CONFIG, "nvfp4", 2),
}
# bf16; FP8 blocks as released; NVFP4 experts as released; the same with dense layers per-tensor FP8 (GLM-5.3);
# compressed-tensors NVFP4 and per-channel FP8; plain fp32 and fp16.
FORMATS = ("bf16", "fp8", "nvfp4", "nvfp4-fp8-dense", "ct-nvfp4", "ct-fp8", "fp32", "fp16")
_BASE = {"fp32": "F32", "fp16": "F16"}
_UNQUANTISED = ("indexer.weights_proj", "mlp.gate", "eh_proj", "lm_head", "shared_head.head")


def module_format(config: ModelConfig, spec: ModuleSpec, layout: str, quantised_draft: bool = False) -> str:
    """How a layout of FORMATS stores a module: plain, fp8, fp8_tensor, fp8_channel or nvfp4."""
    if not spec.linear or spec.name.endswith(_UNQUANTISED):
        return "plain"
    in_draft = (layer_number(spec.name) or 0) >= config.num_hidden_layers
    if layout in ("fp8", "ct-fp8"):
        return "fp8" if layout == "fp8" else "fp8_channel"
    if "nvfp4" in layout and (not in_draft or quantised_draft):
        if spec.group == "experts":
            return "nvfp4"
        if layout == "nvfp4-fp8-dense" and spec.group == "dense mlp":
            return "fp8_tensor"
    return "plain"


def stored_tensors(
    config: ModelConfig,
    layout: str,
    block: tuple[int, int] = (128, 128),
    with_draft: bool = True,
    quantised_draft: bool = False,
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name, type code and shape of every tensor of a checkpoint, in layer order; optional copies are left out."""
    specs = list(trunk_modules(config))
    for module in range(config.num_nextn_predict_layers if with_draft else 0):
        specs += [
            s for s in draft_modules(config, module) if not s.name.endswith((".embed_tokens", ".shared_head.head"))
        ]
    for spec in specs:
        if spec.name == "lm_head" and config.tie_word_embeddings:
            continue
        form = module_format(config, spec, layout, quantised_draft)
        yield from _stored(spec, form, layout, block)


def _stored(
    spec: ModuleSpec, form: str, layout: str, block: tuple[int, int]
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    name, shape = spec.name, spec.shape
    if name.endswith("e_score_correction_bias"):
        yield name, "F32", shape
    elif form == "plain":
        yield name if name.endswith(".bias") else f"{name}.weight", _BASE.get(layout, "BF16"), shape
    elif form == "nvfp4":
        packed, groups = (shape[0], shape[1] // 2), (shape[0], shape[1] // NVFP4_GROUP)
        reciprocal = layout.startswith("ct-")
        yield f"{name}.weight_packed" if reciprocal else f"{name}.weight", "U8", packed
        yield f"{name}.weight_scale", "F8_E4M3", groups
        scalar = (1,) if reciprocal else ()
        yield f"{name}.{'weight_global_scale' if reciprocal else 'weight_scale_2'}", "F32", scalar
        yield f"{name}.{'input_global_scale' if reciprocal else 'input_scale'}", "F32", scalar
    else:
        yield f"{name}.weight", "F8_E4M3", shape
        if form == "fp8":
            yield f"{name}.weight_scale_inv", "F32", (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
        else:
            yield f"{name}.weight_scale", "F32", (shape[0], 1) if form == "fp8_channel" else ()


def quantisation_config(
    config: ModelConfig, layout: str, block: tuple[int, int], quantised_draft: bool = False
) -> dict[str, Any] | None:
    """The recipe that the layout's writer puts in config.json."""
    layers = config.num_hidden_layers
    keep = ["lm_head", "model.embed_tokens", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.gate$"]
    dense = [
        f"model.layers.{i}.mlp.{p}"
        for i in range(layers)
        if config.mlp_layer_types[i] == "dense"
        for p in ("gate_proj", "up_proj", "down_proj")
    ]
    draft = [] if quantised_draft else [f"model.layers.{layers + m}*" for m in range(config.num_nextn_predict_layers)]
    draft += ["eh_proj"]
    if layout == "fp8":
        return {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": list(block), "modules_to_not_convert": _fp8_exclusions(config),
        }  # fmt: skip
    if layout in ("nvfp4", "nvfp4-fp8-dense"):
        ignore = keep + draft + (dense if layout == "nvfp4" else [])
        return {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ignore}
    if layout == "ct-nvfp4":
        weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": NVFP4_GROUP}
    elif layout == "ct-fp8":
        weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
        keep, dense, draft = ["lm_head", "re:.*mlp\\.gate$", "re:.*weights_proj$", "eh_proj"], [], []
    else:
        return None
    return {
        "quant_method": "compressed-tensors", "ignore": keep + dense + draft,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip


def _fp8_exclusions(config: ModelConfig) -> list[str]:
    """The FP8 release's list: each unquantised parameter, with `indexers_proj` for what is `weights_proj`."""
    specs = list(trunk_modules(config))
    for module in range(config.num_nextn_predict_layers):
        specs += [
            s for s in draft_modules(config, module) if not s.name.endswith((".embed_tokens", ".shared_head.head"))
        ]
    names = [spec.name for spec in specs if module_format(config, spec, "fp8") == "plain"]
    return [name.replace("indexer.weights_proj", "indexers_proj") for name in names]
