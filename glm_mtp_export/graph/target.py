"""The target model: embedding, all trunk layers, final norm."""

from __future__ import annotations

import torch
from torch import Tensor

from glm_mtp_export import ops
from glm_mtp_export.config import FULL, SPARSE, ModelConfig
from glm_mtp_export.graph.attention import Caches, Rows, attention
from glm_mtp_export.graph.moe import feed_forward
from glm_mtp_export.graph.weights import Weights

__all__ = ["decoder_layer", "embedded", "target_hidden"]


def embedded(table: Tensor, token_ids: Tensor) -> Tensor:
    """Rows of an embedding [V, H]: [T, H]."""
    return torch.nn.functional.embedding(token_ids, table)


def decoder_layer(
    config: ModelConfig,
    weights: Weights,
    branch: Tensor | None,
    residual: Tensor,
    rows: Rows,
    caches: Caches,
    model: str,
    layer: int,
    index_slot: int | None,
    selection: Tensor | None,
    sparse: bool,
    kept_rows: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One layer on a residual stream kept as (branch not yet added, residual); `branch` None: nothing to add. A
    branch is the rank's part: the norm that reads it sums it over the ranks.

    With `kept_rows` i32 [R] all rows write the caches and only those leave the layer. Returns the new branch and residual, and the
    selection list used (of all rows).
    """
    if branch is None:
        normed = ops.rms_norm(residual, weights["input_norm"], config.rms_norm_eps, 0)
    else:
        normed, residual = weights.added_norm(branch, residual, "input_norm", config.rms_norm_eps)
    mixed, selection = attention(config, weights, normed, rows, caches, model, layer, index_slot, selection, kept_rows)
    if kept_rows is not None:
        residual = torch.index_select(residual, 0, kept_rows)
    normed, residual = weights.added_norm(mixed, residual, "post_attention_norm", config.rms_norm_eps)
    return feed_forward(config, weights, normed, sparse), residual, selection


def target_hidden(config: ModelConfig, weights: Weights, token_ids: Tensor, rows: Rows, caches: Caches) -> Tensor:
    """Hidden states of all rows after the final norm [T, H]; writes both target caches."""
    branch, selection, residual = None, None, embedded(weights["target.embed"], token_ids)
    slots = {layer: slot for slot, layer in enumerate(config.full_layers)}
    for layer in range(config.num_hidden_layers):
        branch, residual, selection = decoder_layer(
            config,
            weights.scope(f"target.layers.{layer}"),
            branch,
            residual,
            rows,
            caches,
            "target",
            layer,
            slots[layer] if config.indexer_types[layer] == FULL else None,
            selection,
            config.mlp_layer_types[layer] == SPARSE,
        )
    assert branch is not None, "a model has at least one layer"
    return weights.added_norm(branch, residual, "target.norm", config.rms_norm_eps)[0]
