"""glm_indexer against float64: written keys, scores of every visible key, and the exact selection rule."""

from __future__ import annotations

from dataclasses import dataclass

import abi_attention
import pytest
import torch
from abi_attention import Step
from abi_products import KernelError
from cache_formats import assert_close, index_page_keys, index_pages, power_of_two_scale, rotated
from sanitized import mark_some

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

THETA = 8e6
# Scores: fp32 sums of a few thousand terms, and now and then one of 4096 q lanes whose rounding (2^-8 of it in bf16, 2^-4 in
# e4m3) falls the other way in float64: 2^-8 / 64 and 2^-4 / 64 of the norm, times the lane's size over the mean.
SCORE_LIMIT = {False: 3e-4, True: 3e-3}
# Keys are rounded once: half a step is at most 2^-8 of a bf16 value and 2^-4 of an e4m3 one; fp32 noise before it.
KEY_STEP = {False: 2.0**-8 + 1e-5, True: 2.0**-4 + 1e-5}


@dataclass(frozen=True)
class Case:
    """Rows of each request end at the given context lengths; all rows of a request are new in this call."""

    contexts: tuple[int, ...]
    rows: tuple[int, ...]
    num_heads: int = 16
    head_dim: int = 64
    rope_dim: int = 32
    topk: int = 64
    interleaved: bool = True
    padding: int = 0


TINY = [
    Case((300,), (4,)),
    Case((300, 65, 64, 1, 129), (4, 2, 1, 1, 3), padding=2),
    Case((1000, 999), (9, 5), interleaved=False),
    Case((200,), (136,)),
]
CORNERS = [
    Case((64, 128), (64, 128), topk=16),
    Case((130,), (3,), num_heads=8, head_dim=16, rope_dim=16, topk=5),
    Case((513, 70), (7, 6), num_heads=40, head_dim=80, rope_dim=0, topk=33),
    Case((260, 261, 262), (1, 1, 1), num_heads=64, head_dim=128, rope_dim=128, topk=1),
    Case((70_000,), (2,), num_heads=32, head_dim=128, rope_dim=64, topk=2048),
]
PRODUCTION = [
    Case((8000,), (4,), 32, 128, 64, 2048),
    Case((8000, 2049, 2048, 40, 7777, 8100, 5000, 6000), (4, 4, 4, 4, 3, 1, 8, 4), 32, 128, 64, 2048, padding=3),
    Case((3000,), (1500,), 32, 128, 64, 2048),
    Case((9000,) * 40, (1,) * 40, 32, 128, 64, 2048),
]


@dataclass(frozen=True)
class Inputs:
    q: torch.Tensor
    key_gate: torch.Tensor
    norm: tuple[torch.Tensor, torch.Tensor]
    step: Step
    cache: torch.Tensor
    layer: int


