"""Checking that a checkpoint's files are whole and still the ones that were recorded: size and sha256 of every shard,
resumable.

In: a view and a JSON file of records, from an earlier run, an interrupted one, or the machine the folder was copied
from. Out: one `FileRecord` per shard. Each finished shard is recorded at once, so a check that was cut off goes on
where it stopped; a shard whose size and change time equal its record is not read again. A shard that differs from its
record raises `CheckpointError`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from glm_mtp_export.artifact import FileRecord, replacing
from glm_mtp_export.checkpoint.view import CheckpointView
from glm_mtp_export.errors import CheckpointError
from glm_mtp_export.json_fields import read_json_object

__all__ = ["check_files"]

_BLOCK_BYTES = 1 << 24
Progress = Callable[[int], None]


def check_files(view: CheckpointView, records: Path, progress: Progress | None = None) -> dict[str, FileRecord]:
    """Hash what is not on record, compare what is; all differences in one CheckpointError.

    Sizes are compared first, so that a cut download is found without reading a byte. `progress` gets the bytes just
    hashed, or skipped because they are on record.
    """
    known = _read_records(records)
    paths = view.store.files
    problems = [f"{name} is missing" for name in sorted(known.keys() - {path.name for path in paths})]
    for path in paths:
        size = path.stat().st_size
        if path.name in known and known[path.name]["num_bytes"] != size:
            problems.append(f"{path.name} has {size} bytes, expected {known[path.name]['num_bytes']}")
    if not problems and not all(_is_settled(path, known) for path in paths):
        _write_records(records, known)  # a place that cannot be written is known before hours of reading
    for path in paths if not problems else ():
        if not _is_recorded(path, known, records, progress):
            problems.append(f"{path.name} differs from its sha256")
    if problems:
        raise CheckpointError(
            f"{view.directory}: {'; '.join(problems)}. Fetch these files again, or remove {records} if the change is wanted."
        )
    return {path.name: FileRecord(known[path.name]["num_bytes"], known[path.name]["sha256"]) for path in paths}


def _is_recorded(path: Path, known: dict[str, dict[str, Any]], records: Path, progress: Progress | None) -> bool:
    """Compare one shard with its record, or make the record. False: it differs."""
    stat, entry = path.stat(), known.get(path.name)
    if _is_settled(path, known):
        if progress:
            progress(stat.st_size)
        return True
    found = _sha256(path, progress)
    if entry is not None and entry["sha256"] != found:
        return False
    known[path.name] = {"num_bytes": stat.st_size, "changed_ns": stat.st_mtime_ns, "sha256": found}
    _write_records(records, known)
    return True


def _is_settled(path: Path, known: dict[str, dict[str, Any]]) -> bool:
    """True for a shard that has not been touched since it was recorded."""
    entry = known.get(path.name)
    return entry is not None and entry["changed_ns"] == path.stat().st_mtime_ns


def _write_records(records: Path, known: dict[str, dict[str, Any]]) -> None:
    with replacing(records) as temporary:
        temporary.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def _sha256(path: Path, progress: Callable[[int], None] | None) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb", buffering=0) as stream:
            while block := stream.read(_BLOCK_BYTES):
                digest.update(block)
                if progress:
                    progress(len(block))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error}). Fetch this shard again.") from error
    return digest.hexdigest()


def _read_records(path: Path) -> dict[str, dict[str, Any]]:
    """Records of an earlier run, or none yet. Raises CheckpointError for a file that holds something else."""
    if not path.exists():
        return {}
    found = read_json_object(path, CheckpointError)
    kinds = {"num_bytes": int, "changed_ns": int, "sha256": str}
    for name, entry in found.items():
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), kind) for key, kind in kinds.items()):
            raise CheckpointError(
                f"{path}: {name} has no size, change time and sha256. Name another file for the records."
            )
    return dict(found)
