"""A card made of host memory, and an engine on it that runs the portable graph: for the session's own logic.

Buffers are numpy arrays whose addresses the session hands to the engine, as it does with device memory. Work waits in the queues
of streams; a `Card` does it as soon as it can, or as late as it may: when the host waits for it, and no further than that. So
memory that is used again too early shows. A graph keeps what was queued in its capture and queues it again.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from glm_mtp_export.artifact import STEP_NAME, Manifest, TensorSpec
from glm_mtp_export.runtime.sessions import weight_loader
from glm_mtp_export.runtime.thinking import ThinkingIds

__all__ = ["Buffer", "Card", "Engine", "Kernels", "Stream", "array_at", "stage_on_the_host"]

Work = Callable[[], object]  # False: it cannot be done yet


def array_at(address: int, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """Memory as an array."""
    kind = np.dtype(dtype)
    raw = (ctypes.c_uint8 * (int(np.prod(shape)) * kind.itemsize)).from_address(address)
    return np.ctypeslib.as_array(raw).view(kind).reshape(shape)


class Stream:
    """Work is done when it is queued."""

    handle = 1

    def queue(self, work: Work) -> None:
        """Take work."""
        work()

    def synchronize(self) -> None:
        """Nothing is ever pending."""

    def close(self) -> None:
        """Nothing to free."""


class Card:
    """The queues, and what went through them. `is_late`: work is done when the host waits for it."""

    def __init__(self, is_late: bool) -> None:
        self.is_late = is_late
        self.streams: list[CardStream] = []
        self.uploads: list[tuple[int, int]] = []  # address on the card, bytes
        self.num_captures = self.num_replays = 0

    def put_into(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        """The card of these modules is this one."""
        makers: dict[str, Callable[..., Any]] = {
            "DeviceBuffer": lambda num_bytes: Buffer(num_bytes, self),
            "PinnedBuffer": Buffer,
            "Stream": lambda: CardStream(self),
            "Event": lambda: Event(self),
            "Graph": lambda stream, work: Graph(self, stream, work),
            "use_device": lambda: None,
            "free_bytes": lambda: 1 << 40,
        }
        for module in modules:
            for name, maker in makers.items():
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, maker)

    def run(self, stream: CardStream, until: Callable[[], bool]) -> None:
        """Do the stream's work in order; what it waits for is done elsewhere, one piece at a time."""
        while not until():
            others = [other for other in self.streams if other is not stream]
            if not stream.step() and not any([other.step() for other in others]):
                raise AssertionError("the card waits for what nobody brings")

    def run_what_can_be(self) -> None:
        """Do all work of all streams that waits for nothing."""
        while any([stream.step() for stream in self.streams]):
            pass


class CardStream(Stream):
    """A queue of a card."""

    def __init__(self, card: Card) -> None:
        self.card, self.pending, self.captured = card, deque[Work](), None
        card.streams.append(self)
        self.handle = len(card.streams)

    def queue(self, work: Work) -> None:
        """Behind what is there."""
        if self.captured is not None:
            self.captured.append(work)
            return
        self.pending.append(work)
        if not self.card.is_late:
            self.card.run_what_can_be()

    def step(self) -> bool:
        """Do one piece of work; False when there is none, or it must wait."""
        if not self.pending or self.pending[0]() is False:
            return False
        self.pending.popleft()
        return True

    def write_value(self, address: int, value: int) -> None:
        """One word."""

        def work() -> None:
            array_at(address, "uint32", (1,))[0] = value & 0xFFFFFFFF

        self.queue(work)

    def synchronize(self) -> None:
        """Do everything."""
        self.card.run(self, lambda: not self.pending)


class Event:
    """Passed when the work before it is done."""

    def __init__(self, card: Card) -> None:
        self.card, self.stream, self.last, self.passed = card, None, 0, 0

    def record(self, stream: CardStream) -> None:
        """Behind what is there."""
        self.stream, self.last = stream, self.last + 1
        number = self.last

        def work() -> None:
            self.passed = number

        stream.queue(work)

    def synchronize(self) -> None:
        """Do what is before it."""
        if self.stream is not None:
            self.card.run(self.stream, lambda: self.passed == self.last)

    def close(self) -> None:
        """Nothing to free."""


class Buffer:
    """Stands for device and pinned memory; filled with garbage, as fresh memory is."""

    def __init__(self, num_bytes: int, card: Card | None = None) -> None:
        self.view: NDArray[np.uint8] = np.full(max(num_bytes, 1), 0x5A, dtype=np.uint8)
        self.num_bytes = num_bytes
        self.address = self.view.ctypes.data
        self.card = card

    def fill(self, byte: int, num_bytes: int, stream: Stream) -> None:
        """As the card does."""

        def work() -> None:
            self.view[:num_bytes] = byte

        stream.queue(work)

    def fill_zero(self, stream: Stream) -> None:
        """As the card does."""
        self.fill(0, self.num_bytes, stream)

    def write(self, data: NDArray[Any], offset: int = 0) -> None:
        """Copy in."""
        flat = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
        self.view[offset : offset + flat.nbytes] = flat

    def read(self) -> NDArray[np.uint8]:
        """Copy out."""
        return self.view.copy()

    def upload(self, source: Buffer, num_bytes: int, stream: Stream, offset: int = 0) -> None:
        """Host to card."""
        if self.card is not None:
            self.card.uploads.append((self.address, num_bytes))

        def work() -> None:
            self.view[offset : offset + num_bytes] = source.view[:num_bytes]

        stream.queue(work)

    def download(self, target: Buffer, num_bytes: int, stream: Stream) -> None:
        """Card to host."""

        def work() -> None:
            target.view[:num_bytes] = self.view[:num_bytes]

        stream.queue(work)

    def close(self) -> None:
        """Writes after this would be seen."""
        self.address = 0


