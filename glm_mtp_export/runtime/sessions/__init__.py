"""Step sessions, one module per backend; each has a class with `load(directory, manifest, profile)`.

In: an artifact directory and a profile. Out: a `StepSession`. Backends are imported when asked for, so that a machine
needs only the packages of the one it uses.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from glm_mtp_export.artifact import Manifest
from glm_mtp_export.engine_manifest import BACKENDS, EngineProfile
from glm_mtp_export.errors import MissingDependencyError, OptionError
from glm_mtp_export.runtime.session import StepSession

__all__ = ["open_session"]

# backend -> (module in this package, class)
_SESSIONS = {
    "onnxruntime": ("onnxruntime", "OnnxRuntimeSession"),
    "tensorrt": ("tensorrt", "TensorRtSession"),
    "tensorrt-rtx": ("tensorrt", "TensorRtSession"),
}


def open_session(directory: Path, manifest: Manifest, profile: EngineProfile) -> StepSession:
    """Load the step graph or engine of `profile.backend`."""
    if profile.backend not in _SESSIONS:
        raise OptionError(f"backend is {profile.backend!r}, expected one of {', '.join(BACKENDS)}.")
    if manifest.parallel.tensor_parallel_size > 1:
        from glm_mtp_export.runtime.sessions.rank import open_leader

        return open_leader(directory, manifest, profile)
    module_name, class_name = _SESSIONS[profile.backend]
    try:
        module = importlib.import_module(f"{__name__}.{module_name}")
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"backend {profile.backend} needs the module {error.name!r}, which is not installed. "
            "Install the extra for it (pip install 'glm-mtp-export[gpu]') or use --backend onnxruntime."
        ) from error
    session: StepSession = getattr(module, class_name).load(directory, manifest, profile)
    return session
