"""Routed experts in three weight formats against float64 loops over rows and slots."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from comparison import U32, assert_close, rounding
from onnx_case import reference, run
from oracle_quantised import E2M1, E4M3, dequantised_blocks, dequantised_groups, e4m3_bytes, quantised_groups

from glm_mtp_export.ops import OP_TABLE

IDS = np.array([[0, 1], [1, -1], [3, 2], [-1, -1], [2, 2]], np.int32)
E4M3_RMS = 0.027  # of one rounding, relative to the value


def silu(value: float) -> float:
    return value / (1 + math.exp(-value))


def experts_oracle(
    x: np.ndarray, ids: np.ndarray, weights: np.ndarray, w13: np.ndarray, w2: np.ndarray, *, quantise: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Sum over slots, and per row the size of what was summed: |weight| |down| |inner| for the error bound."""
    seen = quantised_groups(x) if quantise else np.asarray(x, np.float64)
    out, size = np.zeros(x.shape), np.zeros(x.shape)
    half = w13.shape[1] // 2
    for row in range(len(x)):
        for slot in range(ids.shape[1]):
            expert = ids[row, slot]
            if expert < 0:
                continue
            gate = [math.fsum(seen[row] * w) for w in w13[expert, :half]]
            up = [math.fsum(seen[row] * w) for w in w13[expert, half:]]
            inner = np.array([silu(g) * u for g, u in zip(gate, up, strict=True)])
            inner = quantised_groups(inner[None].astype(np.float32))[0] if quantise else inner
            reach = np.abs(w13[expert]) @ np.abs(seen[row])
            bound = np.array([(1 + abs(g)) * r * ru for g, r, ru in zip(gate, reach[:half], reach[half:], strict=True)])
            out[row] += float(weights[row, slot]) * (w2[expert] @ inner)
            size[row] += abs(float(weights[row, slot])) * (np.abs(w2[expert]) @ bound)
    return out, size


def inputs(hidden: int, intermediate: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(hidden)
    x = rng.standard_normal((5, hidden)).astype(np.float32)
    weights = rng.random((5, 2)).astype(np.float32) * 2.5
    w13 = rng.standard_normal((4, 2 * intermediate, hidden)) / np.sqrt(hidden)
    w2 = rng.standard_normal((4, hidden, intermediate)) / np.sqrt(intermediate)
    return x, weights, w13, w2


@pytest.mark.parametrize("shape", [(32, 12), (48, 7)])
def test_float32_experts(shape: tuple[int, int]) -> None:
    x, weights, w13, w2 = inputs(*shape)
    wide13, wide2 = w13.astype(np.float32), w2.astype(np.float32)
    expected, size = experts_oracle(x, IDS, weights, wide13.astype(np.float64), wide2.astype(np.float64))
    for call in (run, reference):
        found = call("GlmExperts", [x, IDS, weights, wide13, wide2])[0]
        assert_close(found, expected, rounding(size))
        assert not found[3].any(), "a row without experts is zero"


def test_gate_rows_come_first() -> None:
    x, ids, weights = np.ones((1, 1), np.float32), np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32)
    w13, w2 = np.array([[[2.0], [3.0]]], np.float32), np.ones((1, 1, 1), np.float32)
    for call in (run, reference):
        assert call("GlmExperts", [x, ids, weights, w13, w2])[0][0, 0] == pytest.approx(silu(2.0) * 3.0, rel=4 * U32)


def test_an_expert_named_twice_counts_twice_and_negative_weights_count() -> None:
    x, _weights, w13, w2 = inputs(32, 12)
    ids, weights = np.array([[2, 2]], np.int32), np.array([[1.0, -0.25]], np.float32)
    arrays = [x[:1], ids, weights, w13.astype(np.float32), w2.astype(np.float32)]
    single = [x[:1], ids[:, :1], np.array([[0.75]], np.float32), *arrays[3:]]
    for call in (run, reference):
        assert_close(call("GlmExperts", arrays)[0], call("GlmExperts", single)[0], 1e-6)


def test_a_nan_row_stays_alone() -> None:
    x, weights, w13, w2 = inputs(32, 12)
    x[1] = np.nan
    for call in (run, reference):
        found = call("GlmExperts", [x, IDS, weights, w13.astype(np.float32), w2.astype(np.float32)])[0]
        assert np.isnan(found[1]).all()
        assert np.isfinite(found[[0, 2, 3, 4]]).all()


