"""Padding a decode call to a bucket changes nothing for its requests, and the layout never overlaps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from step_calls import PROFILE, K, calls

from glm_mtp_export.artifact import PAGE_SIZE, Manifest
from glm_mtp_export.runtime.session import StepInputs, StepOutputs
from glm_mtp_export.runtime.sessions.onnxruntime import OnnxRuntimeSession
from glm_mtp_export.runtime.sessions.step_layout import CallSizes, StepLayout, bucket, padded


def in_bucket(manifest: Manifest, inputs: StepInputs, sizes: CallSizes) -> StepInputs:
    """The arrays as the card's session lays them out."""
    names = {cache.name for cache in manifest.caches}
    layout = StepLayout.of([spec for spec in manifest.inputs if spec.name not in names], sizes)
    block = np.full(layout.num_bytes, 0xA5, dtype=np.uint8)
    for name, value in inputs.feeds().items():
        layout.view(name, block)[...] = padded(name, value, layout.places[name].shape)
    return StepInputs(**{name: layout.view(name, block).copy() for name in layout.places})


def test_added_requests_and_rows_change_nothing(artifact: Path) -> None:
    manifest = Manifest.load(artifact)
    exact, wide = (OnnxRuntimeSession.load(artifact, manifest, PROFILE) for _ in range(2))
    prompt, decode = calls(np.random.default_rng(3))
    for session in (exact, wide):
        session.run(prompt)
    before = {cache.name: wide.read_cache(cache.name).copy() for cache in manifest.caches}
    expected = exact.run(decode)
    found = wide.run(in_bucket(manifest, decode, CallSizes(bucket(3, 8), 4 * (K + 1), 4)))
    for name in StepOutputs.__dataclass_fields__:
        if getattr(expected, name) is not None:
            np.testing.assert_array_equal(getattr(found, name)[:3], getattr(expected, name), err_msg=name)
    changed = set()
    for cache in manifest.caches:
        # ONNX takes page -1 for the last one, which no request holds here; the kernels leave such pages alone.
        after, wanted = (s.read_cache(cache.name)[:, :-1] for s in (wide, exact))
        np.testing.assert_array_equal(after, wanted, err_msg=cache.name)
        moved = (after != before[cache.name][:, :-1]).any(axis=(0, 2, 3))
        changed |= set(np.flatnonzero(moved).tolist())
    assert changed == {1, 7, 2}  # the pages behind positions 70, 3 and 9, and no other


def test_places_are_aligned_and_apart(artifact: Path) -> None:
    manifest = Manifest.load(artifact)
    names = {cache.name for cache in manifest.caches}
    specs = [spec for spec in manifest.inputs if spec.name not in names]
    layout = StepLayout.of(specs, CallSizes(3, 7, 5))
    block = np.zeros(layout.num_bytes, dtype=np.uint8)
    for number, name in enumerate(layout.places, 1):
        view = layout.view(name, block)
        assert view.ctypes.data % 4 == block.ctypes.data % 4
        assert layout.places[name].offset % 256 == 0
        view.view(np.uint8)[...] = number
    for number, name in enumerate(layout.places, 1):
        assert (layout.view(name, block).view(np.uint8) == number).all(), name
    assert layout.places["row_offsets"].shape == (4,)
    assert layout.places["block_table"].shape == (3, 5)


@pytest.mark.parametrize(
    ("count", "limit", "expected"), [(1, 16, 1), (2, 16, 2), (3, 16, 4), (9, 12, 12), (16, 16, 16)]
)
def test_bucket(count: int, limit: int, expected: int) -> None:
    assert bucket(count, limit) == expected


def test_fill_values() -> None:
    assert padded("row_offsets", np.array([0, 4], np.int32), (4,)).tolist() == [0, 4, 4, 4]
    table = padded("block_table", np.array([[3, 4]], np.int32), (2, 3))
    assert table.tolist() == [[3, 4, 0], [-1, -1, -1]]  # unused columns name page 0, added requests no page
    assert padded("top_p", np.array([0.5], np.float32), (2,)).tolist() == [0.5, 1.0]
    assert PAGE_SIZE == 64
