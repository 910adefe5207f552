"""The choices that other stacks make differently, as lines of the manifest."""

from __future__ import annotations

from glm_mtp_export.config import ModelConfig, SpeculationConfig

__all__ = ["semantic_choices"]


def semantic_choices(config: ModelConfig, speculation: SpeculationConfig, vocabulary_size: int) -> dict[str, str]:
    """Choice by name; the wording is part of the manifest and changes only with the behaviour."""
    drafts = speculation.num_speculative_tokens
    relaxed = speculation.use_relaxed_acceptance_for_thinking
    num_modules = config.num_draft_modules(drafts)
    several = {
        "draft_modules": (
            f"draft step j runs module j mod {num_modules}, with its own caches and list. Over the verified rows every module "
            "runs: module i reads module i - 1's normed state and, like module 0, the token after the row"
        )
    }
    return (several if num_modules > 1 else {}) | {
        "acceptance": "a draft is accepted if it equals the target's sample at its position; lossless, no draft probabilities",
        "relaxed_acceptance": (
            f"in the thinking phase, temperature >= 1e-5: top {speculation.relaxed_topk} and p >= p1 - delta, untempered; "
            "a rejection recovers the argmax; strict from the end marker on, itself included"
            if relaxed
            else "off"
        ),
        "random_draws": "hash of (seed, output position); the same with and without speculation, whatever the batch",
        "sampling_order": "temperature, top-k, top-p, min-p; ties keep lower ids; inverse CDF in vocabulary order",
        "greedy": "temperature below 1e-5: argmax, ties to the lowest id",
        "shifted_tokens": "where(rejected, recovered, draft); the bonus token after the last draft",
        "draft_hidden_state": "normed: target after its final norm, draft after shared_head.norm",
        "eh_proj_order": "embedding half first",
        "position_zero_embedding": "not zeroed",
        "draft_position": "the row of hidden state h_p sits at position p",
        "draft_selection": (
            "none"
            if not drafts
            else "own indexer at step 0, list of the last accepted row reused"
            if config.index_share_for_mtp_iteration
            else "own indexer at every step, own key included"
        ),
        "rejected_entries": "not rolled back; the next call overwrites them before it reads",
        "latent_norm_eps": "1e-6 for q_a and kv_a, whatever rms_norm_eps is",
        "index_key_norm": "LayerNorm with bias, eps 1e-6",
        "index_rope": "interleaved" if config.indexer_rope_interleave else "halves",
        "cached_rotated_lanes": "in place, pairs adjacent" if config.rope_interleave else "in place, halves",
        "selection_ties": "lower position first; list ascending, -1 in unused slots",
        "router": "fp32 scores and bias; bias for choosing only",
        "masked_vocabulary": f"ids from {vocabulary_size} on are -inf in target and draft",
        "chunk_border": "the draft embeds the true next prompt token (next_prompt_token)",
        "nan": "a NaN in a request's logits gives next_tokens -1 for that request alone",
    }
