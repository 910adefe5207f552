"""Small floating-point formats as numpy bit patterns: decoders by table, encoders that round to nearest even, exactly.

bfloat16 travels as uint16, e4m3 / e8m0 / packed e2m1 as uint8. Decoders give float32 and are exact. Encoders take
float32; e4m3 saturates at 448 and e2m1 at 6, NaN stays NaN where the format has one (e2m1 has none: NaN becomes 0).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

__all__ = [
    "CHUNK_VALUES",
    "E2M1_MAX",
    "E4M3_MAX",
    "FP8_BLOCK",
    "NVFP4_GROUP",
    "bf16_to_f32",
    "e2m1_to_f32",
    "e4m3_to_f32",
    "e8m0_to_f32",
    "f32_to_bf16",
    "f32_to_e2m1",
    "f32_to_e4m3",
    "fp8_block_scales",
    "nvfp4_scales",
    "pack_nibbles",
    "quantise_fp8_blocks",
    "quantise_nvfp4",
    "row_chunks",
    "unpack_nibbles",
]

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]

E4M3_MAX = 448.0
E2M1_MAX = 6.0
FP8_BLOCK = 128  # rows and columns that share one scale in the FP8 layout of the kernels
NVFP4_GROUP = 16  # columns that share one e4m3 scale
CHUNK_VALUES = (
    1 << 18
)  # converted at once: temporaries stay in cache, which is up to eight times as fast as whole matrices


def _e4m3_table() -> F32:
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    magnitude = np.where(exponent == 0, np.ldexp(mantissa / 8.0, -6), np.ldexp(1 + mantissa / 8.0, exponent - 7))
    magnitude[(codes & 127) == 127] = np.nan
    return np.where(codes & 128, -magnitude, magnitude).astype(np.float32)


def _e8m0_table() -> F32:
    table = np.ldexp(np.float64(1), np.arange(256) - 127)
    table[255] = np.nan
    return table.astype(np.float32)


_E4M3 = _e4m3_table()
_E8M0 = _e8m0_table()
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def bf16_to_f32(bits: U16) -> F32:
    """Exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(values: F32) -> U16:
    """Nearest, ties to even; a NaN keeps its sign and becomes quiet."""
    values = np.ascontiguousarray(values, np.float32)
    bits = values.view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    if (nan := np.isnan(values)).any():
        rounded = np.where(nan, (bits >> np.uint32(16)) | np.uint32(0x40), rounded)
    return rounded.astype(np.uint16)


def e4m3_to_f32(codes: U8) -> F32:
    """Exact; 0x7F and 0xFF are NaN, there is no infinity."""
    return _E4M3.take(codes)  # a third of the time of indexing


def e8m0_to_f32(codes: U8) -> F32:
    """Powers of two, 2^(code - 127); 255 is NaN."""
    return _E8M0[codes]


def f32_to_e4m3(values: F32) -> U8:
    """Nearest, ties to even, saturating at ±448."""
    halves = np.ascontiguousarray(values, np.float32).view(np.uint16)
    # The upper half of the bits, made odd when the lower half is not zero: eight significant bits that round to four as all
    # 24 would, so a table has every answer.
    return _E4M3_CODES.take(halves[..., 1::2] | (halves[..., 0::2] != 0))


def _e4m3_codes() -> U8:
    """The code of every float32 whose lower 16 bits are zero, by its upper ones."""
    values = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    magnitude = np.fmin(np.abs(values), np.float32(E4M3_MAX))  # a NaN becomes 448 here and is put back below
    bits = magnitude.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFFF) + ((bits >> np.uint32(20)) & np.uint32(1))) >> np.uint32(20)
    normal = rounded.astype(np.int32) - ((127 - 7) << 3)
    tiny = np.rint(magnitude * np.float32(512)).astype(np.int32)  # multiples of 2^-9; 8 is the first normal number
    codes = np.where(magnitude < np.float32(2.0**-6), tiny, normal)
    codes = np.where(np.isnan(values), 0x7F, codes)
    return (codes | (np.signbit(values).astype(np.int32) << 7)).astype(np.uint8)


_E4M3_CODES = _e4m3_codes()


def e2m1_to_f32(codes: U8) -> F32:
    """Exact; one code (0..15) an element."""
    return _E2M1[codes]


def f32_to_e2m1(values: F32) -> U8:
    """Nearest of 0, .5, 1, 1.5, 2, 3, 4, 6, ties to the even code, saturating; one code (0..15) an element."""
    magnitude = np.abs(values)
    codes = np.zeros(values.shape, np.uint8)
    for threshold, tie_goes_up in ((0.25, 0), (0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5.0, 0)):
        codes += (magnitude >= threshold) if tie_goes_up else (magnitude > threshold)
    codes |= np.signbit(values).astype(np.uint8) << np.uint8(3)
    return codes


