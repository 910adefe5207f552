"""Resumable size and hash checks of shards."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from glm_mtp_export.artifact import FileRecord
from glm_mtp_export.checkpoint import CheckpointView, digest
from glm_mtp_export.checkpoint.synthetic import write_synthetic
from glm_mtp_export.errors import CheckpointError


def test_digests_are_those_of_the_files(tmp_path: Path) -> None:
    view = CheckpointView.open(write_synthetic(tmp_path, num_shards=3))
    found = digest.file_digests(view)
    assert len(found) == 3
    for name, record in found.items():
        data = (tmp_path / name).read_bytes()
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
        digest.file_digests(view, records)
    first, _ = list(hashed), hashed.clear()
    found = digest.file_digests(view, records)
    assert sorted(first + hashed) == sorted(found)
    assert found == {
        n: FileRecord((tmp_path / "c" / n).stat().st_size, honest(tmp_path / "c" / n, None)) for n in found
    }


def test_changed_shard_is_hashed_again_and_refused(tmp_path: Path) -> None:
    view = CheckpointView.open(write_synthetic(tmp_path / "c"))
    records = tmp_path / "records.json"
    expected = digest.file_digests(view, records)
    digest.check_files(view, expected, records)
    shard = tmp_path / "c" / "model-00001-of-00002.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors differs from its sha256"):
        digest.check_files(view, expected, records)


def test_cut_and_missing_shards_are_found_by_size_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    view = CheckpointView.open(write_synthetic(tmp_path))
    expected = digest.file_digests(view)
    monkeypatch.setattr(digest, "_sha256", lambda path, progress: pytest.fail("read a file"))
    wrong = {name: FileRecord(record.num_bytes + 1, record.sha256) for name, record in expected.items()}
    with pytest.raises(CheckpointError, match=r"bytes, expected .*; .*bytes, expected"):
        digest.check_files(view, wrong)
    with pytest.raises(CheckpointError, match="other is missing"):
        digest.check_files(view, {**expected, "other": FileRecord(1, "")})


@pytest.mark.parametrize("text", ["", "[]", '{"a": 3}', "{"])
def test_damaged_records_only_cost_time(tmp_path: Path, text: str) -> None:
    view = CheckpointView.open(write_synthetic(tmp_path / "c"))
    records = tmp_path / "records.json"
    records.write_text(text)
    seen: list[int] = []
    assert digest.file_digests(view, records, seen.append) == digest.file_digests(view)
    assert sum(seen) == sum(p.stat().st_size for p in (tmp_path / "c").glob("*.safetensors"))
