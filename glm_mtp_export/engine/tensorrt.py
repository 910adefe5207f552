"""Builds an engine from a device-dialect artifact with TensorRT or TensorRT-RTX, through Polygraphy's loaders.

In: an artifact directory, a profile, a plugin library. Out: `engine.plan`, the plugin library and `engine.json` under
`engine/<backend>`, and a `BuildReport`. Weights are network inputs: the plan stays small and the build takes seconds
at any size. What may go wrong: an artifact of the portable dialect, an op without its plugin, a cache that is read stale
or would be copied, and whatever the toolchain refuses raise `EngineError` with the toolchain's own words; nothing is
written then.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import shutil
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from glm_mtp_export.artifact import DEVICE, STEP_NAME, Manifest, file_record, replacing
from glm_mtp_export.cuda_device import cuda_device
from glm_mtp_export.engine.cache_threads import check_cache_threads
from glm_mtp_export.engine.preflight import PreflightReport, load_graph, preflight
from glm_mtp_export.engine.profile import shape_spans
from glm_mtp_export.engine_manifest import (
    ENGINE_MANIFEST_NAME,
    PLAN_NAME,
    EngineManifest,
    EngineProfile,
    engine_directory,
)
from glm_mtp_export.errors import EngineError, MissingDependencyError
from glm_mtp_export.plugin_library import LIBRARY_NAME, PluginLibrary, find_plugins
from glm_mtp_export.tensorrt_toolchain import LogLine, Toolchain, load_toolchain, require_parser_library

__all__ = [
    "BuildReport",
    "EngineLayer",
    "build",
    "bytes_as_int8",
    "engine_layers",
    "save_timing_cache",
    "set_timing_cache",
]

_WARNING = 2  # the toolchain's severity
_TENSOR = re.compile(r"\{ Name: ([^,]*), Dimensions: \[([-\d,]+)\], Strides: \[([-\d,]+)\]")
# What TensorRT-RTX compiles for: the oldest target with the types that the graph uses. Newer cards run it.
_RTX_TARGET, _RTX_TARGET_FP8 = ("SM80", "8.0"), ("SM89", "8.9")


@dataclass(frozen=True)
class EngineLayer:
    """One layer of a built engine, as its builder lists it."""

    name: str
    kind: str  # PluginV3, custom_layer, NoOp, kgen, ...


@dataclass(frozen=True)
class BuildReport:
    """What a build did. `activation_bytes`: scratch memory of the largest profile, without caches and weights."""

    directory: Path
    manifest: EngineManifest
    preflight: PreflightReport
    layers: tuple[EngineLayer, ...]
    plan_bytes: int
    activation_bytes: int
    parse_seconds: float
    build_seconds: float

    @property
    def native_layers(self) -> tuple[EngineLayer, ...]:
        """Layers that are neither plugins nor bookkeeping without work."""
        idle = ("PluginV3", "custom_layer", "NoOp", "shape_call", "signal", "wait")
        return tuple(layer for layer in self.layers if layer.kind not in idle)


def build(
    artifact: Path,
    profile: EngineProfile,
    *,
    plugins: Path | None = None,
    strict_plugins: bool = True,
    check_only: bool = False,
    timing_cache: Path | None = None,
) -> BuildReport:
    """Build the engine of `artifact` for `profile`. `check_only` builds and inspects, and writes nothing."""
    if profile.backend not in ("tensorrt", "tensorrt-rtx"):
        raise EngineError(f"profile {profile.name} is for {profile.backend}: name one for tensorrt or tensorrt-rtx.")
    manifest = Manifest.load(artifact)
    if manifest.dialect != DEVICE:
        raise EngineError(
            f"{artifact}: the artifact is of the {manifest.dialect} dialect, whose float32 caches our plugins do not "
            "take. Export it again with --dialect device."
        )
    ranks, exported = profile.tensor_parallel_size, manifest.parallel.tensor_parallel_size
    if ranks > 1 and ranks != exported:
        raise EngineError(
            f"profile {profile.name} is sized for {ranks} ranks, {artifact} was exported for {exported}. Export it with "
            f"--tensor-parallel-size {ranks}, or name another profile."
        )
    manifest.verify_files(artifact)
    library = find_plugins(plugins)
    model = load_graph(artifact / STEP_NAME)
    check_cache_threads(model, [cache.name for cache in manifest.caches])
    toolchain = load_toolchain(profile.backend)
    require_parser_library(toolchain)
    report = preflight(model, toolchain.load_plugins(library.path).creators, str(library.path))
    report.require(strict=strict_plugins)
    first_line = len(toolchain.lines)
    step = artifact / STEP_NAME
    plan, seconds = _built(toolchain, step, bytes_as_int8(model), manifest, profile, timing_cache)
    lines = toolchain.lines[first_line:]
    _refuse_copies(lines)
    _refuse_strides(lines)
    engine = _engine_manifest(toolchain, manifest, profile, library, report, check_only)
    directory = engine_directory(artifact, profile.backend)
    if not check_only:
        engine = _write(directory, engine, library, plan)
    return BuildReport(
        directory, engine, report, engine_layers(lines), len(plan), _activation_bytes(lines), seconds[0], seconds[1]
    )


def bytes_as_int8(model: onnx.ModelProto) -> onnx.ModelProto | None:
    """The graph with its UINT8 inputs typed INT8, which builders take at plugins; None when it has no such input."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    inputs = [i for i in changed.graph.input if i.type.tensor_type.elem_type == onnx.TensorProto.UINT8]
    for value in inputs:
        value.type.tensor_type.elem_type = onnx.TensorProto.INT8
    return changed if inputs else None


