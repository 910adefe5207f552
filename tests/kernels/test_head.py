"""glm_head_logits and glm_head_argmax against float64 logits; masks, ties and NaN."""

from __future__ import annotations

import abi_products
import pytest
import torch
from quantised_oracle import assert_close
from sanitized import mark_some, sanitized

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# (rows of x, rows taken, hidden, vocab, valid)
TINY = [(4, 4, 256, 512, 512), (8, 3, 256, 512, 480), (1, 1, 16, 16, 16), (40, 20, 256, 512, 509), (9, 70, 128, 272, 1)]
PRODUCTION = [(8, 4, 6144, 154880, 151552), (200, 130, 6144, 154880, 154871)]
F32_LIMIT = 1e-5  # fp32 sums of exact bf16 products


def _case(case: tuple[int, int, int, int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_x_rows, num_rows, hidden, vocab, _ = case
    generator = torch.Generator(device="cuda").manual_seed(21)
    x = torch.randn(num_x_rows, hidden, device="cuda", generator=generator).bfloat16()
    weight = (torch.randn(vocab, hidden, device="cuda", generator=generator) * hidden**-0.5).bfloat16()
    rows = torch.randint(0, num_x_rows, (num_rows,), device="cuda", dtype=torch.int32, generator=generator)
    return x, rows, weight


@pytest.mark.parametrize("case", mark_some(TINY, 1, 3, 4) + PRODUCTION, ids=str)
def test_logits_equal_float64_product(case: tuple[int, int, int, int, int]) -> None:
    x, rows, weight = _case(case)
    valid = case[-1]
    found = abi_products.head_logits(x, rows, weight, valid)
    expected = torch.cat([x[rows.long()].double() @ part.double().T for part in weight.split(16384)], dim=1)
    assert_close(found[:, :valid], expected[:, :valid], F32_LIMIT, f"logits {case}")
    assert bool((found[:, valid:] == float("-inf")).all())


def test_rows_out_of_range_read_as_zeros() -> None:
    x, rows, weight = _case((4, 4, 256, 512, 512))
    rows = torch.tensor([-1, 2, 4, 0], dtype=torch.int32, device="cuda")
    found = abi_products.head_logits(x, rows, weight, 512)
    assert bool((found[[0, 2]] == 0).all())
    assert_close(found[[1, 3]], x[[2, 0]].double() @ weight.double().T, F32_LIMIT, "rows in range")


@pytest.mark.parametrize("case", mark_some(TINY, 1, 3, 4) + PRODUCTION, ids=str)
def test_argmax_is_the_argmax_of_the_logits(case: tuple[int, int, int, int, int]) -> None:
    x, _, weight = _case(case)
    valid = case[-1]
    found = abi_products.head_argmax(x, weight, valid)
    everything = torch.arange(x.shape[0], dtype=torch.int32, device="cuda")
    logits = abi_products.head_logits(x, everything, weight, valid)
    largest = logits.max(dim=1, keepdim=True).values
    first = (logits == largest).int().argmax(dim=1)
    assert torch.equal(found.long(), first)
    exact = torch.cat([x.double() @ part.double().T for part in weight[:valid].split(16384)], dim=1)
    gap = exact.max(dim=1).values - exact.gather(1, found.long()[:, None])[:, 0]
    assert float(gap.max()) < 1e-5  # the chosen logit is the largest up to fp32 rounding


def test_ties_go_to_the_lowest_id() -> None:
    x, _, weight = _case((5, 1, 256, 512, 512))
    winner = int((x[:1].double() @ weight.double().T).argmax())
    for copy in ({3, 200, 511}, {130, 129}, {511, 510}):
        tied = weight.clone() * 0.1
        for row in copy:
            tied[row] = weight[winner]
        assert int(abi_products.head_argmax(x[:1].contiguous(), tied, 512)[0]) == min(copy)


@sanitized
def test_nan_never_wins() -> None:
    x, _, weight = _case((3, 1, 256, 512, 512))
    expected = abi_products.head_argmax(x, weight, 512)
    poisoned = weight.clone()
    others = [row for row in (0, 1, 64, 130, 511) if row not in expected.tolist()]
    poisoned[others] = float("nan")
    assert torch.equal(abi_products.head_argmax(x, poisoned, 512), expected)
    x[1] = float("nan")
    found = abi_products.head_argmax(x, weight, 512)
    assert int(found[1]) == 0 and int(found[0]) == int(expected[0]) and int(found[2]) == int(expected[2])


def test_negative_logits_and_no_valid_vocabulary() -> None:
    x = torch.ones(2, 64, dtype=torch.bfloat16, device="cuda")
    weight = -torch.ones(256, 64, dtype=torch.bfloat16, device="cuda")
    weight[77] = -0.5
    assert abi_products.head_argmax(x, weight, 256).tolist() == [77, 77]
    assert abi_products.head_argmax(x, weight, 70).tolist() == [0, 0]
    assert abi_products.head_argmax(x, weight, 0).tolist() == [0, 0]
