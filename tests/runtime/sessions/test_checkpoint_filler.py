"""Loading weights shows how far it is: a bar on a terminal, lines in the log elsewhere."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import fake_card
import numpy as np
import pytest

from glm_mtp_export.artifact import Manifest
from glm_mtp_export.checkpoint.view import CheckpointView
from glm_mtp_export.checkpoint.weights import materialise
from glm_mtp_export.demo import nano_checkpoint
from glm_mtp_export.runtime.sessions import checkpoint_filler
from glm_mtp_export.runtime.sessions.checkpoint_filler import CheckpointFiller


@pytest.fixture(autouse=True)
def _card(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_card.stage_on_the_host(monkeypatch)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """The embedded model in the device dialect."""
    from glm_mtp_export.export import ExportOptions, export_checkpoint

    out = tmp_path_factory.mktemp("filler") / "nano"
    return export_checkpoint(nano_checkpoint(), out, ExportOptions(dialect="device"))


def filled(manifest: Manifest) -> dict[str, fake_card.Buffer]:
    filler = CheckpointFiller(manifest)
    buffers = {entry.name: fake_card.Buffer(entry.num_bytes) for entry in manifest.weights}
    for entry in manifest.weights:
        filler(entry, buffers[entry.name])  # type: ignore[arg-type]
    return buffers


def test_every_byte_arrives_and_the_log_tells_each_tenth(manifest: Manifest, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, checkpoint_filler.__name__):
        buffers = filled(manifest)
    view = CheckpointView.open(Path(manifest.checkpoint))
    for entry in manifest.weights:
        assert np.array_equal(buffers[entry.name].view, materialise(view, entry).reshape(-1).view(np.uint8)), entry.name
    lines = [re.search(r" gib=(\S+) of_gib=(\S+)", record.getMessage()) for record in caplog.records]
    assert 3 <= len(lines) <= 10 and lines[-1] is not None and lines[-1][1] == lines[-1][2]


def test_a_terminal_sees_a_bar_that_ends_full(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = checkpoint_filler.Console

    def terminal(**options: Any) -> Any:
        return real(**options, force_terminal=True, width=100)

    monkeypatch.setattr(checkpoint_filler, "Console", terminal)
    filled(manifest)
    shown = capsys.readouterr().err
    total = sum(entry.num_bytes for entry in manifest.weights) / 2**20
    assert "weights" in shown and f"{total:.1f}/{total:.1f} MiB" in shown