@pytest.mark.parametrize("shape", [(144, 48), (128, 64), (272, 80)])
def test_fp8_experts(shape: tuple[int, int]) -> None:
    """With 48 and 80 intermediate columns a scale block of w13 holds gate and up rows together."""
    x, weights, w13, w2 = inputs(*shape)
    rng = np.random.default_rng(1)
    packed, wide = [], []
    for weight in (w13, w2):
        blocks = (-(-weight.shape[1] // 128), -(-weight.shape[2] // 128))
        scale = (rng.random((4, *blocks)) * 0.002 + 0.002).astype(np.float32)
        full = scale.repeat(128, 1)[:, : weight.shape[1]].repeat(128, 2)[:, :, : weight.shape[2]].astype(np.float64)
        values = e4m3_bytes(weight / full)
        packed += [values, scale]
        wide.append(np.array([dequantised_blocks(v, s) for v, s in zip(values, scale, strict=True)]))
    tensors = [torch.from_numpy(p) for p in packed]
    tensors[0], tensors[2] = tensors[0].view(torch.float8_e4m3fn), tensors[2].view(torch.float8_e4m3fn)
    routed = [torch.from_numpy(a) for a in (x, IDS, weights)]
    found = OP_TABLE["GlmExpertsFp8"].reference(*routed, *tensors).numpy()

    tight, size = experts_oracle(x, IDS, weights, *wide, quantise=True)
    # Where float32 rounding moves an inner value over an e4m3 border it moves by 2^-3 of itself, in few places: the
    # remaining elements have to agree to float32.
    error = np.abs(found - tight)
    assert (error <= rounding(size)).mean() > 0.9
    walk = np.sqrt(np.array([[math.fsum((w2[e] ** 2)[h]) for h in range(shape[0])] for e in range(4)]).max())
    assert_close(found, tight, 0.125 * walk * np.abs(weights).sum(), "dequantised inputs")

    # Six roundings meet in an output: x and the weight in gate and in up, the inner value, the weight of down.
    loose, _size = experts_oracle(x, IDS, weights, w13, w2)
    relative = np.sqrt(((found - loose) ** 2).mean() / (loose**2).mean())
    assert 0.5 * np.sqrt(6) * E4M3_RMS < relative < 1.5 * np.sqrt(6) * E4M3_RMS


@pytest.mark.parametrize("shape", [(32, 16), (64, 48)])
def test_nvfp4_experts(shape: tuple[int, int]) -> None:
    x, weights, w13, w2 = inputs(*shape)
    rng = np.random.default_rng(2)
    packed, scales = [], []
    for weight in (w13, w2):
        rows, columns = weight.shape[1:]
        packed.append(rng.integers(0, 256, (4, rows, columns // 2)).astype(np.uint8))
        scales.append(e4m3_bytes(rng.uniform(0.25, 2.0, (4, rows, columns // 16))))
    globals13 = rng.uniform(0.05, 0.5, (4, 2)).astype(np.float32)
    globals2 = rng.uniform(0.05, 0.5, (4, 1)).astype(np.float32)
    wide13, wide2 = [], []
    for e in range(4):
        own = np.array([globals13[e, 0]] * shape[1] + [globals13[e, 1]] * shape[1])
        wide13.append(dequantised_groups(packed[0][e], scales[0][e], own))
        wide2.append(dequantised_groups(packed[1][e], scales[1][e], np.full(shape[0], globals2[e, 0])))
    expected, size = experts_oracle(x, IDS, weights, np.array(wide13), np.array(wide2))
    arrays = [x, IDS, weights, packed[0], scales[0], globals13, packed[1], scales[1], globals2]
    found = OP_TABLE["GlmExpertsNvfp4"].reference(*(torch.from_numpy(a) for a in arrays)).numpy()
    assert_close(found, expected, rounding(size))


def test_gate_and_up_have_their_own_global_scale() -> None:
    """All nibbles and block scales 1.0: gate weights are 0.25 and up weights 0.5, not one of them twice."""
    one_nibbles, one_scale = 0x22, int(e4m3_bytes(np.array([1.0]))[0])
    assert E2M1[2] == 1.0
    assert E4M3[one_scale] == 1.0
    hidden, intermediate = 16, 16
    w13 = torch.full((1, 2 * intermediate, hidden // 2), one_nibbles, dtype=torch.uint8)
    w13_scale = torch.full((1, 2 * intermediate, 1), one_scale, dtype=torch.uint8)
    w2 = torch.full((1, hidden, intermediate // 2), one_nibbles, dtype=torch.uint8)
    w2_scale = torch.full((1, hidden, 1), one_scale, dtype=torch.uint8)
    x, ids, weights = torch.zeros(1, hidden), torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1)
    x[0, 0] = 1.0
    for gate, up in ((0.25, 0.5), (0.5, 0.25)):
        scales = torch.tensor([[gate, up]])
        found = OP_TABLE["GlmExpertsNvfp4"].reference(
            x, ids, weights, w13, w13_scale, scales, w2, w2_scale, torch.ones(1, 1)
        )
        assert_close(found.numpy(), np.full((1, hidden), intermediate * silu(gate) * up), 1e-6)


def test_the_low_nibble_is_the_even_column() -> None:
    """Byte 0x2A: -1.0 then +1.0."""
    packed = np.array([[0x2A] * 8], np.uint8)
    expected = np.array([[-1.0, 1.0] * 8]) * 0.5
    scale = e4m3_bytes(np.array([[2.0]]))
    assert_close(dequantised_groups(packed, scale, np.array([0.25])), expected, 0)
    from glm_mtp_export.ops.precision import dequantised_groups as in_torch

    found = in_torch(torch.from_numpy(packed), torch.from_numpy(scale), torch.tensor(0.25))
    assert_close(found.numpy(), expected, 0)
