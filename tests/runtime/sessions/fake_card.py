"""A card made of host memory, and an engine on it that runs the portable graph: for the session's own logic.

Buffers are numpy arrays whose addresses the session hands to the engine, as it does with device memory. A graph keeps the
work it was given and does it again, with the addresses of its capture.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from glm_mtp_export.artifact import STEP_NAME, Manifest, TensorSpec
from glm_mtp_export.runtime.sessions import weight_loader

__all__ = ["Buffer", "Engine", "Graph", "Stream", "stage_on_the_host"]


class Stream:
    """Work is done when it is queued."""

    handle = 1

    def synchronize(self) -> None:
        """Nothing is ever pending."""

    def close(self) -> None:
        """Nothing to free."""


class Buffer:
    """Stands for device and pinned memory; filled with garbage, as fresh memory is."""

    def __init__(self, num_bytes: int) -> None:
        self.view: NDArray[np.uint8] = np.full(max(num_bytes, 1), 0x5A, dtype=np.uint8)
        self.num_bytes = num_bytes
        self.address = self.view.ctypes.data

    def fill_zero(self, stream: Stream) -> None:
        """As the card does."""
        self.view[:] = 0

    def write(self, data: NDArray[Any], offset: int = 0) -> None:
        """Copy in."""
        flat = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
        self.view[offset : offset + flat.nbytes] = flat

    def read(self) -> NDArray[np.uint8]:
        """Copy out."""
        return self.view.copy()

    def upload(self, source: Buffer, num_bytes: int, stream: Stream, offset: int = 0) -> None:
        """Host to card."""
        self.view[offset : offset + num_bytes] = source.view[:num_bytes]

    def download(self, target: Buffer, num_bytes: int, stream: Stream) -> None:
        """Card to host."""
        target.view[:num_bytes] = self.view[:num_bytes]

    def close(self) -> None:
        """Writes after this would be seen."""
        self.address = 0


def stage_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight loader copies through this card's memory."""
    monkeypatch.setattr(weight_loader, "PinnedBuffer", Buffer)
    monkeypatch.setattr(weight_loader, "Stream", Stream)
    monkeypatch.setattr(weight_loader, "use_device", lambda: None)


class Graph:
    """Repeats the work it was made of."""

    captures = 0
    launches = 0

    def __init__(self, stream: Stream, queue_work: Callable[[], None]) -> None:
        Graph.captures += 1
        self._work = queue_work

    def launch(self, stream: Stream) -> None:
        """Once more."""
        Graph.launches += 1
        self._work()

    def close(self) -> None:
        """Nothing to free."""


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
        """Run the portable graph on the bound memory."""
        self.engine.num_executions += 1
        manifest = self.engine.manifest
        feeds = {spec.name: self._array(spec, self.shapes[spec.name]) for spec in manifest.inputs}
        for name, value in zip(self.engine.output_names, self.engine.session.run(None, feeds), strict=True):
            spec = next(s for s in manifest.outputs if s.name == name)
            self._array(spec, value.shape)[...] = value
        return True

    def _array(self, spec: TensorSpec, shape: tuple[int, ...]) -> NDArray[Any]:
        dtype = np.dtype(spec.dtype)
        size = int(np.prod(shape)) * dtype.itemsize
        raw = (ctypes.c_uint8 * size).from_address(self.addresses[spec.name])
        return np.ctypeslib.as_array(raw).view(dtype).reshape(shape)


class Engine:
    """As much of an ICudaEngine as the session uses."""

    def __init__(self, artifact: Path, manifest: Manifest, most_rows: tuple[int, int], most_columns: int) -> None:
        self.manifest = manifest
        self.most_rows = most_rows
        self.most_columns = most_columns
        self.num_executions = 0
        self.session = ort.InferenceSession(str(artifact / STEP_NAME), providers=["CPUExecutionProvider"])
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
