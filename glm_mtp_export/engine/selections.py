"""How far an artifact's indexers choose the positions that the exporter's reference chose, and what FP8 index keys would cost.

The step has no output for the lists, so the graph is run once more with the lists of its indexer nodes as its only outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from safetensors.numpy import load_file

from glm_mtp_export.artifact import STEP_NAME, Manifest
from glm_mtp_export.export.reference import (
    FP8_SELECTION,
    REFERENCE_NAME,
    SELECTION,
    reference_feeds,
    reference_pages,
    reference_pools,
)
from glm_mtp_export.ops.indexer import INDEXER

__all__ = ["LEAST_SELECTION_OVERLAP", "SelectionOverlap", "selection_overlaps"]

# Scores of the last and the first unchosen position may be equal but for the order of a sum; a wrong gate, scale, norm or rotation
# moves several entries in a hundred (rounding keys and queries to e4m3 moves about one).
LEAST_SELECTION_OVERLAP = 0.999


@dataclass(frozen=True)
class SelectionOverlap:
    """One indexer run: which layer's, and the part of the reference's entries, over rows that see more than index_topk positions,
    that the engine lists too and that the reference itself lists with index keys and queries in FP8."""

    indexer: str
    engine: float
    fp8_keys: float


def selection_overlaps(artifact: Path) -> tuple[SelectionOverlap, ...]:
    """Overlaps of all indexer runs of the reference's first call, in their order, for an artifact of the portable dialect.

    Empty when the artifact holds no lists, or when its reference prompt is within index_topk, where all positions are chosen.
    """
    manifest = Manifest.load(artifact)
    path = artifact / REFERENCE_NAME
    reference = load_file(str(path)) if path.is_file() else {}
    if f"{SELECTION}.0" not in reference or len(reference["prompt"]) <= manifest.config.index_topk:
        return ()
    names, lists = _lists(artifact, manifest, reference["prompt"])
    return tuple(
        SelectionOverlap(
            name,
            _overlap(reference[f"{SELECTION}.{i}"], found, len(reference["prompt"])),
            _overlap(reference[f"{SELECTION}.{i}"], reference[f"{FP8_SELECTION}.{i}"], len(reference["prompt"])),
        )
        for i, (name, found) in enumerate(zip(names, lists, strict=True))
    )


def _lists(artifact: Path, manifest: Manifest, prompt: NDArray[np.int32]) -> tuple[list[str], list[NDArray[np.int32]]]:
    """Owner and lists int32 [T, index_topk] of each indexer node, in the graph's order."""
    model = onnx.load(str(artifact / STEP_NAME), load_external_data=False)
    nodes = [node for node in model.graph.node if node.op_type == INDEXER]
    del model.graph.output[:]
    for node in nodes:
        model.graph.output.append(onnx.helper.make_tensor_value_info(node.output[0], onnx.TensorProto.INT32, None))
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(artifact))
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    num_pages = reference_pages(len(prompt), manifest.speculation)
    feeds = reference_feeds(manifest.config, manifest.speculation, prompt, None, 0, num_pages)
    feeds |= reference_pools(manifest.caches, num_pages)
    known = {i.name for i in session.get_inputs()}
    found = session.run(None, {name: value for name, value in feeds.items() if name in known})
    return [node.input[2].partition(".indexer.")[0] for node in nodes], found


def _overlap(expected: NDArray[np.int32], found: NDArray[np.int32], prompt_length: int) -> float:
    """Part of the entries of `expected` that are in the same row of `found`; rows that see all they can list are left out."""
    rows, width = expected.shape
    first = width if rows == prompt_length else 0  # a later draft step has one row, the newest
    kept = [np.isin(a, b).mean() for a, b in zip(expected[first:], found[first:], strict=True)]
    return float(np.mean(kept))
