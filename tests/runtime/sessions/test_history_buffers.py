"""Lists of ids on their way to the card, and which rows of the vocabulary are cleared for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import fake_card
import numpy as np
import pytest
from step_calls import calls

from glm_mtp_export.artifact import DEVICE, Manifest, step_inputs
from glm_mtp_export.config import SpeculationConfig
from glm_mtp_export.runtime.histories import bias_fields, history_fields
from glm_mtp_export.runtime.session import StepInputs
from glm_mtp_export.runtime.sessions import history_buffers
from glm_mtp_export.runtime.sessions.history_buffers import HistoryBuffers
from glm_mtp_export.runtime.sessions.step_layout import CallSizes

LARGEST = CallSizes(8, 32, 4)
NAMES = ("output_counts", "prompt_mask", "logit_bias")


class Watched:
    """History buffers of a small model, and the fills that they made since the last question."""

    def __init__(self, card: fake_card.Card, manifest: Manifest) -> None:
        speculation = SpeculationConfig(2, enable_penalties=True)
        inputs = step_inputs(manifest.config, speculation, manifest.caches, dialect=DEVICE)
        self.card, self.stream, self.vocabulary = card, fake_card.CardStream(card), manifest.config.vocab_size
        self.buffers = HistoryBuffers(replace(manifest, inputs=inputs), LARGEST)
        self.fills: list[int] = []
        for buffer in self.buffers._rows.values():
            buffer.fill = self.watched(buffer)  # type: ignore[method-assign]

    def watched(self, buffer: Any) -> Any:
        fill = buffer.fill

        def noted(byte: int, num_bytes: int, stream: Any) -> None:
            assert byte == 0
            self.fills.append(num_bytes // (4 * self.vocabulary))
            fill(byte, num_bytes, stream)

        return noted

    def put(self, turn: int, inputs: StepInputs, num_requests: int) -> tuple[list[int], dict[str, list[Any]]]:
        """Requests whose rows were cleared in each array, and the lists that lie on the card."""
        self.fills.clear()
        addresses = self.buffers.put(turn, inputs, num_requests, self.stream)
        self.stream.synchronize()
        lists = {}
        for name, address in (addresses or {}).items():
            value = getattr(inputs, name)
            found = fake_card.array_at(address, str(value.dtype), value.shape)
            np.testing.assert_array_equal(found, value)
            lists[name] = found.tolist()
        return list(self.fills), lists

    def rows(self, num_requests: int) -> np.ndarray:
        shape = (num_requests, self.vocabulary)
        return np.stack([fake_card.array_at(self.buffers.rows[name], "int32", shape) for name in NAMES])


@pytest.fixture
def watched(card: fake_card.Card, artifact: Any) -> Watched:
    return Watched(card, Manifest.load(artifact))


def asking(*lengths: int, bias: bool = False) -> StepInputs:
    """Three requests with histories of these lengths."""
    _, plain = calls(np.random.default_rng(9))
    ids = [np.arange(n, dtype=np.int32) for n in lengths]
    return replace(plain, **history_fields(ids, [1] * 3), **bias_fields([{7: 1.5} if bias else {}] * 3))


def test_rows_are_cleared_once_while_nobody_asks_and_for_every_call_that_does(watched: Watched) -> None:
    none = asking(0, 0, 0)
    assert watched.put(0, none, 4) == ([4, 4, 4], {})
    assert not watched.rows(4).any()
    assert watched.put(1, none, 4) == ([], {})
    assert watched.put(0, none, 2) == ([], {})
    assert watched.put(1, none, 8) == ([8, 8, 8], {})
    fills, lists = watched.put(0, asking(2, 0, 3), 4)
    assert fills == [4, 4, 4] and lists == {"history_ids": [0, 1, 0, 1, 2]}
    assert watched.put(1, asking(1, 0, 0, bias=True), 4)[0] == [4, 4, 4]
    assert watched.put(0, none, 4) == ([4, 4, 4], {})
    assert watched.put(1, none, 4) == ([], {})
    assert watched.put(0, replace(none, history_ids=None, bias_ids=None), 4) == ([], {})


def test_biases_alone_travel_too(watched: Watched) -> None:
    assert watched.put(0, asking(0, 0, 0, bias=True), 4)[1] == {"bias_ids": [7, 7, 7], "bias_values": [1.5, 1.5, 1.5]}


def test_lists_outgrow_their_memory(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """On either turn, and with the other turn's copy still to be made."""
    first = history_buffers._FIRST_BYTES // 4
    for turn, length in ((0, first + 1), (1, 5), (1, 3 * first), (0, 2 * first + 3), (1, 7)):
        lists = watched.put(turn, asking(2, length, 0, bias=True), 4)[1]
        assert len(lists["history_ids"]) == 2 + length and lists["bias_ids"] == [7, 7, 7]
