"""Resumable size and hash checks of shards."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from glm_mtp_export.artifact import FileRecord
from glm_mtp_export.checkpoint import CheckpointView, digest
from glm_mtp_export.checkpoint.synthetic import write_synthetic
from glm_mtp_export.errors import ArtifactError, CheckpointError

SHARD = "model-00001-of-00002.safetensors"


def test_digests_are_those_of_the_files(tmp_path: Path) -> None:
    view, seen = CheckpointView.open(write_synthetic(tmp_path / "c", num_shards=3)), []
    found = digest.check_files(view, tmp_path / "records.json", seen.append)
    assert len(found) == 3 and sum(seen) == sum(record.num_bytes for record in found.values())
    for name, record in found.items():
        data = (tmp_path / "c" / name).read_bytes()
        assert record == FileRecord(len(data), hashlib.sha256(data).hexdigest())


def test_interrupted_check_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    view = CheckpointView.open(write_synthetic(tmp_path / "c", num_shards=4))
    records, hashed = tmp_path / "records.json", []
    honest = digest._sha256

    def counted(path: Path, progress: object) -> str:
        if len(hashed) == 2:
            raise KeyboardInterrupt
        hashed.append(path.name)
        return honest(path, None)

    monkeypatch.setattr(digest, "_sha256", counted)
    with pytest.raises(KeyboardInterrupt):
        digest.check_files(view, records)
    first, _ = list(hashed), hashed.clear()
    found = digest.check_files(view, records)
    assert sorted(first + hashed) == sorted(found)
    assert all(honest(tmp_path / "c" / name, None) == record.sha256 for name, record in found.items())
    hashed.clear()
    assert digest.check_files(view, records) == found and hashed == []


def test_copied_folder_is_checked_against_the_records_of_its_source(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "a")
    records = tmp_path / "records.json"
    found = digest.check_files(CheckpointView.open(tmp_path / "a"), records)
    shutil.copytree(tmp_path / "a", tmp_path / "b", copy_function=shutil.copyfile)
    copy = CheckpointView.open(tmp_path / "b")
    os.utime(tmp_path / "b" / SHARD, ns=(1, 1))
    assert digest.check_files(copy, records) == found
    data = bytearray((tmp_path / "b" / SHARD).read_bytes())
    data[-1] ^= 1
    (tmp_path / "b" / SHARD).write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors differs from its sha256.*remove"):
        digest.check_files(copy, records)


def test_cut_and_missing_shards_are_found_by_size_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    view = CheckpointView.open(write_synthetic(tmp_path / "c"))
    records = tmp_path / "records.json"
    digest.check_files(view, records)
    monkeypatch.setattr(digest, "_sha256", lambda path, progress: pytest.fail("read a file"))
    known = json.loads(records.read_text())
    known[SHARD]["num_bytes"] += 1
    records.write_text(json.dumps(known | {"other": known[SHARD]}))
    with pytest.raises(CheckpointError, match=r"other is missing; model-00001.* bytes, expected \d+"):
        digest.check_files(view, records)


def test_records_that_cannot_be_written_are_known_before_a_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = CheckpointView.open(write_synthetic(tmp_path / "c"))
    monkeypatch.setattr(digest, "_sha256", lambda path, progress: pytest.fail("read a file"))
    with pytest.raises(ArtifactError, match=r"records\.json: cannot be written \(No such file or directory\)"):
        digest.check_files(view, tmp_path / "nowhere" / "records.json")


@pytest.mark.parametrize("text", ["", "[]", '{"a": 3}', '{"a": {"sha256": 3}}'])
def test_a_file_that_holds_no_records_is_refused(tmp_path: Path, text: str) -> None:
    view = CheckpointView.open(write_synthetic(tmp_path / "c"))
    records = tmp_path / "records.json"
    records.write_text(text)
    with pytest.raises(CheckpointError, match=r"records\.json"):
        digest.check_files(view, records)
    assert records.read_text() == text
