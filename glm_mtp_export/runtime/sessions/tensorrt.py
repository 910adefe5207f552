"""The step engine on a CUDA card, with TensorRT or TensorRT-RTX: weights, caches and results stay on the card.

In: an artifact directory with an engine for the profile's backend, and the checkpoint that the artifact was made from.
Out: a `StepSession`. Every weight is a network input, bound once; each cache is one buffer bound as input and output,
which the engine updates in place. A decode call is padded to a power of two of requests and replayed as a CUDA graph,
copies included; a call with prompt rows runs as it is, through the other optimisation profile.

What may go wrong: an engine of another machine, release or artifact, too little memory, a cache that the engine does
not update in place raise `EngineError` before the first call; a kernel that fails raises it in the call.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from glm_mtp_export.artifact import DEVICE, STEP_NAME, CacheSpec, Manifest, WeightEntry
from glm_mtp_export.cuda_device import cuda_device
from glm_mtp_export.engine_manifest import (
    PLAN_NAME,
    EngineManifest,
    EngineProfile,
    Machine,
    engine_directory,
)
from glm_mtp_export.errors import ArtifactError, EngineError
from glm_mtp_export.plugin_library import LIBRARY_NAME, describe_plugins
from glm_mtp_export.runtime.cuda import DeviceBuffer, Graph, PinnedBuffer, Stream, free_bytes, use_device
from glm_mtp_export.runtime.session import StepInputs, StepOutputs
from glm_mtp_export.runtime.sessions.checkpoint_filler import CheckpointFiller
from glm_mtp_export.runtime.sessions.step_layout import CallSizes, StepLayout, bucket, padded
from glm_mtp_export.tensorrt_toolchain import Toolchain, load_toolchain

__all__ = ["TensorRtSession", "WeightFiller"]

WeightFiller = Callable[[WeightEntry, DeviceBuffer], None]
_PREFILL, _DECODE = 0, 1  # order of the optimisation profiles in the engine


class TensorRtSession:
    """Owns the engine, its two execution contexts, all device memory and the captured graphs."""

    def __init__(self, toolchain: Toolchain, engine: Any, manifest: Manifest, profile: EngineProfile) -> None:
        self._toolchain = toolchain
        self._engine = engine
        self._manifest = manifest
        self._profile = profile
        names = {cache.name for cache in manifest.caches}
        self._input_specs = [spec for spec in manifest.inputs if spec.name not in names]
        self._output_specs = [spec for spec in manifest.outputs if spec.name.removesuffix("_out") not in names]
        self._stream = Stream()
        self._weights: dict[str, DeviceBuffer] = {}
        self._caches: dict[str, DeviceBuffer] = {}
        self._graphs: dict[CallSizes, Graph] = {}
        self._warm: set[CallSizes] = set()
        largest = CallSizes(profile.max_batch, max(profile.max_rows, self._decode_rows), self._most_columns)
        num_inputs = StepLayout.of(self._input_specs, largest).num_bytes
        num_outputs = StepLayout.of(self._output_specs, largest).num_bytes
        self._host_in, self._device_in = PinnedBuffer(num_inputs), DeviceBuffer(num_inputs)
        self._host_out, self._device_out = PinnedBuffer(num_outputs), DeviceBuffer(num_outputs)
        self._contexts: list[Any] = []

    # ---- loading

    @classmethod
    def load(
        cls, directory: Path, manifest: Manifest, profile: EngineProfile, fill: WeightFiller | None = None
    ) -> TensorRtSession:
        """Check engine and machine, load the engine, fill the weights, clear the caches.

        `fill` writes one weight into its buffer; without it they are read from the checkpoint that the manifest names.
        """
        if manifest.dialect != DEVICE:
            raise ArtifactError(
                f"{directory}: the dialect is {manifest.dialect!r}, a tensorrt backend runs {DEVICE!r} only. "
                f"Export again with --dialect {DEVICE}, or use --backend onnxruntime."
            )
        folder = engine_directory(directory, profile.backend)
        built = EngineManifest.load(folder)
        toolchain = load_toolchain(profile.backend)
        library = folder / LIBRARY_NAME
        built.check(folder, _machine(toolchain, library), manifest.files[STEP_NAME].sha256)
        _check_profile(built.profile, profile, folder)
        use_device()
        toolchain.load_plugins(library)
        engine = _deserialised(toolchain, folder)
        _check_aliases(engine, manifest, folder)
        session = cls(toolchain, engine, manifest, profile)
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
        """One call; the caches change in place."""
        use_device()
        num_requests, num_rows = inputs.num_requests, len(inputs.token_ids)
        exact = CallSizes(num_requests, num_rows, inputs.block_table.shape[1])
        self._check_fits(exact)
        slots = self._manifest.speculation.num_slots
        batch = bucket(num_requests, self._profile.max_batch)
        is_decode = num_rows <= batch * slots
        columns = bucket(exact.num_columns, self._most_columns)
        sizes = CallSizes(batch, batch * slots, columns) if is_decode else exact
        layout = StepLayout.of(self._input_specs, sizes)
        feeds = inputs.feeds()
        for name, place in layout.places.items():
            layout.view(name, self._host_in.view)[...] = padded(name, feeds[name], place.shape)
        outputs = StepLayout.of(self._output_specs, sizes)
        if is_decode:
            self._decode(sizes, layout, outputs)
        else:
            self._queue(_PREFILL, sizes, layout, outputs)()
        self._stream.synchronize()
        found = {n: outputs.view(n, self._host_out.view)[:num_requests].copy() for n in outputs.places}
        return StepOutputs(**cast(dict[str, Any], found))

    def _decode(self, sizes: CallSizes, inputs: StepLayout, outputs: StepLayout) -> None:
        """Replay the bucket's graph. The first call of a bucket runs uncaptured, since shapes settle in it."""
        graph = self._graphs.get(sizes)
        if graph is not None:
            graph.launch(self._stream)
            return
        work = self._queue(_DECODE, sizes, inputs, outputs)
        if sizes in self._warm:
            self._graphs[sizes] = Graph(self._stream, work)
            self._graphs[sizes].launch(self._stream)
        else:
            work()
            self._warm.add(sizes)

    def _queue(
        self, profile_index: int, sizes: CallSizes, inputs: StepLayout, outputs: StepLayout
    ) -> Callable[[], None]:
        """Bind shapes and addresses for a call; gives the function that queues copies and engine."""
        context = self._contexts[profile_index]
        for name, place in inputs.places.items():
            context.set_input_shape(name, place.shape)
            context.set_tensor_address(name, self._device_in.address + place.offset)
        for name, place in outputs.places.items():
            context.set_tensor_address(name, self._device_out.address + place.offset)
        if missing := context.infer_shapes():
            raise EngineError(f"the engine lacks shapes for {', '.join(missing)} in a call of {sizes}. Build it again.")

        def work() -> None:
            self._device_in.upload(self._host_in, inputs.num_bytes, self._stream)
            first_line = len(self._toolchain.lines)
            if not context.execute_async_v3(self._stream.handle):
                raise EngineError(f"the engine failed in a call of {sizes}:\n{self._toolchain.errors(first_line)}")
            self._device_out.download(self._host_out, outputs.num_bytes, self._stream)

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
        self._stream.synchronize()
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()
        self._contexts.clear()
        self._engine = None
        for buffer in (*self._weights.values(), *self._caches.values(), self._device_in, self._device_out):
            buffer.close()
        self._host_in.close()
        self._host_out.close()
        self._stream.close()


