"""Rotation of both layouts against a float64 loop, up to the last position of the model."""

from __future__ import annotations

import functools

import numpy as np
import onnx
import pytest
import torch
from comparison import U32, assert_close
from onnx import TensorProto, helper
from onnx_case import model_of, session
from oracle_rope import turned

from glm_mtp_export.ops.rope import rotated

THETA = 8e6
POSITIONS = (0, 1, 63, 64, 2047, 131_071, 1_000_003, 2**20 - 1)


@functools.cache
def rotation_model(interleaved: int) -> bytes:
    node = helper.make_node(
        "GlmRotate", ["x", "positions"], ["y"], domain="glm", rope_theta=THETA, interleaved=interleaved
    )
    given = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["T", "H", "d"]),
        helper.make_tensor_value_info("positions", TensorProto.INT32, ["T"]),
    ]
    model = model_of([node], given, [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["T", "H", "d"])])
    return model.SerializeToString()


def in_onnx(x: np.ndarray, positions: np.ndarray, interleaved: int) -> np.ndarray:
    model = onnx.load_from_string(rotation_model(interleaved))
    return session(model).run(None, {"x": x, "positions": positions})[0]


@pytest.mark.parametrize("interleaved", [1, 0])
@pytest.mark.parametrize("width", [2, 8, 64])
def test_both_bodies_turn_as_the_oracle(interleaved: int, width: int) -> None:
    rng = np.random.default_rng(width)
    x = rng.standard_normal((len(POSITIONS), 3, width)).astype(np.float32)
    positions = np.array(POSITIONS, np.int32)
    expected = np.array(
        [[turned(head, p, THETA, bool(interleaved)) for head in row] for row, p in zip(x, POSITIONS, strict=True)]
    )
    # cos and sin carry a reduced angle's rounding (up to pi) and their own; then two products and a sum.
    pairs = np.abs(x).max(axis=(1, 2), keepdims=True)
    limit = (2 * np.pi + 4) * U32 * pairs
    assert_close(in_onnx(x, positions, interleaved), expected, limit, "ONNX body")
    assert_close(rotated(torch.from_numpy(x), torch.from_numpy(positions), THETA, interleaved).numpy(), expected, limit)


def test_the_layouts_differ() -> None:
    x = np.ones((1, 1, 8), np.float32)
    positions = np.array([5], np.int32)
    assert np.abs(in_onnx(x, positions, 1) - in_onnx(x, positions, 0)).max() > 0.1


def test_float64_stays_float64() -> None:
    x = torch.ones(1, 1, 8, dtype=torch.float64)
    expected = turned(np.ones(8), 2**20 - 1, THETA, True)
    assert_close(rotated(x, torch.tensor([2**20 - 1]), THETA, 1).numpy()[0, 0], expected, 1e-15 * 2**20)


def test_a_dot_product_of_rotated_vectors_depends_on_the_distance_only() -> None:
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((1, 1, 64)).astype(np.float32) for _ in range(2))

    def product(at: int) -> float:
        return float((in_onnx(q, np.array([at + 7], np.int32), 1) * in_onnx(k, np.array([at], np.int32), 1)).sum())

    assert abs(product(2**20 - 8) - product(0)) < 64 * 4 * U32 * float(np.abs(q * k).max() * 8)
