"""The step engine on a CUDA card, with TensorRT or TensorRT-RTX: weights, caches and results stay on the card.

In: an artifact directory with an engine for the profile's backend, and the checkpoint that the artifact was made from.
Out: an `AheadSession`. Every weight is a network input, bound once; each cache is one buffer bound as input and output,
which the engine updates in place. A decode call is padded to a power of two of requests and replayed as a CUDA graph; a
call with prompt rows runs as it is, through the other optimisation profile.

A call in the card's queue is: copy the inputs in, put in what the call before left (`StepKernels.follow`), run the
engine, keep what the next call may need (`StepKernels.carry`), copy the results out. The graph holds the three in the
middle. A call may be launched without its token_bitmask: the engine then waits on the card, before it samples, until a
second stream has brought the mask and after it the number of the call's turn.

What may go wrong: an engine of another machine, release or artifact, too little memory, a cache that the engine does
not update in place raise `EngineError` before the first call; a kernel that fails raises it in the call.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from glm_mtp_export.artifact import CacheSpec, Manifest, WeightEntry
from glm_mtp_export.engine_manifest import EngineProfile
from glm_mtp_export.errors import EngineError
from glm_mtp_export.runtime.cuda import DeviceBuffer, Graph, Stream, free_bytes, use_device
from glm_mtp_export.runtime.session import MAX_IN_FLIGHT, Int32, StepInputs, StepOutputs
from glm_mtp_export.runtime.sessions.call_buffers import CallBuffers, CallLayout
from glm_mtp_export.runtime.sessions.checkpoint_filler import CheckpointFiller
from glm_mtp_export.runtime.sessions.engine_file import open_engine
from glm_mtp_export.runtime.sessions.step_kernels import StepKernels
from glm_mtp_export.runtime.sessions.step_layout import CallSizes, bucket
from glm_mtp_export.runtime.thinking import ThinkingIds
from glm_mtp_export.tensorrt_toolchain import Toolchain

__all__ = ["TensorRtSession", "WeightFiller"]

WeightFiller = Callable[[WeightEntry, DeviceBuffer], None]
_PREFILL, _DECODE = 0, 1  # order of the optimisation profiles in the engine


@dataclass
class _Call:
    """One that is launched and not collected."""

    turn: int  # of the pinned memory
    layout: CallLayout
    num_requests: int
    mask_turn: int  # 0: its token_bitmask is known


class TensorRtSession:
    """Owns the engine, its two execution contexts, all device memory and the captured graphs."""

    def __init__(
        self, toolchain: Toolchain, engine: Any, manifest: Manifest, profile: EngineProfile, kernels: StepKernels
    ) -> None:
        self._toolchain = toolchain
        self._engine = engine
        self._manifest = manifest
        self._profile = profile
        self._kernels = kernels
        self._has_mask = any(spec.name == "token_bitmask" for spec in manifest.inputs)
        self._stream, self._mask_stream = Stream(), Stream()
        self._weights: dict[str, DeviceBuffer] = {}
        self._caches: dict[str, DeviceBuffer] = {}
        self._graphs: dict[CallSizes, Graph] = {}
        self._warm: set[CallSizes] = set()
        self._in_flight: deque[_Call] = deque()
        self._num_launched = 0
        self._num_carried = 0  # requests of the call launched last
        self._mask_turn = 0  # of the call launched last without its mask
        largest = CallSizes(profile.max_batch, max(profile.max_rows, self._decode_rows), self._most_columns)
        self._buffers = CallBuffers(manifest, largest)
        self._contexts: list[Any] = []

    # ---- loading

    @classmethod
    def load(
        cls, directory: Path, manifest: Manifest, profile: EngineProfile, fill: WeightFiller | None = None
    ) -> TensorRtSession:
        """Check engine and machine, load the engine, fill the weights, clear the caches.

        `fill` writes one weight into its buffer; without it they are read from the checkpoint that the manifest names.
        """
        toolchain, engine, library = open_engine(directory, manifest, profile)
        kernels = StepKernels(
            library,
            manifest.speculation.draft_width,
            manifest.config.vocab_size,
            ThinkingIds.of(manifest.thinking_token_ids),
        )
        session = cls(toolchain, engine, manifest, profile, kernels)
        try:
            session._allocate(fill or CheckpointFiller(manifest))
        except BaseException:
            session.close()
            raise
        return session

    def _allocate(self, fill: WeightFiller) -> None:
        """Weights, caches, contexts. Refuses with all sizes when they do not fit together."""
        weight_bytes = sum(entry.num_bytes for entry in self._manifest.weights)
        cache_bytes = sum(_pool_bytes(cache, self.num_pages) for cache in self._manifest.caches)
        scratch_bytes = sum(self._engine.get_device_memory_size_for_profile_v2(i) for i in (_PREFILL, _DECODE))
        needed, free = weight_bytes + cache_bytes + scratch_bytes, free_bytes()
        if needed > free:
            raise EngineError(
                f"weights {_gib(weight_bytes)}, caches {_gib(cache_bytes)} and scratch {_gib(scratch_bytes)} need "
                f"{_gib(needed)}, {_gib(free)} are free on this card. Lower num_pages or max_rows in the profile and "
                "build again, or use more cards."
            )
        for entry in self._manifest.weights:
            buffer = self._weights[entry.name] = DeviceBuffer(entry.num_bytes)
            fill(entry, buffer)
        for cache in self._manifest.caches:
            pool = self._caches[cache.name] = DeviceBuffer(_pool_bytes(cache, self.num_pages))
            pool.fill_zero(self._stream)
        self._contexts = [self._context(index) for index in (_PREFILL, _DECODE)]
        if self._buffers.mask_ready is not None:
            self._mask_stream.write_value(self._buffers.mask_ready, 0)
        self._mask_stream.synchronize()
        self._stream.synchronize()

    def _context(self, profile_index: int) -> Any:
        """An execution context with everything bound that stays the same from call to call."""
        context = self._engine.create_execution_context()
        if context is None or not context.set_optimization_profile_async(profile_index, self._stream.handle):
            raise EngineError(f"the engine gives no execution context.\n{self._toolchain.errors()}")
        for name, buffer in self._weights.items():
            context.set_tensor_address(name, buffer.address)
        for cache in self._manifest.caches:
            context.set_input_shape(cache.name, cache.shape(self.num_pages))
            for name in (cache.name, f"{cache.name}_out"):
                context.set_tensor_address(name, self._caches[cache.name].address)
        return context

    # ---- what it is

    @property
    def manifest(self) -> Manifest:
        """What the graph is."""
        return self._manifest

    @property
    def num_pages(self) -> int:
        """Pages of each of the pools."""
        return self._profile.num_pages

    @property
    def num_graphs(self) -> int:
        """Decode graphs captured so far."""
        return len(self._graphs)

    @property
    def _decode_rows(self) -> int:
        return self._profile.max_batch * self._manifest.speculation.num_slots

    @property
    def _most_columns(self) -> int:
        """Largest width of the block table that the engine takes."""
        return int(self._engine.get_tensor_profile_shape("block_table", _DECODE)[2][1])

    # ---- calls

    def run(self, inputs: StepInputs) -> StepOutputs:
        """One call, nothing in flight; the caches change in place."""
        if self._in_flight:
            raise RuntimeError("a call is in flight; collect it before another one is run")
        self.launch(inputs)
        return self.collect()

    def launch(self, inputs: StepInputs, follows: Int32 | None = None) -> None:
        """Queue a call; see `AheadSession`."""
        use_device()
        exact = CallSizes(inputs.num_requests, len(inputs.token_ids), inputs.block_table.shape[1])
        self._check_fits(exact)
        self._check_queue(follows)
        sizes, is_decode = self._sizes(exact)
        mask_turn = self._next_mask_turn() if self._has_mask and inputs.token_bitmask is None else 0
        call = _Call(self._num_launched % MAX_IN_FLIGHT, self._buffers.layout(sizes), exact.num_requests, mask_turn)
        try:
            histories = self._buffers.send(call.turn, call.layout, inputs, follows, mask_turn, self._stream)
            if histories is not None:
                self._kernels.spread(histories, sizes.num_requests, self._stream)
            if is_decode:
                self._decode(call.layout)
            else:
                self._queue(_PREFILL, call.layout)()
            self._buffers.fetch(call.turn, call.layout, self._stream)
        except BaseException:
            self._num_carried = 0  # no later call can go on from this one
            self._let_go(call)
            with contextlib.suppress(EngineError):  # the first error says more
                self._stream.synchronize()  # the next call takes this turn's memory
            raise
        self._in_flight.append(call)
        self._num_launched, self._num_carried = self._num_launched + 1, exact.num_requests

    def supply_bitmask(self, token_bitmask: Int32) -> None:
        """The mask [B, K+1, words] of the call launched last, once those before it are collected."""
        if len(self._in_flight) != 1 or not self._in_flight[0].mask_turn:
            raise RuntimeError("no call waits for a mask, or one before it is not collected")
        use_device()
        call = self._in_flight[0]
        shape = call.layout.large["token_bitmask"]
        self._buffers.large["token_bitmask"].put_late(token_bitmask, shape, self._mask_stream)
        self._let_go(call)

    def collect(self) -> StepOutputs:
        """Wait for the oldest uncollected call."""
        if not self._in_flight:
            raise RuntimeError("no call is in flight")
        if self._in_flight[0].mask_turn:
            raise RuntimeError("the call has no token_bitmask; supply it before collecting")
        use_device()
        call = self._in_flight.popleft()
        return StepOutputs(**cast(dict[str, Any], self._buffers.read(call.turn, call.layout, call.num_requests)))

    def _check_queue(self, follows: Int32 | None) -> None:
        """What is in flight must leave room for this call, and have the requests it continues."""
        if len(self._in_flight) == MAX_IN_FLIGHT:
            raise RuntimeError(f"{MAX_IN_FLIGHT} calls are in flight; collect one first")
        if self._in_flight and self._in_flight[-1].mask_turn:
            raise RuntimeError("the call launched last waits for its mask; supply it before launching another")
        if follows is not None and follows.max(initial=-1) >= self._num_carried:
            raise ValueError(
                f"follows names request {follows.max()}, the call launched last had {self._num_carried} requests"
            )

    def _sizes(self, exact: CallSizes) -> tuple[CallSizes, bool]:
        """What a call of these sizes is run as, and whether it is a decode call: padded to its bucket, and replayed."""
        slots = self._manifest.speculation.num_slots
        batch = bucket(exact.num_requests, self._profile.max_batch)
        if exact.num_rows > batch * slots:
            return exact, False
        return CallSizes(batch, batch * slots, bucket(exact.num_columns, self._most_columns)), True

    def _next_mask_turn(self) -> int:
        """Number of the next call that waits: any but 0, modulo 2^32."""
        if self._buffers.mask_ready is None:
            raise ValueError("the call has no token_bitmask, and this graph cannot wait for one")
        self._mask_turn = (self._mask_turn + 1) % 2**32 or 1
        return self._mask_turn

    def _let_go(self, call: _Call) -> None:
        """End the card's wait for the mask of `call`: what it reads is what lies there once the mask stream is done so far."""
        if call.mask_turn and self._buffers.mask_ready is not None:
            self._mask_stream.write_value(self._buffers.mask_ready, call.mask_turn)
            call.mask_turn = 0

    def _decode(self, layout: CallLayout) -> None:
        """Replay the bucket's graph. The first call of a bucket runs uncaptured, since shapes settle in it."""
        sizes = layout.sizes
        if sizes not in self._graphs:
            work = self._queue(_DECODE, layout)
            if sizes not in self._warm:
                work()
                self._warm.add(sizes)
                return
            self._graphs[sizes] = Graph(self._stream, work)
        self._graphs[sizes].launch(self._stream)

    def _queue(self, profile_index: int, layout: CallLayout) -> Callable[[], None]:
        """Bind shapes and addresses for a call; gives the function that queues engine and launches around it."""
        context, buffers, stream = self._contexts[profile_index], self._buffers, self._stream
        for binding in buffers.bindings(layout):
            if binding.shape is not None:
                context.set_input_shape(binding.name, binding.shape)
            context.set_tensor_address(binding.name, binding.address)
        if missing := context.infer_shapes():
            raise EngineError(
                f"the engine lacks shapes for {', '.join(missing)} in a call of {layout.sizes}. Build it again."
            )
        state, batch = buffers.state(layout), layout.sizes.num_requests

        def work() -> None:
            self._kernels.follow(state, batch, buffers.follows(layout), buffers.carry, stream)
            first_line = len(self._toolchain.lines)
            if not context.execute_async_v3(stream.handle):
                words = self._toolchain.errors(first_line)
                raise EngineError(f"the engine failed in a call of {layout.sizes}:\n{words}")
            self._kernels.carry(state, batch, buffers.results(layout), buffers.carry, stream)

        return work

    def _check_fits(self, sizes: CallSizes) -> None:
        profile = self._profile
        if (
            sizes.num_requests > profile.max_batch
            or sizes.num_rows > max(profile.max_rows, self._decode_rows)
            or sizes.num_columns > self._most_columns
        ):
            raise EngineError(
                f"a call of {sizes} is larger than profile {profile.name} (max_batch {profile.max_batch}, max_rows "
                f"{profile.max_rows}, {self._most_columns} pages a request). Build with a larger profile."
            )

    def read_cache(self, name: str) -> NDArray[np.generic]:
        """The current content of one pool [layers, pages, 64, width], for tests: bfloat16 as uint16, packed as int8."""
        use_device()
        self._stream.synchronize()
        cache = next(c for c in self._manifest.caches if c.name == name)
        dtype = {"bfloat16": np.uint16, "int8": np.int8}[cache.dtype]
        shape = tuple(int(extent) for extent in cache.shape(self.num_pages))
        return self._caches[name].read().view(dtype).reshape(shape)

    def close(self) -> None:
        """Give the memory back; further calls are a bug."""
        use_device()
        for call in self._in_flight:
            self._let_go(call)
        self._in_flight.clear()
        self._stream.synchronize()
        self._mask_stream.synchronize()
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()
        self._contexts.clear()
        self._engine = None
        for buffer in (*self._weights.values(), *self._caches.values()):
            buffer.close()
        self._buffers.close()
        self._stream.close()
        self._mask_stream.close()


def _pool_bytes(cache: CacheSpec, num_pages: int) -> int:
    return int(np.prod([int(extent) for extent in cache.shape(num_pages)])) * cache.item_bytes


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
