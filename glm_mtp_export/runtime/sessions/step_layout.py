"""Where each small tensor of a call lies in one block of memory, so that one copy moves them all.

In: tensor specs and the sizes of a call. Out: `StepLayout`. Also the padding of a decode call to a bucket's sizes: the
added requests have no rows and name no pages, so no op reads or writes anything for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from glm_mtp_export.artifact import TensorSpec

__all__ = ["CallSizes", "StepLayout", "bucket", "padded"]

_ALIGNMENT = 256
# What an added request holds where zero would not do.
_FILL = {
    "block_table": -1,
    "next_prompt_token": -1,
    "top_p": 1,
    "token_bitmask": -1,
    "repetition_penalty": 1,
    "follows": -1,
}


@dataclass(frozen=True)
class CallSizes:
    """B requests, T token rows, P columns of the block table."""

    num_requests: int
    num_rows: int
    num_columns: int

    def extents(self) -> dict[str, int]:
        """By the symbols of the tensor specs."""
        return {
            "B": self.num_requests,
            "B+1": self.num_requests + 1,
            "T": self.num_rows,
            "P": self.num_columns,
        }


@dataclass(frozen=True)
class _Place:
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]


@dataclass(frozen=True)
class StepLayout:
    """Places of a call's tensors; `num_bytes` covers all."""

    places: Mapping[str, _Place]
    num_bytes: int

    @classmethod
    def of(cls, specs: Iterable[TensorSpec], sizes: CallSizes) -> StepLayout:
        """Lay out `specs` one after another, aligned for the kernels."""
        extents, places, end = sizes.extents(), {}, 0
        for spec in specs:
            shape = tuple(e if isinstance(e, int) else extents[e] for e in spec.shape)
            place = _Place(end, shape, np.dtype(spec.dtype))
            places[spec.name] = place
            end += -(-int(np.prod(shape)) * place.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        return cls(places, end)

    def view(self, name: str, block: NDArray[np.uint8]) -> NDArray[np.generic]:
        """The tensor inside `block`, without a copy."""
        place = self.places[name]
        size = int(np.prod(place.shape)) * place.dtype.itemsize
        return block[place.offset : place.offset + size].view(place.dtype).reshape(place.shape)


def bucket(count: int, limit: int) -> int:
    """The next power of two, at most `limit`."""
    return min(1 << max(count - 1, 0).bit_length(), limit)


def padded(name: str, value: NDArray[np.generic], shape: tuple[int, ...]) -> NDArray[np.generic]:
    """`value` widened to `shape`. Columns added to a real request's block table name page 0, as unused ones do."""
    if value.shape == shape:
        return value
    out = np.full(shape, _FILL.get(name, 0), dtype=value.dtype)
    if name == "block_table":
        out[: len(value)] = 0
    if name.endswith("_offsets"):
        out[:] = value[-1]
    out[tuple(slice(extent) for extent in value.shape)] = value
    return out
