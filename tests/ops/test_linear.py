"""GlmLinear, GlmLinearFp8 and GlmSiluMul against float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from comparison import U32, assert_close, rounding
from onnx_case import reference, run
from oracle_quantised import dequantised_blocks, e4m3_bytes, quantised_groups

from glm_mtp_export.ops import OP_TABLE


def product(x: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x weight^T and the sum of the absolute values of its terms, both float64."""
    out, magnitude = np.zeros((len(x), len(weight))), np.zeros((len(x), len(weight)))
    for row, values in enumerate(np.asarray(x, np.float64)):
        for column, weights in enumerate(np.asarray(weight, np.float64)):
            out[row, column] = math.fsum(values * weights)
            magnitude[row, column] = math.fsum(np.abs(values * weights))
    return out, magnitude


@pytest.mark.parametrize("to_f32", [0, 1])
def test_product_of_float32(to_f32: int) -> None:
    rng = np.random.default_rng(to_f32)
    x, weight = rng.standard_normal((5, 96)).astype(np.float32), rng.standard_normal((33, 96)).astype(np.float32)
    x[3] = 0
    expected, magnitude = product(x, weight)
    for outputs in (run, reference):
        assert_close(outputs("GlmLinear", [x, weight], to_f32=to_f32)[0], expected, rounding(magnitude))


def test_bfloat16_rounds_once_unless_float32_is_asked_for() -> None:
    rng = np.random.default_rng(1)
    x, weight = (torch.from_numpy(rng.standard_normal((4, 64)).astype(np.float32)).bfloat16() for _ in range(2))
    expected, magnitude = product(x.double().numpy(), weight.double().numpy())
    wide, narrow = (OP_TABLE["GlmLinear"].reference(x, weight, to_f32) for to_f32 in (1, 0))
    assert (wide.dtype, narrow.dtype) == (torch.float32, torch.bfloat16)
    assert_close(wide.numpy(), expected, rounding(magnitude))
    assert torch.equal(narrow, wide.bfloat16())


# Widths of one block, of several with a partial last one, and of the latent projection's 4.5 blocks.
@pytest.mark.parametrize("shape", [(16, 16), (160, 144), (576, 272)])
def test_fp8_product(shape: tuple[int, int]) -> None:
    rows, columns = shape
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((3, columns)).astype(np.float32) * np.array([[1], [1e-6], [0]], np.float32)
    original = rng.standard_normal((rows, columns))
    blocks = (-(-rows // 128), -(-columns // 128))
    scale = (rng.random(blocks) * 0.01 + 0.02).astype(np.float32)  # 448 scales reach past any of the values
    by_element = scale.repeat(128, 0)[:rows].repeat(128, 1)[:, :columns].astype(np.float64)
    weight_bytes = e4m3_bytes(original / by_element)
    weight = torch.from_numpy(weight_bytes).view(torch.float8_e4m3fn)
    found = OP_TABLE["GlmLinearFp8"].reference(torch.from_numpy(x), weight, torch.from_numpy(scale), 1).numpy()

    tight, magnitude = product(quantised_groups(x), dequantised_blocks(weight_bytes, scale))
    # Quantised values carry two roundings of their own (value * scale) in float32.
    assert_close(found, tight, rounding(magnitude) + 4 * U32 * magnitude, "dequantised inputs")

    loose, _magnitude = product(x, original)
    # e4m3 is off by up to 2^-4 of a value, 0.027 rms; errors of x and of the weight add like a random walk, 5 sigma.
    walk = np.sqrt(product(x.astype(np.float64) ** 2, original**2)[0])
    assert_close(found, loose, 5 * np.sqrt(2) * 0.027 * walk + 1e-10, "original inputs")


def test_fp8_rows_are_quantised_alone() -> None:
    """A large row must not change the scale of its neighbour."""
    rng = np.random.default_rng(9)
    x = torch.from_numpy(rng.standard_normal((2, 128)).astype(np.float32))
    weight, scale = torch.ones(16, 128).to(torch.float8_e4m3fn), torch.ones(1, 1)
    alone = OP_TABLE["GlmLinearFp8"].reference(x[:1], weight, scale, 1)
    beside = OP_TABLE["GlmLinearFp8"].reference(torch.cat((x[:1], x[1:] * 1e6)), weight, scale, 1)
    assert torch.equal(alone[0], beside[0])


def test_silu_mul() -> None:
    rng = np.random.default_rng(2)
    x = np.concatenate((rng.standard_normal((6, 20)) * 3, [[-200.0, -88.8, 0.0, 88.8, 200.0] * 4])).astype(np.float32)
    gate, up = x[:, :10].astype(np.float64), x[:, 10:].astype(np.float64)
    expected = gate * up / (1 + np.vectorize(math.exp)(-gate))
    for outputs in (run, reference):
        # exp carries its argument's rounding, relative error |gate| u, and overflows where sigmoid is below 3e-39.
        limit = (6 + np.abs(gate)) * U32 * np.abs(expected) + np.abs(gate * up) * 3e-39
        assert_close(outputs("GlmSiluMul", [x])[0], expected, limit)
