"""rows.h and norm.h against plain loops: exact ids and positions, float64 norms."""

from __future__ import annotations

import random

import abi_rows
import pytest
import torch
from sanitized import mark_some

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def _ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


# (rows of each request, drafts of each request, K, padding rows)
STEPS = [
    ([1], [0], 0, 0),
    ([4], [3], 3, 0),
    ([4, 1, 9, 3], [3, 0, 0, 2], 3, 2),
    ([300, 2, 700, 1], [0, 1, 5, 0], 5, 17),
    ([2] * 130, [1] * 130, 8, 5),
]


@pytest.mark.parametrize("case", mark_some(STEPS, 2, 3), ids=lambda c: f"B{len(c[0])}-K{c[2]}")
def test_step_and_shift(case: tuple[list[int], list[int], int, int]) -> None:
    sizes, drafts, k, padding = case
    rng = random.Random(3)
    b, slots, total = len(sizes), k + 1, sum(sizes) + padding
    offsets = [sum(sizes[:i]) for i in range(b + 1)]
    tokens = [rng.randrange(1, 1000) for _ in range(total)]
    proposals = [[rng.randrange(1, 1000) for _ in range(max(k, 1))] for _ in range(b)]
    lengths = [rng.randrange(0, 100_000) for _ in range(b)]
    outputs = abi_rows.step_rows(
        _ints(tokens), _ints(offsets), _ints(drafts), torch.tensor(proposals, dtype=torch.int32, device="cuda"),
        _ints(lengths), slots,
    )  # fmt: skip
    ids, positions, requests, logit_rows = ([0] * total, [0] * total, [-1] * total, [0] * (b * slots))
    for r in range(b):
        for i in range(sizes[r]):
            row, draft = offsets[r] + i, i - (sizes[r] - drafts[r])
            ids[row] = proposals[r][draft] if draft >= 0 else tokens[row]
            positions[row], requests[row] = lengths[r] + i, r
        for j in range(slots):
            logit_rows[r * slots + j] = offsets[r + 1] - 1 - drafts[r] + min(j, drafts[r])
    assert [o.tolist() for o in outputs] == [ids, positions, requests, logit_rows]

    accepted = [rng.randrange(0, d + 1) for d in drafts]
    committed = [[rng.randrange(1, 1000) for _ in range(slots)] for _ in range(b)]
    prompt = [rng.choice([-1, 777]) for _ in range(b)]
    found = abi_rows.shift_rows(
        _ints(ids), _ints(offsets), _ints(drafts), _ints(accepted),
        torch.tensor(committed, dtype=torch.int32, device="cuda"), _ints(prompt), _ints(lengths),
    )  # fmt: skip
    shifted = [0] * total
    for r in range(b):
        new = sizes[r] - drafts[r]
        for i in range(sizes[r]):
            shifted[offsets[r] + i] = ids[offsets[r] + i + 1] if i < new - 1 else committed[r][i - new + 1]
        if drafts[r] == 0 and prompt[r] >= 0:
            shifted[offsets[r + 1] - 1] = prompt[r]
    last = [offsets[r] + sizes[r] - drafts[r] - 1 + accepted[r] for r in range(b)]
    following = [lengths[r] + sizes[r] - drafts[r] + accepted[r] for r in range(b)]
    assert [f.tolist() for f in found] == [shifted, last, following, list(range(b))]


def test_no_rows_and_bad_sizes() -> None:
    empty = _ints([])
    outputs = abi_rows.step_rows(
        empty, _ints([0]), empty, torch.zeros(0, 1, dtype=torch.int32, device="cuda"), empty, 1
    )
    assert all(o.numel() == 0 for o in outputs)
    with pytest.raises(abi_rows.KernelError, match="draft_width"):
        abi_rows.step_rows(
            _ints([1]), _ints([0, 1]), _ints([0]), torch.zeros(1, 1, dtype=torch.int32, device="cuda"), _ints([0]), 4
        )


