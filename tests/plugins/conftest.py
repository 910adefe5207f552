"""The plugin library under test: the one that `glm-mtp build-plugins` made."""

from __future__ import annotations

import pytest

from glm_mtp_export.errors import EngineError
from glm_mtp_export.plugin_library import PluginLibrary, find_plugins


@pytest.fixture(scope="session")
def plugin_library() -> PluginLibrary:
    """Skips when the library was not built."""
    try:
        return find_plugins()
    except EngineError as error:
        pytest.skip(str(error))
