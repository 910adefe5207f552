"""Safetensors on disk: which tensors exist, where their bytes lie, and reading them.

In: a checkpoint folder. Out: a `TensorStore` of `TensorInfo` records whose sizes were all checked against their files
before anything is allocated. Every damage (header, offsets, index, missing shard) raises `CheckpointError` naming the
file; odd but usable things are `notices`. A file that ends right after its header is a headers-only stand-in:
everything but reading works.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from glm_mtp_export.checkpoint.reading import FileReader
from glm_mtp_export.errors import CheckpointError
from glm_mtp_export.json_fields import read_json_object

__all__ = ["INDEX_NAME", "ITEM_BITS", "StoredRows", "TensorInfo", "TensorStore", "layer_number", "read_header"]

INDEX_NAME = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own readers
ITEM_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "F4": 4,
}  # fmt: skip
_NUMPY = {
    "BOOL": "u1", "U8": "u1", "I8": "i1", "F8_E4M3": "u1", "F8_E5M2": "u1", "F8_E8M0": "u1", "U16": "<u2", "I16": "<i2",
    "F16": "<f2", "BF16": "<u2", "U32": "<u4", "I32": "<i4", "F32": "<f4", "U64": "<u8", "I64": "<i8", "F64": "<f8",
    "F4": "u1",
}  # fmt: skip
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file. `dtype` is the format's own code (BF16, ...), `offset` counts from the file's start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    num_bytes: int

    @property
    def num_values(self) -> int:
        """Elements of the stored container (a byte with two FP4 values counts once)."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count


class StoredRows(NamedTuple):
    """Rows [first, last) of a tensor seen as [rows, last axis]; a vector is one row."""

    info: TensorInfo
    first: int
    last: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return (self.info.shape[-1] if self.info.shape else 1) * ITEM_BITS[self.info.dtype] // 8


def layer_number(name: str) -> int | None:
    """The N of `...layers.N...` in a tensor or module name."""
    match = _LAYER.search(name)
    return int(match.group(1)) if match else None


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: {what}. The file is damaged or incomplete; fetch it again.")