def _built(
    toolchain: Toolchain,
    step: Path,
    retyped: onnx.ModelProto | None,
    manifest: Manifest,
    profile: EngineProfile,
    timing_cache: Path | None,
) -> tuple[memoryview, tuple[float, float]]:
    """Parse and build; the serialised engine and the seconds each took. `retyped` stands for the file when given."""
    trt, loaders = toolchain.module, _polygraphy(toolchain)
    first_line = len(toolchain.lines)
    started = time.perf_counter()
    try:
        with _quiet_polygraphy():
            if retyped is None:
                network = loaders.NetworkFromOnnxPath(str(step), strongly_typed=True)()
            else:
                network = loaders.NetworkFromOnnxBytes(retyped.SerializeToString(), strongly_typed=True)()
            parsed = time.perf_counter()
            create = loaders.CreateConfig(
                profiles=_profiles(loaders, manifest, profile),
                preview_features=[trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03],
                profiling_verbosity=trt.ProfilingVerbosity.DETAILED,
            )
            config = create(network[0], network[1])
            config.max_aux_streams = 0  # side streams would break the kernels' overlap on the main one
            if toolchain.is_rtx:
                config.num_compute_capabilities = 1
                config.set_compute_capability(getattr(trt.ComputeCapability, _rtx_target(manifest)[0]), 0)
            if timing_cache is not None and not toolchain.is_rtx:  # TensorRT-RTX has no timings to keep
                set_timing_cache(config, timing_cache)
            plan = memoryview(loaders.EngineBytesFromNetwork(network, lambda _builder, _network: config)())
    except Exception as error:  # Polygraphy and the bindings raise their own kinds
        words = toolchain.errors(first_line)
        card = "" if toolchain.is_rtx or cuda_device() else " TensorRT builds on the card it builds for; none is here."
        raise EngineError(f"{step}: {toolchain.name} {toolchain.version} cannot build it.{card}\n{words}") from error
    if timing_cache is not None and not toolchain.is_rtx:
        save_timing_cache(config, timing_cache)
    return plan, (parsed - started, time.perf_counter() - parsed)


def _polygraphy(toolchain: Toolchain) -> Any:
    """Polygraphy's loaders for this toolchain, logging through ours. Raises MissingDependencyError."""
    os.environ["POLYGRAPHY_USE_TENSORRT_RTX"] = "1" if toolchain.is_rtx else "0"  # read when it is first imported
    try:
        loaders = importlib.import_module("polygraphy.backend.trt")
        util = importlib.import_module("polygraphy.backend.trt.util")
    except ImportError as error:
        raise MissingDependencyError(
            f"building engines needs Polygraphy ({error}): pip install 'glm-mtp-export[gpu]'"
        ) from error
    # The loaders take no logger, and the one they make keeps no lines.
    util.TRT_LOGGER = toolchain.logger  # type: ignore[attr-defined]
    return loaders


@contextmanager
def _quiet_polygraphy() -> Iterator[None]:
    """Polygraphy prints its configuration and every error, and calls what its toolchain deprecates."""
    logger = importlib.import_module("polygraphy.logger").G_LOGGER
    with logger.verbosity(logger.CRITICAL + 1), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def _profiles(loaders: Any, manifest: Manifest, profile: EngineProfile) -> list[Any]:
    """Polygraphy profiles, prefill first; the runtime selects them by this order."""
    out = []
    for spans in shape_spans(manifest, profile).values():
        made = loaders.Profile()
        for name, span in spans.items():
            made.add(name, span.smallest, span.tuned, span.largest)
        out.append(made)
    return out


def _rtx_target(manifest: Manifest) -> tuple[str, str]:
    uses_fp8 = any(weight.dtype == "float8_e4m3fn" for weight in manifest.weights)
    return _RTX_TARGET_FP8 if uses_fp8 else _RTX_TARGET


def set_timing_cache(config: Any, path: Path) -> bool:
    """Give `config` the cache at `path`; an empty one, and False, when it is missing or damaged: only time is lost."""
    try:
        cache = config.create_timing_cache(path.read_bytes())
        if cache is not None and config.set_timing_cache(cache, True):
            return True
    except (OSError, RuntimeError, TypeError, ValueError):
        pass
    config.set_timing_cache(config.create_timing_cache(b""), True)
    return False


