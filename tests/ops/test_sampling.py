"""What GlmAccept draws: the hash, one truncated draw, and the law of 200,000 of them."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import pytest
import torch
from acceptance_calls import both, check, inputs
from comparison import assert_same
from onnx import TensorProto, helper
from onnx_case import model_of, run, session
from oracle_sampling import Relaxed, Sampling, draw, fmix32, uniform

from glm_mtp_export.ops.sampling import uniform as uniform_in_torch

INF = math.inf
LARGEST = (8, 783_517)  # seed and position whose hash begins with 24 ones, found by search


@pytest.mark.parametrize(("x", "expected"), [(0, 0), (1, 0x514E28B7), (0xFFFFFFFF, 0x81F16F39)])
def test_the_finaliser_of_murmur3(x: int, expected: int) -> None:
    """MurmurHash3_x86_32 of an empty key is the finaliser of its seed; these are its published values."""
    assert fmix32(x) == expected
    node = helper.make_node("GlmMix32", ["x"], ["y"], domain="glm")
    value = functools.partial(helper.make_tensor_value_info, elem_type=TensorProto.INT64, shape=["n"])
    model = model_of([node], [value("x")], [value("y")])
    rng = np.random.default_rng(x)
    xs = np.concatenate(([x], rng.integers(0, 2**32, 200)))
    assert session(model).run(None, {"x": xs})[0].tolist() == [fmix32(int(v)) for v in xs]


SEEDS = [0, 1, 2, -1, -(2**63), 2**63 - 1, 2**32, 2**32 - 1, -(2**32), 123456789012345]


def test_uniform_numbers_bit_for_bit() -> None:
    positions = [0, 1, 2, 1023, 2**20, 2**31 - 1]
    seeds, places = (torch.tensor(v).flatten() for v in np.meshgrid(SEEDS, positions))
    expected = [uniform(s, p) for s, p in zip(seeds.tolist(), places.tolist(), strict=True)]
    assert uniform_in_torch(seeds, places).tolist() == expected
    assert len(set(expected)) == len(expected)


@pytest.mark.parametrize("vocab", [4096])
def test_a_flat_row_shows_the_uniform_number(vocab: int) -> None:
    """Equal logits: the token drawn is floor(u * V) exactly, for every seed and position."""
    offsets = [0, 5, 1000, 2**20]
    samplings = [Sampling(seed=s, sample_offset=o) for s in SEEDS for o in offsets]
    logits = np.zeros((len(samplings) * 2, vocab), np.float32)
    for _count, _next, committed in both(inputs(logits, [[7]] * len(samplings), samplings, Relaxed(), 2), Relaxed(), 2):
        for row, s in zip(committed, samplings, strict=True):
            assert row.tolist() == [int(uniform(s.seed, s.sample_offset + j) * vocab) for j in (0, 1)]


def test_the_largest_uniform_number_is_below_one() -> None:
    """24 bits of ones: in float32 the number would be 1, no running sum would exceed it and id 0 would come out."""
    seed, position = LARGEST
    assert uniform(seed, position) == 1 - 2.0**-25
    logits = np.zeros((1, 64), np.float32)
    logits[0, 40:] = -INF
    for _count, next_tokens, _committed in both(
        inputs(logits, [[]], [Sampling(seed=seed, sample_offset=position)], Relaxed(), 1), Relaxed(), 1
    ):
        assert next_tokens.tolist() == [39]


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """Distance of counts from expectation in standard deviations of the statistic (mean df, variance 2 df)."""
    statistic = float((((counts - expected) ** 2) / expected).sum())
    degrees = counts.size - 1
    return (statistic - degrees) / math.sqrt(2 * degrees)


def test_uniform_numbers_are_uniform_and_neighbours_independent() -> None:
    seeds, positions = torch.arange(512).repeat_interleave(512), torch.arange(512).repeat(512)
    u = uniform_in_torch(seeds, positions).numpy().reshape(512, 512)
    assert abs(chi_square(np.bincount((u * 256).astype(int).ravel(), minlength=256), np.full(256, u.size / 256))) < 4
    for first, second in ((u[:, :-1], u[:, 1:]), (u[:-1], u[1:]), (u[:-1, :-1], u[1:, 1:]), (u[:-1, 1:], u[1:, :-1])):
        cells = (first * 16).astype(int) * 16 + (second * 16).astype(int)
        assert abs(chi_square(np.bincount(cells.ravel(), minlength=256), np.full(256, cells.size / 256))) < 4
    high = uniform_in_torch(torch.arange(4096) << 32, torch.zeros(4096, dtype=torch.int64)).numpy()
    assert abs(chi_square(np.bincount((high * 64).astype(int), minlength=64), np.full(64, 64.0))) < 4


# --- one draw -------------------------------------------------------------------------------------------------------

TRUNCATIONS = [
    Sampling(),
    Sampling(temperature=0.3),
    Sampling(temperature=3.0),
    Sampling(top_k=1),
    Sampling(top_k=3),
    Sampling(top_k=1000),
    Sampling(top_p=0.6),
    Sampling(top_p=0.0),
    Sampling(min_p=0.2),
    Sampling(min_p=1.0),
    Sampling(temperature=0.8, top_k=5, top_p=0.7, min_p=0.1),
    Sampling(temperature=1e-5),
    Sampling(temperature=0.99e-5),
    Sampling(temperature=0.0, top_k=3, top_p=0.5),
    Sampling(temperature=-1.0),
]


@pytest.mark.parametrize("sampling", TRUNCATIONS)
def test_draws_without_drafts(sampling: Sampling) -> None:
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((200, 40)) * 2
    samplings = [dataclasses.replace(sampling, seed=i, sample_offset=3 * i) for i in range(200)]
    assert check(logits, [[]] * 200, samplings, num_slots=1) > 180


def support(logits: list[float], sampling: Sampling, draws: int = 400) -> set[int]:
    """Tokens that come out over many seeds, the same from both bodies."""
    rows = np.tile(np.array(logits, np.float32), (draws, 1))
    samplings = [dataclasses.replace(sampling, seed=s) for s in range(draws)]
    found = [result[1] for result in both(inputs(rows, [[]] * draws, samplings, Relaxed(), 1), Relaxed(), 1)]
    assert_same(found[0], found[1])
    return set(found[0].tolist())


LOG_HALVES = [math.log(p) for p in (0.125, 0.5, 0.25, 0.125)]


@pytest.mark.parametrize(
    ("logits", "sampling", "expected"),
    [
        ([1.0, 2.0, 2.0, 2.0, 0.0], Sampling(top_k=2), {1, 2}),  # a tie at the top-k border keeps the lower ids
        ([2.0, 2.0, 2.0], Sampling(top_k=1), {0}),
        ([0.0] * 4, Sampling(top_p=0.5), {0, 1}),  # the sum before id 2 is 0.5, not below top_p
        ([0.0] * 4, Sampling(top_p=0.51), {0, 1, 2}),
        ([0.0] * 4, Sampling(top_p=1e-9), {0}),
        ([0.0] * 4, Sampling(top_p=0.0), {0}),  # the best token always stays
        (LOG_HALVES, Sampling(top_p=0.7), {1, 2}),
        ([0.0, math.log(4), math.log(2), 0.0], Sampling(min_p=0.5), {1, 2}),  # p = min_p * p_max stays
        ([0.0, math.log(4), math.log(2), 0.0], Sampling(min_p=0.51), {1}),
        ([0.0] * 4, Sampling(min_p=1.0), {0, 1, 2, 3}),
        ([0.0] * 8, Sampling(top_k=4, top_p=0.5), {0, 1}),  # half of what top-k left, not of everything
        ([5.0, 0.0, 0.0], Sampling(temperature=1000.0), {0, 1, 2}),
        ([0.0, -INF, 0.0, -INF], Sampling(top_k=3), {0, 2}),
    ],
)
def test_borders_of_the_truncations(logits: list[float], sampling: Sampling, expected: set[int]) -> None:
    assert support(logits, sampling) == expected


def test_a_long_tail_survives_top_p_1() -> None:
    """In float32 the running sum reaches 1 before a tail of 1e-8 each: no id of the tail may be dropped, nor one be added."""
    vocab = 50_000
    logits = np.full((1, vocab), math.log(1e-6))
    logits[0, :10] = 0.0
    seeds = [s for s in range(4000) if uniform(s, 0) > 10 / (10 + (vocab - 10) * 1e-6)][:3]
    assert seeds
    rows, samplings = np.tile(logits, (len(seeds), 1)), [Sampling(seed=s) for s in seeds]
    for _count, next_tokens, _committed in both(inputs(rows, [[]] * len(seeds), samplings, Relaxed(), 1), Relaxed(), 1):
        for token, s in zip(next_tokens.tolist(), samplings, strict=True):
            exact = draw(rows[0].astype(np.float32).astype(np.float64).tolist(), s, uniform(s.seed, 0))[0]
            assert abs(token - exact) <= 20  # float32 weights move the 40,000-step staircase by a few steps
            assert token >= 10


def test_greedy_rows_take_the_lowest_of_equal_logits() -> None:
    logits = np.array([[1, 3, 3, 0], [-INF, -2, -2, -INF]], np.float32)
    for _count, next_tokens, _committed in both(
        inputs(logits, [[], []], [Sampling(temperature=0.0, seed=s) for s in (1, 2)], Relaxed(), 1), Relaxed(), 1
    ):
        assert next_tokens.tolist() == [1, 1]


@functools.cache
def law_draws(sampling: Sampling, num_slots: int = 4, batch: int = 50_000) -> np.ndarray:
    """num_accepted and committed of 200,000 slots with different seeds and positions, drafts = the likeliest token."""
    rows = np.tile(np.array(LAW, np.float32), (batch * num_slots, 1))
    samplings = [dataclasses.replace(sampling, seed=b // 10, sample_offset=(b % 10) * num_slots) for b in range(batch)]
    arrays = inputs(rows, [[0] * (num_slots - 1)] * batch, samplings, Relaxed(), num_slots)
    num_accepted, _next, committed = run(
        "GlmAccept", arrays, num_slots=num_slots, relaxed_topk=0, thinking_end_ids=[-1]
    )
    return np.concatenate((num_accepted[:, None], committed), axis=1)


LAW = [math.log(p) for p in (0.4, 0.25, 0.15, 0.1, 0.06, 0.04)]


@pytest.mark.parametrize(
    ("sampling", "probabilities"),
    [
        (Sampling(), [0.4, 0.25, 0.15, 0.1, 0.06, 0.04]),
        (Sampling(top_k=3), [0.5, 0.3125, 0.1875, 0, 0, 0]),
        (Sampling(top_p=0.7), [0.5, 0.3125, 0.1875, 0, 0, 0]),
        (Sampling(min_p=0.2), [0.4 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0.1 / 0.9, 0, 0]),
        (Sampling(temperature=0.5), [p * p / 0.2602 for p in (0.4, 0.25, 0.15, 0.1, 0.06, 0.04)]),
    ],
)
def test_the_law_of_committed_tokens_is_the_truncated_target_s(sampling: Sampling, probabilities: list[float]) -> None:
    draws = law_draws(sampling)
    committed = draws[:, 1:]
    kept = np.array(probabilities) > 0
    counts = np.bincount(committed.ravel(), minlength=6)
    assert not counts[~kept].any()
    assert abs(chi_square(counts[kept], np.array(probabilities)[kept] * committed.size)) < 4
    assert np.abs(counts / committed.size - probabilities).max() < 0.005
    # Acceptance of the likeliest draft is its probability, slot after slot.
    p = probabilities[0]
    chain = np.array([(1 - p) * p**n for n in range(3)] + [p**3]) * len(draws)
    assert abs(chi_square(np.bincount(draws[:, 0], minlength=4), chain)) < 4
    # The emitted text: slot 0 on its own, and slot 1 given slot 0.
    for n in range(2):
        pairs = np.bincount(committed[:, n] * 6 + committed[:, n + 1], minlength=36).reshape(6, 6)[kept][:, kept]
        expected = np.outer(probabilities, probabilities)[kept][:, kept] * len(draws)
        assert abs(chi_square(pairs.ravel(), expected.ravel())) < 4
