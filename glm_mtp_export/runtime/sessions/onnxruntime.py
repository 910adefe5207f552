"""The portable step graph on ONNX Runtime, CPU.

In: `step.onnx` with its external weights, checked against the manifest. Out: a `StepSession`. The caches are float32 pools, one a
layer, that live in this object; each is bound as input and as output. That is sound because a pool has one chain of writers and
a reader takes the newest version: only the first writer touches the input, only the last one writes the output. A lone writer
then updates in place, since ScatterND copies only between different addresses; two buffers would cost a copy of every pool.

What may go wrong: a damaged artifact, a device-dialect graph, or inputs other than the manifest's raise
`ArtifactError`; a graph ONNX Runtime cannot load or run raises `EngineError`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort

from glm_mtp_export.artifact import PORTABLE, STEP_NAME, CacheSpec, Manifest
from glm_mtp_export.engine_manifest import EngineProfile
from glm_mtp_export.errors import ArtifactError, EngineError
from glm_mtp_export.runtime.histories import DENSE_INPUTS, dense_rows
from glm_mtp_export.runtime.session import StepInputs, StepOutputs

__all__ = ["OnnxRuntimeSession"]

_ORT_TYPES = {"float32": "tensor(float)", "int32": "tensor(int32)", "int64": "tensor(int64)", "bool": "tensor(bool)"}


class OnnxRuntimeSession:
    """Owns the ONNX Runtime session and the cache buffers."""

    def __init__(self, session: ort.InferenceSession, manifest: Manifest, num_pages: int) -> None:
        self._session = session
        self._manifest = manifest
        self._num_pages = num_pages
        self._input_names = [i.name for i in session.get_inputs()]
        self._has_penalties = set(DENSE_INPUTS) <= set(self._input_names)
        self._caches = {c.name: _zeros(c, num_pages) for c in manifest.caches}
        cache_outputs = {f"{c.name}_out" for c in manifest.caches}
        self._output_names = [spec.name for spec in manifest.outputs if spec.name not in cache_outputs]

    @classmethod
    def load(cls, directory: Path, manifest: Manifest, profile: EngineProfile) -> OnnxRuntimeSession:
        """Check the files, load the graph, allocate the pools."""
        if manifest.dialect != PORTABLE:
            raise ArtifactError(
                f"{directory}: the dialect is {manifest.dialect!r}, ONNX Runtime runs {PORTABLE!r} only. "
                f"Export again with --dialect {PORTABLE}, or use a tensorrt backend."
            )
        manifest.verify_files(directory)
        options = ort.SessionOptions()
        options.intra_op_num_threads = profile.threads
        options.inter_op_num_threads = 1
        options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
        # Batches change shape from call to call; patterns planned for one shape only cost memory.
        options.enable_mem_pattern = False
        # The host works between calls; spinning threads would take its core.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 3
        try:
            session = ort.InferenceSession(str(directory / STEP_NAME), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime raises its own unrelated classes
            raise EngineError(
                f"{directory / STEP_NAME}: ONNX Runtime {ort.__version__} cannot load it ({error}). Export again, "
                "or install the ONNX Runtime version the manifest's toolchain names."
            ) from error
        _check_signature(session, manifest, directory)
        return cls(session, manifest, profile.num_pages)

    @property
    def manifest(self) -> Manifest:
        """What the graph is."""
        return self._manifest

    @property
    def num_pages(self) -> int:
        """Pages of each pool."""
        return self._num_pages

    def run(self, inputs: StepInputs) -> StepOutputs:
        """One call; the caches change in place."""
        binding = self._session.io_binding()
        feeds = inputs.feeds()
        if self._has_penalties:
            feeds |= dense_rows(inputs, self._manifest.config.vocab_size)
        for name in self._input_names:
            if name in self._caches:
                binding.bind_ortvalue_input(name, self._caches[name])
            elif name in feeds:
                binding.bind_cpu_input(name, np.ascontiguousarray(feeds[name]))
        for name in self._output_names:
            binding.bind_output(name, "cpu")
        for name, value in self._caches.items():
            binding.bind_ortvalue_output(f"{name}_out", value)
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:  # onnxruntime raises its own unrelated classes
            raise EngineError(
                f"The step graph failed in ONNX Runtime ({error}). Run 'glm-mtp verify' on this artifact; if it "
                "fails too, export again."
            ) from error
        values = dict(zip(self._output_names, (v.numpy() for v in binding.get_outputs()), strict=False))
        return StepOutputs(**values)

    def read_cache(self, name: str) -> np.ndarray:
        """The current content of one pool [layers, pages, 64, width], for tests and for `verify`."""
        content: np.ndarray = self._caches[name].numpy()
        return content

    def close(self) -> None:
        """Free the pools and the graph."""
        self._caches = {}
        del self._session


def _pool_shape(cache: CacheSpec, num_pages: int) -> tuple[int, ...]:
    return tuple(int(extent) for extent in cache.shape(num_pages))


def _zeros(cache: CacheSpec, num_pages: int) -> ort.OrtValue:
    return ort.OrtValue.ortvalue_from_numpy(np.zeros(_pool_shape(cache, num_pages), dtype=cache.dtype))


def _check_signature(session: ort.InferenceSession, manifest: Manifest, directory: Path) -> None:
    """Inputs and outputs must be the manifest's, by name and type; all differences in one error."""
    problems = []
    for what, found, specs in (
        ("input", session.get_inputs(), manifest.inputs),
        ("output", session.get_outputs(), manifest.outputs),
    ):
        types = {node.name: node.type for node in found}
        wanted = {spec.name: _ORT_TYPES.get(spec.dtype, spec.dtype) for spec in specs}
        problems += [f"{what} {n} is missing" for n in wanted if n not in types]
        problems += [f"{what} {n} is unknown" for n in types if n not in wanted]
        problems += [
            f"{what} {n} is {types[n]}, expected {wanted[n]}" for n in wanted if n in types and types[n] != wanted[n]
        ]
    if problems:
        raise ArtifactError(f"{directory / STEP_NAME}: {'; '.join(problems)}, by its manifest. Export again.")
