"""The few CUDA driver calls the GPU session needs, through ctypes: memory, streams, events, captured graphs.

The driver library is there wherever a card is; no torch and no CUDA package is needed. Everything runs in the card's
primary context, which TensorRT and the plugins use too. A call that fails raises `EngineError` with the driver's words.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from glm_mtp_export.errors import EngineError

__all__ = ["DeviceBuffer", "Event", "Graph", "PinnedBuffer", "Stream", "free_bytes", "use_device"]

_DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING: nobody asks when
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: no hidden order with other users of the card
_CAPTURE_THREAD = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: other threads may allocate meanwhile


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise EngineError(f"no CUDA driver on this machine ({error}). Use --backend onnxruntime here.") from error
    if library.cuInit(0):
        raise EngineError("the CUDA driver found no card. Use --backend onnxruntime here.")
    return library


def _call(name: str, *arguments: object) -> None:
    status = getattr(_driver(), name)(*arguments)
    if status:
        words = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(words))
        raise EngineError(f"CUDA {name} failed with {status}: {(words.value or b'unknown').decode()}.")


@lru_cache(maxsize=8)
def _primary_context(index: int) -> ctypes.c_void_p:
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuDeviceGet", ctypes.byref(device), index)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    return context


def use_device(index: int = 0) -> None:
    """Make card `index` current for the calling thread; cheap when it already is."""
    _driver()
    _call("cuCtxSetCurrent", _primary_context(index))


def free_bytes() -> int:
    """Free memory of the current card."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    _call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return free.value


class Stream:
    """An ordered queue of work; `handle` is the CUstream as an integer."""

    def __init__(self) -> None:
        stream = ctypes.c_void_p()
        _call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
        self.handle = int(stream.value or 0)

    def synchronize(self) -> None:
        """Wait for everything queued; errors of kernels surface here."""
        _call("cuStreamSynchronize", ctypes.c_void_p(self.handle))

    def write_value(self, address: int, value: int) -> None:
        """Queue writing one 32-bit word of the card. A kernel of another stream that sees it sees all before it in this one."""
        word, flags = ctypes.c_uint32(value & 0xFFFFFFFF), ctypes.c_uint(0)
        _call("cuStreamWriteValue32_v2", ctypes.c_void_p(self.handle), ctypes.c_uint64(address), word, flags)

    def close(self) -> None:
        """Destroy it."""
        if self.handle:
            _call("cuStreamDestroy_v2", ctypes.c_void_p(self.handle))
            self.handle = 0


class Event:
    """A place in a stream that the host can wait for; at first there is nothing to wait for."""

    def __init__(self) -> None:
        self._event = ctypes.c_void_p()
        _call("cuEventCreate", ctypes.byref(self._event), _DISABLE_TIMING)

    def record(self, stream: Stream) -> None:
        """Put it behind everything queued so far."""
        _call("cuEventRecord", self._event, ctypes.c_void_p(stream.handle))

    def synchronize(self) -> None:
        """Wait for the work before it; errors of kernels surface here."""
        _call("cuEventSynchronize", self._event)

    def close(self) -> None:
        """Destroy it."""
        if self._event:
            _call("cuEventDestroy_v2", self._event)
            self._event = ctypes.c_void_p()


class PinnedBuffer:
    """Page-locked host memory, which copies overlap with; `view` is its bytes."""

    def __init__(self, num_bytes: int) -> None:
        pointer = ctypes.c_void_p()
        _call("cuMemHostAlloc", ctypes.byref(pointer), ctypes.c_size_t(num_bytes), 0)
        self.address = int(pointer.value or 0)
        raw = (ctypes.c_uint8 * num_bytes).from_address(self.address)
        self.view: NDArray[np.uint8] = np.ctypeslib.as_array(raw)

    def close(self) -> None:
        """Free it; `view` must not be used any more."""
        if self.address:
            _call("cuMemFreeHost", ctypes.c_void_p(self.address))
            self.address = 0


