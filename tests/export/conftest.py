"""A synthetic checkpoint and its artifact, shared by the export tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm_mtp_export.checkpoint.synthetic import write_synthetic
from glm_mtp_export.config import SpeculationConfig
from glm_mtp_export.export import ExportOptions, export_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """T6 in bf16."""
    return write_synthetic(tmp_path_factory.mktemp("t6") / "t6")


@pytest.fixture(scope="session")
def artifact(checkpoint, tmp_path_factory) -> Path:
    """Its portable artifact with three drafts; tests must not change it."""
    out = tmp_path_factory.mktemp("artifact") / "t6"
    export_checkpoint(checkpoint, out, ExportOptions(speculation=SpeculationConfig(3)))
    return out
