"""The memory of a call on its way to the card and back: what is staged where, and what need not be copied.

In: the artifact's manifest and the sizes of the largest call. Out: `CallBuffers`. Small inputs travel as one block, results as
another, through pinned memory of `MAX_IN_FLIGHT` turns, so that a call can be staged while the one before it waits for the card.
Masks (`LARGE_INPUTS`), which most calls leave as they are, and histories (`history_buffers`) have buffers of their own. Buffers on
the card are single: the queue of the card keeps calls apart.

What may go wrong: a turn staged again before its call is collected would be overwritten under the copy; the session sees to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from glm_mtp_export.artifact import Manifest, TensorSpec
from glm_mtp_export.runtime.cuda import DeviceBuffer, Event, PinnedBuffer, Stream
from glm_mtp_export.runtime.histories import DENSE_INPUTS
from glm_mtp_export.runtime.session import MAX_IN_FLIGHT, Int32, StepInputs
from glm_mtp_export.runtime.sessions.history_buffers import HistoryBuffers
from glm_mtp_export.runtime.sessions.step_kernels import CARRY_NAMES, RESULT_NAMES, STATE_NAMES
from glm_mtp_export.runtime.sessions.step_layout import CallSizes, StepLayout, padded

__all__ = ["LARGE_INPUTS", "Binding", "CallBuffers", "CallLayout", "LargeInput"]

# Inputs with a bit for every request, slot and token, with the byte that fills one that asks for nothing: all tokens allowed.
LARGE_INPUTS: Mapping[str, int] = {"token_bitmask": 0xFF}
_FOLLOWS = TensorSpec("follows", "int32", ("B",), "request of the call before that this one continues; -1: none")
_HISTORIES = tuple(
    TensorSpec(name, "int32", (extent,), "of the lists in HistoryBuffers")
    for name, extent in (("history_offsets", "B+1"), ("history_prompts", "B"), ("bias_offsets", "B+1"))
)
_TICKET_BYTES = 4


@dataclass(frozen=True)
class CallLayout:
    """Places of a call: inputs in the block, large inputs at their buffers' starts, results in their block."""

    sizes: CallSizes
    inputs: StepLayout
    large: Mapping[str, tuple[int, ...]]  # shapes
    outputs: StepLayout


@dataclass(frozen=True)
class Binding:
    """Where the engine finds an input of a call, or puts a result (no shape)."""

    name: str
    address: int
    shape: tuple[int, ...] | None = None


class LargeInput:
    """A mask on the card. Rows of a bucket beyond the call's ask for nothing."""

    def __init__(self, spec: TensorSpec, largest: CallSizes) -> None:
        self._dtype, self._byte = np.dtype(spec.dtype), LARGE_INPUTS[spec.name]
        num_bytes = StepLayout.of([spec], largest).num_bytes
        self._device, self._staging, self._copied = DeviceBuffer(num_bytes), PinnedBuffer(num_bytes), Event()
        self._neutral_bytes = 0  # so many at the start hold the byte that asks for nothing

    @property
    def address(self) -> int:
        """On the card."""
        return self._device.address

    def put(self, value: NDArray[np.generic], shape: tuple[int, ...], stream: Stream) -> None:
        """Queue that the card holds `value`, widened to `shape`."""
        if not self._is_neutral(value):
            self._copy(value, shape, stream)
        elif (num_bytes := self._num_bytes(shape)) > self._neutral_bytes:
            self._device.fill(self._byte, num_bytes, stream)
            self._neutral_bytes = num_bytes

    def put_late(self, value: NDArray[np.generic], shape: tuple[int, ...], stream: Stream) -> None:
        """The same while a kernel waits for it on another stream: always a copy, since a kernel, which fills memory, might have
        to be loaded first, and loading may wait for the card."""
        is_neutral = self._is_neutral(value)
        if is_neutral and self._num_bytes(shape) <= self._neutral_bytes:
            return
        self._copy(value, shape, stream)
        if is_neutral:
            self._neutral_bytes = self._num_bytes(shape)

    def _copy(self, value: NDArray[np.generic], shape: tuple[int, ...], stream: Stream) -> None:
        self._copied.synchronize()  # the last copy has left the staging memory
        num_bytes = self._num_bytes(shape)
        staged = self._staging.view[:num_bytes]
        staged.view(self._dtype).reshape(shape)[: len(value)] = value
        staged[value.nbytes :] = self._byte
        self._device.upload(self._staging, num_bytes, stream)
        self._copied.record(stream)
        self._neutral_bytes = 0

    def _num_bytes(self, shape: tuple[int, ...]) -> int:
        return int(np.prod(shape)) * self._dtype.itemsize

    def _is_neutral(self, value: NDArray[np.generic]) -> bool:
        """Only of a value that is repeated without memory, as `masks.constant` does: other arrays are not looked through."""
        fill = np.frombuffer(bytes([self._byte]) * self._dtype.itemsize, self._dtype)
        return not any(value.strides) and bool(value.flat[0] == fill[0])

    def close(self) -> None:
        """Free all."""
        self._device.close()
        self._staging.close()
        self._copied.close()


