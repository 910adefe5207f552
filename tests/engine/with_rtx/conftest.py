"""Engine builds on a machine without a card. scripts/test-engines.sh sets up what these tests need.

They are skipped where TensorRT-RTX or the plugin library is not there; the script fails instead.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from glm_mtp_export.artifact import Manifest
from glm_mtp_export.config import SpeculationConfig
from glm_mtp_export.engine.profile import load_profile
from glm_mtp_export.engine_manifest import EngineProfile
from glm_mtp_export.errors import EngineError
from glm_mtp_export.export import ExportOptions, export_checkpoint
from glm_mtp_export.plugin_library import PluginLibrary, find_plugins

NANO = Path(__file__).parents[3] / "glm_mtp_export" / "data" / "glm52-nano"
required = bool(os.environ.get("GLM_MTP_REQUIRE_ENGINES"))


@pytest.fixture(scope="session", autouse=True)
def library() -> PluginLibrary:
    """The plugin library that build-plugins made."""
    try:
        found = find_plugins()
        missing = None if importlib.util.find_spec("tensorrt_rtx") else "tensorrt_rtx is not importable"
    except EngineError as error:
        missing = str(error)
    if missing:
        (pytest.fail if required else pytest.skip)(f"{missing}; run scripts/test-engines.sh")
    return found


@pytest.fixture(scope="session")
def profile() -> EngineProfile:
    """The profile of the embedded model."""
    return load_profile("nano-h200")


Export = Callable[..., tuple[Path, Manifest]]


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Export:
    """Export the embedded model in the device dialect; equal options give the same artifact, which tests must not change."""
    made: dict[tuple[object, ...], tuple[Path, Manifest]] = {}

    def export(dtype: str, cache_dtype: str, speculation: SpeculationConfig | None = None) -> tuple[Path, Manifest]:
        key = (dtype, cache_dtype, speculation)
        if key not in made:
            out = tmp_path_factory.mktemp("artifact") / dtype
            chosen = speculation or SpeculationConfig(num_speculative_tokens=3)
            options = ExportOptions(dialect="device", dtype=dtype, cache_dtype=cache_dtype, speculation=chosen)
            made[key] = out, export_checkpoint(NANO, out, options)
        return made[key]

    return export
