"""Artifacts of the embedded model with their engines: made where they are missing, at home where they were carried.

In: a folder and export options. Out: the engine's manifest, or the artifact's. Building needs no card.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from glm_mtp_export.artifact import MANIFEST_NAME, Manifest
from glm_mtp_export.config import ParallelConfig, SpeculationConfig
from glm_mtp_export.demo import nano_checkpoint
from glm_mtp_export.engine.profile import load_profile
from glm_mtp_export.engine_manifest import ENGINE_MANIFEST_NAME, EngineManifest, engine_directory

__all__ = ["at_home", "built"]

PROFILE = "nano-h200"


def built(
    artifact: Path,
    dtype: str,
    cache_dtype: str,
    speculation: SpeculationConfig,
    parallel: ParallelConfig = ParallelConfig(),  # noqa: B008  (frozen)
) -> EngineManifest:
    """Export and build, unless the engine is there."""
    profile = load_profile(PROFILE)
    folder = engine_directory(artifact, profile.backend)
    if (folder / ENGINE_MANIFEST_NAME).is_file():
        return EngineManifest.load(folder)
    from glm_mtp_export.engine import tensorrt
    from glm_mtp_export.export import ExportOptions, export_checkpoint

    options = ExportOptions("device", dtype, cache_dtype, speculation, parallel, overwrite=True)
    export_checkpoint(nano_checkpoint(), artifact, options)
    return tensorrt.build(artifact, profile).manifest


def at_home(artifact: Path) -> Manifest:
    """The artifact's manifest, which names the checkpoint's folder of this machine from now on, not of the one it was built on."""
    manifest = dataclasses.replace(Manifest.load(artifact), checkpoint=str(nano_checkpoint()))
    (artifact / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
    return manifest