def read_header(path: Path) -> tuple[dict[str, TensorInfo], bool]:
    """Tensors of one .safetensors file, and whether the file is a headers-only stand-in.

    Checks that the header is one JSON object, that each tensor's bytes equal its shape times its type, that the tensors
    lie end to end without overlap, and that they fill the file exactly.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            prefix = stream.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise _damaged(path, f"header length {length} does not fit a file of {size} bytes")
            text = stream.read(length)
    except PermissionError:
        raise CheckpointError(f"{path}: this user may not read it. Give read permission.") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error}). Fetch this shard again.") from error
    try:
        raw = json.loads(text.decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"header is not valid JSON ({error})") from error
    if not isinstance(raw, dict):
        raise _damaged(path, f"header is {type(raw).__name__}, expected an object")
    raw.pop("__metadata__", None)
    start = 8 + length
    tensors = {name: _tensor_info(path, name, entry, start) for name, entry in raw.items()}
    end = start
    for info in sorted(tensors.values(), key=lambda t: (t.offset, t.num_bytes)):
        if info.offset != end:
            raise _damaged(path, f"{info.name} begins at byte {info.offset}, expected {end} (tensors lie end to end)")
        end += info.num_bytes
    if size == start and end > start:
        return tensors, True
    if size != end:
        raise _damaged(path, f"has {size} bytes, expected {end} from its header")
    return tensors, False


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _tensor_info(path: Path, name: str, entry: Any, start: int) -> TensorInfo:
    """Check one header entry on its own."""

    def is_count(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 48

    if not name.isprintable():
        raise _damaged(path, f"names a tensor {name!r}")
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise _damaged(path, f"header entry of {name} lacks dtype, shape or data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BITS:
        raise _damaged(path, f"{name} has dtype {dtype!r}, expected one of {', '.join(sorted(ITEM_BITS))}")
    if not isinstance(shape, list) or len(shape) > 8 or not all(map(is_count, shape)):
        raise _damaged(path, f"{name} has shape {shape!r}, expected a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_count, offsets)):
        raise _damaged(path, f"{name} has data_offsets {offsets!r}, expected [begin, end]")
    bits = ITEM_BITS[dtype]
    for extent in shape:
        bits *= extent
    if offsets[1] - offsets[0] != bits // 8 or bits % 8:
        raise _damaged(path, f"{name} spans {offsets[1] - offsets[0]} bytes, expected {bits // 8} for {dtype} {shape}")
    return TensorInfo(name, dtype, tuple(shape), path, start + offsets[0], bits // 8)


class TensorStore:
    """All tensors of a checkpoint folder by name."""

    def __init__(
        self, directory: Path, tensors: Mapping[str, TensorInfo], headers_only: bool, notices: list[str]
    ) -> None:
        self.directory = directory
        self.tensors = dict(tensors)
        self.headers_only = headers_only
        self.notices = tuple(notices)
        self.files = tuple(sorted({info.file for info in self.tensors.values()}))

    @classmethod
    def open(
        cls,
        directory: Path,
        is_wanted_unindexed: Callable[[str], bool] = lambda name: False,
        beside: Path | None = None,
    ) -> TensorStore:
        """Read index and headers; from folder `beside` only what is wanted unindexed and not in `directory`.

        With an index, tensors of files it does not list are taken only if `is_wanted_unindexed(name)` (the MTP layer is
        often shipped in a file of its own); without one, every .safetensors file counts.
        """
        directory = Path(directory)
        if not directory.is_dir():
            raise CheckpointError(
                f"{directory}: no such folder. Give the folder of config.json and .safetensors files."
            )
        files = sorted(p for p in directory.iterdir() if p.suffix == ".safetensors" and not p.name.startswith("."))
        if not files:
            others = sorted(p.name for p in directory.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf"))
            found = f"found {', '.join(others[:3])}" if others else "found none"
            raise CheckpointError(
                f"{directory}: needs .safetensors files, {found}. Convert or fetch the checkpoint again."
            )
        notices: list[str] = []
        index_path = directory / INDEX_NAME
        weight_map = _weight_map(index_path) if index_path.exists() else None
        listed = None if weight_map is None else set(weight_map.values())
        if listed is not None and (absent := sorted(listed - {p.name for p in files})):
            shown = ", ".join(absent[:5]) + (f" and {len(absent) - 5} more" if len(absent) > 5 else "")
            raise CheckpointError(f"{index_path}: names {shown}, not in the folder. Fetch the missing shards.")
        tensors: dict[str, TensorInfo] = {}
        stand_ins: list[str] = []
        for path in sorted(files, key=lambda p: (listed is not None and p.name not in listed, p.name)):
            found_here, headers_only = read_header(path)
            if listed is not None and path.name not in listed:
                _add_unindexed(tensors, found_here, path, is_wanted_unindexed, notices)
            else:
                _add_indexed(tensors, found_here, path, weight_map, notices)
            stand_ins += [path.name] * headers_only
        if beside is not None:
            stand_ins += _add_folder(tensors, beside, is_wanted_unindexed, notices)
        if weight_map is not None and (lost := sorted(weight_map.keys() - tensors.keys())):
            shown = ", ".join(lost[:5]) + (f" and {len(lost) - 5} more" if len(lost) > 5 else "")
            raise CheckpointError(f"{index_path}: names {shown}, not in their shards. Fetch those shards again.")
        if stand_ins:
            notices.append(f"{len(stand_ins)} of {len(files)} files hold headers only: weights cannot be read")
        return cls(directory, tensors, bool(stand_ins), notices)

    def read(self, info: TensorInfo, begin: int = 0, end: int | None = None) -> npt.NDArray[np.uint8]:
        """Bytes [begin, end) of a tensor, read into a fresh array."""
        end = info.num_bytes if end is None else end
        buffer = np.empty(end - begin, np.uint8)
        self.read_into(info, buffer, begin)
        return buffer

    def read_into(self, info: TensorInfo, buffer: npt.NDArray[np.uint8], begin: int = 0) -> None:
        """Fill `buffer` (uint8, contiguous, e.g. pinned memory) with a tensor's bytes from `begin` on."""
        with FileReader() as reader:
            reader.read_into(info, buffer, begin)

    def rows(self, info: TensorInfo, start: int, stop: int) -> npt.NDArray[Any]:
        """Rows of a tensor seen as [rows, last axis] (a vector is one row), as the numpy type that holds its bits."""
        pitch = StoredRows(info, start, stop).row_bytes
        return self.read(info, start * pitch, stop * pitch).view(_NUMPY[info.dtype]).reshape(stop - start, -1)