def pack_nibbles(codes: U8) -> U8:
    """[..., C] codes -> [..., C/2] bytes; the low nibble is the even column."""
    packed: U8 = codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))
    return packed


def unpack_nibbles(packed: U8) -> U8:
    """[..., C/2] bytes -> [..., C] codes."""
    codes = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), np.uint8)
    codes[..., 0::2] = packed & np.uint8(15)
    codes[..., 1::2] = packed >> np.uint8(4)
    return codes


def row_chunks(start: int, stop: int, num_columns: int) -> Iterator[tuple[int, int]]:
    """Cut rows into ranges of about CHUNK_VALUES values."""
    step = max(1, CHUNK_VALUES // max(1, num_columns))
    for first in range(start, stop, step):
        yield first, min(first + step, stop)


def quantise_fp8_blocks(values: F32, block: int = FP8_BLOCK) -> tuple[U8, F32]:
    """[R, C] -> e4m3 codes [R, C] and float32 multipliers [ceil(R/block), ceil(C/block)]; edge blocks are partial.

    The largest magnitude of a block maps to 448; an all-zero block has scale 1.
    """
    codes = np.empty(values.shape, np.uint8)
    scales = _empty_scales(values, block)
    for rows, columns, row, blocks in _tiles(values, block):
        tile = values[rows, columns]
        scales[row, blocks] = scale = _tile_scales(tile, block)
        codes[rows, columns] = f32_to_e4m3(tile / scale[np.arange(tile.shape[1]) // block])
    return codes, scales


def fp8_block_scales(values: F32, block: int = FP8_BLOCK) -> F32:
    """The multipliers of `quantise_fp8_blocks` alone, for a fraction of its time."""
    scales = _empty_scales(values, block)
    for rows, columns, row, blocks in _tiles(values, block):
        scales[row, blocks] = _tile_scales(values[rows, columns], block)
    return scales


def _empty_scales(values: F32, block: int) -> F32:
    rows, cols = values.shape
    return np.empty((-(-rows // block), -(-cols // block)), np.float32)


def _tiles(values: F32, block: int) -> Iterator[tuple[slice, slice, int, slice]]:
    """One row of blocks, or a part of it, at a time: rows and columns of values, row and columns of scales."""
    rows, cols = values.shape
    width = max(1, CHUNK_VALUES // block // block) * block
    for row, top in enumerate(range(0, rows, block)):
        for left in range(0, cols, width):
            right = min(left + width, cols)
            yield slice(top, top + block), slice(left, right), row, slice(left // block, -(-right // block))


def _tile_scales(tile: F32, block: int) -> F32:
    starts = np.arange(0, tile.shape[1], block)
    largest = np.maximum.reduceat(np.abs(tile).max(axis=0), starts)
    scale = (largest / np.float32(E4M3_MAX)).astype(np.float32)
    scale[scale == 0] = 1
    return scale


def quantise_nvfp4(values: F32) -> tuple[U8, U8, np.float32]:
    """[R, C] -> packed e2m1 [R, C/2], e4m3 group scales [R, C/16], one float32 scale; value = e2m1 * group * global.

    C must be a multiple of 16. The global scale maps the largest magnitude to 6 * 448.
    """
    rows, cols = values.shape
    groups = values.reshape(rows, cols // NVFP4_GROUP, NVFP4_GROUP)
    scales, overall = nvfp4_scales(values)
    packed = np.empty((rows, cols // 2), np.uint8)
    for start, stop in row_chunks(0, rows, cols):
        step = e4m3_to_f32(scales[start:stop])[:, :, None] * overall
        step[step == 0] = np.inf  # a group too small for any scale becomes zeros
        scaled = groups[start:stop] / step
        packed[start:stop] = pack_nibbles(f32_to_e2m1(scaled).reshape(-1, cols))
    return packed, scales, overall


def nvfp4_scales(values: F32) -> tuple[U8, np.float32]:
    """The group scales and the global scale of `quantise_nvfp4` alone, for a fraction of its time."""
    rows, cols = values.shape
    groups = values.reshape(rows, cols // NVFP4_GROUP, NVFP4_GROUP)
    largest = np.empty(groups.shape[:2], np.float32)
    for start, stop in row_chunks(0, rows, cols):
        part = np.abs(groups[start:stop])
        while part.shape[2] > 1:  # in halves: a maximum along so short an axis is slow
            half = part.shape[2] // 2
            part = np.maximum(part[:, :, :half], part[:, :, half:])
        largest[start:stop] = part[:, :, 0]
    overall = np.float32(largest.max() / (E2M1_MAX * E4M3_MAX)) or np.float32(1)
    return f32_to_e4m3((largest / np.float32(E2M1_MAX) / overall).astype(np.float32)), overall
