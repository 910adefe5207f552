"""The CUDA card of this machine, asked through the driver library: no torch, no CUDA package.

Out: `CudaDevice`, or None where there is no driver or no card.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

__all__ = ["CudaDevice", "cuda_device"]

_CAPABILITY_MAJOR, _CAPABILITY_MINOR, _NUM_MULTIPROCESSORS = 75, 76, 16  # CUdevice_attribute


@dataclass(frozen=True)
class CudaDevice:
    """One card. `driver_cuda` is the newest CUDA that the driver serves, such as "13.0"."""

    name: str
    compute_capability: str
    driver_cuda: str
    memory_bytes: int
    num_multiprocessors: int


def cuda_device(index: int = 0) -> CudaDevice | None:
    """Ask the driver about card `index`."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version, handle, memory = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    name = ctypes.create_string_buffer(256)
    steps = (
        lambda: driver.cuInit(0),
        lambda: driver.cuDriverGetVersion(ctypes.byref(version)),
        lambda: driver.cuDeviceGet(ctypes.byref(handle), index),
        lambda: driver.cuDeviceGetName(name, len(name), handle),
        lambda: driver.cuDeviceTotalMem_v2(ctypes.byref(memory), handle),
    )
    if any(step() for step in steps):
        return None

    def attribute(which: int) -> int:
        value = ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(value), which, handle)
        return value.value

    return CudaDevice(
        name=name.value.decode(),
        compute_capability=f"{attribute(_CAPABILITY_MAJOR)}.{attribute(_CAPABILITY_MINOR)}",
        driver_cuda=f"{version.value // 1000}.{version.value % 1000 // 10}",
        memory_bytes=memory.value,
        num_multiprocessors=attribute(_NUM_MULTIPROCESSORS),
    )
