"""The sigmoid router: float64 loops, large correction biases, groups, ties."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from comparison import U32, assert_close, assert_same, rounding
from onnx_case import reference, run

from glm_mtp_export.ops import OP_TABLE


def best_first(values: list[float], count: int) -> list[int]:
    """Indices of the `count` largest, best first, equal values by index."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]


def router_oracle(
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray,
    top_k: int,
    n_group: int,
    topk_group: int,
    norm: int,
    factor: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """ids, weights, and the margin of each row: the smallest difference that a choice rests on."""
    ids, weights, margins = [], [], []
    for row in np.asarray(x, np.float64):
        scores = [1 / (1 + math.exp(-math.fsum(row * w))) for w in np.asarray(weight, np.float64)]
        biased = [s + float(b) for s, b in zip(scores, bias, strict=True)]
        size = len(biased) // n_group
        groups = [biased[g * size : (g + 1) * size] for g in range(n_group)]
        strength = [sum(sorted(group, reverse=True)[:2]) for group in groups]
        kept = best_first(strength, topk_group)
        allowed = [b if e // size in kept else -math.inf for e, b in enumerate(biased)]
        chosen = best_first(allowed, top_k)
        ranked = [allowed[e] for e in best_first(allowed, min(top_k + 1, len(allowed)))]
        borders = [a - b for a, b in itertools.pairwise(ranked)]
        by_strength = sorted(strength, reverse=True)
        borders += [by_strength[topk_group - 1] - by_strength[topk_group]] if topk_group < n_group else []
        total = sum(scores[e] for e in chosen) + 1e-20 if norm else 1.0
        ids.append(chosen)
        weights.append([scores[e] / total * factor for e in chosen])
        margins.append(min(borders, default=math.inf))
    return np.array(ids, np.int32), np.array(weights), np.array(margins)


CONFIGS = [(2, 1, 1, 1), (8, 1, 1, 1), (1, 1, 1, 1), (2, 4, 2, 1), (4, 4, 1, 0), (4, 2, 2, 1)]


@pytest.mark.parametrize(("top_k", "n_group", "topk_group", "norm"), CONFIGS)
@pytest.mark.parametrize("offset", [0.0, 34.5, 10.16, -3.0])
def test_choice_and_weights(top_k: int, n_group: int, topk_group: int, norm: int, offset: float) -> None:
    rng = np.random.default_rng(int(top_k + 10 * n_group + abs(offset)))
    x, weight = rng.standard_normal((60, 24)).astype(np.float32), rng.standard_normal((16, 24)).astype(np.float32)
    bias = (offset + rng.uniform(-0.14, 0.14, 16)).astype(np.float32)
    expected_ids, expected_weights, margins = router_oracle(x, weight, bias, top_k, n_group, topk_group, norm, 2.5)
    # A score is right to 24 products' rounding; score + bias is rounded once more, and a group's value is a sum of two.
    clear = margins > 40 * U32 + 4 * U32 * 2 * (abs(offset) + 1.2)
    assert clear.mean() > 0.9
    for call in (run, reference):
        ids, weights = call(
            "GlmRouter",
            [x, weight, bias],
            top_k=top_k,
            n_group=n_group,
            topk_group=topk_group,
            norm_topk_prob=norm,
            routed_scaling_factor=2.5,
        )
        assert_same(ids[clear], expected_ids[clear], "expert_ids")
        # The logit's error, absolute, is the score's error, relative; then a few roundings of the quotient.
        logit_error = float(rounding((np.abs(x) @ np.abs(weight).T).max()))
        assert_close(
            weights[clear],
            expected_weights[clear],
            (logit_error + 8 * U32) * np.abs(expected_weights[clear]),
            "expert_weights",
        )


def route(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, **changes: float) -> list[list[np.ndarray]]:
    attributes = dict(top_k=3, n_group=1, topk_group=1, norm_topk_prob=1, routed_scaling_factor=1.0) | changes
    return [call("GlmRouter", [x, weight, bias], **attributes) for call in (run, reference)]


def test_exact_ties_take_the_lower_ids_in_order() -> None:
    x, weight, bias = np.zeros((1, 4), np.float32), np.ones((8, 4), np.float32), np.full(8, 34.5, np.float32)
    for ids, weights in route(x, weight, bias):
        assert ids.tolist() == [[0, 1, 2]]
        assert_close(weights, np.full((1, 3), 1 / 3), 2 * U32)
    bias[[2, 5]] = 35.0
    for ids, _weights in route(x, weight, bias):
        assert ids.tolist() == [[2, 5, 0]]


def test_tied_groups_take_the_lower_group() -> None:
    x, weight, bias = np.zeros((1, 4), np.float32), np.ones((8, 4), np.float32), np.zeros(8, np.float32)
    bias[6:] = 1.0  # group 3 is best, groups 0 to 2 tie
    for ids, _weights in route(x, weight, bias, n_group=4, topk_group=2, top_k=4):
        assert ids.tolist() == [[6, 7, 0, 1]]


def test_a_group_counts_its_best_two_and_no_third() -> None:
    x, weight = np.zeros((1, 4), np.float32), np.ones((8, 4), np.float32)
    bias = np.array([3, 0, 0, 0, 1.6, 1.6, -9, -9], np.float32)
    for ids, _weights in route(x, weight, bias, n_group=2, topk_group=1, top_k=2):
        assert ids.tolist() == [[4, 5]]


def test_the_bias_is_float32_and_only_chooses() -> None:
    """Offsets of 1e-4 on 34.5 vanish in bf16, where a step is 0.25; and weights must not see the bias at all."""
    x, weight = np.zeros((1, 4), np.float32), np.ones((8, 4), np.float32)
    bias = (34.5 + np.arange(8) * 1e-4).astype(np.float32)
    for ids, weights in route(x, weight, bias, norm_topk_prob=0):
        assert ids.tolist() == [[7, 6, 5]]
        assert weights.tolist() == [[0.5, 0.5, 0.5]]
    for tensors in (x, weight):
        assert torch.from_numpy(tensors).bfloat16().float().numpy().tolist() == tensors.tolist()
    ids, _weights = OP_TABLE["GlmRouter"].reference(
        torch.zeros(1, 4, dtype=torch.bfloat16),
        torch.ones(8, 4, dtype=torch.bfloat16),
        torch.from_numpy(bias),
        3,
        1,
        1,
        1,
        1.0,
    )
    assert ids.tolist() == [[7, 6, 5]]


def test_negative_biases_do_not_let_a_dropped_group_back_in() -> None:
    """Filling dropped groups with 0 instead of -inf would prefer them to negative choices."""
    x, weight = np.zeros((1, 4), np.float32), np.ones((8, 4), np.float32)
    bias = np.array([-5, -5, -5, -5, -9, -9, -9, -9], np.float32)
    for ids, _weights in route(x, weight, bias, n_group=2, topk_group=1):
        assert ids.tolist() == [[0, 1, 2]]


def test_vanishing_scores_do_not_divide_by_zero() -> None:
    x, weight = np.full((1, 4), -50, np.float32), np.ones((8, 4), np.float32)
    for ids, weights in route(x, weight, np.zeros(8, np.float32)):
        assert ids.tolist() == [[0, 1, 2]]
        assert np.isfinite(weights).all()
