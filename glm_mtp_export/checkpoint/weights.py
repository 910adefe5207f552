"""Executes the weight plan: reads checkpoint rows, converts them and gives the bytes of each graph weight.

In: a `CheckpointView` and `WeightEntry` records. Out: numpy arrays (bfloat16 as uint16 bits, e4m3 as uint8), or the
same bytes piece by piece, so that a stack of experts never lies in memory as a whole. Stored codes pass through
untouched where the wanted format is the stored one; otherwise values go through exact float32. Damage raises
`CheckpointError`.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
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

__all__ = ["PIECE_BYTES", "Part", "Progress", "entry_parts", "fill", "materialise", "pieces", "stream", "write_entry"]

PIECE_BYTES = 1 << 25  # about what one piece takes as float32; bounds the memory of everything here
_NUM_READERS = min(4, os.cpu_count() or 1)  # numpy and reads release the interpreter; each holds a few pieces of memory
Progress = Callable[[int], None]  # called with the bytes of the graph weight that were just finished
_NUMPY: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "bfloat16": np.dtype("<u2"),
    "float8_e4m3fn": np.dtype("u1"),
    "uint8": np.dtype("u1"),
}


@dataclass(frozen=True)
class Part:
    """Rows [start, stop) of a stored weight: what a recipe is made of."""

    weight: StoredWeight
    start: int
    stop: int

    @property
    def num_values(self) -> int:
        """Values of the part."""
        return (self.stop - self.start) * self.weight.num_columns

    def cut(self, entry: WeightEntry) -> Iterator[Part]:
        """Smaller parts of about PIECE_BYTES, whole FP8 blocks each; NVFP4 needs the part's largest value, so it stays
        whole."""
        step = max(1, PIECE_BYTES // (4 * max(1, self.weight.num_columns)))
        if entry.format == FP8_BLOCK_FORMAT:
            step = max(FP8_BLOCK, step // FP8_BLOCK * FP8_BLOCK)
        elif entry.format == NVFP4:
            step = self.stop - self.start
        for start in range(self.start, self.stop, step):
            yield Part(self.weight, start, min(start + step, self.stop))

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

    def _nvfp4_component(self, component: str) -> npt.NDArray[Any]:
        weight, rows = self.weight, (self.start, self.stop)
        if weight.format != NVFP4:
            codes, groups, overall = quantise_nvfp4(weight.floats(*rows))
            made: dict[str, npt.NDArray[Any]] = {"values": codes, "group_scale": groups}
            return made.get(component, np.array([overall], np.float32))
        if component == "global_scale":
            return np.array([weight.global_scale()], np.float32)
        return weight.codes(*rows) if component == "values" else weight.group_scales(*rows)

    def made(self, entry: WeightEntry) -> npt.NDArray[Any]:
        """This part of the graph weight; of stored codes and scales only the wanted ones are read."""
        weight, rows = self.weight, (self.start, self.stop)
        if entry.format == NVFP4:
            return self._nvfp4_component(entry.component)
        if entry.format == FP8_BLOCK_FORMAT:
            if self.has_kernel_blocks:
                return weight.codes(*rows) if entry.component == "values" else weight.kernel_scales(*rows)
            return self.fp8()[entry.component == "block_scale"]
        return weight.bf16(*rows) if entry.dtype == "bfloat16" else weight.floats(*rows)


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


def pieces(view: CheckpointView, entry: WeightEntry) -> Iterator[npt.NDArray[Any]]:
    """Consecutive parts of the weight in row-major order, each about PIECE_BYTES or less (an NVFP4 matrix is one
    piece).

    The next few pieces are read and converted by threads while the caller works on this one.
    """
    parts = (smaller for part in entry_parts(view, entry) for smaller in part.cut(entry))
    first = list(islice(parts, 2))
    if len(first) < 2:
        yield from (part.made(entry) for part in first)
        return
    with ThreadPoolExecutor(_NUM_READERS) as readers:
        waiting: deque[Future[npt.NDArray[Any]]] = deque()
        try:
            for part in chain(first, parts):
                waiting.append(readers.submit(part.made, entry))
                if len(waiting) > _NUM_READERS:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            readers.shutdown(cancel_futures=True)


def fill(
    view: CheckpointView, entry: WeightEntry, buffer: npt.NDArray[np.uint8], progress: Progress | None = None
) -> None:
    """Write the weight's bytes into `buffer` (uint8, contiguous, exactly entry.num_bytes: pinned memory, a mapped
    file).

    Raises ValueError for a buffer of another size.
    """
    if buffer.dtype != np.uint8 or buffer.shape != (entry.num_bytes,):
        raise ValueError(f"{entry.name}: buffer is {buffer.dtype} {buffer.shape}, expected uint8 ({entry.num_bytes},)")
    done = 0
    for piece in pieces(view, entry):
        buffer[done : done + piece.nbytes].view(piece.dtype)[:] = piece.reshape(-1)
        done += piece.nbytes
        if progress:
            progress(piece.nbytes)
    _check_complete(entry, done)


def materialise(view: CheckpointView, entry: WeightEntry) -> npt.NDArray[Any]:
    """The whole weight, shape as in the entry; bfloat16 as uint16 bits, e4m3 as uint8."""
    result = np.empty(entry.shape, _NUMPY[entry.dtype])
    fill(view, entry, result.reshape(-1).view(np.uint8))
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
    _check_complete(entry, done)
    return done


def _check_complete(entry: WeightEntry, num_bytes: int) -> None:
    if num_bytes != entry.num_bytes:  # a bug, not an input
        raise AssertionError(f"{entry.name}: recipe {entry.recipe} made {num_bytes} bytes of {entry.num_bytes}")
