"""Engine profiles: reading them from `engines/*.toml`, and the shapes each optimisation profile spans.

In: a profile name or a TOML path, and an artifact's manifest. Out: `EngineProfile`, and for the tensorrt backends the
smallest, tuned and largest shape of every dynamic input. What may go wrong: an unknown name or field raises
`OptionError` with the nearest one.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from glm_mtp_export.artifact import PAGE_SIZE, Manifest, TensorSpec
from glm_mtp_export.engine_manifest import BACKENDS, EngineProfile
from glm_mtp_export.errors import OptionError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["BACKENDS", "PROFILE_FOLDER", "EngineProfile", "Span", "load_profile", "profile_names", "shape_spans"]

_CHECKOUT_FOLDER = Path(__file__).parents[2] / "engines"
_INSTALLED_FOLDER = Path(sys.prefix) / "share" / "glm-mtp-export" / "engines"
PROFILE_FOLDER = _CHECKOUT_FOLDER if _CHECKOUT_FOLDER.is_dir() else _INSTALLED_FOLDER


@dataclass(frozen=True)
class Span:
    """Shapes of one input in one optimisation profile."""

    smallest: tuple[int, ...]
    tuned: tuple[int, ...]
    largest: tuple[int, ...]


def profile_names(folder: Path = PROFILE_FOLDER) -> tuple[str, ...]:
    """Names of the profiles in `folder`."""
    return tuple(sorted(path.stem for path in folder.glob("*.toml")))


def load_profile(name: str, folder: Path = PROFILE_FOLDER) -> EngineProfile:
    """Read a profile by name, or by path when `name` ends in .toml. Raises OptionError."""
    path = Path(name) if name.endswith(".toml") else folder / f"{name}.toml"
    if not path.is_file():
        names = profile_names(folder)
        near = difflib.get_close_matches(name, names, 1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise OptionError(f"profile '{name}': {path} does not exist.{hint} Profiles are {', '.join(names) or 'none'}.")
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"{path}: not a TOML file ({error}). Mend it or name another profile.") from error
    return EngineProfile.from_mapping({"name": path.stem, **raw}, str(path))


def shape_spans(manifest: Manifest, profile: EngineProfile) -> dict[str, dict[str, Span]]:
    """Profile name (`prefill`, `decode`) -> input name -> shapes, for the dynamic inputs of the step graph."""
    slots = manifest.speculation.num_slots
    opt_batch = profile.opt_batch or profile.max_batch
    # The last call of a request also names pages for its drafts and for those that the draft layer adds.
    most_pages = -(-(profile.max_context + 2 * slots) // PAGE_SIZE)
    pages = min(most_pages, 128)
    smallest = {"B": 1, "T": 1, "P": 1, "N": 1}
    prefill = {"B": min(opt_batch, profile.opt_rows or profile.max_rows), "T": profile.opt_rows or profile.max_rows}
    decode = {"B": opt_batch, "T": opt_batch * slots}
    largest = {"B": profile.max_batch, "P": most_pages, "N": profile.num_pages}
    tuned = {"P": pages, "N": profile.num_pages}
    return {
        "prefill": _spans(manifest.inputs, smallest, {**tuned, **prefill}, {**largest, "T": profile.max_rows}),
        "decode": _spans(manifest.inputs, smallest, {**tuned, **decode}, {**largest, "T": profile.max_batch * slots}),
    }


def _spans(
    specs: Iterable[TensorSpec], smallest: Mapping[str, int], tuned: Mapping[str, int], largest: Mapping[str, int]
) -> dict[str, Span]:
    dynamic = (spec for spec in specs if any(isinstance(extent, str) for extent in spec.shape))
    return {spec.name: Span(*(_shape(spec, sizes) for sizes in (smallest, tuned, largest))) for spec in dynamic}


def _shape(spec: TensorSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(extent if isinstance(extent, int) else _extent(extent, sizes) for extent in spec.shape)


def _extent(symbol: str, sizes: Mapping[str, int]) -> int:
    """`T` or `B+1` in numbers."""
    name, _, added = symbol.partition("+")
    return sizes[name] + int(added or 0)
