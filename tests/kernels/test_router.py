"""glm_router against a float64 loop: choice by biased score, weights without bias, groups, ties."""

from __future__ import annotations

import itertools

import abi_products
import pytest
import torch
from sanitized import mark_some, sanitized

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# (rows, hidden, experts, top_k, n_group, topk_group)
TINY = [
    (1, 256, 16, 4, 1, 1),
    (7, 256, 16, 4, 1, 1),
    (33, 256, 16, 4, 4, 2),
    (130, 128, 48, 6, 3, 1),
    (5, 16, 16, 16, 1, 1),
]
PRODUCTION = [(1, 6144, 256, 8, 1, 1), (4, 6144, 256, 8, 1, 1), (64, 6144, 256, 8, 8, 4), (2048, 6144, 256, 8, 1, 1)]
# fp32 sums of 6144 exact products differ from float64 by about 1e-6; two choices closer than this may swap.
CLOSE = 2e-5


def _case(rows: int, hidden: int, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(31)
    x = torch.randn(rows, hidden, device="cuda", generator=generator).bfloat16()
    weight = (torch.randn(num_experts, hidden, device="cuda", generator=generator) * hidden**-0.5).bfloat16()
    bias = torch.randn(num_experts, device="cuda", generator=generator) * 0.1
    return x, weight, bias


def _choose(choice: list[float], top_k: int, n_group: int, topk_group: int) -> tuple[list[int], float]:
    """Ids by descending choice, lower id first, and the smallest gap that decided something."""
    size = len(choice) // n_group
    gap = float("inf")
    values = []
    for g in range(n_group):
        members = sorted(choice[g * size : (g + 1) * size], reverse=True)
        values.append(sum(members[:2]))
    groups = sorted(range(n_group), key=lambda g: (-values[g], g))
    if topk_group < n_group:
        gap = values[groups[topk_group - 1]] - values[groups[topk_group]]
    kept = [e for g in groups[:topk_group] for e in range(g * size, (g + 1) * size)]
    order = sorted(kept, key=lambda e: (-choice[e], e))
    for first, second in itertools.pairwise(order[: top_k + 1]):
        gap = min(gap, choice[first] - choice[second])
    return order[:top_k], gap


@pytest.mark.parametrize("case", mark_some(TINY, 1, 2, 3) + PRODUCTION, ids=str)
def test_router_equals_float64_loop(case: tuple[int, ...]) -> None:
    rows, hidden, num_experts, top_k, n_group, topk_group = case
    x, weight, bias = _case(rows, hidden, num_experts)
    ids, weights = abi_products.router(x, weight, bias, top_k, n_group, topk_group, True, 2.5)
    scores = torch.sigmoid(x.double() @ weight.double().T)
    choices = (scores + bias.double()).tolist()
    found_ids, compared = ids.tolist(), 0
    for row in range(rows):
        expected, gap = _choose(choices[row], top_k, n_group, topk_group)
        if gap < CLOSE:
            continue
        compared += 1
        assert found_ids[row] == expected, f"row {row}, gap {gap}"
        chosen = scores[row, expected]
        wanted = chosen / (chosen.sum() + 1e-20) * 2.5
        assert float((weights[row].double() - wanted).abs().max()) < 1e-5
    assert compared >= 0.9 * rows


def test_weights_without_normalisation() -> None:
    x, weight, bias = _case(4, 256, 16)
    ids, weights = abi_products.router(x, weight, bias, 4, 1, 1, False, 1.5)
    scores = torch.sigmoid(x.double() @ weight.double().T).gather(1, ids.long()) * 1.5
    assert float((weights.double() - scores).abs().max()) < 1e-5


def test_ties_go_to_the_lower_id() -> None:
    x, weight, bias = _case(6, 256, 256)
    weight[:] = weight[0]
    bias[:] = 0.25
    bias[100:] = 0.5
    ids, _ = abi_products.router(x, weight, bias, 8)
    assert ids.tolist() == [list(range(100, 108))] * 6
    bias[:] = 0.0
    ids, _ = abi_products.router(x, weight, bias, 8, 8, 2)  # all groups tie: the first two
    assert ids.tolist() == [list(range(8))] * 6


@sanitized
def test_nan_row_gives_ids_in_range() -> None:
    x, weight, bias = _case(3, 256, 16)
    clean, _ = abi_products.router(x, weight, bias, 4)
    x[1] = float("nan")
    ids, weights = abi_products.router(x, weight, bias, 4)
    assert ids[1].tolist() == [0, 1, 2, 3] and bool(weights[1].isnan().all())
    assert torch.equal(ids[[0, 2]], clean[[0, 2]])


def test_row_alone_equals_row_in_batch_and_repeats() -> None:
    x, weight, bias = _case(64, 6144, 256)
    ids, weights = abi_products.router(x, weight, bias, 8)
    for rows in (1, 5, 33, 64):
        part_ids, part_weights = abi_products.router(x[:rows].contiguous(), weight, bias, 8)
        assert torch.equal(part_ids, ids[:rows]) and torch.equal(part_weights, weights[:rows])


def test_refuses_groups_that_cannot_hold_the_choice() -> None:
    x, weight, bias = _case(2, 256, 16)
    with pytest.raises(abi_products.KernelError, match="kept groups must hold top_k"):
        abi_products.router(x, weight, bias, 5, 4, 1)
