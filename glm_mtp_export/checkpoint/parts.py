"""The recipes of the weight plan: which rows of which stored weights make a graph weight, whole or one rank's slice of
it.

In: a view and an entry of the whole plan. Out: `Part` records in row-major order; each knows how to read and convert
itself, so that they can be worked on one by one, or by several threads. Damage raises `CheckpointError`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from glm_mtp_export.artifact import WeightEntry
from glm_mtp_export.checkpoint.formats import FP8_BLOCK_FORMAT, NVFP4, StoredWeight
from glm_mtp_export.checkpoint.index import StoredRows
from glm_mtp_export.checkpoint.names import expert_module
from glm_mtp_export.checkpoint.numeric import (
    F32,
    FP8_BLOCK,
    NVFP4_GROUP,
    U8,
    bf16_to_f32,
    e2m1_to_f32,
    e4m3_to_f32,
    fp8_block_scales,
    nvfp4_scales,
    quantise_fp8_blocks,
    quantise_nvfp4,
    unpack_nibbles,
)
from glm_mtp_export.checkpoint.sharding import Cut
from glm_mtp_export.checkpoint.view import CheckpointView

__all__ = ["PIECE_BYTES", "Part", "cut_parts", "entry_parts", "made_rows"]

PIECE_BYTES = 1 << 25  # about what one piece takes as float32; bounds the memory of everything here


@dataclass(frozen=True)
class Part:
    """Rows [start, stop) of a stored weight: what a recipe is made of. `kept` cuts what was made of them."""

    weight: StoredWeight
    start: int
    stop: int
    kept: tuple[slice, slice] | None = None

    @property
    def num_values(self) -> int:
        """Values of the part."""
        return (self.stop - self.start) * self.weight.num_columns

    def cut(self, entry: WeightEntry) -> Iterator[Part]:
        """Smaller parts of about PIECE_BYTES, whole FP8 blocks each; NVFP4 needs the part's largest value, so it stays
        whole."""
        step = max(1, PIECE_BYTES // (4 * max(1, self.weight.num_columns)))
        if entry.precision == FP8_BLOCK_FORMAT:
            step = max(FP8_BLOCK, step // FP8_BLOCK * FP8_BLOCK)
        if entry.precision == NVFP4 or (self.kept and self.kept[0] != slice(None)):
            step = max(1, self.stop - self.start)
        for start in range(self.start, self.stop, step):
            yield replace(self, start=start, stop=min(start + step, self.stop))

    @property
    def has_kernel_blocks(self) -> bool:
        """Whether FP8 codes and scales pass through as stored."""
        return self.weight.has_kernel_blocks and self.start % FP8_BLOCK == 0

    def fp8(self) -> tuple[U8, F32]:
        """e4m3 codes and 128 x 128 block scales, as stored where that is the stored layout."""
        if self.has_kernel_blocks:
            return self.weight.codes(self.start, self.stop), self.weight.kernel_scales(self.start, self.stop)
        return quantise_fp8_blocks(self.weight.floats(self.start, self.stop))

    def nvfp4(self) -> tuple[U8, U8, np.float32]:
        """Packed e2m1, group scales, global scale, as stored where that is the stored format."""
        weight, rows = self.weight, (self.start, self.stop)
        if weight.format == NVFP4:
            return weight.codes(*rows), weight.group_scales(*rows), weight.global_scale()
        return quantise_nvfp4(weight.floats(*rows))

    def rounded(self, precision: str) -> F32:
        """The part as float32 after a conversion to `precision`: the values that kernels of that format work with."""
        if precision == NVFP4:
            packed, groups, overall = self.nvfp4()
            # e2m1 * e4m3 is exact in float32, so only the last product rounds.
            return e2m1_to_f32(unpack_nibbles(packed)) * np.repeat(e4m3_to_f32(groups), NVFP4_GROUP, axis=1) * overall
        if precision == FP8_BLOCK_FORMAT:
            codes, scales = self.fp8()
            rows, columns = (np.arange(extent) // FP8_BLOCK for extent in codes.shape)
            return e4m3_to_f32(codes) * scales[rows[:, None], columns[None, :]]
        if precision == "bfloat16":
            return bf16_to_f32(self.weight.bf16(self.start, self.stop))
        return self.weight.floats(self.start, self.stop)

    def stored(self, entry: WeightEntry) -> StoredRows | None:
        """The rows on disk whose bytes are this part before `kept` cuts it; None when it takes arithmetic.

        Whatever reads a weight asks here first, so that stored bytes pass untouched everywhere.
        """
        weight, rows = self.weight, (self.start, self.stop)
        if entry.format == NVFP4:
            if weight.format != NVFP4 or entry.component == "global_scale":
                return None
            return weight.value_rows(*rows) if entry.component == "values" else weight.group_scale_rows(*rows)
        if entry.format == FP8_BLOCK_FORMAT:
            if not self.has_kernel_blocks:
                return None
            return weight.value_rows(*rows) if entry.component == "values" else weight.kernel_scale_rows(*rows)
        # A plain weight: as stored, unless its values went through a format that rounds.
        same = entry.precision == entry.dtype == weight.precision
        return weight.value_rows(*rows) if same else None

    def made_shape(self, entry: WeightEntry) -> tuple[int, int]:
        """Rows and columns of what `made` gives, in elements of the entry's dtype."""
        rows = made_rows(self, entry)
        columns = 1 if entry.component == "global_scale" else entry.shape[-1]
        if self.kept is None:
            return rows, columns
        return len(range(rows)[self.kept[0]]), len(range(columns)[self.kept[1]])

    def made(self, entry: WeightEntry) -> npt.NDArray[Any]:
        """This part of the graph weight; of stored codes and scales only the wanted ones are read."""
        rows = self.stored(entry)
        whole = self._computed(entry) if rows is None else self.weight.store.rows(*rows)
        return whole if self.kept is None else whole[self.kept]

    def _computed(self, entry: WeightEntry) -> npt.NDArray[Any]:
        if entry.format == NVFP4:
            return self._nvfp4_component(entry.component)
        if entry.format == FP8_BLOCK_FORMAT:
            if self.has_kernel_blocks:  # the codes are stored, so it is the scales
                return self.weight.kernel_scales(self.start, self.stop)
            if entry.component == "block_scale":
                return fp8_block_scales(self.weight.floats(self.start, self.stop))
            return self.fp8()[0]
        return self.weight.bf16(self.start, self.stop) if entry.dtype == "bfloat16" else self.rounded(entry.precision)

    def _nvfp4_component(self, component: str) -> npt.NDArray[Any]:
        weight = self.weight
        if weight.format == NVFP4:  # codes and group scales are stored
            return np.array([weight.global_scale()], np.float32)
        values = weight.floats(self.start, self.stop)
        if component == "values":
            return quantise_nvfp4(values)[0]
        groups, overall = nvfp4_scales(values)
        return groups if component == "group_scale" else np.array([overall], np.float32)


