"""Opening the engine of an artifact: it must be this machine's, this release's and this artifact's, and update caches in place.

In: an artifact directory with an engine for the profile's backend. Out: the toolchain, the engine, and the plugin library it runs
with. What may go wrong: anything that does not match raises `EngineError` with what was found, what was expected
and the command that helps, before the toolchain sees the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from glm_mtp_export.artifact import DEVICE, STEP_NAME, Manifest
from glm_mtp_export.cuda_device import cuda_device
from glm_mtp_export.engine_manifest import PLAN_NAME, EngineManifest, EngineProfile, Machine, engine_directory
from glm_mtp_export.errors import ArtifactError, EngineError
from glm_mtp_export.plugin_library import LIBRARY_NAME, describe_plugins
from glm_mtp_export.runtime.cuda import use_device
from glm_mtp_export.tensorrt_toolchain import Toolchain, load_toolchain

__all__ = ["check_aliases", "check_profile", "open_engine"]


def open_engine(directory: Path, manifest: Manifest, profile: EngineProfile) -> tuple[Toolchain, Any, Path]:
    """Toolchain, engine and plugin library for `profile`, on the current card."""
    if manifest.dialect != DEVICE:
        raise ArtifactError(
            f"{directory}: the dialect is {manifest.dialect!r}, a tensorrt backend runs {DEVICE!r} only. "
            f"Export again with --dialect {DEVICE}, or use --backend onnxruntime."
        )
    folder = engine_directory(directory, profile.backend)
    built = EngineManifest.load(folder)
    toolchain = load_toolchain(profile.backend)
    library = folder / LIBRARY_NAME
    built.check(folder, _machine(toolchain, library), manifest.files[STEP_NAME].sha256)
    check_profile(built.profile, profile, folder)
    use_device()
    library = toolchain.load_plugins(library).path
    engine = _deserialised(toolchain, folder)
    check_aliases(engine, manifest, folder)
    return toolchain, engine, library


def _machine(toolchain: Toolchain, library: Path) -> Machine:
    """What is here. A library that is missing is left to the manifest's file list."""
    card = cuda_device()
    if card is None:
        raise EngineError("no CUDA card on this machine. Use --backend onnxruntime here.")
    plugins = describe_plugins(library) if library.is_file() else None
    return Machine(
        toolchain={toolchain.name: toolchain.version, "cuda": plugins.cuda if plugins else "none"},
        compute_capability=card.compute_capability,
        driver_cuda=card.driver_cuda,
        plugin_sha256=plugins.sha256 if plugins else "",
    )


def check_profile(built: EngineProfile, wanted: EngineProfile, folder: Path) -> None:
    """A profile other than the built one may only ask for less."""
    limits = ("num_pages", "max_batch", "max_rows", "max_context")
    larger = [
        f"{n} {getattr(wanted, n)}, built for {getattr(built, n)}"
        for n in limits
        if getattr(wanted, n) > getattr(built, n)
    ]
    if larger:
        raise EngineError(f"{folder}: profile {wanted.name} asks for {'; '.join(larger)}. Build the engine with it.")


def _deserialised(toolchain: Toolchain, folder: Path) -> Any:
    first_line = len(toolchain.lines)
    runtime = toolchain.module.Runtime(toolchain.logger)
    engine = runtime.deserialize_cuda_engine((folder / PLAN_NAME).read_bytes())
    if engine is None:
        words = toolchain.errors(first_line)
        raise EngineError(
            f"{folder / PLAN_NAME}: {toolchain.name} {toolchain.version} refuses this engine:\n{words}\n"
            "Build it again on this machine with 'glm-mtp build-engine'."
        )
    return engine


def check_aliases(engine: Any, manifest: Manifest, folder: Path) -> None:
    """Every cache output must be its input: else the engine copies the pool, or writes into a buffer nobody reads."""
    # Measured with TensorRT-RTX 1.6.1: for a cache with several writers in a row the engine names no input. The builder has
    # refused copies by then, and both names are bound to one address.
    told = {c.name: engine.get_aliased_input_tensor(f"{c.name}_out") for c in manifest.caches}
    wrong = [name for name, found in told.items() if found not in (name, None)]
    if wrong:
        raise EngineError(f"{folder}: {', '.join(wrong)} would not be updated in place. Export and build again.")
