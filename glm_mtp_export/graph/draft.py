"""The draft: one NextN layer, run once over the verified rows and then K - 1 times on its own output.

The row of hidden state h_p sits at position p and embeds token p + 1. The hidden state that goes in is always a normed one: the
target's after its final norm in step 0, the layer's own after shared_head.norm afterwards. With
`index_share_for_mtp_iteration` the layer's indexer runs in step 0 and its list at the last accepted row serves all later steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glm_mtp_export import ops
from glm_mtp_export.config import ModelConfig
from glm_mtp_export.graph.attention import Caches, Rows
from glm_mtp_export.graph.target import decoder_layer
from glm_mtp_export.graph.weights import Weights

__all__ = ["draft_tokens"]


def _draft_layer(
    config: ModelConfig,
    weights: Weights,
    token_ids: Tensor,
    hidden: Tensor,
    rows: Rows,
    caches: Caches,
    selection: Tensor | None,
    kept_rows: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The NextN layer on tokens [T] and normed hidden states [T, H]: branch, residual and the list used.

    `selection` None: the layer's own indexer runs. `kept_rows` i32 [R]: rows that go on after the caches are written.
    """
    scope = weights.scope("draft.layers.0")
    table = scope["embed"] if "embed" in scope else weights["target.embed"]
    halves = ops.draft_input(table, token_ids, hidden, scope["enorm"], scope["hnorm"], config.rms_norm_eps)
    joined = scope.linear("eh_proj", halves)
    slot = 0 if selection is None else None
    return decoder_layer(config, scope, None, joined, rows, caches, "draft", 0, slot, selection, True, kept_rows)


def draft_tokens(
    config: ModelConfig,
    weights: Weights,
    shifted: Tensor,
    hidden: Tensor,
    last_rows: Tensor,
    next_positions: Tensor,
    request_ids: Tensor,
    rows: Rows,
    caches: Caches,
    num_tokens: int,
    valid_vocab: int,
) -> Tensor:
    """Propose `num_tokens` tokens for each request: i32 [B, num_tokens].

    shifted i32 [T]: the token after each row; hidden [T, H]: the target's normed states; last_rows i32 [B]: each request's last
    accepted row; next_positions i32 [B]: where the second step's row sits.
    """
    scope = weights.scope("draft.layers.0")
    head = "draft.layers.0.lm_head" if "lm_head" in scope else "target.lm_head"
    # Of the verified rows only the last accepted one proposes anything; the others are there for their cache entries, so they
    # stop before the output projection and the experts, which are most of the layer's weights.
    branch, residual, selection = _draft_layer(config, weights, shifted, hidden, rows, caches, None, last_rows)
    shared = torch.index_select(selection, 0, last_rows) if config.index_share_for_mtp_iteration else None
    proposals: list[Tensor] = []
    while True:
        carried, _ = ops.add_rms_norm(branch, residual, scope["shared_head_norm"], config.rms_norm_eps)
        proposals.append(weights.head_argmax(carried, head, valid_vocab))
        step = len(proposals)
        if step == num_tokens:
            return torch.stack(proposals, dim=1)
        positions = next_positions if step == 1 else next_positions + (step - 1)
        step_rows = Rows(positions, request_ids, rows.block_table)
        branch, residual, _ = _draft_layer(config, weights, proposals[-1], carried, step_rows, caches, shared)
