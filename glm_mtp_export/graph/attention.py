"""One attention block: latent projections, the layer's own selection or the one it shares, sparse latent attention.

Sources: GlmMoeDsaAttention and GlmMoeDsaIndexer of transformers; the latent norms and the index key norm have eps 1e-6 whatever
`rms_norm_eps` says.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from glm_mtp_export import ops
from glm_mtp_export.config import ModelConfig
from glm_mtp_export.graph.weights import Weights

__all__ = ["LATENT_NORM_EPS", "Caches", "Rows", "attention", "selected"]

LATENT_NORM_EPS = 1e-6


@dataclass(frozen=True)
class Rows:
    """Where the rows of a pass sit: positions i32 [T], row_requests i32 [T] (-1: padding), block_table i32 [B, P]."""

    positions: Tensor
    row_requests: Tensor
    block_table: Tensor


class Caches:
    """The newest version of each pool. Every cache is one linear thread: a writer replaces it, a reader takes what is here.

    A family is one pool with a layer axis, or one pool a layer (`artifact.CacheSpec`); `place` hides which.
    """

    def __init__(self, pools: dict[str, Tensor]) -> None:
        self._pools = dict(pools)

    def __getitem__(self, name: str) -> Tensor:
        return self._pools[name]

    def place(self, family: str, slot: int) -> tuple[str, int]:
        """Name of the pool that holds layer `slot` of a family, and the layer's index in it."""
        return (family, slot) if family in self._pools else (f"{family}.{slot}", 0)

    def replace(self, name: str, pool: Tensor) -> None:
        """Put the version that a writer returned."""
        self._pools[name] = pool


def selected(
    config: ModelConfig,
    weights: Weights,
    normed: Tensor,
    query_latent: Tensor,
    rows: Rows,
    caches: Caches,
    family: str,
    slot: int,
) -> Tensor:
    """Run the layer's indexer: write the rows' keys to `family` at layer `slot`, return their lists i32 [T, index_topk]."""
    key_gate = weights.linear("wk_gate", normed, to_f32=True)
    name, layer = caches.place(family, slot)
    selection, updated = ops.indexer(
        weights.linear("wq_b", query_latent),
        key_gate,
        weights["k_norm_weight"],
        weights["k_norm_bias"],
        rows.positions,
        rows.row_requests,
        rows.block_table,
        caches[name],
        layer,
        config.index_n_heads,
        config.index_head_dim,
        config.qk_rope_head_dim,
        config.rope_theta,
        int(config.indexer_rope_interleave),
        config.index_topk,
        LATENT_NORM_EPS,
    )
    caches.replace(name, updated)
    return selection


def attention(
    config: ModelConfig,
    weights: Weights,
    normed: Tensor,
    rows: Rows,
    caches: Caches,
    model: str,
    layer: int,
    index_slot: int | None,
    selection: Tensor | None,
    kept_rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of layer `layer` of `model` ("target" or "draft") on normed hidden states [T, H].

    With `index_slot` the layer owns an indexer, whose keys live in that slot of the index cache, and its fresh list is used;
    without, `selection` of an earlier layer. All rows write the caches; with `kept_rows` i32 [R] only those go on. Returns the
    block's output [T or R, H], of which a rank has its heads' part, and the list it used.
    """
    block = weights.scope("attn")
    down = block.linear("qkv_a", normed)
    query_latent = ops.rms_norm(down, block["q_a_norm"], LATENT_NORM_EPS, 0)
    if index_slot is not None:
        scope = weights.scope("indexer")
        selection = selected(config, scope, normed, query_latent, rows, caches, f"{model}_indexer", index_slot)
    assert selection is not None, "the first layer must own an indexer"
    name, place = caches.place(f"{model}_mla", layer)
    mixed, updated = ops.mla_attention(
        block.linear("q_b", query_latent),
        down,
        block["kv_a_norm"],
        block["w_uk"],
        block["w_uv"],
        selection,
        rows.positions,
        rows.row_requests,
        rows.block_table,
        caches[name],
        place,
        block["w_uk"].shape[0],  # heads of this rank
        config.qk_nope_head_dim,
        config.qk_rope_head_dim,
        config.v_head_dim,
        config.kv_lora_rank,
        config.rope_theta,
        int(config.rope_interleave),
        config.attention_scale,
        LATENT_NORM_EPS,
        config.q_lora_rank,
    )
    caches.replace(name, updated)
    if kept_rows is not None:
        mixed = torch.index_select(mixed, 0, kept_rows)
    return block.linear("o", mixed), selection
