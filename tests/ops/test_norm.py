"""RMSNorm ops against float64 loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from comparison import U32, assert_close
from onnx_case import reference, run

from glm_mtp_export.ops import OP_TABLE


def rms_norm_oracle(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    out = np.zeros(x.shape)
    for row, values in enumerate(np.asarray(x, np.float64)):
        mean_square = sum(float(v) ** 2 for v in values) / len(values)
        for lane, value in enumerate(values):
            out[row, lane] = value / math.sqrt(mean_square + eps) * float(weight[lane])
    return out


def close(actual: np.ndarray, expected: np.ndarray) -> None:
    """Mean, root, division, product: the sum's error halves in the root, so a handful of roundings relative to the value."""
    assert_close(actual, expected, 8 * U32 * np.abs(expected) + 1e-38)


@pytest.mark.parametrize("columns", [(0, 12), (4, 6), (6, 6)])
@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_columns_from_the_offset_on(columns: tuple[int, int], eps: float) -> None:
    offset, width = columns
    rng = np.random.default_rng(width)
    x = rng.standard_normal((5, 12)).astype(np.float32) * np.array([[1], [1e-3], [1e3], [1e-20], [0]], np.float32)
    x[:, :offset] = np.nan  # columns before and after are another tensor's
    x[:, offset + width :] = np.inf
    weight = rng.standard_normal(width).astype(np.float32)
    expected = rms_norm_oracle(x[:, offset : offset + width], weight, float(np.float32(eps)))
    for outputs in (run, reference):
        close(outputs("GlmRmsNorm", [x, weight], eps=eps, column_offset=offset)[0], expected)


def test_eps_matters_for_small_rows() -> None:
    x, weight = np.full((1, 8), 1e-3, np.float32), np.ones(8, np.float32)
    small, large = (run("GlmRmsNorm", [x, weight], eps=eps, column_offset=0)[0][0, 0] for eps in (1e-6, 1e-5))
    assert small == pytest.approx(1 / math.sqrt(2), rel=1e-6)
    assert large == pytest.approx(1 / math.sqrt(11), rel=1e-6)


def test_a_nan_row_stays_alone() -> None:
    x = np.ones((3, 8), np.float32)
    x[1, 2] = np.nan
    y = run("GlmRmsNorm", [x, np.ones(8, np.float32)], eps=1e-5, column_offset=0)[0]
    assert np.isnan(y[1]).all()
    assert np.isfinite(y[[0, 2]]).all()


def test_the_fused_op_normalises_the_sum_it_returns() -> None:
    rng = np.random.default_rng(3)
    x, residual = (rng.standard_normal((4, 16)).astype(np.float32) for _ in range(2))
    weight = rng.standard_normal(16).astype(np.float32)
    for outputs in (run, reference):
        y, total = outputs("GlmAddRmsNorm", [x, residual, weight], eps=1e-5)
        assert_close(total, x + residual, 0, "sum")
        close(y, rms_norm_oracle(x + residual, weight, float(np.float32(1e-5))))


def test_bfloat16_rounds_before_the_weight_as_hugging_face_does() -> None:
    rng = np.random.default_rng(4)
    x = torch.from_numpy(rng.standard_normal((3, 64)).astype(np.float32)).bfloat16()
    weight = torch.from_numpy(rng.standard_normal(64).astype(np.float32)).bfloat16()
    wide = torch.from_numpy(rms_norm_oracle(x.double().numpy(), np.ones(64), 1e-5))
    expected = (wide.bfloat16().double() * weight.double()).bfloat16()
    found = OP_TABLE["GlmRmsNorm"].reference(x, weight, 1e-5, 0)
    assert found.dtype == torch.bfloat16
    # The float32 value before the rounding may fall on the other side of a bf16 border, one step away.
    assert ((found.double() - expected.double()).abs() <= expected.double().abs() * 2.0**-7).all()
    assert (found == expected).double().mean() > 0.99
