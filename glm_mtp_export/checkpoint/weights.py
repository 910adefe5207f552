"""Executes the weight plan: reads checkpoint rows, converts them and gives the bytes of each graph weight.

In: a `CheckpointView` and `WeightEntry` records. Out: numpy arrays (bfloat16 as uint16 bits, e4m3 as uint8), or the
same bytes piece by piece, so that a stack of experts never lies in memory as a whole. Stored codes pass through
untouched where the wanted format is the stored one; otherwise values go through exact float32. Damage raises
`CheckpointError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from glm_mtp_export.artifact import WeightEntry
from glm_mtp_export.checkpoint.formats import FP8_BLOCK_FORMAT, NVFP4, StoredWeight
from glm_mtp_export.checkpoint.names import expert_module
from glm_mtp_export.checkpoint.numeric import (
    F32,
    FP8_BLOCK,
    U8,
    quantise_fp8_blocks,
    quantise_nvfp4,
)
from glm_mtp_export.checkpoint.view import CheckpointView

__all__ = ["PIECE_BYTES", "Progress", "materialise", "pieces", "stream", "write_entry"]

PIECE_BYTES = 1 << 26  # about what one piece takes as float32; bounds the memory of everything here
Progress = Callable[[int], None]  # called with the bytes of the graph weight that were just finished
_NUMPY: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "bfloat16": np.dtype("<u2"),
    "float8_e4m3fn": np.dtype("u1"),
    "uint8": np.dtype("u1"),
}


@dataclass(frozen=True)
class _Part:
    """Rows [start, stop) of a stored weight."""

    weight: StoredWeight
    start: int
    stop: int


def materialise(view: CheckpointView, entry: WeightEntry) -> npt.NDArray[Any]:
    """The whole weight, shape as in the entry."""
    result = np.empty(entry.shape, _NUMPY[entry.dtype])
    flat, done = result.reshape(-1), 0
    for piece in pieces(view, entry):
        flat[done : done + piece.size] = piece.reshape(-1)
        done += piece.size
    _check_complete(entry, done, result.size)
    return result


def stream(
    view: CheckpointView, entries: Iterable[WeightEntry], progress: Progress | None = None
) -> Iterator[tuple[WeightEntry, npt.NDArray[Any]]]:
    """Each weight in turn; only one is in memory unless the caller keeps them."""
    for entry in entries:
        yield entry, materialise(view, entry)
        if progress:
            progress(entry.num_bytes)


def write_entry(view: CheckpointView, entry: WeightEntry, file: BinaryIO, progress: Progress | None = None) -> int:
    """Write the weight's bytes at the file's position, piece by piece; gives the number of bytes."""
    done = 0
    for piece in pieces(view, entry):
        file.write(np.ascontiguousarray(piece).data)
        done += piece.nbytes
        if progress:
            progress(piece.nbytes)
    _check_complete(entry, done, entry.num_bytes)
    return done


def pieces(view: CheckpointView, entry: WeightEntry) -> Iterator[npt.NDArray[Any]]:
    """Consecutive parts of the weight in row-major order, each about PIECE_BYTES or less (an NVFP4 matrix is one
    piece)."""
    for part in _parts(view, entry):
        yield from _part_pieces(part, entry)


def _check_complete(entry: WeightEntry, found: int, expected: int) -> None:
    if found != expected:
        raise AssertionError(f"{entry.name}: recipe {entry.recipe} made {found} of {expected}")  # a bug, not an input


def _parts(view: CheckpointView, entry: WeightEntry) -> Iterator[_Part]:
    """The recipe: which rows of which modules, in order."""
    config = view.config
    if entry.recipe in ("copy", "concat_rows"):
        for source in entry.sources:
            weight = view.weight(source)
            yield _Part(weight, 0, weight.num_rows)
    elif entry.recipe in ("kv_b_key", "kv_b_value"):
        weight = view.weight(entry.sources[0])
        nope, head = config.qk_nope_head_dim, config.qk_nope_head_dim + config.v_head_dim
        first, last = (0, nope) if entry.recipe == "kv_b_key" else (nope, head)
        for index in range(config.num_attention_heads):
            yield _Part(weight, index * head + first, index * head + last)
    else:
        projections = {"experts_gate_up": ("gate_proj", "up_proj"), "experts_down": ("down_proj",)}[entry.recipe]
        layer = entry.sources[0].removesuffix(".mlp.experts")
        for expert in range(config.n_routed_experts):
            for projection in projections:
                weight = view.weight(expert_module(layer, expert, projection))
                yield _Part(weight, 0, weight.num_rows)


def _part_pieces(part: _Part, entry: WeightEntry) -> Iterator[npt.NDArray[Any]]:
    if entry.format == NVFP4:
        codes, groups, overall = _nvfp4(part)
        made: dict[str, npt.NDArray[Any]] = {"values": codes, "group_scale": groups}
        yield made.get(entry.component, np.array([overall], np.float32))
        return
    step = max(1, PIECE_BYTES // (4 * max(1, part.weight.num_columns)))
    if entry.format == FP8_BLOCK_FORMAT:
        step = max(FP8_BLOCK, step // FP8_BLOCK * FP8_BLOCK)
    for start in range(part.start, part.stop, step):
        stop = min(start + step, part.stop)
        if entry.format == FP8_BLOCK_FORMAT:
            codes, scales = _fp8(part.weight, start, stop)
            yield codes if entry.component == "values" else scales
        elif entry.dtype == "bfloat16":
            yield part.weight.bf16(start, stop)
        else:
            yield part.weight.floats(start, stop)


def _fp8(weight: StoredWeight, start: int, stop: int) -> tuple[U8, F32]:
    if weight.has_kernel_blocks:
        return weight.fp8_parts(start, stop)
    return quantise_fp8_blocks(weight.floats(start, stop))


def _nvfp4(part: _Part) -> tuple[U8, U8, np.float32]:
    if part.weight.format == NVFP4:
        return part.weight.nvfp4_parts(part.start, part.stop)
    return quantise_nvfp4(part.weight.floats(part.start, part.stop))
