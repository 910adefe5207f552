"""Writing safetensors files: headers, data, and how a checkpoint is cut into shards. No tensor is copied to be
written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from glm_mtp_export.checkpoint.index import INDEX_NAME, ITEM_BITS

__all__ = [
    "Entry",
    "Tensor",
    "file_header",
    "num_bytes",
    "shard_name",
    "split_shards",
    "write_index",
    "write_safetensors",
]

Entry = tuple[str, str, tuple[int, ...]]  # name, type code, shape


@dataclass(frozen=True)
class Tensor:
    """A tensor to write: the safetensors type code, the shape, and its bits (any numpy type of the right size)."""

    dtype: str
    shape: tuple[int, ...]
    bits: npt.NDArray[Any]


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """One file with data."""
    entries = [(name, t.dtype, t.shape) for name, t in tensors.items()]
    with path.open("wb") as stream:
        stream.write(file_header(entries))
        for tensor in tensors.values():
            stream.write(tensor.bits.tobytes())


def num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    count = ITEM_BITS[dtype]
    for extent in shape:
        count *= extent
    return count // 8


def file_header(entries: Sequence[Entry]) -> bytes:
    """Length and JSON of a file's header, padded with blanks to 8 bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape in entries:
        size = num_bytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def shard_name(number: int, num_shards: int) -> str:
    """File name of shard `number`, counted from 1."""
    return f"model-{number:05d}-of-{num_shards:05d}.safetensors"


def split_shards(entries: Sequence[Entry], num_shards: int) -> list[list[Entry]]:
    """Cut a list of tensors, in order, into shards of about equal bytes."""
    total = max(1, sum(num_bytes(dtype, shape) for _, dtype, shape in entries))
    shards: list[list[Entry]] = [[] for _ in range(num_shards)]
    done = 0
    for entry in entries:
        shards[min(done * num_shards // total, num_shards - 1)].append(entry)
        done += num_bytes(entry[1], entry[2])
    return shards


def write_index(directory: Path, shards: Sequence[Sequence[Entry]]) -> None:
    """`model.safetensors.index.json` for shards that are named by `shard_name`."""
    total = sum(num_bytes(dtype, shape) for shard in shards for _, dtype, shape in shard)
    weight_map = {
        name: shard_name(number, len(shards)) for number, shard in enumerate(shards, 1) for name, _, _ in shard
    }
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX_NAME).write_text(json.dumps(index, indent=1, sort_keys=True) + "\n")
