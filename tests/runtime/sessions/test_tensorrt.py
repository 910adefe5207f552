"""The card's session: its own logic on a card of host memory, and what it refuses before it touches one.

Numbers on a real card are compared by scripts/gpu_check.py.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import fake_card
import numpy as np
import pytest
from card_session import MOST_COLUMNS, session_on
from test_step_layout import PROFILE, K, calls

from glm_mtp_export.artifact import Manifest
from glm_mtp_export.checkpoint.view import CheckpointView
from glm_mtp_export.checkpoint.weights import materialise
from glm_mtp_export.errors import ArtifactError, EngineError
from glm_mtp_export.runtime.session import StepOutputs
from glm_mtp_export.runtime.sessions import tensorrt
from glm_mtp_export.runtime.sessions.engine_file import check_aliases, check_profile
from glm_mtp_export.runtime.sessions.onnxruntime import OnnxRuntimeSession


@pytest.fixture
def session(artifact: Path, card: fake_card.Card) -> tensorrt.TensorRtSession:
    """A session over the fake card, weights and caches in place."""
    return session_on(card, artifact, Manifest.load(artifact))


def test_calls_equal_the_portable_session(
    artifact: Path, session: tensorrt.TensorRtSession, card: fake_card.Card
) -> None:
    reference = OnnxRuntimeSession.load(artifact, session.manifest, PROFILE)
    prompt, decode = calls(np.random.default_rng(5))
    # The same decode call again and again: first as it is, then captured, then replayed.
    for number, inputs in enumerate([prompt, decode, decode, decode, prompt, decode]):
        expected, found = reference.run(inputs), session.run(inputs)
        for name in StepOutputs.__dataclass_fields__:
            if getattr(expected, name) is not None:
                wanted, got = getattr(expected, name), getattr(found, name)
                np.testing.assert_array_equal(got, wanted, err_msg=f"call {number}, {name}")
    for cache in session.manifest.caches:
        found_pool = session._caches[cache.name].read().view(np.float32).reshape(cache.shape(PROFILE.num_pages))
        np.testing.assert_array_equal(found_pool[:, :-1], reference.read_cache(cache.name)[:, :-1])
    assert (card.num_captures, card.num_replays, session.num_graphs) == (1, 3, 1)


def test_prompt_and_decode_calls_use_their_profiles(session: tensorrt.TensorRtSession) -> None:
    prompt, decode = calls(np.random.default_rng(5))
    session.run(prompt)
    session.run(decode)
    prefill_context, decode_context = session._engine.contexts
    assert (prefill_context.profile, decode_context.profile) == (0, 1)
    assert prefill_context.shapes["token_ids"] == (82,)  # as it is
    assert decode_context.shapes["token_ids"] == (4 * (K + 1),)  # three requests in a bucket of four
    assert decode_context.shapes["block_table"] == (4, 2)


def test_results_do_not_change_with_the_next_call(session: tensorrt.TensorRtSession) -> None:
    prompt, decode = calls(np.random.default_rng(5))
    first = session.run(prompt)
    kept = first.next_tokens.copy()
    session.run(decode)
    np.testing.assert_array_equal(first.next_tokens, kept)


def test_every_weight_arrives_whole(session: tensorrt.TensorRtSession) -> None:
    view = CheckpointView.open(session.manifest.checkpoint)
    for entry in session.manifest.weights:
        wanted = materialise(view, entry).view(np.uint8).reshape(-1)
        np.testing.assert_array_equal(session._weights[entry.name].read(), wanted, err_msg=entry.name)


def test_both_contexts_have_one_address_for_a_cache_and_its_output(session: tensorrt.TensorRtSession) -> None:
    for cache in session.manifest.caches:
        addresses = {
            context.addresses[name]
            for context in session._engine.contexts
            for name in (cache.name, f"{cache.name}_out")
        }
        assert addresses == {session._caches[cache.name].address}


def test_calls_beyond_the_profile_are_refused(session: tensorrt.TensorRtSession) -> None:
    prompt, _ = calls(np.random.default_rng(5))
    wide = dataclasses.replace(prompt, block_table=np.zeros((3, MOST_COLUMNS + 1), dtype=np.int32))
    with pytest.raises(EngineError, match=r"larger than profile t6 .*3 pages a request"):
        session.run(wide)
    assert not session._engine.feeds


def test_too_little_memory_is_refused_with_all_sizes(
    session: tensorrt.TensorRtSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorrt, "free_bytes", lambda: 1 << 10)
    with pytest.raises(EngineError, match=r"weights .* GiB, caches .* GiB and scratch .* are free on this card"):
        session._allocate(tensorrt.CheckpointFiller(session.manifest))


def test_a_portable_artifact_is_refused(artifact: Path) -> None:
    profile = dataclasses.replace(PROFILE, backend="tensorrt-rtx")
    with pytest.raises(ArtifactError, match="Export again with --dialect device"):
        tensorrt.TensorRtSession.load(artifact, Manifest.load(artifact), profile)


def test_a_profile_may_ask_for_less_than_was_built_but_not_for_more(tmp_path: Path) -> None:
    check_profile(PROFILE, dataclasses.replace(PROFILE, max_batch=1), tmp_path)
    with pytest.raises(EngineError, match="max_batch 9, built for 8"):
        check_profile(PROFILE, dataclasses.replace(PROFILE, max_batch=9), tmp_path)


def test_a_cache_that_is_not_updated_in_place_is_named(artifact: Path) -> None:
    manifest = Manifest.load(artifact)
    lost = manifest.caches[1].name

    class Told:
        def __init__(self, answer: str | None) -> None:
            self.answer = answer

        def get_aliased_input_tensor(self, name: str) -> str | None:
            return self.answer if name == f"{lost}_out" else name.removesuffix("_out")

    check_aliases(Told(None), manifest, artifact)  # an engine names no input behind several writers
    with pytest.raises(EngineError, match=f": {lost} would not be updated in place"):
        check_aliases(Told("token_ids"), manifest, artifact)
