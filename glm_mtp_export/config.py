"""The model's configuration: what `config.json` says, checked, under the names Hugging Face uses.

In: a `config.json` as a mapping. Out: a frozen `ModelConfig` that the graph, the checkpoint reader, the planner and the
runtime share. What may go wrong: a field that is missing, of the wrong type or contradictory raises `ConfigError` naming it;
oddities that do not change the result are collected in `notices`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Mapping

__all__ = ["FULL", "SHARED", "DENSE", "SPARSE", "ModelConfig", "SpeculationConfig"]

FULL, SHARED = "full", "shared"
DENSE, SPARSE = "dense", "sparse"


@dataclass(frozen=True)
class ModelConfig:
    """GLM-5.x (`glm_moe_dsa`) sizes and switches. Counts are per layer unless the name says otherwise."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_nextn_predict_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    routed_scaling_factor: float
    norm_topk_prob: bool
    mlp_layer_types: tuple[str, ...]  # DENSE or SPARSE, one a trunk layer
    indexer_types: tuple[str, ...]  # FULL or SHARED, one a trunk layer; the MTP layer is always full
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    index_share_for_mtp_iteration: bool
    rms_norm_eps: float
    rope_theta: float
    rope_interleave: bool
    indexer_rope_interleave: bool
    max_position_embeddings: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    dtype: str | None = None
    quantization: Mapping[str, Any] | None = None  # quantization_config as found, for the checkpoint reader
    notices: tuple[str, ...] = field(default=(), compare=False)

    @property
    def qk_head_dim(self) -> int:
        """Width of one query head: nope part first, rope part last."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def mla_width(self) -> int:
        """Values of one row of the MLA cache: latent first, rotated key last."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def attention_scale(self) -> float:
        """Softmax scale; rope_type is default, so there is no extra factor."""
        return float(self.qk_head_dim) ** -0.5

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Trunk layers that own an indexer; slot i of the target indexer cache belongs to full_layers[i]."""
        return tuple(i for i, kind in enumerate(self.indexer_types) if kind == FULL)


@dataclass(frozen=True)
class SpeculationConfig:
    """What is compiled into the step graph beside the model itself. Field names are the command line's."""

    num_speculative_tokens: int = 1
    use_relaxed_acceptance_for_thinking: bool = False
    relaxed_topk: int = 10
    relaxed_delta: float = 0.6
    enable_structured_output: bool = False
    num_logprobs: int = -1  # -1: no log-probabilities; 0: of the committed token; n: also the n most likely

    @property
    def num_slots(self) -> int:
        """Verified positions of a request: its drafts and the one after them."""
        return self.num_speculative_tokens + 1

    @property
    def draft_width(self) -> int:
        """Columns of `draft_tokens`; never zero, since engines refuse empty dimensions."""
        return max(self.num_speculative_tokens, 1)
