"""Nano on disk: the official Hugging Face layout of GLM-5.2.

In: a trained ``NanoModel``. Out: config.json, generation_config.json, two bf16 shards with their index (experts one by
one, MTP layer at index ``num_hidden_layers``, no copy of head or embedding), tokenizer files, chat template.
Correction biases stay float32. ``load_checkpoint`` is the way back, for evaluation and tests.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from nano.model import NanoConfig, NanoModel
from nano.tokenizer import build_tokenizer

__all__ = ["checkpoint_tensors", "config_json", "load_checkpoint", "round_to_bfloat16", "save_checkpoint"]

_EOS = ("<|endoftext|>", "<|user|>", "<|observation|>")
_SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def _stays_float32(name: str) -> bool:
    return name.endswith("e_score_correction_bias")


@torch.no_grad()
def round_to_bfloat16(model: NanoModel, trunk_only: bool = False) -> None:
    """Put every weight on the bfloat16 grid in place, so that what follows sees what the files will hold."""
    mtp = f"model.layers.{model.c.num_hidden_layers}."
    for name, parameter in model.named_parameters():
        if not (trunk_only and name.startswith(mtp)):
            parameter.copy_(parameter.bfloat16().float())


def checkpoint_tensors(model: NanoModel) -> dict[str, Tensor]:
    """Tensors under their names on disk, bf16 (correction biases f32), on the CPU."""
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        value = value.detach().cpu()
        if name.endswith(".mlp.w13") or name.endswith(".mlp.w2"):
            prefix = name.rsplit(".", 1)[0] + ".experts"
            for expert, weight in enumerate(value):
                if name.endswith("w2"):
                    tensors[f"{prefix}.{expert}.down_proj.weight"] = weight
                else:
                    gate, up = weight.chunk(2)
                    tensors[f"{prefix}.{expert}.gate_proj.weight"] = gate
                    tensors[f"{prefix}.{expert}.up_proj.weight"] = up
        else:
            tensors[name] = value
    return {
        name: (value.float() if _stays_float32(name) else value.bfloat16()).contiguous().clone()
        for name, value in tensors.items()
    }


def config_json(c: NanoConfig) -> dict[str, Any]:
    """``config.json`` with the fields of the official one. ``head_dim`` is as misleading there as here."""
    tokenizer = build_tokenizer()
    eos = [tokenizer.token_to_id(text) for text in _EOS]
    layers = c.num_hidden_layers
    return {
        "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "dtype": "bfloat16",
        "attention_bias": False, "attention_dropout": 0.0, "eos_token_id": eos, "pad_token_id": eos[0], "ep_size": 1,
        "first_k_dense_replace": c.first_k_dense_replace, "head_dim": c.qk_nope_head_dim, "hidden_act": "silu",
        "hidden_size": c.hidden_size, "index_head_dim": c.index_head_dim, "index_n_heads": c.index_n_heads,
        "index_share_for_mtp_iteration": True, "index_skip_topk_offset": 2, "index_topk": c.index_topk,
        "index_topk_freq": 2, "index_topk_pattern": None, "indexer_rope_interleave": True,
        "indexer_types": list(c.indexer_types), "initializer_range": 0.02, "intermediate_size": c.intermediate_size,
        "kv_lora_rank": c.kv_lora_rank, "max_position_embeddings": c.max_position_embeddings,
        "mlp_layer_types": ["dense" if i < c.first_k_dense_replace else "sparse" for i in range(layers)],
        "moe_intermediate_size": c.moe_intermediate_size, "moe_layer_freq": 1, "moe_router_dtype": "float32",
        "n_group": 1, "n_routed_experts": c.n_routed_experts, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_attention_heads": c.num_attention_heads, "num_experts_per_tok": c.num_experts_per_tok,
        "num_hidden_layers": layers, "num_key_value_heads": c.num_attention_heads, "num_nextn_predict_layers": 1,
        "pretraining_tp": 1, "q_lora_rank": c.q_lora_rank, "qk_head_dim": c.qk_nope_head_dim + c.qk_rope_head_dim,
        "qk_nope_head_dim": c.qk_nope_head_dim, "qk_rope_head_dim": c.qk_rope_head_dim, "rms_norm_eps": c.rms_norm_eps,
        "rope_interleave": True, "rope_parameters": {"rope_theta": c.rope_theta, "rope_type": "default"},
        "routed_scaling_factor": c.routed_scaling_factor, "scoring_func": "sigmoid", "tie_word_embeddings": False,
        "topk_group": 1, "topk_method": "noaux_tc", "transformers_version": "5.12.0", "use_cache": True,
        "v_head_dim": c.v_head_dim, "vocab_size": c.vocab_size,
    }  # fmt: skip


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _shard_of(name: str, c: NanoConfig) -> str:
    """First shard: embedding and the layers before the last one; second: last layer, MTP layer, norm, head."""
    if name.startswith("model.layers."):
        return _SHARDS[int(name.split(".")[2]) >= c.num_hidden_layers - 1]
    return _SHARDS[name != "model.embed_tokens.weight"]


def save_checkpoint(model: NanoModel, folder: Path) -> None:
    """Write all files but the report and the card."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = checkpoint_tensors(model)
    weight_map = {name: _shard_of(name, model.c) for name in sorted(tensors)}
    for shard in _SHARDS:
        part = {name: tensors[name] for name, place in weight_map.items() if place == shard}
        save_file(part, folder / shard, metadata={"format": "pt"})
    total = sum(value.numel() * value.element_size() for value in tensors.values())
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    config = config_json(model.c)
    _write_json(folder / "config.json", config)
    generation = {"do_sample": True, "temperature": 1.0, "top_p": 0.95, "transformers_version": "5.12.0"}
    _write_json(
        folder / "generation_config.json", {key: config[key] for key in ("eos_token_id", "pad_token_id")} | generation
    )
    build_tokenizer().save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model.c.max_position_embeddings,
        "clean_up_tokenization_spaces": False, "eos_token": _EOS[0], "pad_token": _EOS[0], "padding_side": "left",
    }  # fmt: skip
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    shutil.copyfile(Path(__file__).with_name("chat_template.jinja"), folder / "chat_template.jinja")


def load_checkpoint(folder: Path, c: NanoConfig | None = None) -> NanoModel:
    """The training model with a checkpoint's weights, float32. Raises KeyError for a tensor that is missing."""
    model = NanoModel(c or NanoConfig())
    tensors: dict[str, Tensor] = {}
    for shard in _SHARDS:
        with safe_open(folder / shard, framework="pt") as file:
            tensors |= {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118 (safe_open is no mapping)
    state: dict[str, Tensor] = {}
    for name in model.state_dict():
        prefix, _, leaf = name.rpartition(".")
        experts = range(model.c.n_routed_experts)
        if leaf == "w13":
            pairs = [[tensors[f"{prefix}.experts.{e}.{part}_proj.weight"] for part in ("gate", "up")] for e in experts]
            state[name] = torch.stack([torch.cat(pair) for pair in pairs])
        elif leaf == "w2":
            state[name] = torch.stack([tensors[f"{prefix}.experts.{e}.down_proj.weight"] for e in experts])
        else:
            state[name] = tensors[name]
    model.load_state_dict(state)
    return model