class _Turn:
    """Pinned memory of one call in flight, and the event behind its results."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        self.inputs, self.outputs, self.done = PinnedBuffer(num_inputs), PinnedBuffer(num_outputs), Event()

    def close(self) -> None:
        self.inputs.close()
        self.outputs.close()
        self.done.close()


class CallBuffers:
    """Owns them all. A call is laid out, staged in a turn, uploaded, run by the session, downloaded, and read."""

    def __init__(self, manifest: Manifest, largest: CallSizes) -> None:
        caches = {name for cache in manifest.caches for name in (cache.name, f"{cache.name}_out")}
        apart = {*caches, "mask_ready", *DENSE_INPUTS}
        inputs = [spec for spec in manifest.inputs if spec.name not in apart]
        has_penalties = any(spec.name in DENSE_INPUTS for spec in manifest.inputs)
        self._histories = HistoryBuffers(manifest, largest) if has_penalties else None
        self._vocab_size = manifest.config.vocab_size
        self._own = [_FOLLOWS, *(_HISTORIES if has_penalties else ())]  # of the session, not of the graph
        self._inputs = [*self._own, *(spec for spec in inputs if spec.name not in LARGE_INPUTS)]
        self._large_specs = [spec for spec in inputs if spec.name in LARGE_INPUTS]
        self._outputs = [spec for spec in manifest.outputs if spec.name not in caches]
        self.large = {spec.name: LargeInput(spec, largest) for spec in self._large_specs}
        num_inputs = StepLayout.of(self._inputs, largest).num_bytes
        num_outputs = StepLayout.of(self._outputs, largest).num_bytes
        self._turns = [_Turn(num_inputs, num_outputs) for _ in range(MAX_IN_FLIGHT)]
        self._block, self._results = DeviceBuffer(num_inputs), DeviceBuffer(num_outputs)
        by_name = {spec.name: spec for spec in inputs}
        width = manifest.speculation.draft_width
        by_name["committed_tokens"] = TensorSpec("committed_tokens", "int32", ("B", width + 1))
        self._carry = StepLayout.of(
            [by_name.get(name, TensorSpec(name, "int32", ("B",))) for name in CARRY_NAMES], largest
        )
        self._carried = DeviceBuffer(self._carry.num_bytes)
        has_ticket = any(spec.name == "mask_ready" for spec in manifest.inputs)
        self._mask_ready = DeviceBuffer(_TICKET_BYTES) if has_ticket else None
        self._layout_of = lru_cache(maxsize=64)(self._layout)

    def layout(self, sizes: CallSizes) -> CallLayout:
        """Places of a call; equal sizes have equal places."""
        return self._layout_of(sizes)

    def _layout(self, sizes: CallSizes) -> CallLayout:
        large = {n: p.shape for n, p in StepLayout.of(self._large_specs, sizes).places.items()}
        return CallLayout(sizes, StepLayout.of(self._inputs, sizes), large, StepLayout.of(self._outputs, sizes))

    # ---- addresses

    def bindings(self, layout: CallLayout) -> Iterator[Binding]:
        """Every input and result that the engine is given for a call."""
        own = {spec.name for spec in self._own}
        for name, place in layout.inputs.places.items():
            if name not in own:
                yield Binding(name, self._block.address + place.offset, place.shape)
        for name, address in (self._histories.rows if self._histories else {}).items():
            yield Binding(name, address, (layout.sizes.num_requests, self._vocab_size))
        for name, shape in layout.large.items():
            yield Binding(name, self.large[name].address, shape)
        if self._mask_ready is not None:
            yield Binding("mask_ready", self._mask_ready.address, (1,))
        for name, place in layout.outputs.places.items():
            yield Binding(name, self._results.address + place.offset)

    def state(self, layout: CallLayout) -> dict[str, int]:
        """Of the inputs that a call before has a say in."""
        places = layout.inputs.places
        found = {name: self._block.address + places[name].offset for name in STATE_NAMES if name in places}
        return found | ({"output_counts": self._histories.rows["output_counts"]} if self._histories else {})

    def follows(self, layout: CallLayout) -> int:
        """Which call before that is, for each request."""
        return self._block.address + layout.inputs.places[_FOLLOWS.name].offset

    def results(self, layout: CallLayout) -> dict[str, int]:
        """Of what a call hands on; without drafts there is no `next_draft_tokens`."""
        places = layout.outputs.places
        return {name: self._results.address + places[name].offset for name in RESULT_NAMES if name in places}

    @property
    def carry(self) -> dict[str, int]:
        """Of what lies there for the next call; the same for every call."""
        return {name: self._carried.address + place.offset for name, place in self._carry.places.items()}

    @property
    def mask_ready(self) -> int | None:
        """The last mask ticket that is there; None: this graph cannot wait for one."""
        return None if self._mask_ready is None else self._mask_ready.address

    # ---- copies

    def send(
        self,
        turn: int,
        layout: CallLayout,
        inputs: StepInputs,
        follows: Int32 | None,
        mask_turn: int,
        stream: Stream,
    ) -> Mapping[str, int] | None:
        """Queue the copies of a call's inputs. A mask that is not there comes later. Gives what the histories' rows are to be
        filled from, if a request has one."""
        feeds, num_requests = inputs.feeds(), inputs.num_requests
        none = np.full(num_requests, -1, dtype=np.int32)
        own = {_FOLLOWS.name: none if follows is None else follows, "mask_turn": _as_int32(mask_turn)}
        for spec in self._own[1:]:
            told = getattr(inputs, spec.name)
            own[spec.name] = np.zeros(num_requests + (spec.shape == ("B+1",)), np.int32) if told is None else told
        staging = self._turns[turn].inputs
        for name, place in layout.inputs.places.items():
            value = own[name] if name in own else feeds[name]
            layout.inputs.view(name, staging.view)[...] = padded(name, value, place.shape)
        for name, shape in layout.large.items():
            if name in feeds:
                self.large[name].put(feeds[name], shape, stream)
        self._block.upload(staging, layout.inputs.num_bytes, stream)
        if self._histories is None:
            return None
        lists = self._histories.put(turn, inputs, layout.sizes.num_requests, stream)
        if lists is None:
            return None
        places = {s.name: self._block.address + layout.inputs.places[s.name].offset for s in _HISTORIES}
        return {**lists, **places, **self._histories.rows}

    def fetch(self, turn: int, layout: CallLayout, stream: Stream) -> None:
        """Queue the copy of the results, and what `read` waits for."""
        self._results.download(self._turns[turn].outputs, layout.outputs.num_bytes, stream)
        self._turns[turn].done.record(stream)

    def read(self, turn: int, layout: CallLayout, num_requests: int) -> dict[str, NDArray[np.generic]]:
        """Wait for the results of a turn and copy them out, those of a bucket's added requests left out."""
        self._turns[turn].done.synchronize()
        block = self._turns[turn].outputs.view
        return {name: layout.outputs.view(name, block)[:num_requests].copy() for name in layout.outputs.places}

    def close(self) -> None:
        """Free all."""
        for large in self.large.values():
            large.close()
        for turn in self._turns:
            turn.close()
        if self._histories is not None:
            self._histories.close()
        for buffer in (self._block, self._results, self._carried, self._mask_ready):
            if buffer is not None:
                buffer.close()


def _as_int32(ticket: int) -> Int32:
    """[1]; tickets count modulo 2^32."""
    return np.array([ticket & 0xFFFFFFFF], dtype=np.uint32).view(np.int32)
