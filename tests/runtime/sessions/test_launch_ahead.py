"""Calls launched before the results of the one before are known: equal, value by value, to the same calls one after the other."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import fake_card
import numpy as np
import pytest
from card_session import session_on
from step_calls import PROFILE, K, calls

from glm_mtp_export.artifact import DEVICE, Manifest, step_inputs
from glm_mtp_export.config import SpeculationConfig
from glm_mtp_export.runtime.ahead import HostAheadSession
from glm_mtp_export.runtime.masks import constant
from glm_mtp_export.runtime.session import AheadSession, Int32, StepInputs, StepOutputs
from glm_mtp_export.runtime.sessions import tensorrt
from glm_mtp_export.runtime.sessions.onnxruntime import OnnxRuntimeSession

# Relaxed acceptance of anything: drafts of a model with random weights are accepted while it thinks, and only then.
EVERYTHING = SpeculationConfig(K, True, 200, 1.0, enable_structured_output=True, enable_penalties=True, num_logprobs=0)
NUM_CALLS = 24
PROMPTS = (5, 66, 1, 20)
VOCABULARY = 320
CONTINUED = ("token_ids", "draft_tokens", "cache_lengths", "sample_offset", "in_thinking_phase")


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


@dataclasses.dataclass
class Known:
    """A request as far as the host has read results."""

    length: int = 0
    num_output: int = 0
    token: int = 0
    drafts: Int32 = dataclasses.field(default_factory=lambda: np.zeros(K, np.int32))
    is_open: bool = True


class Chain:
    """Four requests that decode on in changing company, planned one call ahead of what is known. Equal results give equal calls."""

    def __init__(self, session: AheadSession, seed: int, markers: tuple[int, int]) -> None:
        self.session, self.generator, self.markers = session, np.random.default_rng(seed), markers
        self.requests = [Known() for _ in PROMPTS]
        self.uncollected: list[tuple[list[int], StepInputs]] = []  # who is in it, and what was fed
        self.results: list[StepOutputs] = []

    def run(self) -> list[StepOutputs]:
        """All calls, two in flight wherever possible."""
        for _ in range(NUM_CALLS):
            members = self.generator.permutation(len(PROMPTS))[: self.generator.integers(1, len(PROMPTS) + 1)].tolist()
            inputs, follows = self.planned(members)
            mask = self.mask(len(members))
            comes_late = bool(self.generator.integers(0, 2))
            given = dataclasses.replace(inputs, token_bitmask=None if comes_late else mask)
            self.session.launch(given, follows if (follows >= 0).any() else None)
            self.uncollected.append((members, inputs))
            while len(self.uncollected) > 1:
                self.collect()
            if comes_late:
                self.session.supply_bitmask(mask)
                mask = np.zeros_like(mask)  # the session has its own copy by now
        self.collect()
        return self.results

    def planned(self, members: list[int]) -> tuple[StepInputs, Int32]:
        """Inputs for no draft accepted in the call in flight, and who is in that one."""
        before, fed = self.uncollected[-1] if self.uncollected else ([], None)
        follows = np.array([before.index(m) if m in before else -1 for m in members], np.int32)
        new = [self.requests[m].length == 0 and j < 0 for m, j in zip(members, follows, strict=True)]
        rows = np.array([PROMPTS[m] if n else 1 for m, n in zip(members, new, strict=True)])
        drafts = np.where(new, 0, self.generator.integers(0, K + 1, len(members))).astype(np.int32)
        offsets = np.concatenate([[0], np.cumsum(rows + drafts)]).astype(np.int32)
        tokens = np.zeros(offsets[-1], np.int32)
        columns: dict[str, list[Any]] = {name: [] for name in CONTINUED[1:]}
        for b, m in enumerate(members):
            known, ahead, one_more = self.requests[m], 0, 0
            if new[b]:
                tokens[offsets[b] : offsets[b + 1]] = np.arange(PROMPTS[m]) * (m + 3) % VOCABULARY
            elif follows[b] >= 0:
                assert fed is not None
                ahead = int(np.diff(fed.row_offsets)[follows[b]] - fed.num_drafts[follows[b]])
                one_more = 1
            else:
                tokens[offsets[b]] = known.token
            values = (known.drafts, known.length + ahead, known.num_output + one_more, known.is_open)
            for name, value in zip(columns, values, strict=True):
                columns[name].append(value)
        return self.inputs(members, tokens, offsets, drafts, columns), follows

    def inputs(
        self, members: list[int], tokens: Int32, offsets: Int32, drafts: Int32, columns: dict[str, list[Any]]
    ) -> StepInputs:
        """All arrays; penalties now and then."""
        num, one = len(members), np.ones(len(members), np.float32)
        shape = (num, VOCABULARY)
        penalised = bool(self.generator.integers(0, 2))
        counts = self.generator.integers(0, 2, shape).astype(np.int32)
        bias = np.zeros(shape, np.float32)
        bias[:, self.markers] = (6, 5)  # the phase changes every few tokens
        return StepInputs(
            token_ids=tokens, row_offsets=offsets, num_drafts=drafts,
            draft_tokens=np.array(columns["draft_tokens"], np.int32),
            cache_lengths=np.array(columns["cache_lengths"], np.int32),
            block_table=np.array([[2 * m, 2 * m + 1] for m in members], np.int32),
            next_prompt_token=np.full(num, -1, np.int32), temperature=0.9 * one, top_k=np.zeros(num, np.int32),
            top_p=one, min_p=0 * one, seed=np.array(members, np.int64),
            sample_offset=np.array(columns["sample_offset"], np.int32),
            in_thinking_phase=np.array(columns["in_thinking_phase"], np.bool_),
            relaxed_delta=np.ones(1, np.float32), presence_penalty=one * penalised, frequency_penalty=0 * one,
            repetition_penalty=one, output_counts=counts if penalised else constant(shape, 0),
            prompt_mask=constant(shape, 0), logit_bias=bias if self.generator.integers(0, 2) else constant(shape, 0, np.float32),
        )  # fmt: skip

    def mask(self, num: int) -> Int32:
        """Everything allowed, or a third of the tokens."""
        shape = (num, K + 1, VOCABULARY // 32)
        if self.generator.integers(0, 2):
            return constant(shape, -1)
        bits = self.generator.integers(-(2**31), 2**31, (2, *shape)).astype(np.int32)
        return bits[0] | bits[1] & 0x55555555

    def collect(self) -> None:
        """Read the oldest call, and know more."""
        members, fed = self.uncollected.pop(0)
        outputs = self.session.collect()
        self.results.append(outputs)
        assert outputs.next_draft_tokens is not None
        for b, m in enumerate(members):
            known, accepted = self.requests[m], int(outputs.num_accepted[b])
            rows = int(np.diff(fed.row_offsets)[b] - fed.num_drafts[b])
            for token in (*known.drafts[:accepted], outputs.next_tokens[b]):
                if token in self.markers:
                    known.is_open = bool(token == self.markers[0])
            known.length += rows + accepted
            known.num_output += accepted + 1
            known.token, known.drafts = int(outputs.next_tokens[b]), outputs.next_draft_tokens[b]


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
    expected = Chain(HostAheadSession(inner), seed, markers).run()
    session = session_on(card, everything, manifest)
    found = Chain(session, seed, markers).run()
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert_same(one, other, number)
    for number, (feeds, inputs) in enumerate(zip(session._engine.feeds, inner.inputs, strict=True)):
        for name, wanted in inputs.feeds().items():
            place = tuple(slice(extent) for extent in wanted.shape)
            np.testing.assert_array_equal(feeds[name][place], wanted, err_msg=f"call {number}, {name}")
    # What the comparison rests on: drafts were accepted, phases changed, graphs replayed, masks came late and in time.
    assert sum(int(outputs.num_accepted.sum()) for outputs in expected) > 10
    assert {bool(value) for inputs in inner.inputs for value in inputs.in_thinking_phase} == {True, False}
    assert card.num_replays > card.num_captures > 2
    assert {bool(feeds["mask_turn"][0]) for feeds in session._engine.feeds} == {True, False}
    session.close()


def decode() -> StepInputs:
    """A decode call of three requests with everything that the artifact takes."""
    _, plain = calls(np.random.default_rng(9))
    one, shape = np.ones(3, np.float32), (3, VOCABULARY)
    given = {
        "relaxed_delta": np.ones(1, np.float32), "presence_penalty": 0 * one, "frequency_penalty": 0 * one,
        "repetition_penalty": one, "output_counts": constant(shape, 0), "prompt_mask": constant(shape, 0),
        "logit_bias": constant(shape, 0, np.float32), "token_bitmask": constant((3, K + 1, VOCABULARY // 32), -1),
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