def save_timing_cache(config: Any, path: Path) -> None:
    """Write the cache that the build filled."""
    cache = config.get_timing_cache()
    if cache is not None:
        with replacing(path) as temporary:
            temporary.write_bytes(bytes(cache.serialize()))


def _refuse_copies(lines: list[LogLine]) -> None:
    """The builder copies a tensor that two layers update, or that is read after an update. No cache may be copied."""
    copies = [line.text for line in lines if line.severity <= _WARNING and "copies before plugin" in line.text]
    if copies:
        listing = "\n".join(f"  {text}" for text in copies)
        raise EngineError(
            f"the builder would copy a cache on every call; a cache must be one thread of writers:\n{listing}\n"
            "Export the checkpoint again with this release."
        )


def strided_tensors(lines: list[LogLine]) -> list[str]:
    """Tensors of plugin layers whose rows do not follow one another, as `layer: tensor [extents] strides [strides]`.

    Plugins take linear tensors and are told no strides, yet TensorRT-RTX lets them write straight into a part of a
    concatenation's result (measured with 1.6.1): every row but the first lands in the wrong place.
    """
    found = []
    for layer in re.finditer(
        r"^Name: (.*?), LayerType: (?:custom_layer|PluginV3),(.*)$", _layer_listing(lines), re.MULTILINE
    ):
        for name, extents, strides in re.findall(_TENSOR, layer[2]):
            if not _is_dense([int(e) for e in extents.split(",")], [int(s) for s in strides.split(",")]):
                found.append(f"{layer[1]}: {name} [{extents}] strides [{strides}]")
    return found


def _is_dense(extents: list[int], strides: list[int]) -> bool:
    """Row-major without gaps, as far as the extents are known: -1 is a dynamic one."""
    expected = 1
    for extent, stride in zip(reversed(extents), reversed(strides), strict=True):
        if extent != 1 and stride != expected:
            return False
        if extent < 0:
            return True
        expected *= extent
    return True


def _refuse_strides(lines: list[LogLine]) -> None:
    if strided := strided_tensors(lines):
        listing = "\n".join(f"  {text}" for text in strided)
        raise EngineError(
            f"the builder gives plugins tensors with gaps, which they cannot see:\n{listing}\n"
            "A plugin must not feed a Concat or read a Slice; export the checkpoint again with this release."
        )


def _layer_listing(lines: list[LogLine]) -> str:
    return next((line.text for line in reversed(lines) if line.text.startswith("Layers:")), "")


def engine_layers(lines: list[LogLine]) -> tuple[EngineLayer, ...]:
    """The layers of the engine from the builder's detailed log. Empty when this toolchain does not print them."""
    found = re.findall(r"^Name: (.*?), LayerType: (\w+)", _layer_listing(lines), re.MULTILINE)
    return tuple(EngineLayer(name, kind) for name, kind in found)


def _activation_bytes(lines: list[LogLine]) -> int:
    found = [re.search(r"Total Activation Memory: (\d+) bytes", line.text) for line in lines]
    return max((int(match[1]) for match in found if match), default=0)


def _engine_manifest(
    toolchain: Toolchain,
    manifest: Manifest,
    profile: EngineProfile,
    library: PluginLibrary,
    report: PreflightReport,
    check_only: bool,
) -> EngineManifest:
    card = cuda_device()
    capability = _rtx_target(manifest)[1] if toolchain.is_rtx else card.compute_capability if card else "0.0"
    return EngineManifest(
        backend=profile.backend,
        profile=profile,
        toolchain={toolchain.name: toolchain.version, "cuda": library.cuda},
        compute_capability=capability,
        plugin_sha256=library.sha256,
        plugin_archs=library.archs,
        step_sha256=manifest.files[STEP_NAME].sha256,
        files={},
        num_plugin_layers=sum(f.num_nodes for f in report.findings if f.runs_as == "plugin"),
        newer_cards=toolchain.is_rtx,
        checked_only=check_only,
    )


def _write(directory: Path, engine: EngineManifest, library: PluginLibrary, plan: memoryview) -> EngineManifest:
    """Plan and plugin library first, engine.json last: a directory without it is no engine."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / ENGINE_MANIFEST_NAME).unlink(missing_ok=True)
    with replacing(directory / PLAN_NAME) as temporary:
        temporary.write_bytes(plan)
    with replacing(directory / LIBRARY_NAME) as temporary:
        shutil.copyfile(library.path, temporary)
    files = {name: file_record(directory / name) for name in (PLAN_NAME, LIBRARY_NAME)}
    engine = dataclasses.replace(engine, files=files)
    with replacing(directory / ENGINE_MANIFEST_NAME) as temporary:
        temporary.write_text(engine.to_json(), encoding="utf-8")
    return engine
