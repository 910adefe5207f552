"""The inputs of a call as one message for the other ranks of a tensor-parallel group.

In: `StepInputs`, which requests of the call before they continue, or a mask that comes later. Out: bytes, and from them
the same. An array that repeats one value without taking memory for it (masks that allow everything) travels as that value. A
message that does not fit together raises `EngineError`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm_mtp_export.errors import EngineError
from glm_mtp_export.runtime.session import Int32, StepInputs

__all__ = ["packed", "packed_bitmask", "unpacked", "unpacked_bitmask"]

_FOLLOWS, _BITMASK = "follows", "token_bitmask"
_NAMES = (*(field.name for field in fields(StepInputs)), _FOLLOWS)
_TYPES = tuple(np.dtype(name) for name in ("int32", "float32", "int64", "bool"))
# Which input, type, whether one value stands for all, number of axes; then four extents.
_HEADER = struct.Struct("<4B4i")
_ALIGNMENT = 8
_MOST_AXES = 4


def packed(inputs: StepInputs, follows: Int32 | None = None) -> bytes:
    """One message."""
    values = [(field.name, getattr(inputs, field.name)) for field in fields(StepInputs)]
    return _joined([*values, (_FOLLOWS, follows)])


def unpacked(message: bytes) -> tuple[StepInputs, Int32 | None]:
    """The same inputs and `follows`; the arrays are read-only views of `message`."""
    try:
        arrays: dict[str, Any] = dict(_arrays(message))
        follows = arrays.pop(_FOLLOWS, None)
        return StepInputs(**arrays), follows
    except (struct.error, ValueError, IndexError, TypeError) as error:
        raise _unreadable(message, error) from error


def packed_bitmask(token_bitmask: Int32) -> bytes:
    """A mask [B, K+1, words] that comes after its call's inputs."""
    return _joined([(_BITMASK, token_bitmask)])


def unpacked_bitmask(message: bytes) -> Int32:
    """The same mask, read-only."""
    try:
        arrays: dict[str, Any] = dict(_arrays(message))
        mask: Int32 = arrays[_BITMASK]
        return mask
    except (struct.error, ValueError, IndexError, KeyError) as error:
        raise _unreadable(message, error) from error


def _unreadable(message: bytes, error: Exception) -> EngineError:
    return EngineError(
        f"rank 0 sent a step of {len(message)} bytes that cannot be read ({error}). Start all ranks with one release."
    )


def _joined(values: Iterable[tuple[str, Any]]) -> bytes:
    parts: list[bytes] = []
    for name, value in values:
        if value is None:
            continue
        repeats = value.size > 1 and not any(value.strides)  # as `masks.constant` makes them
        extents = (*value.shape, *[0] * (_MOST_AXES - value.ndim))
        parts.append(_HEADER.pack(_NAMES.index(name), _TYPES.index(value.dtype), repeats, value.ndim, *extents))
        data = value.reshape(-1)[:1].tobytes() if repeats else value.tobytes()
        parts += [data, bytes(-(_HEADER.size + len(data)) % _ALIGNMENT)]
    return b"".join(parts)


def _arrays(message: bytes) -> Iterator[tuple[str, NDArray[np.generic]]]:
    position = 0
    while position < len(message):
        index, kind, repeats, num_axes, *extents = _HEADER.unpack_from(message, position)
        shape, dtype = tuple(extents[:num_axes]), _TYPES[kind]
        count = 1 if repeats else int(np.prod(shape))
        start = position + _HEADER.size
        data = np.frombuffer(message, dtype, count, start)
        yield _NAMES[index], np.broadcast_to(data, shape) if repeats else data.reshape(shape)
        position += -(-(_HEADER.size + data.nbytes) // _ALIGNMENT) * _ALIGNMENT
