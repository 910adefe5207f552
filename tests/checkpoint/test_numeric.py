"""Encoders and decoders of the small formats against plain float64 definitions."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm_mtp_export.checkpoint import numeric

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def e4m3(code: int) -> float:
    exponent, mantissa = (code >> 3) & 15, code & 7
    if code & 127 == 127:
        return math.nan
    magnitude = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -magnitude if code & 128 else magnitude


def nearest_even(value: float, magnitudes: list[float]) -> int:
    """Index of the nearest magnitude; a tie goes to the even index; beyond the last one: the last."""
    distances = [abs(abs(value) - m) for m in magnitudes]
    best = min(distances)
    candidates = [i for i, d in enumerate(distances) if d == best]
    return candidates[0] if len(candidates) == 1 else next(i for i in candidates if i % 2 == 0)


def test_e4m3_table() -> None:
    found = numeric.e4m3_to_f32(np.arange(256, dtype=np.uint8))
    for code in range(256):
        assert math.isnan(found[code]) if math.isnan(e4m3(code)) else found[code] == e4m3(code)
    assert found[0x7E] == 448 and np.signbit(found[0x80])


def test_e8m0_table() -> None:
    found = numeric.e8m0_to_f32(np.arange(256, dtype=np.uint8))
    assert found[127] == 1 and found[0] == 2.0**-127 and found[254] == 2.0**127 and np.isnan(found[255])


def test_e4m3_round_trips_every_code() -> None:
    codes = np.array([c for c in range(256) if c & 127 != 127], np.uint8)
    assert np.array_equal(numeric.f32_to_e4m3(numeric.e4m3_to_f32(codes)), codes)
    assert list(numeric.f32_to_e4m3(np.array([np.nan, np.inf, -np.inf, 1e9], np.float32)) & 127) == [127, 126, 126, 126]


def test_e4m3_ties_and_neighbours() -> None:
    """Every midpoint between two codes, and one float32 step to either side."""
    magnitudes = [e4m3(c) for c in range(127)]
    middles = np.array([(a + b) / 2 for a, b in itertools.pairwise(magnitudes)], np.float32)
    for values in (middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(1e9))):
        expected = [nearest_even(float(v), magnitudes) for v in values]
        assert list(numeric.f32_to_e4m3(values)) == expected
        assert list(numeric.f32_to_e4m3(-values)) == [c | 128 for c in expected]


@given(st.lists(st.floats(-500, 500, width=32), min_size=1, max_size=20))
def test_e4m3_is_nearest_even(values: list[float]) -> None:
    magnitudes = [e4m3(c) for c in range(127)]
    found = numeric.f32_to_e4m3(np.array(values, np.float32))
    assert [int(c) & 127 for c in found] == [nearest_even(v, magnitudes) for v in values]


@given(st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=20))
def test_e2m1_is_nearest_even(values: list[float]) -> None:
    found = numeric.f32_to_e2m1(np.array(values, np.float32))
    assert [int(c) & 7 for c in found] == [nearest_even(v, E2M1) for v in values]
    assert [bool(c & 8) for c in found] == [math.copysign(1, v) < 0 for v in values]


def test_e2m1_ties_go_to_the_even_code() -> None:
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 9.0], np.float32)
    assert list(numeric.e2m1_to_f32(numeric.f32_to_e2m1(ties))) == [0, 1, 1, 2, 2, 4, 4, 6]


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_bf16_is_nearest_even(value: float) -> None:
    bits = int(numeric.f32_to_bf16(np.array([value], np.float32))[0])
    below = int(np.array([value], np.float32).view(np.uint32)[0]) >> 16
    candidates = [below, below + 1]
    exact = [float(numeric.bf16_to_f32(np.array([c], np.uint16))[0]) for c in candidates]
    limit = 2.0**128  # where an infinity would lie if the format went on
    exact = [math.copysign(limit, e) if math.isinf(e) else e for e in exact]
    errors = [abs(e - value) for e in exact]
    expected = below if errors[0] < errors[1] else below + 1 if errors[1] < errors[0] else below + (below & 1)
    assert bits == expected


def test_bf16_keeps_nan_and_infinity() -> None:
    values = np.array([np.nan, -np.nan, np.inf, -np.inf], np.float32)
    found = numeric.bf16_to_f32(numeric.f32_to_bf16(values))
    assert np.isnan(found[:2]).all() and list(found[2:]) == [np.inf, -np.inf]
    hidden = np.array([0x7F800001], np.uint32).view(np.float32)  # a NaN whose payload is in the low half only
    assert np.isnan(numeric.bf16_to_f32(numeric.f32_to_bf16(hidden)))[0]


def test_nibbles_low_is_the_even_column() -> None:
    packed = np.array([[0x2A]], np.uint8)
    assert list(numeric.e2m1_to_f32(numeric.unpack_nibbles(packed))[0]) == [-1.0, 1.0]
    codes = np.random.default_rng(0).integers(0, 16, (3, 8), dtype=np.uint8)
    assert np.array_equal(numeric.unpack_nibbles(numeric.pack_nibbles(codes)), codes)


@pytest.mark.parametrize("shape", [(1, 1), (16, 16), (17, 33), (130, 257), (5, 300)])
def test_fp8_blocks_with_partial_edges(shape: tuple[int, int]) -> None:
    values = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    values[0] = 0
    codes, scales = numeric.quantise_fp8_blocks(values)
    assert scales.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    for i in range(shape[0]):
        for j in range(0, shape[1], 7):
            scale = float(scales[i // 128, j // 128])
            block = values[i // 128 * 128 :][:128, j // 128 * 128 :][:, :128]
            largest = float(np.abs(block).max())
            assert scale == (np.float32(largest / 448) if largest else 1)
            # half a step of a 3-bit mantissa, or of the smallest subnormal; one float32 division on top
            bound = max(abs(float(values[i, j])) * 2.0**-4, scale * 2.0**-10) * (1 + 1e-6)
            assert abs(e4m3(int(codes[i, j])) * scale - float(values[i, j])) <= bound


def test_nvfp4_groups() -> None:
    values = np.random.default_rng(2).standard_normal((6, 64)).astype(np.float32)
    values[2, :16] = 0
    packed, scales, overall = numeric.quantise_nvfp4(values)
    assert packed.shape == (6, 32) and scales.shape == (6, 4)
    assert overall == np.float32(np.abs(values).max() / (6 * 448))
    for i in range(6):
        for j in range(64):
            step = e4m3(int(scales[i, j // 16])) * float(overall)
            code = int(packed[i, j // 2]) >> 4 if j % 2 else int(packed[i, j // 2]) & 15
            found = (-1 if code & 8 else 1) * E2M1[code & 7] * step
            # half the widest e2m1 gap (4 to 6), plus what rounding the group scale down may cut off at 6
            assert abs(found - float(values[i, j])) <= step * (1 + 6 / 16)
    assert not packed[2, :8].any()


@pytest.mark.parametrize("shape", [(1, 16), (200, 304), (130, 4096)])
def test_scales_alone_are_those_of_the_whole_quantisation(shape: tuple[int, int]) -> None:
    values = np.random.default_rng(4).standard_normal(shape).astype(np.float32)
    values[0, :16] = 0
    assert np.array_equal(numeric.fp8_block_scales(values), numeric.quantise_fp8_blocks(values)[1])
    groups, overall = numeric.nvfp4_scales(values)
    _, expected_groups, expected_overall = numeric.quantise_nvfp4(values)
    assert np.array_equal(groups, expected_groups) and overall == expected_overall
    largest = np.abs(values.reshape(shape[0], -1, 16)).max(axis=2)
    assert np.array_equal(groups, numeric.f32_to_e4m3(largest / np.float32(6) / overall))


def test_e4m3_of_any_bits_is_that_of_their_exact_value() -> None:
    """Against the rule in float64, on bits of every kind: subnormals, ties and their neighbours, infinities, NaNs."""
    rng = np.random.default_rng(5)
    bits = rng.integers(0, 1 << 32, 1 << 16, dtype=np.uint32)
    ties = (rng.integers(0, 1 << 16, 1 << 14, dtype=np.uint32) << 16)[:, None] + np.array([0, 1, 0xFFFF], np.uint32)
    near = (ties & np.uint32(0x807FFFFF)) | (rng.integers(114, 138, ties.shape, dtype=np.uint32) << 23)  # 2^-13 to 2^10
    values = np.concatenate([bits, ties.ravel(), near.ravel()]).view(np.float32)
    found = numeric.f32_to_e4m3(values)
    with np.errstate(invalid="ignore"):
        exact = np.clip(np.abs(values.astype(np.float64)), 0, 448)
    exponent = np.clip(np.floor(np.log2(np.where(exact > 0, exact, 1))), -6, 8)
    step = np.exp2(exponent - 3)
    rounded = np.rint(exact / step) * step  # numpy rounds halves to even; codes of equal parity have even quotients
    with np.errstate(invalid="ignore"):
        expected = np.where(np.isnan(values), np.nan, np.copysign(rounded, values))
    decoded = numeric.e4m3_to_f32(found).astype(np.float64)
    assert np.array_equal(decoded, expected, equal_nan=True)
    assert np.array_equal(np.signbit(decoded), np.signbit(values))
