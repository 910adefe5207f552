"""Holds a freshly built engine against the exporter's reference, so that an engine that builds but talks nonsense is found here.

In: a function that runs the step, and the artifact's reference file. Out: a `SelfCheck` with the error of every layer; raises
`EngineError` when tokens differ or a layer is out of bounds, naming the first layer that is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from glm_mtp_export.artifact import Manifest
from glm_mtp_export.errors import EngineError
from glm_mtp_export.export.reference import REFERENCE_NAME, reference_feeds, reference_pages, reference_pools

__all__ = ["FP32_LAYER_BOUND", "LayerError", "SelfCheck", "self_check"]

# Float32 against float32: reductions of up to a few thousand terms in another order, some tens of roundings deep, give errors of
# 1e-5 of the largest value; a wrong scale or a swapped tensor gives 1e-2 and more.
FP32_LAYER_BOUND = 1e-3
Arrays = Mapping[str, NDArray[np.generic]]


@dataclass(frozen=True)
class LayerError:
    """Largest difference of one layer's cache rows, relative to the layer's largest value."""

    cache: str
    layer: int
    relative: float


@dataclass(frozen=True)
class SelfCheck:
    """What was compared. `performed` is False when the artifact holds no reference."""

    performed: bool
    num_tokens: int = 0
    layers: tuple[LayerError, ...] = ()

    @property
    def worst(self) -> LayerError | None:
        """The layer with the largest error."""
        return max(self.layers, key=lambda e: e.relative, default=None)


def self_check(
    run: Callable[[Arrays], Arrays], manifest: Manifest, directory: Path, bound: float = FP32_LAYER_BOUND
) -> SelfCheck:
    """Repeat the reference's two calls through `run`, which maps step inputs with caches to step outputs."""
    path = directory / REFERENCE_NAME
    if not path.is_file():
        return SelfCheck(False)
    try:
        reference = load_file(str(path))
    except (OSError, SafetensorError) as error:
        raise EngineError(f"{path}: cannot be read ({error}). Export the checkpoint again.") from error
    prompt, config, speculation = reference["prompt"], manifest.config, manifest.speculation
    num_pages = reference_pages(len(prompt), speculation)
    pools: dict[str, NDArray[np.generic]] = dict(reference_pools(manifest.caches, num_pages))
    tokens, drafts, length, problems, compared = prompt, None, 0, [], 0
    for label in ("first", "second"):
        outputs = run({**reference_feeds(config, speculation, tokens, drafts, length, num_pages), **pools})
        for name in ("num_accepted", "next_tokens", "next_draft_tokens"):
            if name in outputs:
                expected, found = reference[f"{label}.{name}"], np.asarray(outputs[name])
                compared += expected.size
                if not np.array_equal(expected, found):
                    problems.append(f"{name} of the {label} call is {found.tolist()}, expected {expected.tolist()}")
        pools = {c.name: np.asarray(outputs[f"{c.name}_out"]) for c in manifest.caches}
        tokens, length = reference[f"{label}.next_tokens"], len(prompt)
        drafts = reference.get(f"{label}.next_draft_tokens")
    layers = tuple(
        LayerError(name.partition(".")[0], slot, _relative(pool, expected))
        for name in pools
        for slot, pool, expected in _by_layer(name, pools[name], reference[name])
    )
    wrong = [e for e in layers if not e.relative <= bound]
    if wrong:
        first = wrong[0]
        problems.insert(
            0,
            f"{first.cache} layer {first.layer} is off by {first.relative:.2e} of its largest value, bound {bound:.0e}",
        )
    if problems:
        raise EngineError(
            f"{directory}: the engine disagrees with the exporter's reference: {'; '.join(problems)}. "
            "Export and build again; if it stays, this toolchain computes the graph wrongly."
        )
    return SelfCheck(True, compared, layers)


def _by_layer(
    name: str, pool: NDArray[np.generic], expected: NDArray[np.generic]
) -> Iterator[tuple[int, NDArray[np.generic], NDArray[np.generic]]]:
    """Layer number and rows of both, for a pool a layer or a pool with a layer axis."""
    _, _, slot = name.partition(".")
    for layer in range(len(pool)):
        yield (int(slot) if slot else layer), pool[layer], expected[layer]


def _relative(found: NDArray[np.generic], expected: NDArray[np.generic]) -> float:
    """Largest absolute difference over the largest absolute expected value; NaN anywhere gives NaN."""
    difference = np.abs(found.astype(np.float64) - expected.astype(np.float64)).max()
    return float(difference / max(np.abs(expected.astype(np.float64)).max(), 1e-30))