def stage_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight loader copies through this card's memory."""
    monkeypatch.setattr(weight_loader, "PinnedBuffer", Buffer)
    monkeypatch.setattr(weight_loader, "Stream", Stream)
    monkeypatch.setattr(weight_loader, "use_device", lambda: None)


class Graph:
    """Queues again what was queued in its capture."""

    def __init__(self, card: Card, stream: CardStream, queue_work: Callable[[], None]) -> None:
        card.num_captures += 1
        self._card = card
        stream.captured = []
        try:
            queue_work()
        finally:
            self._work, stream.captured = stream.captured, None

    def launch(self, stream: CardStream) -> None:
        """Once more."""
        self._card.num_replays += 1
        for work in self._work:
            stream.queue(work)

    def close(self) -> None:
        """Nothing to free."""


class Kernels:
    """The launches around a step, request by request."""

    def __init__(self, draft_width: int, vocab_size: int, ids: ThinkingIds) -> None:
        self.draft_width, self.vocab_size, self.ids = draft_width, vocab_size, ids

    def spread(self, histories: Mapping[str, int], num_requests: int, stream: Stream) -> None:
        """glm_spread_histories."""

        def work() -> None:
            for b in range(num_requests):
                counts, prompt, bias = (
                    array_at(histories[name] + 4 * b * self.vocab_size, dtype, (self.vocab_size,))
                    for name, dtype in (("output_counts", "int32"), ("prompt_mask", "int32"), ("logit_bias", "float32"))
                )
                first, last = array_at(histories["history_offsets"] + 4 * b, "int32", (2,))
                num_prompt = array_at(histories["history_prompts"] + 4 * b, "int32", (1,))[0]
                for place in range(first, last):
                    token = array_at(histories["history_ids"] + 4 * place, "int32", (1,))[0]
                    if place < first + num_prompt:
                        prompt[token] = 1
                    else:
                        counts[token] += 1
                first, last = array_at(histories["bias_offsets"] + 4 * b, "int32", (2,))
                for place in range(first, last):
                    token = array_at(histories["bias_ids"] + 4 * place, "int32", (1,))[0]
                    bias[token] = array_at(histories["bias_values"] + 4 * place, "float32", (1,))[0]

        stream.queue(work)

    def follow(
        self, state: Mapping[str, int], num_requests: int, follows: int, carry: Mapping[str, int], stream: Stream
    ) -> None:
        """glm_follow_step."""

        def work() -> None:
            here, before = self._state(state, num_requests), self._carry(carry)
            for b, j in enumerate(array_at(follows, "int32", (num_requests,)).tolist()):
                if j < 0:
                    continue
                token = array_at(state["token_ids"] + 4 * int(here["row_offsets"][b]), "int32", (1,))
                token[0] = max(before["next_tokens"](j), 0)
                here["draft_tokens"][b] = before["draft_tokens"](j)
                here["cache_lengths"][b] += before["num_accepted"](j)
                here["sample_offset"][b] += before["num_accepted"](j)
                here["in_thinking_phase"][b] = before["in_thinking_phase"](j)
                if "output_counts" not in state or np.diff(here["history_offsets"][b : b + 2])[0] == 0:
                    continue
                counts = array_at(state["output_counts"] + 4 * b * self.vocab_size, "int32", (self.vocab_size,))
                for token in before["committed_tokens"](j):
                    if token >= 0:
                        counts[token] += 1

        stream.queue(work)

    def carry(
        self,
        state: Mapping[str, int],
        num_requests: int,
        results: Mapping[str, int],
        carry: Mapping[str, int],
        stream: Stream,
    ) -> None:
        """glm_carry_step."""

        def work() -> None:
            here, ids = self._state(state, num_requests), self.ids
            accepted, tokens = (array_at(results[n], "int32", (num_requests,)) for n in ("num_accepted", "next_tokens"))
            proposals = np.zeros((num_requests, self.draft_width), np.int32)
            if "next_draft_tokens" in results:
                proposals = array_at(results["next_draft_tokens"], "int32", proposals.shape)
            for b in range(num_requests):
                is_open = bool(here["in_thinking_phase"][b])
                for token in (*here["draft_tokens"][b, : accepted[b]], tokens[b]):
                    if token in (ids.begin, ids.end, ids.tool_call):
                        is_open = bool(token == ids.begin)
                array_at(carry["num_accepted"] + 4 * b, "int32", (1,))[0] = accepted[b]
                array_at(carry["next_tokens"] + 4 * b, "int32", (1,))[0] = tokens[b]
                width = self.draft_width
                array_at(carry["draft_tokens"] + 4 * b * width, "int32", (width,))[:] = proposals[b]
                array_at(carry["in_thinking_phase"] + b, "bool", (1,))[0] = is_open
                committed = array_at(carry["committed_tokens"] + 4 * b * (width + 1), "int32", (width + 1,))
                committed[:] = -1
                committed[: accepted[b]] = here["draft_tokens"][b, : accepted[b]]
                committed[accepted[b]] = tokens[b]

        stream.queue(work)

    def _state(self, addresses: Mapping[str, int], num: int) -> dict[str, NDArray[Any]]:
        shapes = {name: (num + 1,) for name in ("row_offsets", "history_offsets")}
        shapes["draft_tokens"] = (num, self.draft_width)
        return {
            name: array_at(address, "bool" if name == "in_thinking_phase" else "int32", shapes.get(name, (num,)))
            for name, address in addresses.items()
            if name not in ("token_ids", "output_counts")
        }

    def _carry(self, addresses: Mapping[str, int]) -> dict[str, Callable[[int], Any]]:
        width = self.draft_width
        return {
            "num_accepted": lambda j: array_at(addresses["num_accepted"] + 4 * j, "int32", (1,))[0],
            "next_tokens": lambda j: array_at(addresses["next_tokens"] + 4 * j, "int32", (1,))[0],
            "draft_tokens": lambda j: array_at(addresses["draft_tokens"] + 4 * j * width, "int32", (width,)),
            "in_thinking_phase": lambda j: array_at(addresses["in_thinking_phase"] + j, "bool", (1,))[0],
            "committed_tokens": lambda j: array_at(
                addresses["committed_tokens"] + 4 * j * (width + 1), "int32", (width + 1,)
            ),
        }


