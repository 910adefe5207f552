"""How much a `--dtype` conversion costs: the error of each module group against the stored (dequantised) weights.

In: a view and the weight plan. Out: one `ConversionError` per group whose values change, for the manifest. A number of evenly
spaced parts of each weight is measured, and the record says how many values that were.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from glm_mtp_export.artifact import ConversionError, WeightEntry
from glm_mtp_export.checkpoint.formats import FP8_BLOCK_FORMAT, NVFP4
from glm_mtp_export.checkpoint.parts import Part, entry_parts
from glm_mtp_export.checkpoint.view import CheckpointView
from glm_mtp_export.checkpoint.weights import Progress

__all__ = ["conversion_errors"]


@dataclass
class _Sums:
    stored: set[str]
    converted: set[str]
    difference: float = 0.0
    magnitude: float = 0.0
    largest: float = 0.0
    num_measured: int = 0
    num_values: int = 0


def conversion_errors(
    view: CheckpointView, entries: Iterable[WeightEntry], max_parts: int = 4, progress: Progress | None = None
) -> tuple[ConversionError, ...]:
    """Measure up to `max_parts` evenly spaced parts (matrices, or heads of kv_b) of each weight that is converted.

    Weights whose stored values pass through, and groups that lose nothing, are left out. A headers-only checkpoint has
    nothing to measure and gives an empty tuple.
    """
    sums: dict[tuple[str, str], _Sums] = {}
    for entry in entries if not view.store.headers_only else ():
        parts = [] if entry.component != "values" else [p for p in entry_parts(view, entry) if not _is_exact(p, entry)]
        if parts:
            key = entry.name.partition(".")[0], _group(view, entry)
            total = sums.setdefault(key, _Sums(set(), set()))
            total.stored |= {part.weight.precision for part in parts}
            total.converted.add(entry.precision)
            total.num_values += sum(part.num_values for part in parts)
            for index in sorted({round(i) for i in np.linspace(0, len(parts) - 1, min(max_parts, len(parts)))}):
                _measure(parts[index], entry, total)
        if progress:
            progress(entry.num_bytes)
    return tuple(
        ConversionError(
            *key,
            ", ".join(sorted(s.stored)),
            ", ".join(sorted(s.converted)),
            (s.difference / s.magnitude) ** 0.5,
            s.largest,
            s.num_measured,
            s.num_values,
        )
        for key, s in sums.items()
        if s.difference > 0
    )


def _is_exact(part: Part, entry: WeightEntry) -> bool:
    """Whether the stored values reach the graph unchanged by construction."""
    if entry.precision == NVFP4:
        return part.weight.format == NVFP4
    if entry.precision == FP8_BLOCK_FORMAT:
        return part.has_kernel_blocks
    return entry.precision in ("float32", part.weight.precision)


def _group(view: CheckpointView, entry: WeightEntry) -> str:
    source = entry.sources[0]
    return "experts" if source not in view.specs else view.specs[source].group


def _measure(part: Part, entry: WeightEntry, total: _Sums) -> None:
    """Add one part: sums in float64, piece by piece."""
    worst = peak = 0.0
    for piece in part.cut(entry):
        stored = piece.weight.floats(piece.start, piece.stop)
        difference = piece.rounded(entry.precision).astype(np.float64) - stored
        total.difference += float(np.square(difference).sum())
        total.magnitude += float(np.square(stored.astype(np.float64)).sum())
        worst, peak = max(worst, float(np.abs(difference).max())), max(peak, float(np.abs(stored).max()))
        total.num_measured += piece.num_values
    total.largest = max(total.largest, worst / peak if peak else 0.0)