class DeviceBuffer:
    """Memory of the card; `address` is 256-byte aligned."""

    def __init__(self, num_bytes: int) -> None:
        pointer = ctypes.c_uint64()
        _call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(num_bytes))
        self.address = pointer.value
        self.num_bytes = num_bytes

    def fill(self, byte: int, num_bytes: int, stream: Stream) -> None:
        """Queue writing `byte` into the first `num_bytes`. A kernel does it: it waits where kernels fill the card."""
        size, value = ctypes.c_size_t(num_bytes), ctypes.c_ubyte(byte)
        _call("cuMemsetD8Async", ctypes.c_uint64(self.address), value, size, ctypes.c_void_p(stream.handle))

    def fill_zero(self, stream: Stream) -> None:
        """Queue writing zeros."""
        self.fill(0, self.num_bytes, stream)

    def write(self, data: NDArray[np.generic], offset: int = 0) -> None:
        """Copy host bytes in and wait."""
        flat = np.ascontiguousarray(data)
        if offset + flat.nbytes > self.num_bytes:
            raise ValueError(f"{flat.nbytes} bytes at {offset} do not fit into {self.num_bytes}")
        source, size = ctypes.c_void_p(flat.ctypes.data), ctypes.c_size_t(flat.nbytes)
        _call("cuMemcpyHtoD_v2", ctypes.c_uint64(self.address + offset), source, size)

    def read(self) -> NDArray[np.uint8]:
        """Copy everything out and wait."""
        out = np.empty(self.num_bytes, dtype=np.uint8)
        size = ctypes.c_size_t(self.num_bytes)
        _call("cuMemcpyDtoH_v2", ctypes.c_void_p(out.ctypes.data), ctypes.c_uint64(self.address), size)
        return out

    def upload(self, source: PinnedBuffer, num_bytes: int, stream: Stream, offset: int = 0) -> None:
        """Queue a copy of the first `num_bytes` of `source` to `offset` in this buffer."""
        if offset + num_bytes > self.num_bytes:
            raise ValueError(f"{num_bytes} bytes at {offset} do not fit into {self.num_bytes}")
        destination, size = ctypes.c_uint64(self.address + offset), ctypes.c_size_t(num_bytes)
        host, queue = ctypes.c_void_p(source.address), ctypes.c_void_p(stream.handle)
        _call("cuMemcpyHtoDAsync_v2", destination, host, size, queue)

    def download(self, target: PinnedBuffer, num_bytes: int, stream: Stream) -> None:
        """Queue a copy of the first `num_bytes` of this buffer to `target`."""
        source, size = ctypes.c_uint64(self.address), ctypes.c_size_t(num_bytes)
        host, queue = ctypes.c_void_p(target.address), ctypes.c_void_p(stream.handle)
        _call("cuMemcpyDtoHAsync_v2", host, source, size, queue)

    def close(self) -> None:
        """Free it."""
        if self.address:
            _call("cuMemFree_v2", ctypes.c_uint64(self.address))
            self.address = 0


class Graph:
    """Work captured once and launched many times: the addresses inside stay what they were."""

    def __init__(self, stream: Stream, queue_work: Callable[[], None]) -> None:
        queue, graph, executable = ctypes.c_void_p(stream.handle), ctypes.c_void_p(), ctypes.c_void_p()
        _call("cuStreamBeginCapture_v2", queue, _CAPTURE_THREAD)
        try:
            queue_work()
        finally:
            _call("cuStreamEndCapture", queue, ctypes.byref(graph))
        try:
            _call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_uint64(0))
        finally:
            _call("cuGraphDestroy", graph)
        self._executable = executable

    def launch(self, stream: Stream) -> None:
        """Queue the captured work."""
        _call("cuGraphLaunch", self._executable, ctypes.c_void_p(stream.handle))

    def close(self) -> None:
        """Destroy it."""
        if self._executable:
            _call("cuGraphExecDestroy", self._executable)
            self._executable = ctypes.c_void_p()
