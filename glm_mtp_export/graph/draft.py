"""The draft: NextN modules, each run once over the verified rows, and then K - 1 steps on their own output.

The row of hidden state h_p sits at position p and embeds token p + 1. The hidden state that goes in is always a normed one: the
target's after its final norm in step 0, the layer's own after shared_head.norm afterwards. With
`index_share_for_mtp_iteration` the layer's indexer runs in step 0 and its list at the last accepted row serves all later steps.

With m modules, step j runs module j mod m. So that each module's caches hold every committed position, all of them go over the
verified rows: module i takes module i - 1's normed state of the row (module 0 the target's) and, like module 0, the token after
the row. Tokens further on are not known for the last rows, and caches that waited for them would depend on where calls end.
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
    module: int,
    token_ids: Tensor,
    hidden: Tensor,
    rows: Rows,
    caches: Caches,
    selection: Tensor | None,
    kept_rows: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """NextN module `module` on tokens [T] and normed hidden states [T, H]: branch, residual and the list used.

    `selection` None: the module's own indexer runs. `kept_rows` i32 [R]: rows that go on after the caches are written.
    """
    scope = weights.scope(f"draft.layers.{module}")
    table = scope["embed"] if "embed" in scope else weights["target.embed"]
    halves = ops.draft_input(table, token_ids, hidden, scope["enorm"], scope["hnorm"], config.rms_norm_eps)
    joined = scope.linear("eh_proj", halves)
    slot = module if selection is None else None
    return decoder_layer(config, scope, None, joined, rows, caches, "draft", module, slot, selection, True, kept_rows)


def _normed(config: ModelConfig, weights: Weights, module: int, branch: Tensor, residual: Tensor) -> Tensor:
    """A module's state after its shared_head.norm, which its head and the next module read."""
    return weights.added_norm(branch, residual, f"draft.layers.{module}.shared_head_norm", config.rms_norm_eps)[0]


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
    num_modules = config.num_draft_modules(num_tokens)
    carried, shared = _extended(config, weights, num_modules, shifted, hidden, last_rows, rows, caches)
    proposals: list[Tensor] = []
    while True:
        module = len(proposals) % num_modules
        own = f"draft.layers.{module}.lm_head"
        proposals.append(weights.head_argmax(carried, own if own in weights else "target.lm_head", valid_vocab))
        step = len(proposals)
        if step == num_tokens:
            return torch.stack(proposals, dim=1)
        module = step % num_modules
        positions = next_positions if step == 1 else next_positions + (step - 1)
        step_rows = Rows(positions, request_ids, rows.block_table)
        listed = shared[module]
        branch, residual, _ = _draft_layer(config, weights, module, proposals[-1], carried, step_rows, caches, listed)
        carried = _normed(config, weights, module, branch, residual)


def _extended(
    config: ModelConfig,
    weights: Weights,
    num_modules: int,
    shifted: Tensor,
    hidden: Tensor,
    last_rows: Tensor,
    rows: Rows,
    caches: Caches,
) -> tuple[Tensor, list[Tensor | None]]:
    """All modules on the verified rows: module 0's normed state at the last accepted rows, and each module's list there.

    The lists are None where every step selects for itself.
    """
    first: Tensor | None = None
    lists: list[Tensor | None] = []
    for module in range(num_modules):
        # Of the verified rows only the last accepted one proposes anything; the others are there for their cache entries, so
        # unless another module reads their states they stop before the output projection and the experts, which are most of
        # the layer's weights.
        kept = last_rows if module == num_modules - 1 else None
        branch, residual, selection = _draft_layer(config, weights, module, shifted, hidden, rows, caches, None, kept)
        share = config.index_share_for_mtp_iteration
        lists.append(torch.index_select(selection, 0, last_rows) if share else None)
        hidden = _normed(config, weights, module, branch, residual)
        if first is None:
            first = hidden if kept is not None else torch.index_select(hidden, 0, last_rows)
    assert first is not None, "drafting needs a module"
    return first, lists
