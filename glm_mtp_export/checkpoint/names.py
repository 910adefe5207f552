"""The name map: which modules a configuration must have, and what each tensor name on disk stands for.

A *module* is one parameter of the model under its official name without `.weight` (`model.layers.3.mlp.gate`,
`model.layers.0.self_attn.indexer.k_norm.bias`); a *role* is what a tensor is to its module (values, block scale, ...).
Packed expert tensors stand for many modules. Nothing here touches a file; what maps to nothing is left to the caller to
refuse.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from glm_mtp_export.checkpoint.index import layer_number
from glm_mtp_export.config import FULL, SPARSE, ModelConfig

__all__ = [
    "EMBEDDING",
    "FINAL_NORM",
    "GROUPS",
    "HEAD",
    "PACKED_EXPERTS",
    "ModuleSpec",
    "TensorRole",
    "draft_layer",
    "draft_modules",
    "expert_module",
    "graph_prefix",
    "kv_scale_layer",
    "tensor_role",
    "trunk_modules",
]

EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens", "lm_head", "model.norm"
PACKED_EXPERTS = ("gate_up_proj", "down_proj")
# Rows of the inspect report, in its order.
GROUPS = (
    "embedding", "head", "norms", "attention", "indexer", "dense mlp", "router", "experts", "shared experts",
    "mtp projection",
)  # fmt: skip


@dataclass(frozen=True)
class ModuleSpec:
    """One parameter that the model needs: official name without `.weight`, shape in values, report group."""

    name: str
    shape: tuple[int, ...]
    group: str
    linear: bool = False  # a matrix that quantisation recipes may cover
    optional: bool = False  # has a stand-in (an alias) when it is not on disk


@dataclass(frozen=True)
class TensorRole:
    """What a tensor on disk is: `role` (weight, weight_scale, ...) of `module`."""

    module: str
    role: str


_ROLES = (
    "weight", "weight_scale_inv", "weight_scale", "weight_scale_2", "weight_packed", "weight_global_scale",
    "input_scale", "input_global_scale", "weight_shape", "weight_zero_point", "weight_g_idx",
)  # fmt: skip
_PACKED = re.compile(r"^(.*\.mlp\.experts\.(?:gate_up_proj|down_proj))(?:\.?_?(scale_inv|scale))?$")
_KV_SCALE = re.compile(r"\.(?:self_attn|attn)\.(?:(?:[kv]|kv|qkv|kv_b)_proj\.)?(?:k_scale|v_scale|kv_scale)$")
_BUFFERS = re.compile(r"rotary_emb\.(?:inv_freq|cos_cached|sin_cached)$")


def tensor_role(name: str) -> TensorRole:
    """Split a tensor's name; parameters that are no `.weight` (biases) are modules themselves."""
    module, _, last = name.rpartition(".")
    if last in _ROLES:
        return TensorRole(module, last)
    if packed := _PACKED.match(name):
        suffix = packed.group(2)
        return TensorRole(packed.group(1), f"weight_{suffix}" if suffix else "weight")
    if _BUFFERS.search(name):
        return TensorRole(module, "buffer")
    return TensorRole(name, "weight")


def kv_scale_layer(name: str) -> int | None:
    """Layer of a key/value cache scale under any of its names, trunk or MTP layer; None for every other tensor."""
    return layer_number(name) if name.endswith(("k_scale", "v_scale")) and _KV_SCALE.search(name) else None


def graph_prefix(config: ModelConfig, layer: int) -> str:
    """`target.layers.N.` for trunk layers, `draft.layers.M.` for the MTP modules that are stored behind them."""
    trunk = config.num_hidden_layers
    return f"target.layers.{layer}." if layer < trunk else f"draft.layers.{layer - trunk}."


def draft_layer(config: ModelConfig, module: int) -> str:
    """Stored prefix of MTP module `module`, without the last dot."""
    return f"model.layers.{config.num_hidden_layers + module}"


def expert_module(layer_prefix: str, expert: int, projection: str) -> str:
    """`projection`: gate_proj, up_proj or down_proj."""
    return f"{layer_prefix}.mlp.experts.{expert}.{projection}"


