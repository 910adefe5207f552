"""Calls launched before the results of the one before are known: equal, value by value, to the same calls one after the other."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import fake_card
import numpy as np
import pytest
from card_session import session_on
from decode_chain import EVERYTHING, DecodeChain
from step_calls import PROFILE, K, calls

from glm_mtp_export.artifact import DEVICE, Manifest, step_inputs
from glm_mtp_export.runtime.ahead import HostAheadSession
from glm_mtp_export.runtime.histories import dense_rows
from glm_mtp_export.runtime.masks import constant
from glm_mtp_export.runtime.session import StepInputs, StepOutputs
from glm_mtp_export.runtime.sessions import tensorrt
from glm_mtp_export.runtime.sessions.onnxruntime import OnnxRuntimeSession

VOCABULARY = 320


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small synthetic checkpoint, portable, with all that can be compiled in."""
    from glm_mtp_export.checkpoint.synthetic import write_synthetic
    from glm_mtp_export.export import ExportOptions, export_checkpoint

    root = tmp_path_factory.mktemp("everything")
    checkpoint = write_synthetic(root / "checkpoint")
    export_checkpoint(checkpoint, root / "artifact", ExportOptions(speculation=EVERYTHING))
    return root / "artifact"


def waiting_manifest(artifact: Path, markers: tuple[int, int]) -> Manifest:
    """As if the graph could wait for its mask, and with markers that a model with random weights says."""
    manifest = Manifest.load(artifact)
    inputs = step_inputs(manifest.config, manifest.speculation, manifest.caches, dialect=DEVICE)
    return dataclasses.replace(
        manifest, inputs=inputs, thinking_token_ids=dict(zip(("think", "think_end"), markers, strict=True))
    )


class Recorder:
    """A session that keeps the inputs it ran with."""

    def __init__(self, session: OnnxRuntimeSession, manifest: Manifest) -> None:
        self.session, self.manifest, self.num_pages = session, manifest, session.num_pages
        self.inputs: list[StepInputs] = []

    def run(self, inputs: StepInputs) -> StepOutputs:
        """Keep, and run."""
        self.inputs.append(inputs)
        return self.session.run(inputs)

    def close(self) -> None:
        """Nothing to free."""


def reference(artifact: Path, manifest: Manifest) -> Recorder:
    """The portable session."""
    return Recorder(OnnxRuntimeSession.load(artifact, Manifest.load(artifact), PROFILE), manifest)


def assert_same(found: StepOutputs, expected: StepOutputs, place: object) -> None:
    """Every token, exactly. A matrix of a bucket's size sums in another order: some tens of float32 roundings below 8."""
    for name in StepOutputs.__dataclass_fields__:
        if (wanted := getattr(expected, name)) is not None:
            bound = 1e-5 if wanted.dtype == np.float32 else 0
            np.testing.assert_allclose(
                getattr(found, name), wanted, rtol=0, atol=bound, err_msg=f"call {place}, {name}"
            )


@pytest.mark.parametrize("seed", [1, 2])
def test_calls_launched_ahead_equal_calls_one_after_the_other(
    everything: Path, card: fake_card.Card, seed: int
) -> None:
    markers = (7, 11)
    manifest = waiting_manifest(everything, markers)
    inner = reference(everything, manifest)
    expected = DecodeChain(HostAheadSession(inner), seed, markers, VOCABULARY).run()
    session = session_on(card, everything, manifest)
    found = DecodeChain(session, seed, markers, VOCABULARY).run()
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert_same(one, other, number)
    for number, (feeds, inputs) in enumerate(zip(session._engine.feeds, inner.inputs, strict=True)):
        for name, wanted in (inputs.feeds() | dense_rows(inputs, VOCABULARY)).items():
            place = tuple(slice(extent) for extent in wanted.shape)
            np.testing.assert_array_equal(feeds[name][place], wanted, err_msg=f"call {number}, {name}")
    # What the comparison rests on: drafts were accepted, phases changed, graphs replayed, masks came late and in time.
    assert sum(int(outputs.num_accepted.sum()) for outputs in expected) > 10
    assert {bool(value) for inputs in inner.inputs for value in inputs.in_thinking_phase} == {True, False}
    assert card.num_replays > card.num_captures > 2
    assert {bool(feeds["mask_turn"][0]) for feeds in session._engine.feeds} == {True, False}
    # Some calls ask for penalties, some for nothing; tokens that a call in flight found are counted, more than one at times.
    counted = [dense_rows(inputs, VOCABULARY)["output_counts"].sum() for inputs in inner.inputs]
    assert 0 in counted and max(counted) > 60
    session.close()


