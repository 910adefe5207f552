"""What is copied for a large input, and what the card holds of it."""

from __future__ import annotations

from typing import Any

import fake_card
import numpy as np
import pytest
from numpy.typing import NDArray

from glm_mtp_export.artifact import TensorSpec
from glm_mtp_export.runtime.masks import constant
from glm_mtp_export.runtime.sessions.call_buffers import LARGE_INPUTS, LargeInput
from glm_mtp_export.runtime.sessions.step_layout import CallSizes, padded

LARGEST = CallSizes(8, 32, 4)
WORDS = 5
MASK = TensorSpec("token_bitmask", "int32", ("B", 3, WORDS))
COUNTS = TensorSpec("output_counts", "int32", ("B", WORDS))


class Watched:
    """A large input, its stream, and the copies and fills that it made since the last question."""

    def __init__(self, card: fake_card.Card, spec: TensorSpec) -> None:
        self.spec, self.card, self.stream = spec, card, fake_card.CardStream(card)
        self.large = LargeInput(spec, LARGEST)
        self.fills: list[int] = []
        fill = self.large._device.fill

        def watched(byte: int, num_bytes: int, stream: Any) -> None:
            self.fills.append(num_bytes)
            fill(byte, num_bytes, stream)

        self.large._device.fill = watched  # type: ignore[method-assign]

    def put(self, value: NDArray[Any], num_requests: int, is_late: bool = False) -> tuple[list[int], list[int]]:
        """Bytes of copies and of fills; the card then holds what the layout would."""
        shape = (num_requests, *(int(extent) for extent in self.spec.shape[1:]))
        self.card.uploads.clear()
        self.fills.clear()
        (self.large.put_late if is_late else self.large.put)(value, shape, self.stream)
        self.stream.synchronize()
        found = fake_card.array_at(self.large.address, self.spec.dtype, shape)
        np.testing.assert_array_equal(found, padded(self.spec.name, value, shape))
        return [num_bytes for _, num_bytes in self.card.uploads], list(self.fills)


@pytest.fixture
def mask(card: fake_card.Card) -> Watched:
    """Of bitmasks."""
    return Watched(card, MASK)


def some(num_requests: int) -> NDArray[np.int32]:
    """A mask that forbids."""
    return np.arange(num_requests * 3 * WORDS, dtype=np.int32).reshape(num_requests, 3, WORDS)


def test_what_asks_for_nothing_is_never_copied_and_filled_once(mask: Watched) -> None:
    row = 3 * WORDS * 4
    assert mask.put(constant((2, 3, WORDS), -1), 2) == ([], [2 * row])
    assert mask.put(constant((2, 3, WORDS), -1), 2) == ([], [])
    assert mask.put(constant((1, 3, WORDS), -1), 1) == ([], [])  # fewer requests
    assert mask.put(constant((3, 3, WORDS), -1), 4) == ([], [4 * row])  # more, in a bucket of four
    assert mask.put(constant((4, 3, WORDS), -1), 4) == ([], [])
    assert mask.put(some(3), 4) == ([4 * row], [])
    assert mask.put(some(3), 4) == ([4 * row], [])  # an array that may have changed
    assert mask.put(constant((4, 3, WORDS), -1), 4) == ([], [4 * row])


def test_while_a_kernel_waits_memory_is_copied_and_not_filled(mask: Watched) -> None:
    row = 3 * WORDS * 4
    assert mask.put(constant((3, 3, WORDS), -1), 4, is_late=True) == ([4 * row], [])
    assert mask.put(constant((2, 3, WORDS), -1), 2, is_late=True) == ([], [])
    assert mask.put(constant((4, 3, WORDS), -1), 4) == ([], [])
    assert mask.put(some(2), 2, is_late=True) == ([2 * row], [])
    assert mask.put(constant((4, 3, WORDS), -1), 4, is_late=True) == ([4 * row], [])


def test_constants_are_told_from_arrays_that_may_change(mask: Watched) -> None:
    row = 3 * WORDS * 4
    free = np.full((2, 3, WORDS), -1, dtype=np.int32)
    view = free.view()
    view.setflags(write=False)
    assert mask.put(free, 2)[0] == [2 * row]
    assert mask.put(view, 2)[0] == [2 * row]  # what is behind it may be written
    repeated = np.broadcast_to(np.int32(-1), (2, 3, WORDS))
    assert mask.put(repeated, 2) == ([], [2 * row])
    assert mask.put(np.broadcast_to(np.int32(5), (2, 3, WORDS)), 2)[0] == [2 * row]
    other = constant((2, 3, WORDS), 7)
    assert mask.put(other, 2)[0] == [2 * row]
    assert mask.put(other, 2)[0] == [2 * row]


@pytest.mark.parametrize("name", LARGE_INPUTS)
def test_the_byte_that_asks_for_nothing_is_what_a_bucket_is_padded_with(name: str) -> None:
    dtype = np.float32 if name == "logit_bias" else np.int32
    added = padded(name, np.ones((1, 2), dtype), (2, 2))[1]
    assert set(added.tobytes()) == {LARGE_INPUTS[name]}