# bf16 output: half a step is at most 2^-8 of the value; fp32 sums of up to 16384 squares add less than 1e-6.
ROUNDING = 2.0**-8 + 1e-6


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize(
    ("rows", "row_width", "offset", "width"),
    mark_some(
        [
            (1, 8, 0, 8),
            (3, 128, 64, 32),
            (7, 2624, 0, 2048),
            (5, 6144, 0, 6144),
            (2, 16384, 0, 16384),
            (33, 4112, 16, 4096),
        ],
        *(1, 3),
        unpack=True,
    ),
)
def test_rms_norm(rows: int, row_width: int, offset: int, width: int) -> None:
    x = (torch.randn(rows, row_width, device="cuda") * 3 + 1).bfloat16()
    x[:, :offset] = float("nan")
    x[:, offset + width :] = float("nan")
    weight = torch.randn(width, device="cuda").bfloat16()
    found = abi_rows.rms_norm(x, weight, 1e-5, offset)
    expected = _normed(x[:, offset : offset + width], weight, 1e-5)
    assert bool(((found.double() - expected).abs() <= expected.abs() * ROUNDING).all())
    assert torch.equal(abi_rows.rms_norm(x[-1:].contiguous(), weight, 1e-5, offset)[0], found[-1])


@pytest.mark.parametrize(("rows", "width"), mark_some([(1, 64), (4, 6144), (9, 2048), (2, 16384)], 0, 2, unpack=True))
def test_add_rms_norm(rows: int, width: int) -> None:
    x, residual = (torch.randn(rows, width, device="cuda").bfloat16() for _ in range(2))
    weight = torch.randn(width, device="cuda").bfloat16()
    y, total = abi_rows.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, abi_rows.rms_norm(total, weight, 1e-5))
    # In place: y over x, sum over residual.
    abi_rows.call("glm_add_rms_norm", x, residual, weight, x, residual, rows, width, 1e-5)
    torch.cuda.synchronize()
    assert torch.equal(x, y)
    assert torch.equal(residual, total)


@pytest.mark.parametrize(("rows", "width"), mark_some([(1, 8), (5, 2048), (130, 12288)], 1, unpack=True))
def test_silu_mul(rows: int, width: int) -> None:
    x = (torch.randn(rows, 2 * width, device="cuda") * 4).bfloat16()
    x[0, 0] = -200.0
    found = abi_rows.silu_mul(x).double()
    gate, up = x[:, :width].double(), x[:, width:].double()
    expected = gate / (1 + torch.exp(-gate)) * up
    assert bool(((found - expected).abs() <= expected.abs() * ROUNDING + 1e-37).all())


def test_norm_refusals() -> None:
    x, weight = torch.zeros(2, 64, device="cuda").bfloat16(), torch.zeros(12, device="cuda").bfloat16()
    with pytest.raises(abi_rows.KernelError, match="multiple of 8"):
        abi_rows.rms_norm(x, weight, 1e-5)
    with pytest.raises(abi_rows.KernelError, match="inside the row"):
        abi_rows.rms_norm(x, torch.zeros(32, device="cuda").bfloat16(), 1e-5, 40)


@pytest.mark.parametrize(("rows", "width"), mark_some([(1, 64), (5, 256), (4, 6144), (3, 16384)], 1, unpack=True))
def test_draft_input(rows: int, width: int) -> None:
    table = (torch.randn(11, width, device="cuda") * 50).bfloat16()
    hidden = torch.randn(rows, width, device="cuda").bfloat16()
    token_norm, hidden_norm = (torch.randn(width, device="cuda").bfloat16() for _ in range(2))
    token_ids = torch.arange(rows, device="cuda", dtype=torch.int32) * 4 % 11
    found = abi_rows.draft_input(table, token_ids, hidden, token_norm, hidden_norm, 1e-5)
    assert torch.equal(found[:, :width], abi_rows.rms_norm(table[token_ids.long()], token_norm, 1e-5))
    assert torch.equal(found[:, width:], abi_rows.rms_norm(hidden, hidden_norm, 1e-5))


def test_draft_input_of_a_token_outside_the_vocabulary_is_zero() -> None:
    table, hidden = (torch.ones(2, 64, device="cuda").bfloat16() for _ in range(2))
    norm = torch.ones(64, device="cuda").bfloat16()
    token_ids = torch.tensor([-1, 2], device="cuda", dtype=torch.int32)
    found = abi_rows.draft_input(table, token_ids, hidden, norm, norm, 1e-5)
    assert bool((found[:, :64] == 0).all())
    assert bool((found[:, 64:] == 1).all())
