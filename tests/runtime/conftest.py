"""Lets the tests of the runtime import the toy model and the oracle that lie beside them; artifacts they share."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent))

if TYPE_CHECKING:
    from real_graph import Artifacts


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Artifacts:
    """Exports of the small synthetic checkpoint."""
    from real_graph import Artifacts

    return Artifacts(tmp_path_factory.mktemp("real"))