def entry_parts(view: CheckpointView, entry: WeightEntry) -> Iterator[Part]:
    """The recipe: which rows of which modules, in order."""
    config = view.config
    if entry.recipe in ("copy", "concat_rows"):
        for source in entry.sources:
            weight = view.weight(source)
            yield Part(weight, 0, weight.num_rows)
    elif entry.recipe in ("kv_b_key", "kv_b_value"):
        weight = view.weight(entry.sources[0])
        nope, head = config.qk_nope_head_dim, config.qk_nope_head_dim + config.v_head_dim
        first, last = (0, nope) if entry.recipe == "kv_b_key" else (nope, head)
        for index in range(config.num_attention_heads):
            yield Part(weight, index * head + first, index * head + last)
    else:
        projections = {"experts_gate_up": ("gate_proj", "up_proj"), "experts_down": ("down_proj",)}[entry.recipe]
        layer = entry.sources[0].removesuffix(".mlp.experts")
        for expert in range(config.n_routed_experts):
            for projection in projections:
                weight = view.weight(expert_module(layer, expert, projection))
                yield Part(weight, 0, weight.num_rows)


def cut_parts(view: CheckpointView, entry: WeightEntry, cut: Cut) -> Iterator[Part]:
    """The parts of a rank's slice. Rows outside it are not read, unless one scale needs the whole matrix.

    The weight is seen as [lead, rows, columns]: experts or heads, then a matrix; a part never spans two of them.
    """
    if cut.axis is None:
        yield from entry_parts(view, entry)
        return
    num_axes = 3 if entry.component == "global_scale" else len(entry.shape)
    num_rows = entry.shape[-2] if num_axes == 3 and entry.component != "global_scale" else entry.shape[num_axes - 2]
    kind = ("lead", "rows", "columns")[cut.axis + 3 - num_axes]
    position = 0
    for part in entry_parts(view, entry):
        lead, first = divmod(position, num_rows)
        count = made_rows(part, entry)
        position += count
        if kind == "lead":
            if any(start <= lead < stop for start, stop in cut.ranges):
                yield part
        elif kind == "columns":
            ((start, stop),) = cut.ranges
            yield replace(part, kept=(slice(None), slice(start, stop)))
        else:
            for start, stop in cut.ranges:
                begin, end = max(start - first, 0), min(stop - first, count)
                if begin < end:
                    yield _rows_of(part, entry, begin, end)


def made_rows(part: Part, entry: WeightEntry) -> int:
    """Rows of the graph weight that a part makes."""
    rows = part.stop - part.start
    return {"block_scale": -(-rows // FP8_BLOCK), "global_scale": 1}.get(entry.component, rows)


def _rows_of(part: Part, entry: WeightEntry, begin: int, end: int) -> Part:
    """Rows [begin, end) of what a part makes."""
    if entry.rounded_to == FP8_BLOCK_FORMAT or (entry.precision == NVFP4 and part.weight.format != NVFP4):
        # The scale of a row comes from its block, or from the whole matrix.
        return replace(part, kept=(slice(begin, end), slice(None)))
    unit = FP8_BLOCK if entry.component == "block_scale" else 1
    return replace(part, start=part.start + begin * unit, stop=min(part.start + end * unit, part.stop))
