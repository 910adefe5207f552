"""The inputs of a call as one message for the other ranks of a tensor-parallel group.

In: `StepInputs`. Out: bytes, and from them equal `StepInputs`. An array that repeats one value without taking memory for it
(penalties that no request uses) travels as that value. A message that does not fit together raises `EngineError`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm_mtp_export.errors import EngineError
from glm_mtp_export.runtime.session import StepInputs

__all__ = ["packed", "unpacked"]

_NAMES = tuple(field.name for field in fields(StepInputs))
_TYPES = tuple(np.dtype(name) for name in ("int32", "float32", "int64", "bool"))
# Which input, type, whether one value stands for all, number of axes; then four extents.
_HEADER = struct.Struct("<4B4i")
_ALIGNMENT = 8
_MOST_AXES = 4


def packed(inputs: StepInputs) -> bytes:
    """One message."""
    parts: list[bytes] = []
    for index, name in enumerate(_NAMES):
        value = getattr(inputs, name)
        if value is None:
            continue
        repeats = value.size > 1 and not any(value.strides)
        extents = (*value.shape, *[0] * (_MOST_AXES - value.ndim))
        parts.append(_HEADER.pack(index, _TYPES.index(value.dtype), repeats, value.ndim, *extents))
        data = value.reshape(-1)[:1].tobytes() if repeats else value.tobytes()
        parts += [data, bytes(-(_HEADER.size + len(data)) % _ALIGNMENT)]
    return b"".join(parts)


def unpacked(message: bytes) -> StepInputs:
    """The same inputs; the arrays are read-only views of `message`."""
    try:
        arrays: dict[str, Any] = dict(_arrays(message))
        return StepInputs(**arrays)
    except (struct.error, ValueError, IndexError, TypeError) as error:
        raise EngineError(
            f"rank 0 sent a step of {len(message)} bytes that cannot be read ({error}). Start all ranks with one release."
        ) from error


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
