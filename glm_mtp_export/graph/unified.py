"""The unified step: verify the drafts, accept, propose new ones; one graph, no host decision inside."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from glm_mtp_export import ops
from glm_mtp_export.artifact import CACHE_NAMES
from glm_mtp_export.config import ModelConfig, ParallelConfig, SpeculationConfig
from glm_mtp_export.errors import ConfigError
from glm_mtp_export.graph.attention import Caches, Rows
from glm_mtp_export.graph.draft import draft_tokens
from glm_mtp_export.graph.target import target_hidden
from glm_mtp_export.graph.weights import Weights

__all__ = ["UnifiedStep"]


class UnifiedStep(torch.nn.Module):
    """One call of the step graph; inputs and outputs are those of `artifact.step_inputs` and `artifact.step_outputs`.

    valid_vocab: length of the tokenizer; logits beyond it are -inf in target and draft. thinking_end_ids: tokens that end the
    thinking phase, for relaxed acceptance. parallel: the weights passed in are one rank's slices, and inputs has `rank`.
    """

    def __init__(
        self,
        config: ModelConfig,
        speculation: SpeculationConfig,
        valid_vocab: int,
        thinking_end_ids: tuple[int, ...] = (),
        parallel: ParallelConfig | None = None,
    ) -> None:
        super().__init__()
        num_drafts = speculation.num_speculative_tokens
        if num_drafts and not config.num_nextn_predict_layers:
            raise ConfigError(
                "num_nextn_predict_layers is 0; drafting needs an MTP layer. Export with --num-speculative-tokens 0."
            )
        if config.num_draft_modules(num_drafts) > 1 and not config.index_share_for_mtp_iteration:
            raise ConfigError(
                f"num_nextn_predict_layers is {config.num_nextn_predict_layers} and index_share_for_mtp_iteration is "
                "false: a step would select among positions that only other modules have written. Export with "
                "--num-speculative-tokens 1, which runs the first module alone, or 0."
            )
        self.config, self.speculation, self.parallel = config, speculation, parallel or ParallelConfig()
        self.valid_vocab, self.thinking_end_ids = valid_vocab, list(thinking_end_ids) or [-1]

    def forward(self, inputs: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run the step; caches come back as `<name>_out` and are new versions, not copies of a guess."""
        config, speculation = self.config, self.speculation
        scope = Weights(weights, self.parallel, inputs.get("rank"))
        pools = [name for name in inputs if name.partition(".")[0] in CACHE_NAMES]
        caches = Caches({name: inputs[name] for name in pools})
        row_token_ids, positions, row_requests, logit_rows = ops.step_rows(
            inputs["token_ids"],
            inputs["row_offsets"],
            inputs["num_drafts"],
            inputs["draft_tokens"],
            inputs["cache_lengths"],
            speculation.num_slots,
        )
        rows = Rows(positions, row_requests, inputs["block_table"])
        hidden = target_hidden(config, scope, row_token_ids, rows, caches)
        logits = scope.head_logits(hidden, logit_rows, self.valid_vocab)
        outputs, committed = self._accepted(inputs, logits)
        if speculation.num_speculative_tokens:
            shifted, last_rows, next_positions, request_ids = ops.shift_rows(
                row_token_ids,
                inputs["row_offsets"],
                inputs["num_drafts"],
                outputs["num_accepted"],
                committed,
                inputs["next_prompt_token"],
                inputs["cache_lengths"],
            )
            outputs["next_draft_tokens"] = draft_tokens(
                config,
                scope,
                shifted,
                hidden,
                last_rows,
                next_positions,
                request_ids,
                rows,
                caches,
                speculation.num_speculative_tokens,
                self.valid_vocab,
            )
        if speculation.num_logprobs >= 0:
            chosen, top_ids, top_logprobs = ops.token_logprobs(logits, committed, speculation.num_logprobs)
            outputs["committed_logprobs"] = chosen
            if speculation.num_logprobs:
                outputs |= {"top_ids": top_ids, "top_logprobs": top_logprobs}
        return outputs | {f"{name}_out": caches[name] for name in pools}

    def _accepted(self, inputs: Mapping[str, Tensor], logits: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Acceptance on float32 logits [B * slots, V]: the two outputs, and the committed tokens [B, slots]."""
        speculation = self.speculation
        if speculation.enable_penalties:
            names = ("presence_penalty", "frequency_penalty", "repetition_penalty")
            state = ("output_counts", "prompt_mask", "logit_bias")
            given = (inputs[name] for name in (*names, *state))
            logits = ops.penalties(logits, inputs["draft_tokens"], *given, speculation.num_slots)
        if speculation.enable_structured_output:
            # The device dialect has these two as inputs; elsewhere a mask is always there before the step begins.
            known = torch.zeros(1, dtype=torch.int32, device=logits.device)
            turn, ready = (inputs.get(name, known) for name in ("mask_turn", "mask_ready"))
            logits = ops.mask_logits(logits, inputs["token_bitmask"], turn, ready)
        relaxed = speculation.use_relaxed_acceptance_for_thinking
        num_accepted, next_tokens, committed = ops.accept(
            logits,
            inputs["draft_tokens"],
            inputs["num_drafts"],
            inputs["temperature"],
            inputs["top_k"],
            inputs["top_p"],
            inputs["min_p"],
            inputs["seed"],
            inputs["sample_offset"],
            inputs["in_thinking_phase"],
            inputs["relaxed_delta"] if relaxed else torch.zeros(1, device=logits.device),
            speculation.num_slots,
            speculation.relaxed_topk if relaxed else 0,
            self.thinking_end_ids,
        )
        return {"num_accepted": num_accepted, "next_tokens": next_tokens}, committed
