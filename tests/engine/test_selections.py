"""What the indexers choose, held against the exporter's reference: the lists are in no output and only partly in the caches."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file, save_file

from glm_mtp_export.artifact import STEP_NAME
from glm_mtp_export.checkpoint.synthetic import write_synthetic
from glm_mtp_export.config import SpeculationConfig
from glm_mtp_export.engine.selections import LEAST_SELECTION_OVERLAP, selection_overlaps
from glm_mtp_export.export import ExportOptions, export_checkpoint
from glm_mtp_export.export.reference import FP8_SELECTION, REFERENCE_NAME
from glm_mtp_export.verify import VerifyReport

TRUNK = ["target.layers.0", "target.layers.1", "target.layers.2"]  # the others share


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    folder = tmp_path_factory.mktemp("selections")

    def export(name: str, drafts: int, **fields: object) -> Path:
        checkpoint = folder / f"{name}-checkpoint"
        write_synthetic(checkpoint, seed=5, **fields)
        options = ExportOptions(dialect="portable", speculation=SpeculationConfig(num_speculative_tokens=drafts))
        export_checkpoint(checkpoint, folder / name, options)
        return folder / name

    return export


@pytest.fixture(scope="module")
def artifact(exported: Callable[..., Path]) -> Path:
    return exported("shared", 3)


def report(artifact: Path) -> VerifyReport:
    return VerifyReport("onnxruntime", 1, 1, 0.0, selection_overlaps(artifact), (), 1.0, False)


def test_the_engine_lists_what_the_reference_lists(artifact: Path) -> None:
    found = selection_overlaps(artifact)
    assert [s.indexer for s in found] == [*TRUNK, "draft.layers.0"]
    assert all(s.engine == 1.0 for s in found)
    assert report(artifact).passed and "4 indexers keep 100.00%" in report(artifact).text()


def test_fp8_keys_keep_most_of_the_first_layers_list(artifact: Path) -> None:
    """Field case: an overlap of 0.95 at least. Layers further down also see what other choices changed above them."""
    first = selection_overlaps(artifact)[0]
    assert 0.95 <= first.fp8_keys < 1.0
    stored = load_file(str(artifact / REFERENCE_NAME))
    assert len([name for name in stored if name.startswith(f"{FP8_SELECTION}.")]) == len(TRUNK) + 1


def test_every_draft_step_that_chooses_for_itself_is_compared(exported: Callable[..., Path]) -> None:
    found = selection_overlaps(exported("own", 3, index_share_for_mtp_iteration=False))
    assert [s.indexer for s in found] == [*TRUNK, *["draft.layers.0"] * 3]
    assert all(s.engine == 1.0 for s in found)


def test_without_drafts_the_target_is_compared(exported: Callable[..., Path]) -> None:
    assert [s.indexer for s in selection_overlaps(exported("plain", 0))] == TRUNK


@pytest.mark.parametrize("position", [0, 3])
def test_a_wrong_query_is_named_though_no_key_changes(artifact: Path, tmp_path: Path, position: int) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(artifact, broken)
    model = onnx.load(str(broken / STEP_NAME), load_external_data=False)
    node = [n for n in model.graph.node if n.op_type == "GlmIndexer"][position]
    at = list(model.graph.node).index(node)
    model.graph.node.insert(at, onnx.helper.make_node("Neg", [node.input[0]], ["negated"]))
    model.graph.node[at + 1].input[0] = "negated"
    (broken / STEP_NAME).write_bytes(model.SerializeToString())
    found = selection_overlaps(broken)
    assert [s.engine >= LEAST_SELECTION_OVERLAP for s in found[: position + 1]] == [True] * position + [False]
    assert not report(broken).passed and f"  {found[position].indexer}: " in report(broken).text()


def test_a_reference_without_lists_or_none_at_all_says_that_nothing_was_compared(
    artifact: Path, tmp_path: Path
) -> None:
    old = tmp_path / "old"
    shutil.copytree(artifact, old)
    kept = {k: np.asarray(v) for k, v in load_file(str(old / REFERENCE_NAME)).items() if not k.startswith("selection")}
    save_file(kept, str(old / REFERENCE_NAME))
    assert selection_overlaps(old) == () and "selections: none to compare" in report(old).text() and report(old).passed
    (old / REFERENCE_NAME).unlink()
    assert selection_overlaps(old) == ()
