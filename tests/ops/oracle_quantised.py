"""Number formats written from their definitions: e4m3 (sign, 4 exponent bits with bias 7, 3 mantissa bits, no infinity), e2m1."""

from __future__ import annotations

import numpy as np

__all__ = [
    "E2M1",
    "E4M3",
    "dequantised_blocks",
    "dequantised_groups",
    "e4m3_bytes",
    "power_of_two_scale",
    "quantised_groups",
]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _e4m3(byte: int) -> float:
    sign, exponent, mantissa = byte >> 7, (byte >> 3) & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


E4M3 = np.array([_e4m3(byte) for byte in range(256)])


def e4m3_bytes(values: np.ndarray) -> np.ndarray:
    """Nearest e4m3 byte of each value, ties to even, at most 448 in size."""
    sizes = E4M3[:127]
    flat = np.abs(np.asarray(values, np.float64)).clip(max=448.0).reshape(-1)
    out = np.zeros(flat.shape, np.uint8)
    for i, size in enumerate(flat):
        above = min(int(np.searchsorted(sizes, size)), 126)
        below = max(above - 1, 0)
        near = size - sizes[below] < sizes[above] - size
        middle = size - sizes[below] == sizes[above] - size
        out[i] = below if near or (middle and below % 2 == 0) else above
    negative = np.signbit(np.asarray(values, np.float64)).reshape(-1)
    return (out + np.where(negative, 128, 0)).astype(np.uint8).reshape(np.shape(values))


def power_of_two_scale(amax: float, floor: float) -> float:
    """The smallest power of two s >= floor with amax <= 448 s."""
    scale = floor
    while amax > 448.0 * scale:
        scale *= 2.0
    return scale


def quantised_groups(x: np.ndarray, group: int = 128) -> np.ndarray:
    """float64 values of rows x [T, I] after e4m3 with one float32 scale max(amax, 1e-10) / 448 per row and group."""
    out = np.zeros(x.shape)
    for row in range(x.shape[0]):
        for start in range(0, x.shape[1], group):
            part = np.asarray(x[row, start : start + group], np.float32)
            scale = np.float32(max(float(np.abs(part).max()), 1e-10)) / np.float32(448.0)
            out[row, start : start + group] = E4M3[e4m3_bytes(part / scale)] * float(scale)
    return out


def dequantised_blocks(weight_bytes: np.ndarray, scale: np.ndarray, block: int = 128) -> np.ndarray:
    """float64 [O, I] of e4m3 bytes, each value times the scale of its block."""
    out = np.zeros(weight_bytes.shape)
    for o in range(weight_bytes.shape[0]):
        for i in range(weight_bytes.shape[1]):
            out[o, i] = E4M3[weight_bytes[o, i]] * float(scale[o // block, i // block])
    return out


def dequantised_groups(packed: np.ndarray, scale_bytes: np.ndarray, row_global: np.ndarray) -> np.ndarray:
    """float64 [O, I] of NVFP4: packed [O, I/2], low nibble first; e4m3 scales [O, I/16]; one global scale a row [O]."""
    out = np.zeros((packed.shape[0], 2 * packed.shape[1]))
    for o in range(out.shape[0]):
        for i in range(out.shape[1]):
            byte = int(packed[o, i // 2])
            nibble = byte >> 4 if i % 2 else byte & 15
            out[o, i] = E2M1[nibble] * E4M3[scale_bytes[o, i // 16]] * float(row_global[o])
    return out