def make_inputs(case: Case, fp8: bool, seed: int = 5) -> Inputs:
    """Random rows; the pages hold the keys of earlier positions and NaN everywhere else."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    num_pages_each = max(-(-context // 64) for context in case.contexts) + 1
    num_pages, layer = len(case.contexts) * num_pages_each + 3, 1
    order = torch.randperm(num_pages - 1, device="cuda", generator=generator)[: num_pages - 3] + 1
    table = order.view(len(case.contexts), num_pages_each).int().contiguous()
    keys = torch.randn(num_pages, 64, case.head_dim, device="cuda", generator=generator)
    pages = index_pages(keys, fp8)
    valid = torch.zeros(num_pages, 64, dtype=torch.bool, device="cuda")
    positions, requests = [], []
    for b, (context, rows) in enumerate(zip(case.contexts, case.rows, strict=True)):
        old = torch.arange(context - rows, device="cuda")
        valid[table[b, old // 64].long(), old % 64] = True
        positions += list(range(context - rows, context))
        requests += [b] * rows
        table[b, -(-context // 64) :] = 0x7FFFFFF0  # no such page: must not be touched
    if fp8:
        raw = pages.reshape(num_pages, -1)
        hostile = torch.full_like(raw, 0x7F)
        keep = torch.cat((valid[..., None].expand(-1, -1, case.head_dim).flatten(1), valid.repeat_interleave(4, 1)), 1)
        pages = torch.where(keep, raw, hostile).view(pages.shape)
    else:
        pages = torch.where(valid[..., None], pages, torch.nan)
    cache = torch.stack((pages.flip(0), pages, pages.flip(0))).contiguous()
    positions += [123] * case.padding
    requests += [-1] * case.padding
    total = len(positions)
    q = torch.randn(total, case.num_heads * case.head_dim, device="cuda", generator=generator).bfloat16()
    key_gate = torch.randn(total, case.head_dim + case.num_heads, device="cuda", generator=generator) * 2 + 0.5
    norm = (
        1 + 0.2 * torch.randn(case.head_dim, device="cuda", generator=generator),
        0.2 * torch.randn(case.head_dim, device="cuda", generator=generator),
    )
    step = Step(
        torch.tensor(positions, dtype=torch.int32, device="cuda"),
        torch.tensor(requests, dtype=torch.int32, device="cuda"),
        table,
    )
    return Inputs(q, key_gate, norm, step, cache, layer)


def run(case: Case, inputs: Inputs, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return abi_attention.indexer(
        inputs.q, inputs.key_gate, inputs.norm, inputs.step, cache, inputs.layer, case.num_heads, case.rope_dim,
        case.topk, case.interleaved, THETA,
    )  # fmt: skip


def expected_keys(case: Case, inputs: Inputs) -> torch.Tensor:
    """float64 [T, head_dim], before rounding."""
    x = inputs.key_gate[:, : case.head_dim].double()
    centred = x - x.mean(1, keepdim=True)
    normed = centred / (centred.square().mean(1, keepdim=True) + 1e-6).sqrt()
    keys = normed * inputs.norm[0].double() + inputs.norm[1].double()
    turned = rotated(keys[:, : case.rope_dim], inputs.step.positions, THETA, case.interleaved)
    return torch.cat((turned, keys[:, case.rope_dim :]), 1)


def rounded_q(case: Case, inputs: Inputs, fp8: bool) -> torch.Tensor:
    """float64 [T, heads, head_dim] as the kernel multiplies it."""
    q = inputs.q.double().unflatten(1, (case.num_heads, case.head_dim))
    turned = rotated(q[..., : case.rope_dim], inputs.step.positions, THETA, case.interleaved)
    q = torch.cat((turned, q[..., case.rope_dim :]), -1)
    if not fp8:
        return q.bfloat16().double()
    scale = power_of_two_scale(q.abs().amax(-1, keepdim=True), 2.0**-120)
    return (q / scale).float().to(torch.float8_e4m3fn).double() * scale


def expected_list(scores: list[float], topk: int) -> list[int]:
    """The rule on plain floats: best first, lower position on ties, NaN best, -inf never; stored ascending, then -1."""
    ranked = sorted(range(len(scores)), key=lambda t: (-(float("inf") if scores[t] != scores[t] else scores[t]), t))
    chosen = sorted(t for t in ranked[:topk] if scores[t] != float("-inf"))
    return chosen + [-1] * (topk - len(chosen))


def check(case: Case, fp8: bool) -> None:
    inputs = make_inputs(case, fp8)
    cache = inputs.cache.clone()
    selection, scores = run(case, inputs, cache)

    written = index_page_keys(cache, inputs.layer, case.head_dim)
    keys, real = expected_keys(case, inputs), inputs.step.row_requests >= 0
    positions, requests = inputs.step.positions.long(), inputs.step.row_requests.long()
    slots = inputs.step.block_table[requests.clamp(min=0), positions // 64].long() * 64 + positions % 64
    found = written.flatten(0, 1)[slots[real]]
    bound = keys[real].abs() * KEY_STEP[fp8] + keys[real].abs().amax(-1, keepdim=True) * (2.0**-17 if fp8 else 1e-6)
    assert bool(((found - keys[real]).abs() <= bound).all()), "a written key is off by more than its rounding"
    changed = (cache.view(torch.int8) != inputs.cache.view(torch.int8)).flatten(2)
    assert not bool(changed[[0, 2]].any()), "another layer was written"
    touched_pages = set(changed[1].any(1).nonzero().flatten().tolist())
    assert touched_pages <= set((slots[real] // 64).tolist()), "a page without new rows was written"

    q, gates = rounded_q(case, inputs, fp8), inputs.key_gate[:, case.head_dim :].double()
    for row in range(len(positions)):
        context = int(positions[row]) + 1
        if not bool(real[row]):
            assert bool((selection[row] == -1).all())
            continue
        if context <= case.topk:
            assert selection[row].tolist() == list(range(context)) + [-1] * (case.topk - context)
            assert bool(scores[row].isnan().all()), "a row that selects its whole context was scored"
            continue
        pages = inputs.step.block_table[requests[row], : -(-context // 64)].long()
        visible = written[pages].flatten(0, 1)[:context]
        products = torch.relu(visible @ q[row].T) * case.head_dim**-0.5
        expected = (products * gates[row] * case.num_heads**-0.5).sum(1)
        assert_close(scores[row, :context], expected, SCORE_LIMIT[fp8], f"scores of row {row}")
        assert bool(scores[row, context:].isnan().all()), "a key past the row's own position was scored"
    scored = [r for r in range(len(positions)) if bool(real[r]) and int(positions[r]) >= case.topk]
    for row in scored[:: max(1, len(scored) // 24)]:
        context = int(positions[row]) + 1
        assert selection[row].tolist() == expected_list(scores[row, :context].tolist(), case.topk), f"row {row}"


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("case", mark_some(TINY, 1, 3), ids=str)
def test_tiny(case: Case, fp8: bool) -> None:
    check(case, fp8)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("case", mark_some(CORNERS, 2), ids=str)
def test_corners(case: Case, fp8: bool) -> None:
    check(case, fp8)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("case", PRODUCTION, ids=str)
def test_production(case: Case, fp8: bool) -> None:
    check(case, fp8)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("case", [TINY[1], PRODUCTION[1]], ids=str)
def test_repeats_and_lone_rows_have_the_same_bits(case: Case, fp8: bool) -> None:
    inputs = make_inputs(case, fp8)
    cache = inputs.cache.clone()
    selection, scores = run(case, inputs, cache)
    again, scores_again = run(case, inputs, inputs.cache.clone())
    assert torch.equal(selection, again)
    assert torch.equal(scores.view(torch.int32), scores_again.view(torch.int32))
    for row in range(0, selection.shape[0], 5):
        alone = Inputs(
            inputs.q[row : row + 1].contiguous(), inputs.key_gate[row : row + 1].contiguous(), inputs.norm,
            inputs.step.rows(row, row + 1), cache, inputs.layer,
        )  # fmt: skip
        one, one_scores = run(case, alone, cache.clone())
        assert torch.equal(one[0], selection[row])
        assert torch.equal(one_scores[0].view(torch.int32), scores[row].view(torch.int32))


@pytest.mark.parametrize("context", [700, 20_000])
def test_ties_nan_and_huge_scores(context: int) -> None:
    """Equal keys tie exactly; a NaN key is selected, -1e30 scores are ordered, an unreachable page never is."""
    case = Case((context,), (1,), num_heads=16, head_dim=64, rope_dim=0, topk=64)
    inputs = make_inputs(case, False)
    pages = inputs.cache[inputs.layer]
    table = inputs.step.block_table[0].long()
    positions = torch.arange(context - 1, device="cuda")
    keys = torch.randn(7, 64, device="cuda").bfloat16()
    pages[table[positions // 64], positions % 64] = keys[positions % 7]
    inputs.key_gate[:, 64:] *= 1e30
    lost, broken = 2, 333
    pages[table[broken // 64], broken % 64] = torch.nan
    inputs.step.block_table[0, lost] = -5
    selection, scores = run(case, inputs, inputs.cache)
    values = scores[0, :context].tolist()
    assert values[broken] != values[broken]
    assert all(values[t] == float("-inf") for t in range(lost * 64, lost * 64 + 64))
    assert selection[0].tolist() == expected_list(values, case.topk)
    assert broken in selection[0].tolist()
    kept = [t for t in selection[0].tolist() if t not in (broken, context - 1)]
    assert len({values[t] for t in kept}) < len(kept), "the case has no ties"


def test_positions_of_a_million() -> None:
    """Angles stay exact: the key at position 1,000,003 equals float64 rope to a bf16 step."""
    case = Case((64,), (1,))
    inputs = make_inputs(case, False)
    far = 1_000_003
    table = torch.zeros(1, far // 64 + 1, dtype=torch.int32, device="cuda")
    table[0, far // 64] = 2
    step = Step(torch.tensor([far], dtype=torch.int32, device="cuda"), inputs.step.row_requests, table)
    # Every page but its own is page 0: the row is scored over a million keys.
    moved = Inputs(inputs.q, inputs.key_gate, inputs.norm, step, inputs.cache.nan_to_num(0.0), inputs.layer)
    cache = moved.cache.clone()
    run(case, moved, cache)
    found = cache[inputs.layer, 2, far % 64].double()
    expected = expected_keys(case, moved)[0]
    assert float(((found - expected).abs() - expected.abs() * 2.0**-8).max()) <= 1e-5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_heads": 12}, "multiple of 8"),
        ({"head_dim": 24}, "multiple of 16"),
        ({"layer": 3}, "layer 3"),
        ({"index_topk": 20_000}, "index_topk"),
        ({"rope_dim": 65}, "rope_dim"),
        ({"q": 0}, "q is null"),
    ],
    ids=str,
)
def test_refusals_say_what_is_wrong(change: dict[str, int], words: str) -> None:
    case = TINY[0]
    inputs = make_inputs(case, False)
    selection = torch.empty(4, case.topk, dtype=torch.int32, device="cuda")
    args = abi_attention.indexer_args(
        inputs.q, inputs.key_gate, inputs.norm, inputs.step, inputs.cache, inputs.layer, case.num_heads, case.rope_dim,
        case.topk, True, THETA, selection, None,
    )  # fmt: skip
    space = abi_attention.workspace("glm_indexer", args)
    for name, value in change.items():
        setattr(args, name, value)
    with pytest.raises(KernelError, match=words):
        abi_attention.launch("glm_indexer", args, space)
