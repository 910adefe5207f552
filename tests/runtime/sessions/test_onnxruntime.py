"""What the ONNX Runtime session refuses, and that updating caches in place is the same as copying them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from real_graph import PROFILE, Artifacts

from glm_mtp_export.artifact import DEVICE, MANIFEST_NAME, PAGE_SIZE, Manifest
from glm_mtp_export.errors import ArtifactError, EngineError, OptionError
from glm_mtp_export.runtime.histories import dense_rows, history_fields
from glm_mtp_export.runtime.session import StepInputs
from glm_mtp_export.runtime.sessions import open_session
from glm_mtp_export.runtime.sessions.onnxruntime import OnnxRuntimeSession


@pytest.fixture
def copy(artifacts: Artifacts, tmp_path: Path) -> Path:
    return Path(shutil.copytree(artifacts.artifact(3), tmp_path / "artifact"))


def _inputs(rng: np.random.Generator, lengths: list[int], fed: int, drafts: int, vocab: int) -> StepInputs:
    count = len(lengths)
    pages = rng.permutation(12)[: 3 * count].reshape(count, 3)
    return StepInputs(
        token_ids=rng.integers(5, 300, count * (fed + drafts)).astype(np.int32),
        row_offsets=np.arange(0, count * (fed + drafts) + 1, fed + drafts, dtype=np.int32),
        num_drafts=np.full(count, drafts, np.int32),
        draft_tokens=rng.integers(5, 300, (count, 3)).astype(np.int32),
        cache_lengths=np.array(lengths, np.int32),
        block_table=pages.astype(np.int32),
        next_prompt_token=np.full(count, -1, np.int32),
        temperature=np.zeros(count, np.float32),
        top_k=np.zeros(count, np.int32),
        top_p=np.ones(count, np.float32),
        min_p=np.zeros(count, np.float32),
        seed=np.zeros(count, np.int64),
        sample_offset=np.zeros(count, np.int32),
        in_thinking_phase=np.zeros(count, np.bool_),
        presence_penalty=np.zeros(count, np.float32),
        frequency_penalty=np.zeros(count, np.float32),
        repetition_penalty=np.ones(count, np.float32),
        **history_fields([rng.integers(0, vocab, 7).astype(np.int32)] * count, [4] * count),
    )


def test_caches_updated_in_place_equal_copied_ones_bit_for_bit(artifacts: Artifacts) -> None:
    session = artifacts.session(3)
    plain = ort.InferenceSession(str(artifacts.artifact(3) / "step.onnx"), providers=["CPUExecutionProvider"])
    names = [output.name for output in plain.get_outputs()]
    rng = np.random.default_rng(3)
    caches = {c.name: np.zeros((1, session.num_pages, PAGE_SIZE, c.width), np.float32) for c in session.manifest.caches}
    for lengths, fed, drafts in (([0, 0], 50, 0), ([20, 3], 30, 2), ([40, 0, 60], 1, 2), ([61], 2, 1)):
        inputs = _inputs(rng, lengths, fed, drafts, session.manifest.config.vocab_size)
        expected = dict(
            zip(
                names,
                plain.run(
                    None, {**{**inputs.feeds(), **dense_rows(inputs, session.manifest.config.vocab_size)}, **caches}
                ),
                strict=True,
            )
        )
        found = session.run(inputs)
        caches = {name: expected[f"{name}_out"] for name in caches}
        assert np.array_equal(found.num_accepted, expected["num_accepted"])
        assert np.array_equal(found.next_tokens, expected["next_tokens"])
        assert found.next_draft_tokens is not None
        assert np.array_equal(found.next_draft_tokens, expected["next_draft_tokens"])
        for name, content in caches.items():
            assert np.array_equal(session.read_cache(name), content), name


def test_outputs_of_one_call_survive_the_next(artifacts: Artifacts) -> None:
    session, rng = artifacts.session(3), np.random.default_rng(5)
    first = session.run(_inputs(rng, [0, 0], 5, 0, 320))
    kept = first.next_tokens.copy()
    for _ in range(3):
        session.run(_inputs(rng, [0, 0], 5, 0, 320))
    assert np.array_equal(first.next_tokens, kept)


def test_damaged_and_missing_files_are_named(copy: Path) -> None:
    manifest = Manifest.load(copy)
    with (copy / "weights.bin").open("r+b") as stream:
        stream.seek(1000)
        stream.write(b"\x01\x02\x03")
    with pytest.raises(ArtifactError, match=r"weights\.bin differs from its sha256"):
        open_session(copy, manifest, PROFILE)
    (copy / "weights.bin").unlink()
    with pytest.raises(ArtifactError, match=r"weights\.bin is missing"):
        open_session(copy, manifest, PROFILE)


def test_device_dialect_is_refused_before_files_are_read(copy: Path) -> None:
    (copy / "step.onnx").unlink()
    with pytest.raises(ArtifactError, match="--dialect portable"):
        open_session(copy, replace(Manifest.load(copy), dialect=DEVICE), PROFILE)


def test_signature_must_be_the_manifests(copy: Path) -> None:
    manifest = Manifest.load(copy)
    inputs = (
        replace(manifest.inputs[0], name="tokens"),
        replace(manifest.inputs[1], dtype="int64"),
        *manifest.inputs[2:],
    )
    with pytest.raises(ArtifactError) as caught:
        open_session(copy, replace(manifest, inputs=inputs), PROFILE)
    message = str(caught.value)
    assert "input tokens is missing" in message and "input token_ids is unknown" in message
    assert "input row_offsets is tensor(int32), expected tensor(int64)" in message


def test_a_graph_that_does_not_load_is_an_engine_error(copy: Path) -> None:
    manifest = Manifest.load(copy)
    (copy / "step.onnx").write_bytes(b"not a graph")
    with pytest.raises(ArtifactError, match=r"step\.onnx has 11 bytes"):
        open_session(copy, manifest, PROFILE)
    with pytest.raises(EngineError, match="cannot load it"):
        OnnxRuntimeSession.load(copy, replace(manifest, files={}), PROFILE)


def test_unknown_backend_is_refused(copy: Path) -> None:
    profile = replace(PROFILE)
    object.__setattr__(profile, "backend", "tensorflow")
    with pytest.raises(OptionError, match="'tensorflow', expected one of onnxruntime"):
        open_session(copy, Manifest.load(copy), profile)


def test_manifest_of_another_release_is_refused(copy: Path) -> None:
    path = copy / MANIFEST_NAME
    path.write_text(path.read_text().replace('"format_version": 1', '"format_version": 99'))
    with pytest.raises(ArtifactError, match="format_version is 99"):
        Manifest.load(copy)
