"""The artifact of the session tests; makes the helpers beside them importable."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small synthetic checkpoint, portable, two drafts."""
    from glm_mtp_export.checkpoint.synthetic import write_synthetic
    from glm_mtp_export.config import SpeculationConfig
    from glm_mtp_export.export import ExportOptions, export_checkpoint

    root = tmp_path_factory.mktemp("t6")
    checkpoint = write_synthetic(root / "checkpoint")
    export_checkpoint(checkpoint, root / "artifact", ExportOptions(speculation=SpeculationConfig(2)))
    return root / "artifact"


@pytest.fixture(params=[False, True], ids=["work at once", "work at the last moment"])
def card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A card of host memory under the session."""
    import fake_card

    from glm_mtp_export.runtime.sessions import call_buffers, history_buffers, tensorrt

    made = fake_card.Card(request.param)
    made.put_into(monkeypatch, tensorrt, call_buffers, history_buffers)
    fake_card.stage_on_the_host(monkeypatch)
    return made
