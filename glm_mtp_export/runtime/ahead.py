"""What a call hands to the next one when the host has not seen its results: the reference, and a session that follows it.

A decode row of the next call depends on this call in six values: the token to feed, the drafts to verify, how long the caches are,
how many tokens are out, whether the model still thinks, and which tokens penalties count. `Carry` holds them for every request of
a call; `followed` puts them into inputs that were made for "no draft accepted". A card does the same with `glm_carry_step` and
`glm_follow_step`, between two calls in its queue. A request whose logits held a NaN (`next_tokens == -1`) feeds token 0, since its
row is void anyway.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from glm_mtp_export.runtime.histories import extended
from glm_mtp_export.runtime.session import MAX_IN_FLIGHT, Int32, SessionOver, StepInputs, StepOutputs, StepSession
from glm_mtp_export.runtime.thinking import ThinkingIds, ThinkingPhase

__all__ = ["Carry", "HostAheadSession", "carried", "followed"]


@dataclass(frozen=True)
class Carry:
    """Of B requests after a call."""

    num_accepted: Int32  # [B]
    next_tokens: Int32  # [B]
    draft_tokens: Int32  # [B, W], the new proposals
    in_thinking_phase: NDArray[np.bool_]  # [B], after the committed tokens
    committed_tokens: Int32  # [B, W+1], accepted drafts and the token after them, then -1


def carried(inputs: StepInputs, outputs: StepOutputs, ids: ThinkingIds) -> Carry:
    """What the call with these inputs and outputs hands on. Counts out of range, which end their request, are clipped."""
    is_open = inputs.in_thinking_phase.copy()
    num_accepted = np.clip(outputs.num_accepted, 0, inputs.num_drafts)
    committed = np.full((inputs.num_requests, inputs.draft_tokens.shape[1] + 1), -1, dtype=np.int32)
    for b, accepted in enumerate(num_accepted):
        committed[b, :accepted] = inputs.draft_tokens[b, :accepted]
        committed[b, accepted] = outputs.next_tokens[b]
        phase = ThinkingPhase(ids)
        phase.is_open = bool(is_open[b])
        phase.advance_all(committed[b, : accepted + 1].tolist())
        is_open[b] = phase.is_open
    drafts = outputs.next_draft_tokens if outputs.next_draft_tokens is not None else np.zeros_like(inputs.draft_tokens)
    return Carry(num_accepted, outputs.next_tokens, drafts, is_open, committed)


def followed(inputs: StepInputs, follows: Int32, carry: Carry) -> StepInputs:
    """`inputs` with the values of request follows[b] of the call before in every request b that continues one."""
    rows = np.flatnonzero(follows >= 0)
    before = follows[rows]
    token_ids, drafts = inputs.token_ids.copy(), inputs.draft_tokens.copy()
    lengths, offsets, is_open = (
        inputs.cache_lengths.copy(),
        inputs.sample_offset.copy(),
        inputs.in_thinking_phase.copy(),
    )
    token_ids[inputs.row_offsets[rows]] = np.maximum(carry.next_tokens[before], 0)
    drafts[rows] = carry.draft_tokens[before]
    lengths[rows] += carry.num_accepted[before]
    offsets[rows] += carry.num_accepted[before]
    is_open[rows] = carry.in_thinking_phase[before]
    found = {
        int(b): carry.committed_tokens[j][carry.committed_tokens[j] >= 0].tolist()
        for b, j in zip(rows, before, strict=True)
    }
    return replace(
        extended(inputs, found),
        token_ids=token_ids,
        draft_tokens=drafts,
        cache_lengths=lengths,
        sample_offset=offsets,
        in_thinking_phase=is_open,
    )


class HostAheadSession(SessionOver[StepSession]):
    """Launches ahead on any session, one call after the other on the caller's thread: what the engine must keep to, on a CPU."""

    def __init__(self, session: StepSession) -> None:
        super().__init__(session)
        self._ids = ThinkingIds.of(session.manifest.thinking_token_ids)
        self._needs_mask = any(spec.name == "token_bitmask" for spec in session.manifest.inputs)
        self._queue: deque[tuple[StepInputs, Int32 | None]] = deque()
        self._before: tuple[StepInputs, StepOutputs] | None = None

    def launch(self, inputs: StepInputs, follows: Int32 | None = None) -> None:
        """Queue a call."""
        if len(self._queue) == MAX_IN_FLIGHT:
            raise RuntimeError(f"{MAX_IN_FLIGHT} calls are in flight; collect one first")
        self._queue.append((inputs, follows))

    def supply_bitmask(self, token_bitmask: Int32) -> None:
        """Give the queued call its mask."""
        if len(self._queue) != 1 or self._queue[-1][0].token_bitmask is not None:
            raise RuntimeError("no call waits for a mask, or one before it is not collected")
        inputs, follows = self._queue.pop()
        self._queue.append((replace(inputs, token_bitmask=token_bitmask), follows))

    def collect(self) -> StepOutputs:
        """Run the oldest queued call."""
        inputs, follows = self._queue.popleft()
        if self._needs_mask and inputs.token_bitmask is None:
            raise RuntimeError("the call has no token_bitmask; supply it before collecting")
        if follows is not None:
            assert self._before is not None
            inputs = followed(inputs, follows, carried(*self._before, self._ids))
        outputs = self._session.run(inputs)
        self._before = inputs, outputs
        return outputs

    def run(self, inputs: StepInputs) -> StepOutputs:
        """One call, nothing in flight."""
        self.launch(inputs)
        return self.collect()

    def close(self) -> None:
        """Close the session behind it."""
        self._queue.clear()
        self._session.close()
