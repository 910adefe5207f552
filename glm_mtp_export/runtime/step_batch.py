"""From scheduled rows to the arrays of one call.

In: rows with their pages. Out: `StepInputs`; for rows that continue an unseen one, the values for "no draft accepted",
which the session corrects, and no masks where they depend on unseen tokens. Only arrays the artifact's graph has are
filled; penalties and biases are told as the token ids they are about, and only when the graph was compiled for them.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import numpy as np

from glm_mtp_export.artifact import PAGE_SIZE, Manifest
from glm_mtp_export.runtime.histories import bias_fields, history_fields
from glm_mtp_export.runtime.masks import TokenMasks, is_restricted
from glm_mtp_export.runtime.paging import slots_needed
from glm_mtp_export.runtime.sampling import BAN_BIAS, Capabilities
from glm_mtp_export.runtime.scheduler import ScheduledRow
from glm_mtp_export.runtime.session import Int32, StepInputs

__all__ = ["StepBatcher"]

_NONE = np.zeros(0, dtype=np.int32)


class StepBatcher:
    """Builds the inputs of every call for one artifact."""

    def __init__(self, manifest: Manifest, capabilities: Capabilities) -> None:
        self._speculation = manifest.speculation
        self._capabilities = capabilities
        self._num_drafts = manifest.speculation.num_speculative_tokens
        self._masks = TokenMasks(capabilities) if capabilities.has_token_bitmask else None
        delta = self._speculation.relaxed_delta
        relaxed = self._speculation.use_relaxed_acceptance_for_thinking
        self._relaxed_delta = np.array([delta], dtype=np.float32) if relaxed else None

    def inputs(self, rows: Items[ScheduledRow]) -> StepInputs:
        """Arrays of one call; row b of each belongs to rows[b]."""
        token_ids, row_offsets, next_prompt_token = self._fed_tokens(rows)
        sequences = [row.sequence for row in rows]
        params = [s.params for s in sequences]
        drafts = np.zeros((len(rows), self._speculation.draft_width), dtype=np.int32)
        for b, row in enumerate(rows):
            if row.num_drafts and row.follows < 0:
                drafts[b, : row.num_drafts] = row.sequence.drafts[: row.num_drafts]
        return StepInputs(
            token_ids=token_ids,
            row_offsets=row_offsets,
            num_drafts=np.array([row.num_drafts for row in rows], dtype=np.int32),
            draft_tokens=drafts,
            cache_lengths=np.array([row.start for row in rows], dtype=np.int32),
            block_table=self._block_table(rows),
            next_prompt_token=next_prompt_token,
            temperature=np.array([p.temperature for p in params], dtype=np.float32),
            top_k=np.array([p.top_k for p in params], dtype=np.int32),
            top_p=np.array([p.top_p for p in params], dtype=np.float32),
            min_p=np.array([p.min_p for p in params], dtype=np.float32),
            seed=np.array([s.seed for s in sequences], dtype=np.int64),
            sample_offset=np.array([s.planned_output for s in sequences], dtype=np.int32),
            in_thinking_phase=np.array([s.phase.is_open for s in sequences], dtype=np.bool_),
            relaxed_delta=self._relaxed_delta,
            token_bitmask=None if self._masks is None or self._bitmask_waits(rows) else self._masks.bitmask(rows),
            **self._penalties(rows),
        )

    def _bitmask_waits(self, rows: Items[ScheduledRow]) -> bool:
        """True when a mask depends on tokens that are not known yet."""
        return self._masks is not None and any(row.follows >= 0 and is_restricted(row) for row in rows)

    def bitmask(self, rows: Items[ScheduledRow]) -> Int32:
        """The masks of a call that was launched without them, now that its sequences have caught up."""
        assert self._masks is not None
        return self._masks.bitmask(rows)

    def _fed_tokens(self, rows: Items[ScheduledRow]) -> tuple[Int32, Int32, Int32]:
        tokens: list[int] = []
        offsets = [0]
        following = []
        for row in rows:
            sequence = row.sequence
            start = row.start
            end = start + row.num_tokens
            tokens += sequence.token_ids[start:end] if row.follows < 0 else [0]
            if row.num_drafts:
                tokens += [0] * row.num_drafts
            offsets.append(len(tokens))
            following.append(sequence.token_ids[end] if end < len(sequence.token_ids) else -1)
        return (
            np.array(tokens, dtype=np.int32),
            np.array(offsets, dtype=np.int32),
            np.array(following, dtype=np.int32),
        )

    def _block_table(self, rows: Items[ScheduledRow]) -> Int32:
        widths = [
            -(-slots_needed(r.most_start, r.num_tokens, r.num_drafts, self._num_drafts) // PAGE_SIZE) for r in rows
        ]
        table = np.zeros((len(rows), max(widths)), dtype=np.int32)
        for b, row in enumerate(rows):
            table[b, : widths[b]] = row.sequence.page_row[: widths[b]]
        return table

    def _penalties(self, rows: Items[ScheduledRow]) -> dict[str, Any]:
        """Inputs of a build with penalties."""
        if not self._capabilities.has_penalties:
            return {}
        sequences = [row.sequence for row in rows]
        params = [s.params for s in sequences]
        arrays: dict[str, Any] = {}
        for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
            arrays[name] = np.array([getattr(p, name) for p in params], dtype=np.float32)
        ids = [s.known_ids() if s.params.has_penalties else _NONE for s in sequences]
        arrays |= history_fields(ids, [s.num_prompt for s in sequences])
        # A mask bans where there is one: a grammar may overrule it there, and a row of nothing but -inf could not be sampled.
        ban = 0.0 if self._capabilities.has_token_bitmask else -np.inf
        biases = [{t: ban if v <= BAN_BIAS else v for t, v in p.logit_bias.items()} for p in params]
        return arrays | bias_fields(biases)
