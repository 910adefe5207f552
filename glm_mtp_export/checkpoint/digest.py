"""Checking that a checkpoint's files are the ones that were seen before: size and sha256 of every shard, resumable.

In: a view, and optionally a JSON file of records from an earlier or interrupted run. Out: one `FileRecord` per shard;
each finished shard is written to that file at once, so a check that was cut off goes on where it stopped. A shard whose
size and change time equal its record is not read again. A shard that differs from what was expected raises
`CheckpointError` naming it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from glm_mtp_export.artifact import FileRecord, replacing
from glm_mtp_export.checkpoint.view import CheckpointView
from glm_mtp_export.errors import CheckpointError

__all__ = ["check_files", "file_digests"]

_BLOCK_BYTES = 1 << 24


def file_digests(
    view: CheckpointView, records: Path | None = None, progress: Callable[[int], None] | None = None
) -> dict[str, FileRecord]:
    """Size and sha256 of every shard; `progress` gets the bytes just hashed (or skipped because they are on record)."""
    known = _read_records(records)
    found: dict[str, FileRecord] = {}
    for path in sorted({info.file for info in view.store.tensors.values()}):
        stat = path.stat()
        key = [stat.st_size, stat.st_mtime_ns]
        entry = known.get(path.name)
        if entry is None or entry["stamp"] != key:
            entry = known[path.name] = {"stamp": key, "sha256": _sha256(path, progress)}
            if records is not None:
                with replacing(records) as temporary:
                    temporary.write_text(json.dumps(known, indent=1, sort_keys=True))
        elif progress:
            progress(stat.st_size)
        found[path.name] = FileRecord(stat.st_size, str(entry["sha256"]))
    return found


def check_files(
    view: CheckpointView,
    expected: Mapping[str, FileRecord],
    records: Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Compare the shards with `expected`; sizes first, so that a cut download is found without reading a byte."""
    sizes = {path.name: path.stat().st_size for path in {info.file for info in view.store.tensors.values()}}
    problems = [f"{name} is missing" for name in sorted(expected.keys() - sizes.keys())]
    for name in sorted(expected.keys() & sizes.keys()):
        if sizes[name] != expected[name].num_bytes:
            problems.append(f"{name} has {sizes[name]} bytes, expected {expected[name].num_bytes}")
    if not problems:
        found = file_digests(view, records, progress)
        problems = [f"{n} differs from its sha256" for n, r in sorted(expected.items()) if found[n] != r]
    if problems:
        raise CheckpointError(f"{view.directory}: {'; '.join(problems)}. Fetch these files again.")


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


def _read_records(path: Path | None) -> dict[str, dict[str, object]]:
    """Records of an earlier run; anything unreadable only costs the time to hash again."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path is not None else {}
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {
        name: entry
        for name, entry in found.items()
        if isinstance(entry, dict) and isinstance(entry.get("sha256"), str) and isinstance(entry.get("stamp"), list)
    }
