"""One stored weight in whichever format it lies on disk: what it is, and its rows as float32 or as raw codes.

A `StoredWeight` is a window of rows [first_row, first_row + shape[0]) of a tensor seen as [rows, columns]; a packed
expert tensor gives one window per expert and projection. Values are exact dequantised float32:

    plain       bf16, fp16 or fp32 values
    fp8_block   e4m3 x float32 multiplier per block of (rows, columns), edge blocks partial
    fp8_tensor  e4m3 x one multiplier
    fp8_channel e4m3 x one multiplier a row
    nvfp4       packed e2m1 x e4m3 per 16 columns x one float32 (given as itself, or as its reciprocal)

The format is decided by `identify` from dtype and companions alone. What cannot be proven raises `CheckpointError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from glm_mtp_export.checkpoint.index import StoredRows, TensorInfo, TensorStore
from glm_mtp_export.checkpoint.numeric import (
    F32,
    FP8_BLOCK,
    NVFP4_GROUP,
    U8,
    U16,
    bf16_to_f32,
    e2m1_to_f32,
    e4m3_to_f32,
    e8m0_to_f32,
    f32_to_bf16,
    row_chunks,
    unpack_nibbles,
)
from glm_mtp_export.errors import CheckpointError

__all__ = ["FP8_BLOCK_FORMAT", "FP8_CHANNEL", "FP8_TENSOR", "NVFP4", "PLAIN", "StoredWeight", "identify"]

PLAIN, FP8_BLOCK_FORMAT, FP8_TENSOR, FP8_CHANNEL, NVFP4 = "plain", "fp8_block", "fp8_tensor", "fp8_channel", "nvfp4"
_UNUSED_ROLES = ("input_scale", "input_global_scale", "weight_shape")  # of activations, or said by the config already
_PLAIN_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


@dataclass(frozen=True)
class StoredWeight:
    """A weight on disk. `shape` is in values; a vector counts as one row."""

    store: TensorStore
    shape: tuple[int, ...]
    format: str
    values: TensorInfo
    scale: TensorInfo | None = None
    overall: TensorInfo | None = None  # nvfp4: the float32 scale
    reciprocal: bool = False  # nvfp4: `overall` divides instead of multiplying
    block: tuple[int, int] = (FP8_BLOCK, FP8_BLOCK)
    first_row: int = 0  # of this window in the tensor
    matrix_row: int = 0  # of this window in the matrix whose blocks the scales belong to
    scale_row: int = 0  # first row of that matrix's scales in the scale tensor

    @property
    def num_rows(self) -> int:
        """Rows of the window."""
        return self.shape[0] if len(self.shape) > 1 else 1

    @property
    def num_columns(self) -> int:
        """Values in a row."""
        return self.shape[-1]

    @property
    def precision(self) -> str:
        """bfloat16, float16, float32, or the quantised format's name."""
        return _PLAIN_DTYPES[self.values.dtype] if self.format == PLAIN else self.format

    def window(self, first_row: int, num_rows: int, matrix_row: int, scale_row: int) -> StoredWeight:
        """Rows of a stack of matrices as a weight of their own; block scales stay those of their matrix."""
        shape = (num_rows, self.num_columns)
        return replace(self, shape=shape, first_row=first_row, matrix_row=matrix_row, scale_row=scale_row)

    def floats(self, start: int, stop: int) -> F32:
        """Dequantised rows [stop - start, columns]."""
        values = np.empty((stop - start, self.num_columns), np.float32)
        for first, last in row_chunks(start, stop, self.num_columns):
            values[first - start : last - start] = self._floats(first, last)
        return values

    def _floats(self, start: int, stop: int) -> F32:
        if self.format == PLAIN:
            return _plain_floats(self._raw(start, stop), self.values.dtype)
        if self.format == NVFP4:
            values = e2m1_to_f32(unpack_nibbles(self.codes(start, stop))).reshape(stop - start, -1, NVFP4_GROUP)
            scales = e4m3_to_f32(self.group_scales(start, stop))[:, :, None]
            # e2m1 * e4m3 is exact in float32, so only the last product rounds.
            return (values * scales * self.global_scale()).reshape(stop - start, -1)
        values = e4m3_to_f32(self._raw(start, stop))
        multipliers = self._multipliers(start, stop)
        width = self.block[1] if multipliers.shape[1] > 1 else self.num_columns
        if self.num_columns % width:
            multipliers = np.repeat(multipliers, width, axis=1)[:, : self.num_columns]
            width = 1
        blocks = values.reshape(len(values), -1, width)
        blocks *= multipliers[:, :, None]
        return values

    def bf16(self, start: int, stop: int) -> U16:
        """Rows as bfloat16 bits; stored bfloat16 passes through untouched."""
        if self.format == PLAIN and self.values.dtype == "BF16":
            bits: U16 = self._raw(start, stop)
            return bits
        values = np.empty((stop - start, self.num_columns), np.uint16)
        for first, last in row_chunks(start, stop, self.num_columns):
            values[first - start : last - start] = f32_to_bf16(self._floats(first, last))
        return values

    @property
    def has_kernel_blocks(self) -> bool:
        """Whether codes and scales can pass to the kernels' 128 x 128 layout as they are."""
        if self.format == FP8_TENSOR:
            return True
        return self.format == FP8_BLOCK_FORMAT and self.block == (FP8_BLOCK,) * 2 and self.matrix_row % FP8_BLOCK == 0

    def value_rows(self, start: int, stop: int) -> StoredRows:
        """Where the values, codes or packed codes of rows [start, stop) lie."""
        return StoredRows(self.values, self.first_row + start, self.first_row + stop)

    def group_scale_rows(self, start: int, stop: int) -> StoredRows:
        """NVFP4: where the group scales of rows [start, stop) lie."""
        assert self.scale is not None
        return StoredRows(self.scale, self.first_row + start, self.first_row + stop)

    def kernel_scale_rows(self, start: int, stop: int) -> StoredRows | None:
        """Where the scales that `kernel_scales` gives lie as they are; None when they are made."""
        assert self.scale is not None
        if self.format == FP8_TENSOR or self.scale.dtype != "F32":
            return None
        first = self.scale_row + (self.matrix_row + start) // FP8_BLOCK
        return StoredRows(self.scale, first, first + -(-(stop - start) // FP8_BLOCK))

    def codes(self, start: int, stop: int) -> U8:
        """e4m3 codes [rows, columns], or packed e2m1 [rows, columns/2], as stored."""
        return self._raw(start, stop)

    def kernel_scales(self, start: int, stop: int) -> F32:
        """FP8 multipliers [ceil(rows/128), ceil(columns/128)]; `start` must be whole blocks, see has_kernel_blocks."""
        rows, cols = -(-(stop - start) // FP8_BLOCK), -(-self.num_columns // FP8_BLOCK)
        assert self.scale is not None
        if self.format == FP8_TENSOR:
            return np.full((rows, cols), self._scalar(self.scale), np.float32)
        first = self.scale_row + (self.matrix_row + start) // FP8_BLOCK
        return self._scale_floats(first, first + rows)

    def group_scales(self, start: int, stop: int) -> U8:
        """NVFP4: e4m3 bits [rows, columns/16]."""
        scales: U8 = self.store.rows(*self.group_scale_rows(start, stop))
        return scales

    def global_scale(self) -> np.float32:
        """NVFP4: the float32 that multiplies, whichever way it is stored."""
        assert self.overall is not None
        overall = self._scalar(self.overall)
        return np.float32(1) / overall if self.reciprocal else overall

    def same_bytes(self, other: StoredWeight) -> bool:
        """Whether two plain weights of one dtype and shape hold the same bits."""
        if self.format != PLAIN or (self.values.dtype, self.shape) != (other.values.dtype, other.shape):
            return False
        step = max(1, (1 << 24) // max(1, self.num_columns * 4))
        ranges = [(i, min(i + step, self.num_rows)) for i in range(0, self.num_rows, step)]
        return all(np.array_equal(self._raw(*r).view(np.uint8), other._raw(*r).view(np.uint8)) for r in ranges)

    def _raw(self, start: int, stop: int) -> npt.NDArray[Any]:
        return self.store.rows(*self.value_rows(start, stop))

    def _scalar(self, info: TensorInfo) -> np.float32:
        return np.float32(_plain_floats(self.store.rows(info, 0, 1), info.dtype).reshape(-1)[0])

    def _scale_floats(self, start: int, stop: int) -> F32:
        assert self.scale is not None
        return _plain_floats(self.store.rows(self.scale, start, stop), self.scale.dtype)

    def _multipliers(self, start: int, stop: int) -> F32:
        """FP8 multipliers of rows [start, stop): one a block of columns, or one a row; one row may stand for all."""
        assert self.scale is not None
        if self.format == FP8_TENSOR:
            return np.full((1, 1), self._scalar(self.scale), np.float32)
        if self.format == FP8_CHANNEL:
            if len(self.scale.shape) == 1:
                return self._scale_floats(0, 1).reshape(-1, 1)[self.first_row + start : self.first_row + stop]
            return self._scale_floats(self.first_row + start, self.first_row + stop)
        rows = (self.matrix_row + np.arange(start, stop)) // self.block[0]
        scales = self._scale_floats(self.scale_row + int(rows[0]), self.scale_row + int(rows[-1]) + 1)
        return scales[rows - rows[0]]


def _plain_floats(raw: npt.NDArray[Any], dtype: str) -> F32:
    if dtype == "BF16":
        return bf16_to_f32(raw)
    if dtype == "F8_E8M0":
        return e8m0_to_f32(raw)
    return raw.astype(np.float32)


def identify(
    store: TensorStore, shape: tuple[int, ...], roles: Mapping[str, TensorInfo], block: tuple[int, int]
) -> StoredWeight:
    """Decide a module's format from what lies on disk and check every shape; raises CheckpointError.

    `shape` is the module's in values (a packed expert tensor's is [experts, rows, columns]), `block` the recipe's FP8
    block.
    """
    if "weight_packed" in roles and roles["weight_packed"].dtype != "U8":
        raise CheckpointError(
            f"{_at(roles['weight_packed'])} is not U8: int4/int8 groups (pack-quantized) are not "
            "supported. Use a bf16, FP8 or NVFP4 checkpoint."
        )
    values = roles.get("weight_packed") or roles["weight"]
    weight = _identified(store, shape, values, roles, block)
    used = (weight.values, weight.scale, weight.overall)
    if beside := [t.name for role, t in roles.items() if t not in used and role not in _UNUSED_ROLES]:
        raise CheckpointError(
            f"{_at(values)} is {weight.precision}, but {', '.join(beside)} lies beside it: the format cannot be proven. "
            "Fetch the shards again."
        )
    return weight


def _identified(
    store: TensorStore,
    shape: tuple[int, ...],
    values: TensorInfo,
    roles: Mapping[str, TensorInfo],
    block: tuple[int, int],
) -> StoredWeight:
    if values.dtype in _PLAIN_DTYPES:
        _expect(values, shape)
        return StoredWeight(store, shape, PLAIN, values)
    if values.dtype == "F8_E4M3":
        return _identify_fp8(store, shape, values, roles, block)
    if values.dtype == "U8":
        return _identify_nvfp4(store, shape, values, roles)
    raise CheckpointError(
        f"{_at(values)} is {values.dtype}, expected bf16, fp16, fp32, e4m3 or NVFP4 bytes. Use such a checkpoint."
    )


def _identify_fp8(
    store: TensorStore,
    shape: tuple[int, ...],
    values: TensorInfo,
    roles: Mapping[str, TensorInfo],
    block: tuple[int, int],
) -> StoredWeight:
    _expect(values, shape)
    scale = roles.get("weight_scale_inv") or roles.get("weight_scale")
    if scale is None:
        raise CheckpointError(
            f"{_at(values)} is FP8 without a weight_scale_inv or weight_scale. Fetch the shard that has it."
        )
    if scale.dtype not in ("F32", "BF16", "F16", "F8_E8M0"):
        raise CheckpointError(f"{_at(scale)} has dtype {scale.dtype}, expected a float scale. Fetch this shard again.")
    blocks = (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1])) if len(shape) > 1 else ()
    if scale.num_values == 1 and len(shape) == 2:
        return StoredWeight(store, shape, FP8_TENSOR, values, scale)
    if scale.shape == blocks:
        return StoredWeight(store, shape, FP8_BLOCK_FORMAT, values, scale, block=block)
    if len(shape) == 2 and scale.shape in ((shape[0], 1), (shape[0],)):
        return StoredWeight(store, shape, FP8_CHANNEL, values, scale)
    raise CheckpointError(
        f"{_at(scale)} is {list(scale.shape)}, expected {list(blocks)} = ceil({list(shape)} / {list(block)}). "
        "Check weight_block_size in config.json, or fetch this shard again."
    )


def _identify_nvfp4(
    store: TensorStore, shape: tuple[int, ...], values: TensorInfo, roles: Mapping[str, TensorInfo]
) -> StoredWeight:
    scale, packed_name = roles.get("weight_scale"), values.name.endswith("_packed")
    overall = roles.get("weight_global_scale" if packed_name else "weight_scale_2")
    if scale is None or overall is None:
        missing = "weight_scale" if scale is None else "weight_global_scale" if packed_name else "weight_scale_2"
        raise CheckpointError(
            f"{_at(values)} holds packed bytes, but {missing} is missing: the format cannot be proven. Fetch it."
        )
    if scale.dtype != "F8_E4M3" or shape[-1] % NVFP4_GROUP or len(shape) != 2:
        raise CheckpointError(
            f"{_at(scale)} is {scale.dtype} for a weight of {list(shape)}: only NVFP4 (e4m3 scales, groups of 16, "
            "one tensor a projection) is supported, no MXFP4. Use a bf16, FP8 or NVFP4 checkpoint."
        )
    _expect(values, (*shape[:-1], shape[-1] // 2))
    _expect(scale, (*shape[:-1], shape[-1] // NVFP4_GROUP))
    if overall.num_values != 1 or overall.dtype != "F32":
        raise CheckpointError(
            f"{_at(overall)} is {overall.dtype} {list(overall.shape)}, expected one F32. Fetch this shard again."
        )
    return StoredWeight(store, shape, NVFP4, values, scale, overall, reciprocal=packed_name)


def _at(info: TensorInfo) -> str:
    return f"{info.file.name}: {info.name}"


def _expect(info: TensorInfo, shape: tuple[int, ...]) -> None:
    if info.shape != shape:
        raise CheckpointError(
            f"{_at(info)} is {list(info.shape)}, expected {list(shape)} from config.json. "
            "Check that config and weights belong together, or fetch this shard again."
        )