def _pool_bytes(cache: CacheSpec, num_pages: int) -> int:
    return int(np.prod([int(extent) for extent in cache.shape(num_pages)])) * cache.item_bytes


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _machine(toolchain: Toolchain, library: Path) -> Machine:
    """What is here. A library that is missing is left to the manifest's file list."""
    card = cuda_device()
    if card is None:
        raise EngineError("no CUDA card on this machine. Use --backend onnxruntime here.")
    plugins = describe_plugins(library) if library.is_file() else None
    return Machine(
        toolchain={toolchain.name: toolchain.version, "cuda": plugins.cuda if plugins else "none"},
        compute_capability=card.compute_capability,
        driver_cuda=card.driver_cuda,
        plugin_sha256=plugins.sha256 if plugins else "",
    )


def _check_profile(built: EngineProfile, wanted: EngineProfile, folder: Path) -> None:
    """A profile other than the built one may only ask for less."""
    limits = ("num_pages", "max_batch", "max_rows", "max_context")
    larger = [
        f"{n} {getattr(wanted, n)}, built for {getattr(built, n)}"
        for n in limits
        if getattr(wanted, n) > getattr(built, n)
    ]
    if larger:
        raise EngineError(f"{folder}: profile {wanted.name} asks for {'; '.join(larger)}. Build the engine with it.")


def _deserialised(toolchain: Toolchain, folder: Path) -> Any:
    first_line = len(toolchain.lines)
    runtime = toolchain.module.Runtime(toolchain.logger)
    engine = runtime.deserialize_cuda_engine((folder / PLAN_NAME).read_bytes())
    if engine is None:
        words = toolchain.errors(first_line)
        raise EngineError(
            f"{folder / PLAN_NAME}: {toolchain.name} {toolchain.version} refuses this engine:\n{words}\n"
            "Build it again on this machine with 'glm-mtp build-engine'."
        )
    return engine


def _check_aliases(engine: Any, manifest: Manifest, folder: Path) -> None:
    """Every cache output must be its input: else the engine copies the pool, or writes into a buffer nobody reads."""
    # Measured with TensorRT-RTX 1.6.1: for a cache with several writers in a row the engine names no input. The builder has
    # refused copies by then, and both names are bound to one address.
    told = {c.name: engine.get_aliased_input_tensor(f"{c.name}_out") for c in manifest.caches}
    wrong = [name for name, found in told.items() if found not in (name, None)]
    if wrong:
        raise EngineError(f"{folder}: {', '.join(wrong)} would not be updated in place. Export and build again.")