def trunk_modules(config: ModelConfig) -> Iterator[ModuleSpec]:
    """Every parameter of the target model."""
    vocab, hidden = config.vocab_size, config.hidden_size
    yield ModuleSpec(EMBEDDING, (vocab, hidden), "embedding")
    yield ModuleSpec(HEAD, (vocab, hidden), "head", linear=True, optional=config.tie_word_embeddings)
    yield ModuleSpec(FINAL_NORM, (hidden,), "norms")
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        yield from _decoder_modules(
            config, prefix, config.indexer_types[layer] == FULL, config.mlp_layer_types[layer] == SPARSE
        )


def draft_modules(config: ModelConfig, module: int) -> Iterator[ModuleSpec]:
    """Every parameter of one MTP module: it is sparse and owns an indexer at any depth of the trunk."""
    prefix, hidden, vocab = draft_layer(config, module), config.hidden_size, config.vocab_size
    yield ModuleSpec(f"{prefix}.enorm", (hidden,), "norms")
    yield ModuleSpec(f"{prefix}.hnorm", (hidden,), "norms")
    yield ModuleSpec(f"{prefix}.eh_proj", (hidden, 2 * hidden), "mtp projection", linear=True)
    yield ModuleSpec(f"{prefix}.shared_head.norm", (hidden,), "norms", optional=True)
    yield ModuleSpec(f"{prefix}.embed_tokens", (vocab, hidden), "embedding", optional=True)
    yield ModuleSpec(f"{prefix}.shared_head.head", (vocab, hidden), "head", linear=True, optional=True)
    yield from _decoder_modules(config, prefix, True, True)


def _decoder_modules(config: ModelConfig, prefix: str, full: bool, sparse: bool) -> Iterator[ModuleSpec]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    yield ModuleSpec(f"{prefix}.input_layernorm", (hidden,), "norms")
    yield ModuleSpec(f"{prefix}.post_attention_layernorm", (hidden,), "norms")
    attention = {
        "q_a_proj": (config.q_lora_rank, hidden),
        "q_b_proj": (heads * config.qk_head_dim, config.q_lora_rank),
        "kv_a_proj_with_mqa": (config.mla_width, hidden),
        "kv_b_proj": (heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank),
        "o_proj": (hidden, heads * config.v_head_dim),
    }
    for name, shape in attention.items():
        yield ModuleSpec(f"{prefix}.self_attn.{name}", shape, "attention", linear=True)
    yield ModuleSpec(f"{prefix}.self_attn.q_a_layernorm", (config.q_lora_rank,), "attention")
    yield ModuleSpec(f"{prefix}.self_attn.kv_a_layernorm", (config.kv_lora_rank,), "attention")
    if full:
        yield from _indexer_modules(config, f"{prefix}.self_attn.indexer")
    if sparse:
        yield from _sparse_modules(config, f"{prefix}.mlp")
    else:
        yield from _swiglu_modules(f"{prefix}.mlp", hidden, config.intermediate_size, "dense mlp")


def _indexer_modules(config: ModelConfig, prefix: str) -> Iterator[ModuleSpec]:
    dim = config.index_head_dim
    yield ModuleSpec(f"{prefix}.wq_b", (config.index_n_heads * dim, config.q_lora_rank), "indexer", linear=True)
    yield ModuleSpec(f"{prefix}.wk", (dim, config.hidden_size), "indexer", linear=True)
    yield ModuleSpec(f"{prefix}.weights_proj", (config.index_n_heads, config.hidden_size), "indexer", linear=True)
    yield ModuleSpec(f"{prefix}.k_norm", (dim,), "indexer")
    yield ModuleSpec(f"{prefix}.k_norm.bias", (dim,), "indexer")


def _sparse_modules(config: ModelConfig, prefix: str) -> Iterator[ModuleSpec]:
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    yield ModuleSpec(f"{prefix}.gate", (config.n_routed_experts, hidden), "router", linear=True)
    yield ModuleSpec(f"{prefix}.gate.e_score_correction_bias", (config.n_routed_experts,), "router")
    for expert in range(config.n_routed_experts):
        yield from _swiglu_modules(f"{prefix}.experts.{expert}", hidden, inner, "experts")
    yield from _swiglu_modules(f"{prefix}.shared_experts", hidden, inner * config.n_shared_experts, "shared experts")


def _swiglu_modules(prefix: str, hidden: int, inner: int, group: str) -> Iterator[ModuleSpec]:
    yield ModuleSpec(f"{prefix}.gate_proj", (inner, hidden), group, linear=True)
    yield ModuleSpec(f"{prefix}.up_proj", (inner, hidden), group, linear=True)
    yield ModuleSpec(f"{prefix}.down_proj", (hidden, inner), group, linear=True)
