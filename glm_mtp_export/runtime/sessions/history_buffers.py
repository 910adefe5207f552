"""Histories and biases of a call on the card: token ids on their way there, and the rows of the vocabulary that they become.

In: `StepInputs.history_ids` and `bias_ids` with their offsets. Out: `output_counts`, `prompt_mask` and `logit_bias` [B, V], zeros
but where a request asks for something. The ids go through pinned memory of `MAX_IN_FLIGHT` turns, as the small inputs do, that
grows as needed; the rows are cleared and filled again for every call in which some request asks, and left alone while none does.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from glm_mtp_export.artifact import Manifest
from glm_mtp_export.runtime.cuda import DeviceBuffer, PinnedBuffer, Stream
from glm_mtp_export.runtime.histories import DENSE_INPUTS
from glm_mtp_export.runtime.session import MAX_IN_FLIGHT, StepInputs
from glm_mtp_export.runtime.sessions.step_layout import CallSizes

__all__ = ["HistoryBuffers"]

_LISTS = ("history_ids", "bias_ids", "bias_values")
_ELEMENT_BYTES = 4  # of lists and rows
_FIRST_BYTES = 1 << 18


class HistoryBuffers:
    """Of an artifact with penalties. What may go wrong: a turn used again before its call is collected."""

    def __init__(self, manifest: Manifest, largest: CallSizes) -> None:
        self._row_bytes = _ELEMENT_BYTES * manifest.config.vocab_size
        self._rows = {name: DeviceBuffer(largest.num_requests * self._row_bytes) for name in DENSE_INPUTS}
        self._turns = [PinnedBuffer(_FIRST_BYTES) for _ in range(MAX_IN_FLIGHT)]
        self._lists = DeviceBuffer(_FIRST_BYTES)
        self._num_clear = 0  # so many requests' rows are zeros

    @property
    def rows(self) -> Mapping[str, int]:
        """Addresses of the three inputs; fixed."""
        return {name: buffer.address for name, buffer in self._rows.items()}

    def put(self, turn: int, inputs: StepInputs, num_requests: int, stream: Stream) -> Mapping[str, int] | None:
        """Queue that the rows of so many requests are zeros, and the copies of a call's lists; gives their addresses, or None when
        nobody asks for anything."""
        lists = {name: value for name in _LISTS if (value := getattr(inputs, name)) is not None and value.size}
        if not lists:
            if num_requests > self._num_clear:
                self._clear(num_requests, stream)
            return None
        self._clear(num_requests, stream)
        self._num_clear = 0
        num_bytes = sum(value.nbytes for value in lists.values())
        self._make_room(turn, num_bytes, stream)
        addresses, end = {}, 0
        for name, value in lists.items():
            self._stage(turn, end, value)
            addresses[name] = self._lists.address + end
            end += value.nbytes
        self._lists.upload(self._turns[turn], num_bytes, stream)
        return addresses

    def _clear(self, num_requests: int, stream: Stream) -> None:
        for buffer in self._rows.values():
            buffer.fill(0, num_requests * self._row_bytes, stream)
        self._num_clear = num_requests

    def _stage(self, turn: int, offset: int, value: NDArray[np.generic]) -> None:
        self._turns[turn].view[offset : offset + value.nbytes] = np.ascontiguousarray(value).view(np.uint8)

    def _make_room(self, turn: int, num_bytes: int, stream: Stream) -> None:
        if num_bytes > self._turns[turn].view.nbytes:
            self._turns[turn].close()  # its last call is collected
            self._turns[turn] = PinnedBuffer(2 * num_bytes)
        if num_bytes > self._lists.num_bytes:
            stream.synchronize()  # a call before may still read the lists
            self._lists.close()
            self._lists = DeviceBuffer(2 * num_bytes)

    def close(self) -> None:
        """Free all."""
        for buffer in (*self._rows.values(), self._lists):
            buffer.close()
        for turn in self._turns:
            turn.close()
