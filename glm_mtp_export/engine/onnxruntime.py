"""The embedded default: ONNX Runtime on the CPU. Building checks the artifact, loads it once and holds it against the reference.

There is no plan to write: the engine directory holds only engine.json, which records the profile and the runtime's version.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from glm_mtp_export.artifact import DEVICE, STEP_NAME, Manifest, replacing
from glm_mtp_export.engine.selfcheck import Arrays, SelfCheck, self_check
from glm_mtp_export.engine_manifest import ENGINE_MANIFEST_NAME, EngineManifest, EngineProfile, engine_directory
from glm_mtp_export.errors import EngineError

__all__ = ["build", "check"]


def build(artifact: Path, profile: EngineProfile) -> tuple[EngineManifest, SelfCheck]:
    """Check `artifact`, run its self-check and write its engine.json. Raises as `check` does."""
    checked = check(artifact, profile.threads)
    engine = EngineManifest(
        backend="onnxruntime",
        profile=profile,
        toolchain={"onnxruntime": ort.__version__},
        compute_capability="0.0",
        plugin_sha256="",
        plugin_archs=(),
        step_sha256=Manifest.load(artifact).files[STEP_NAME].sha256,
        files={},
        num_plugin_layers=0,
        notes=() if checked.performed else ("no self-check: the artifact holds no reference",),
    )
    folder = engine_directory(artifact, "onnxruntime")
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / ENGINE_MANIFEST_NAME) as path:
        path.write_text(engine.to_json(), encoding="utf-8")
    return engine, checked


def check(artifact: Path, threads: int = 0) -> SelfCheck:
    """Hold an artifact against its reference without writing anything.

    Raises ArtifactError for damaged files, EngineError for an artifact of the device dialect, a graph that does not load, or a
    failed self-check.
    """
    manifest = Manifest.load(artifact)
    if manifest.dialect == DEVICE:
        raise EngineError(
            f"{artifact}: the artifact is of the device dialect, which needs our GPU plugins. Use --backend tensorrt, or export "
            "with --dialect portable for ONNX Runtime."
        )
    manifest.verify_files(artifact)
    return self_check(_runner(artifact, threads), manifest, artifact)


def _runner(artifact: Path, threads: int) -> Any:
    """A function from step inputs to step outputs on a fresh session."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    try:
        session = ort.InferenceSession(str(artifact / STEP_NAME), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the runtime raises its own classes, all of them about this file
        raise EngineError(
            f"{artifact / STEP_NAME}: ONNX Runtime {ort.__version__} cannot load it ({error}). "
            "Export the checkpoint again, or install another onnxruntime."
        ) from error
    names = [output.name for output in session.get_outputs()]

    def run(feeds: Arrays) -> dict[str, np.ndarray]:
        return dict(zip(names, session.run(None, dict(feeds)), strict=True))

    return run
