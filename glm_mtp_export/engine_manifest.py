"""The contracts between engine builder and runtime: the profile an engine is built for, and the manifest beside it.

An engine directory, `<artifact>/engine/<backend>/`, holds

    engine.plan   what the toolchain made
    engine.json   EngineManifest: from what, with what and for what it was made

In: JSON and profile mappings. Out: frozen records. A profile that makes no sense raises `OptionError`.
`EngineManifest.check` compares a manifest with the machine at hand and raises `EngineError` before anything is
deserialised: toolchains answer a foreign engine with a number or with silence.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glm_mtp_export.artifact import PAGE_SIZE, FileRecord, file_record
from glm_mtp_export.errors import EngineError, OptionError

__all__ = [
    "BACKENDS",
    "ENGINE_MANIFEST_NAME",
    "PLAN_NAME",
    "EngineManifest",
    "EngineProfile",
    "Machine",
    "engine_directory",
]

BACKENDS = ("onnxruntime", "tensorrt", "tensorrt-rtx")
PLAN_NAME, ENGINE_MANIFEST_NAME = "engine.plan", "engine.json"
ENGINE_FORMAT_VERSION = 1


@dataclass(frozen=True)
class EngineProfile:
    """What an engine is sized for. A request holds up to `max_context` positions; a page holds PAGE_SIZE of them.

    The tensorrt backends make two optimisation profiles of it: prefill/mixed, up to `max_rows` token rows, and decode,
    up to max_batch * (K + 1) rows. `opt_*` are the sizes the builder tunes for.
    """

    name: str
    backend: str
    num_pages: int
    max_batch: int
    max_rows: int
    max_context: int
    opt_rows: int = 0  # of prefill; 0: max_rows
    opt_batch: int = 0  # of decode; 0: max_batch
    threads: int = 0  # onnxruntime; 0: one per core
    tensor_parallel_size: int = 1
    max_total_context: int = 0  # positions that the requests of one call hold together; 0: as many as the pages hold

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            near = difflib.get_close_matches(self.backend, BACKENDS, 1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            names = ", ".join(BACKENDS)
            raise OptionError(f"profile {self.name}: backend is {self.backend!r}, expected one of {names}.{hint}")
        for name in ("num_pages", "max_batch", "max_rows", "max_context", "tensor_parallel_size"):
            if (value := getattr(self, name)) < 1:
                raise OptionError(f"profile {self.name}: {name} is {value}, expected 1 or more. Mend the profile.")
        if problems := self._problems():
            raise OptionError(f"profile {self.name}: {'; '.join(problems)}. Mend the profile.")

    def _problems(self) -> list[str]:
        problems = []
        pages = self.max_pages_per_request
        if self.max_rows < self.max_batch:
            problems.append(f"max_rows is {self.max_rows}, below max_batch {self.max_batch}: a request needs a row")
        if pages > self.num_pages:
            problems.append(f"max_context {self.max_context} needs {pages} pages, num_pages is {self.num_pages}")
        if not 0 <= self.opt_rows <= self.max_rows:
            problems.append(f"opt_rows is {self.opt_rows}, expected 0 to max_rows {self.max_rows}")
        if not 0 <= self.opt_batch <= self.max_batch:
            problems.append(f"opt_batch is {self.opt_batch}, expected 0 to max_batch {self.max_batch}")
        if 0 != self.max_total_context < self.max_context:
            problems.append(
                f"max_total_context is {self.max_total_context}, expected 0 or at least max_context {self.max_context}"
            )
        if self.threads < 0:
            problems.append(f"threads is {self.threads}, expected 0 or more")
        return problems

    @property
    def max_pages_per_request(self) -> int:
        """Columns of the block table."""
        return -(-self.max_context // PAGE_SIZE)

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any], where: str) -> EngineProfile:
        """Build from a TOML or JSON table. Unknown, missing or mistyped fields raise OptionError naming `where`."""
        types = {f.name: f.type for f in dataclasses.fields(cls)}
        for key, value in raw.items():
            if key not in types:
                near = difflib.get_close_matches(key, types, 1)
                hint = f" Did you mean '{near[0]}'?" if near else ""
                raise OptionError(f"{where}: unknown field '{key}'.{hint} Fields are {', '.join(types)}.")
            expected = str if types[key] == "str" else int
            if type(value) is not expected:
                kind = "text" if expected is str else "a whole number"
                raise OptionError(f"{where}: {key} is {value!r}, expected {kind}.")
        required = (f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING)
        if missing := [name for name in required if name not in raw]:
            raise OptionError(f"{where}: {', '.join(missing)} missing. Compare with the profiles in engines/.")
        return cls(**raw)


@dataclass(frozen=True)
class Machine:
    """What an engine is loaded with: versions of the toolchain, the card, the plugin library."""

    toolchain: Mapping[str, str]  # "tensorrt" or "tensorrt_rtx", and "cuda": what the plugin library was compiled with
    compute_capability: str  # of the card, such as "9.0"
    driver_cuda: str  # the newest CUDA that the driver serves, such as "13.0"
    plugin_sha256: str


@dataclass(frozen=True)
class EngineManifest:
    """From what, with what and for what an engine was built."""

    backend: str
    profile: EngineProfile
    toolchain: Mapping[str, str]
    compute_capability: str
    plugin_sha256: str
    plugin_archs: tuple[str, ...]  # machine code inside the plugin library, such as 90a
    step_sha256: str  # of the step.onnx it was built from
    files: Mapping[str, FileRecord]
    num_plugin_layers: int
    newer_cards: bool = False  # True: newer compute capabilities run it too (TensorRT-RTX compiles on load)
    checked_only: bool = False  # True: built without a card, never deserialised
    format_version: int = ENGINE_FORMAT_VERSION
    notes: tuple[str, ...] = field(default=())

    def to_json(self) -> str:
        """Serialise with a fixed key order."""
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str) -> EngineManifest:
        """Parse; raises EngineError naming `where`."""
        try:
            raw = json.loads(text)
            if (version := raw["format_version"]) != ENGINE_FORMAT_VERSION:
                reads = f"this release reads {ENGINE_FORMAT_VERSION}"
                raise EngineError(f"{where}: format_version is {version}, {reads}. {_REBUILD}")
            raw["profile"] = EngineProfile.from_mapping(raw["profile"], where)
            raw["files"] = {name: FileRecord(**record) for name, record in raw["files"].items()}
            raw["plugin_archs"], raw["notes"] = tuple(raw["plugin_archs"]), tuple(raw["notes"])
            return cls(**raw)
        except (EngineError, OptionError):
            raise
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise EngineError(f"{where}: not an engine manifest of this release ({error!r}). {_REBUILD}") from error

    @classmethod
    def load(cls, directory: Path) -> EngineManifest:
        """Read engine.json of an engine directory."""
        path = directory / ENGINE_MANIFEST_NAME
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise EngineError(f"{path}: cannot be read ({error}). {_REBUILD}") from error
        return cls.from_json(text, str(path))

    def check(self, directory: Path, machine: Machine, step_sha256: str) -> None:
        """Refuse an engine that this machine or this artifact cannot use; all reasons in one EngineError."""
        problems = [*self._file_problems(directory), *self._machine_problems(machine)]
        if self.step_sha256 != step_sha256:
            problems.append("it was built from another step.onnx than the artifact holds")
        if problems:
            raise EngineError(
                f"{directory}: this engine cannot be used here: {'; '.join(problems)}. "
                f"Rebuild with: glm-mtp build-engine --backend {self.backend} --profile {self.profile.name}"
            )

    def _file_problems(self, directory: Path) -> list[str]:
        problems = []
        for name, record in self.files.items():
            path = directory / name
            if not path.is_file():
                problems.append(f"{name} is missing")
            elif path.stat().st_size != record.num_bytes:
                problems.append(f"{name} has {path.stat().st_size} bytes, expected {record.num_bytes}")
            elif file_record(path).sha256 != record.sha256:
                problems.append(f"{name} differs from its sha256 in {ENGINE_MANIFEST_NAME}")
        return problems

    def _machine_problems(self, machine: Machine) -> list[str]:
        problems = []
        for name, built in self.toolchain.items():
            found = machine.toolchain.get(name)
            if found != built:
                problems.append(f"it was built with {name} {built}, here is {found or 'none'}")
        cuda = self.toolchain.get("cuda", "0.0")
        if _version(machine.driver_cuda) < _version(cuda):
            problems.append(f"it needs CUDA {cuda}, this driver serves {machine.driver_cuda} (update the driver)")
        if not self._runs_on(machine.compute_capability):
            built = self.compute_capability + (" or newer" if self.newer_cards else "")
            problems.append(f"it was built for compute capability {built}, this card has {machine.compute_capability}")
        if not any(_arch_runs_on(arch, machine.compute_capability) for arch in self.plugin_archs):
            problems.append(
                f"its plugin library holds code for {', '.join(self.plugin_archs)}, "
                f"this card has compute capability {machine.compute_capability} (glm-mtp build-plugins --arch)"
            )
        if machine.plugin_sha256 != self.plugin_sha256:
            found = machine.plugin_sha256[:12] or "none"
            problems.append(f"it was built with plugin library sha256 {self.plugin_sha256[:12]}, found {found}")
        return problems

    def _runs_on(self, compute_capability: str) -> bool:
        built, found = _version(self.compute_capability), _version(compute_capability)
        return built <= found if self.newer_cards else built == found


def engine_directory(artifact: Path, backend: str) -> Path:
    """Where the engine of `backend` lies in an artifact."""
    return artifact / "engine" / backend


_REBUILD = "Build the engine again with 'glm-mtp build-engine'."


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def _arch_runs_on(arch: str, compute_capability: str) -> bool:
    """`90a` runs on 9.0 alone: code for an architecture-specific target is not forward compatible."""
    return arch.rstrip("af") == compute_capability.replace(".", "")