def decode() -> StepInputs:
    """A decode call of three requests with everything that the artifact takes."""
    _, plain = calls(np.random.default_rng(9))
    one = np.ones(3, np.float32)
    given = {
        "relaxed_delta": np.ones(1, np.float32), "presence_penalty": 0 * one, "frequency_penalty": 0 * one,
        "repetition_penalty": one, "token_bitmask": constant((3, K + 1, VOCABULARY // 32), -1),
    }  # fmt: skip
    return dataclasses.replace(plain, **given)


@pytest.fixture
def session(everything: Path, card: fake_card.Card) -> tensorrt.TensorRtSession:
    """One that can wait for masks."""
    return session_on(card, everything, waiting_manifest(everything, (7, 11)))


def test_a_session_that_closes_lets_a_waiting_call_go_on(session: tensorrt.TensorRtSession) -> None:
    """Else the card would wait, and with it whoever waits for the card."""
    engine = session._engine
    known = decode()
    session.launch(known)
    session.launch(dataclasses.replace(known, token_bitmask=None))
    session.close()
    assert len(engine.feeds) == 2


def test_a_call_that_cannot_be_queued_leaves_the_session_usable(
    session: tensorrt.TensorRtSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = decode()
    expected = session.run(known)
    with monkeypatch.context() as broken:
        broken.setattr(session._kernels, "carry", lambda *_: (_ for _ in ()).throw(RuntimeError("no launch")))
        with pytest.raises(RuntimeError, match="no launch"):
            session.launch(dataclasses.replace(known, token_bitmask=None))
    with pytest.raises(ValueError, match="the call launched last had 0 requests"):
        session.launch(known, np.zeros(3, np.int32))
    assert_same(session.run(known), expected, "after")


def test_calls_out_of_order_are_refused(session: tensorrt.TensorRtSession) -> None:
    known = decode()
    late = dataclasses.replace(known, token_bitmask=None)
    mask = known.token_bitmask
    assert mask is not None
    with pytest.raises(RuntimeError, match="no call is in flight"):
        session.collect()
    with pytest.raises(ValueError, match="follows names request 0, the call launched last had 0 requests"):
        session.launch(known, np.zeros(3, np.int32))
    session.launch(known)
    with pytest.raises(RuntimeError, match="no call waits for a mask"):
        session.supply_bitmask(mask)
    with pytest.raises(ValueError, match="follows names request 3, the call launched last had 3 requests"):
        session.launch(late, np.array([-1, 3, 0], np.int32))
    session.launch(late, np.array([-1, 2, 0], np.int32))
    with pytest.raises(RuntimeError, match="2 calls are in flight"):
        session.launch(known)
    with pytest.raises(RuntimeError, match="one before it is not collected"):
        session.supply_bitmask(mask)
    session.collect()
    with pytest.raises(RuntimeError, match="has no token_bitmask; supply it"):
        session.collect()
    with pytest.raises(RuntimeError, match="waits for its mask; supply it before launching"):
        session.launch(known)
    with pytest.raises(RuntimeError, match="a call is in flight"):
        session.run(known)
    session.supply_bitmask(mask)
    with pytest.raises(RuntimeError, match="no call waits for a mask"):
        session.supply_bitmask(mask)
    session.collect()
    assert len(session._engine.feeds) == 2


def test_tickets_go_round(session: tensorrt.TensorRtSession) -> None:
    """From the largest 32-bit number to 1: 0 stands for a mask that is known."""
    late = dataclasses.replace(decode(), token_bitmask=None)
    session._mask_turn = 2**32 - 2
    session._mask_stream.write_value(session._buffers.mask_ready, session._mask_turn)
    for _ in range(3):
        session.launch(late)
        session.supply_bitmask(constant((3, K + 1, VOCABULARY // 32), -1))
        session.collect()
    assert [int(feeds["mask_turn"][0]) for feeds in session._engine.feeds] == [-1, 1, 2]


def test_a_graph_that_cannot_wait_takes_no_call_without_a_mask(everything: Path, card: fake_card.Card) -> None:
    session = session_on(card, everything, Manifest.load(everything))
    with pytest.raises(ValueError, match="has no token_bitmask, and this graph cannot wait"):
        session.launch(dataclasses.replace(decode(), token_bitmask=None))
    assert not session._engine.feeds
