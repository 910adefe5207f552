"""Random weights for benchmarks of full-size models, made on the card: a function of a weight's name and place, so that every rank
of a job holds slices of the same model.

In: entries of a weight plan, and the rank. Out: a filler for a session. Values are normal with the fan-in's scale (uniform bytes
would make huge numbers, zeros run faster than real data). A weight is drawn in chunks of whole rows, each from a seed of its own;
a rank draws the chunks that it needs a part of.
"""

from __future__ import annotations

import ctypes
import math
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from glm_mtp_export.artifact import Manifest, WeightEntry
from glm_mtp_export.checkpoint.sharding import Cut, rank_cut

__all__ = ["Change", "RandomFiller", "lost_part", "random_pieces", "rounded_once_more"]

Change = Callable[[WeightEntry, torch.Tensor, torch.Generator], torch.Tensor]
"""Of a weight and whole rows of it as they are stored: what to store instead; the generator is seeded by name and place."""

_CHUNK_VALUES = 1 << 25
_QUANTISED_FAN_IN = 6144  # of nearly all quantised weights
_CODE_SCALE = 2.4  # of a normal value before it becomes an e2m1 code, whose largest is 6
_CODE_SPREAD, _GROUP_SCALE_SPREAD = 2.36, 1.43  # root mean squares of codes and of group scales as made here


class RandomFiller:
    """Called with a weight of the rank's plan and the buffer on the current card that takes it."""

    def __init__(self, manifest: Manifest, rank: int = 0, change: Change | None = None) -> None:
        self._whole = {entry.name: entry for entry in manifest.weights}
        self._parallel, self._rank, self._change = manifest.parallel, rank, change
        self._copy = ctypes.CDLL("libcuda.so.1").cuMemcpyDtoD_v2

    def __call__(self, entry: WeightEntry, buffer: Any) -> None:
        whole, offset = self._whole[entry.name], 0
        for piece in random_pieces(whole, rank_cut(whole, self._parallel, self._rank), "cuda", self._change):
            size = piece.numel() * piece.element_size()
            to, source = ctypes.c_uint64(buffer.address + offset), ctypes.c_uint64(piece.data_ptr())
            if status := self._copy(to, source, ctypes.c_size_t(size)):
                raise RuntimeError(f"{entry.name}: a copy on the card failed with {status}")
            offset += size
        torch.cuda.synchronize()
        if offset != entry.num_bytes:
            raise RuntimeError(f"{entry.name}: made {offset} bytes, expected {entry.num_bytes}")


def random_pieces(whole: WeightEntry, cut: Cut, device: str, change: Change | None = None) -> Iterator[torch.Tensor]:
    """The slice `cut` of a weight, as contiguous pieces that follow each other."""
    columns, num_rows = whole.shape[-1], math.prod(whole.shape[:-1])
    chunk = max(_CHUNK_VALUES // columns, 1)
    row_ranges, column_ranges = _kept(whole.shape, cut)
    generator = torch.Generator(device)
    first = 0
    for begin in range(0, num_rows, chunk):
        end = min(begin + chunk, num_rows)
        while first < len(row_ranges) and row_ranges[first][1] <= begin:
            first += 1
        parts = []
        for start, stop in row_ranges[first:]:
            if start >= end:
                break
            parts.append((max(start, begin) - begin, min(stop, end) - begin))
        if not parts:
            continue
        generator.manual_seed(zlib.crc32(f"{whole.name} {begin}".encode()))
        values = torch.randn((end - begin, columns), device=device, generator=generator)
        made = _stored(whole, values)
        if change is not None:
            generator.manual_seed(zlib.crc32(f"change of {whole.name} {begin}".encode()))
            made = change(whole, made, generator)
        rows = torch.cat([made[start:stop] for start, stop in parts]) if len(parts) > 1 else made[slice(*parts[0])]
        if column_ranges != [(0, columns)]:
            rows = torch.cat([rows[:, start:stop] for start, stop in column_ranges], dim=1)
        yield rows.contiguous()


def _kept(shape: tuple[int, ...], cut: Cut) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Ranges of rows, all axes but the last as one, and of columns. Ascending."""
    rows, columns = [(0, math.prod(shape[:-1]))], [(0, shape[-1])]
    if cut.axis is None:
        return rows, columns
    if cut.axis == len(shape) - 1:
        return rows, list(cut.ranges)
    extent, inner = shape[cut.axis], math.prod(shape[cut.axis + 1 : -1])
    outer = range(math.prod(shape[: cut.axis]))
    return [((o * extent + a) * inner, (o * extent + b) * inner) for o in outer for a, b in cut.ranges], columns


def _stored(entry: WeightEntry, values: torch.Tensor) -> torch.Tensor:
    """Normal values as the weight keeps them."""
    if entry.component == "block_scale":
        return torch.full_like(values, _QUANTISED_FAN_IN**-0.5)
    if entry.component == "global_scale":
        return torch.full_like(values, _QUANTISED_FAN_IN**-0.5 / (_CODE_SPREAD * _GROUP_SCALE_SPREAD))
    if entry.component == "group_scale":
        return (values.abs() + 0.5).to(torch.float8_e4m3fn).view(torch.uint8)
    if entry.dtype == "uint8":
        return _packed_codes(values)
    if entry.dtype == "float8_e4m3fn":
        return values.to(torch.float8_e4m3fn).view(torch.uint8)
    if entry.name.endswith(("norm", "norm_weight")):
        values = 1 + 0.1 * values
    elif entry.name.endswith("bias"):
        values = 0.05 * values
    elif not entry.name.endswith("embed"):
        values = values * entry.shape[-1] ** -0.5
    return values.to(torch.bfloat16) if entry.dtype == "bfloat16" else values


def _packed_codes(values: torch.Tensor) -> torch.Tensor:
    """Two e2m1 codes a byte, of independent normal values: one from `values` themselves, one from the fine digits of their rank.

    Both signs are equally likely: codes whose mean is not 0 give all rows of a batch one direction, and few experts all of them.
    """
    fine = torch.special.ndtri((torch.special.ndtr(values.double()) * 4096).frac().clamp(1e-4, 1 - 1e-4)).float()
    # Half way between 0, 0.5, 1, 1.5, 2, 3, 4 and 6.
    bounds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=values.device)
    low, high = (
        torch.bucketize(normal.abs() * _CODE_SCALE, bounds).to(torch.uint8) | (normal < 0).to(torch.uint8) << 3
        for normal in (values, fine)
    )
    return low | high << 4


def rounded_once_more(entry: WeightEntry, made: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Noise in a product that ranks add up, of the size of one rounding to bf16, relative to the whole. It goes into the values
    where they are bf16, else into the scales of their blocks, which are as independent."""
    is_summed = entry.shard_axis == len(entry.shape) - 1
    if not is_summed or made.dtype == torch.uint8:
        return made
    noise = torch.rand(made.shape, device=made.device, generator=generator) * 2 - 1
    if made.dtype == torch.float32:
        return made * (1 + noise * 2**-9)  # half a unit in bf16's last place at most
    # One in twelve goes to a neighbour: in the mean of squares the twelfth of a unit's square that a rounding makes.
    step = (noise > 11 / 12).short() - (noise < -11 / 12).short()
    return torch.where(made == 0, made, (made.view(torch.int16) + step).view(torch.bfloat16))


def lost_part(name: str) -> Change:
    """Without the second half of the columns of a weight: what a sum of two ranks would be without the second one's part."""

    def change(entry: WeightEntry, made: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        if entry.name == name:
            made[:, made.shape[1] // 2 :] = 0
        return made

    return change
