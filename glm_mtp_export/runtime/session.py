"""The step contract between the engine on the host and whatever runs the step graph.

In: `StepInputs`, host arrays of one call (architecture of the graph: `glm_mtp_export.artifact.step_inputs`). Out:
`StepOutputs`. A session owns the four paged caches; the host only names pages and lengths. What may go wrong: a
session that cannot run raises `EngineError`; a NaN in one request is no error of the call but `next_tokens == -1` for
that request.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Generic, Protocol, TypeGuard, TypeVar

import numpy as np
from numpy.typing import NDArray

from glm_mtp_export.artifact import Manifest

__all__ = [
    "HISTORY_FIELDS",
    "MAX_IN_FLIGHT",
    "AheadSession",
    "SessionOver",
    "StepInputs",
    "StepOutputs",
    "StepSession",
    "can_launch_ahead",
]

HISTORY_FIELDS = (
    "history_ids",
    "history_offsets",
    "history_prompts",
    "bias_ids",
    "bias_values",
    "bias_offsets",
)
MAX_IN_FLIGHT = 2  # calls launched and not collected: one that runs, one queued behind it

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]


@dataclass(frozen=True)
class StepInputs:
    """Host arrays of one call: B requests, T rows, P pages a request, W = max(K, 1). Optional ones follow the
    manifest."""

    token_ids: Int32  # [T]
    row_offsets: Int32  # [B+1]
    num_drafts: Int32  # [B]
    draft_tokens: Int32  # [B, W]
    cache_lengths: Int32  # [B]
    block_table: Int32  # [B, P]; unused entries name page 0
    next_prompt_token: Int32  # [B]; -1: use the sampled one
    temperature: Float32  # [B]
    top_k: Int32  # [B]
    top_p: Float32  # [B]
    min_p: Float32  # [B]
    seed: NDArray[np.int64]  # [B]
    sample_offset: Int32  # [B]
    in_thinking_phase: NDArray[np.bool_]  # [B]
    relaxed_delta: Float32 | None = None  # [1]
    token_bitmask: Int32 | None = None  # [B, K+1, ceil(V/32)]
    presence_penalty: Float32 | None = None  # [B]
    frequency_penalty: Float32 | None = None  # [B]
    repetition_penalty: Float32 | None = None  # [B]
    # What `output_counts`, `prompt_mask` and `logit_bias` [B, V] of a graph with penalties are made of; see `histories`.
    history_ids: Int32 | None = None  # [H], prompt and output of the requests with penalties, one after another
    history_offsets: Int32 | None = None  # [B+1]
    history_prompts: Int32 | None = None  # [B], so many of a request's are its prompt
    bias_ids: Int32 | None = None  # [N], one request after another
    bias_values: Float32 | None = None  # [N], added to the logits of bias_ids
    bias_offsets: Int32 | None = None  # [B+1]

    @property
    def num_requests(self) -> int:
        """Requests in the call."""
        return len(self.num_drafts)

    def feeds(self) -> dict[str, NDArray[np.generic]]:
        """Arrays by graph input name, absent ones and those that histories make left out."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in HISTORY_FIELDS}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class StepOutputs:
    """Host arrays a call gives back."""

    num_accepted: Int32  # [B]
    next_tokens: Int32  # [B]; -1: NaN in this request
    next_draft_tokens: Int32 | None = None  # [B, K]
    committed_logprobs: Float32 | None = None  # [B, K+1]
    top_ids: Int32 | None = None  # [B, K+1, n]
    top_logprobs: Float32 | None = None  # [B, K+1, n]


class StepSession(Protocol):
    """A loaded step graph with its caches. Not safe to call from two threads at once."""

    @property
    def manifest(self) -> Manifest:
        """What the graph is."""

    @property
    def num_pages(self) -> int:
        """Pages of each of the four pools."""

    def run(self, inputs: StepInputs) -> StepOutputs:
        """One call; the caches change in place."""

    def close(self) -> None:
        """Give the memory back; further calls are a bug."""


class AheadSession(StepSession, Protocol):
    """A session that takes a call before the results of the one before it are known on the host."""

    def launch(self, inputs: StepInputs, follows: Int32 | None = None) -> None:
        """Queue a call; at most MAX_IN_FLIGHT may be uncollected.

        `follows` [B]: where it is j >= 0, request b continues request j of the call launched just before: the session puts in
        what that call found (`glm_mtp_export.runtime.ahead.followed`), and the arrays hold the values for no draft accepted. In a
        structured-output build `token_bitmask` None means that `supply_bitmask` gives it.
        """

    def supply_bitmask(self, token_bitmask: Int32) -> None:
        """The mask [B, K+1, words] of the call launched last, once those before it are collected."""

    def collect(self) -> StepOutputs:
        """Wait for the oldest uncollected call."""


def can_launch_ahead(session: StepSession) -> TypeGuard[AheadSession]:
    """True when calls of this session may be launched before the results of the one before are known."""
    return hasattr(session, "launch")


_Inner = TypeVar("_Inner", bound=StepSession)


class SessionOver(Generic[_Inner]):
    """Base of a session that runs another one's graph: it is what the other one is."""

    def __init__(self, session: _Inner) -> None:
        self._session = session

    @property
    def manifest(self) -> Manifest:
        """What the graph is."""
        return self._session.manifest

    @property
    def num_pages(self) -> int:
        """Pages of each of the pools."""
        return self._session.num_pages
