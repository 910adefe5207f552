"""What runs on the card before and after a step: the plugin library's launches that hand a call's results to the next one.

In: the plugin library of an engine, and the addresses of arrays on the card by name. Out: queued launches; the arrays are those
of `glm_mtp_export.runtime.ahead` and `histories`, which are their references. Without penalties there are no histories. A launch
that fails raises `EngineError` with the library's words.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path

from glm_mtp_export.errors import EngineError
from glm_mtp_export.runtime.cuda import Stream
from glm_mtp_export.runtime.histories import DENSE_INPUTS
from glm_mtp_export.runtime.session import HISTORY_FIELDS
from glm_mtp_export.runtime.thinking import ThinkingIds

__all__ = ["CARRY_NAMES", "HISTORY_NAMES", "RESULT_NAMES", "STATE_NAMES", "StepKernels"]

# Arrays by name, in the order of the header; their types are those of the step graph, of `StepInputs` and of `ahead.Carry`.
STATE_NAMES = (
    "row_offsets",
    "token_ids",
    "draft_tokens",
    "cache_lengths",
    "sample_offset",
    "in_thinking_phase",
    "history_offsets",
    "output_counts",
)
RESULT_NAMES = ("num_accepted", "next_tokens", "next_draft_tokens")
CARRY_NAMES = ("num_accepted", "next_tokens", "draft_tokens", "in_thinking_phase", "committed_tokens")
HISTORY_NAMES = (*HISTORY_FIELDS, *DENSE_INPUTS)
Addresses = Mapping[str, int]


def _pointers(names: tuple[str, ...]) -> list[tuple[str, type]]:
    return [(name, ctypes.c_void_p) for name in names]


class _State(ctypes.Structure):
    """GlmStepState."""

    _fields_ = (*_pointers(STATE_NAMES), *((n, ctypes.c_int32) for n in ("num_requests", "draft_width", "vocab_size")))


class _Results(ctypes.Structure):
    """GlmStepResults."""

    _fields_ = (*_pointers(RESULT_NAMES), *((name, ctypes.c_int32) for name in ("think", "think_end", "tool_call")))


class _Carry(ctypes.Structure):
    """GlmCarry."""

    _fields_ = _pointers(CARRY_NAMES)


class _Histories(ctypes.Structure):
    """GlmHistories."""

    _fields_ = (*_pointers(HISTORY_NAMES), ("num_requests", ctypes.c_int32), ("vocab_size", ctypes.c_int32))


class StepKernels:
    """The launches for steps with `draft_width` columns of drafts, so many tokens, and these thinking markers."""

    def __init__(self, library: Path, draft_width: int, vocab_size: int, ids: ThinkingIds) -> None:
        self._library = ctypes.CDLL(str(library.resolve()))
        self._draft_width, self._vocab_size = draft_width, vocab_size
        markers = {"think": ids.begin, "think_end": ids.end, "tool_call": ids.tool_call}
        self._markers = {name: -1 if token is None else token for name, token in markers.items()}
        try:
            self._follow, self._carry = self._library.glm_mtp_follow_step, self._library.glm_mtp_carry_step
            self._spread = self._library.glm_mtp_spread_histories
            self._library.glm_mtp_step_ahead_last_error.restype = ctypes.c_char_p
        except AttributeError as error:
            raise EngineError(
                f"{library}: the plugin library is of an older release ({error}). Build this release's with "
                "'glm-mtp build-plugins', then the engine with 'glm-mtp build-engine'."
            ) from error

    def spread(self, histories: Addresses, num_requests: int, stream: Stream) -> None:
        """Queue filling rows of zeros from lists of ids; a list that is not there is empty."""
        found = _Histories(**histories, num_requests=num_requests, vocab_size=self._vocab_size)
        self._check(self._spread(ctypes.byref(found), _queue(stream)))

    def follow(self, state: Addresses, num_requests: int, follows: int, carry: Addresses, stream: Stream) -> None:
        """Queue putting what the step before left into the inputs at `state`, where `follows` [num_requests] names a request."""
        arrays = ctypes.byref(self._state(state, num_requests))
        self._check(self._follow(arrays, ctypes.c_void_p(follows), ctypes.byref(_Carry(**carry)), _queue(stream)))

    def carry(self, state: Addresses, num_requests: int, results: Addresses, carry: Addresses, stream: Stream) -> None:
        """Queue keeping a step's results at `carry` for the next one; without `next_draft_tokens` proposals are 0."""
        arrays, found = ctypes.byref(self._state(state, num_requests)), _Results(**results, **self._markers)
        self._check(self._carry(arrays, ctypes.byref(found), ctypes.byref(_Carry(**carry)), _queue(stream)))

    def _state(self, addresses: Addresses, num_requests: int) -> _State:
        return _State(
            **addresses, num_requests=num_requests, draft_width=self._draft_width, vocab_size=self._vocab_size
        )

    def _check(self, status: int) -> None:
        if status:
            words = (self._library.glm_mtp_step_ahead_last_error() or b"").decode(errors="replace")
            raise EngineError(f"the launch around a step failed ({status}): {words}.")


def _queue(stream: Stream) -> ctypes.c_void_p:
    return ctypes.c_void_p(stream.handle)