class Context:
    """An execution context: shapes and addresses by name, frozen into the work by value as a captured graph has them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.profile: int | None = None

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        """Remember which."""
        self.profile = index
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        """Refuses what the profile does not span, as the engine would."""
        if name == "token_ids":
            assert shape[0] <= self.engine.most_rows[self.profile], (shape, self.profile)
        self.shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        """Remember where."""
        self.addresses[name] = address
        return True

    def infer_shapes(self) -> list[str]:
        """Inputs without a shape."""
        return [spec.name for spec in self.engine.manifest.inputs if spec.name not in self.shapes]

    def execute_async_v3(self, stream: int) -> bool:
        """Queue the portable graph on the memory bound now."""
        shapes, addresses = dict(self.shapes), dict(self.addresses)
        self.engine.card.streams[stream - 1].queue(lambda: self.engine.execute(shapes, addresses))
        return True


class Engine:
    """As much of an ICudaEngine as the session uses."""

    def __init__(
        self, artifact: Path, manifest: Manifest, most_rows: tuple[int, int], most_columns: int, card: Card
    ) -> None:
        self.manifest = manifest
        self.card = card
        self.feeds: list[dict[str, NDArray[Any]]] = []  # inputs of every execution, caches left out
        self.most_rows = most_rows
        self.most_columns = most_columns
        self.session = ort.InferenceSession(str(artifact / STEP_NAME), providers=["CPUExecutionProvider"])
        self.input_names = [value.name for value in self.session.get_inputs()]
        self.output_names = [output.name for output in self.session.get_outputs()]
        self.contexts: list[Context] = []

    def get_device_memory_size_for_profile_v2(self, index: int) -> int:
        """No scratch."""
        return 0

    def get_tensor_profile_shape(self, name: str, index: int) -> list[tuple[int, ...]]:
        """Only the block table's largest shape is asked for."""
        return [(1, 1), (1, 1), (1, self.most_columns)]

    def create_execution_context(self) -> Context:
        """A fresh one."""
        self.contexts.append(Context(self))
        return self.contexts[-1]

    def execute(self, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]) -> bool:
        """Run the graph. Not before the turn of its mask, if it has to wait for one."""

        def found(spec: TensorSpec, shape: tuple[int, ...]) -> NDArray[Any]:
            return array_at(addresses[spec.name], spec.dtype, shape)

        feeds = {spec.name: found(spec, shapes[spec.name]) for spec in self.manifest.inputs}
        turn, ready = (int(feeds.get(name, np.zeros(1))[0]) for name in ("mask_turn", "mask_ready"))
        if turn != 0 and (ready - turn) % 2**32 >= 2**31:
            return False
        caches = {cache.name for cache in self.manifest.caches}
        self.feeds.append({name: value.copy() for name, value in feeds.items() if name not in caches})
        outputs = self.session.run(None, {name: feeds[name] for name in self.input_names})
        for name, value in zip(self.output_names, outputs, strict=True):
            found(next(s for s in self.manifest.outputs if s.name == name), value.shape)[...] = value
        return True