def _add_folder(
    tensors: dict[str, TensorInfo], folder: Path, is_wanted: Callable[[str], bool], notices: list[str]
) -> list[str]:
    """Take the MTP tensors of another folder; gives the names of its files that hold headers only."""
    files = sorted(p for p in folder.glob("*.safetensors") if not p.name.startswith("."))
    if not files:
        raise CheckpointError(f"{folder}: needs .safetensors files, found none. Give the folder of the MTP layer.")
    stand_ins, before = [], len(tensors)
    for path in files:
        found, headers_only = read_header(path)
        wanted = {name: info for name, info in found.items() if is_wanted(name) and name not in tensors}
        tensors.update(wanted)
        if wanted and headers_only:
            stand_ins.append(path.name)
    if len(tensors) == before:
        raise CheckpointError(
            f"{folder}: holds no MTP tensors that the checkpoint lacks (they are named by a layer behind the trunk). "
            "Give the folder of the MTP layer, or leave it out."
        )
    notices.append(f"{folder}: {len(tensors) - before} MTP tensors of this folder are used")
    return stand_ins


def _weight_map(path: Path) -> dict[str, str]:
    """The index's map from tensor to file; file names must be plain names of this folder."""
    found = read_json_object(path, CheckpointError).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise _damaged(path, "has no weight_map")
    good: set[str] = set()  # a few hundred files, but hundreds of thousands of names
    for name, file in found.items():
        if not name.isprintable():
            raise _damaged(path, f"names a tensor {name!r}")
        if isinstance(file, str) and file in good:
            continue
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise _damaged(path, f"maps {name} to {file!r}, expected the name of a .safetensors file beside it")
        good.add(file)
    return found


def _add_indexed(
    tensors: dict[str, TensorInfo],
    found: dict[str, TensorInfo],
    path: Path,
    weight_map: dict[str, str] | None,
    notices: list[str],
) -> None:
    """Take a listed file's tensors; the index decides between two files that hold the same name."""
    unlisted = 0
    for name, info in found.items():
        if weight_map is not None and name not in weight_map:
            unlisted += 1
        elif weight_map is not None and weight_map[name] != path.name:
            continue
        if weight_map is None and name in tensors:
            raise CheckpointError(f"{path}: {name} is also in {tensors[name].file.name}. Remove one of the two files.")
        tensors.setdefault(name, info)
    if unlisted:
        notices.append(f"{path.name}: {unlisted} tensors are missing in {INDEX_NAME}; they are used")


def _add_unindexed(
    tensors: dict[str, TensorInfo],
    found: dict[str, TensorInfo],
    path: Path,
    is_wanted: Callable[[str], bool],
    notices: list[str],
) -> None:
    """Take from a file that the index does not list what is wanted and not yet known."""
    wanted = {name: info for name, info in found.items() if is_wanted(name) and name not in tensors}
    tensors.update(wanted)
    if wanted:
        notices.append(
            f"{path.name}: {len(wanted)} MTP tensors found in a file that {INDEX_NAME} does not list; they are used"
        )
    if len(found) > len(wanted):
        notices.append(f"{path.name}: {len(found) - len(wanted)} tensors ignored, {INDEX_NAME} does not list this file")
