"""glm_mla_attention against float64: written latents, attention over the list, padding, splits, both cache formats."""

from __future__ import annotations

from dataclasses import dataclass, replace

import abi_attention
import pytest
import torch
from abi_attention import MlaWeights, Step
from abi_products import KernelError
from cache_formats import assert_close, latent_rows, packed_latents, rotated
from sanitized import mark_some

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

THETA = 8e6
# Against an oracle that rounds the absorbed q as attention.h says: probabilities, attended latent and output are rounded to
# bf16, 2^-9 at most and 1.1e-3 in the root mean square each. Against one without rounding: scores of size 8 move by 2^-9
# of themselves, so the weights of a peaked softmax move by a percent.
OUTPUT_LIMIT, UNROUNDED_LIMIT = 4e-3, 1.5e-2
LATENT_STEP = {False: 2.0**-8 + 1e-5, True: 2.0**-4 + 1e-5}


@dataclass(frozen=True)
class Case:
    """Rows of each request end at the given contexts; a row's list has `used` entries (all visible ones if fewer)."""

    contexts: tuple[int, ...]
    rows: tuple[int, ...]
    used: int = 64
    topk: int = 64
    num_heads: int = 8
    kv_lora: int = 128
    rope_dim: int = 32
    nope_dim: int = 64
    v_dim: int = 64
    interleaved: bool = True
    padding: int = 0
    column_offset: int = 48
    num_splits: int = 0


TINY = [
    Case((300,), (4,)),
    Case((300, 65, 64, 1, 129), (4, 2, 1, 1, 3), padding=2),
    Case((1000, 999), (9, 5), interleaved=False, column_offset=0),
    Case((200,), (136,)),
]
CORNERS = [
    Case((500, 20), (3, 2), used=0),
    Case((64, 128), (64, 128), used=17),
    Case((900,), (5,), topk=300, used=300, num_splits=3, num_heads=3),
    Case((900, 77), (5, 1), topk=300, used=130, num_splits=5, num_heads=20, kv_lora=384, nope_dim=48, v_dim=80),
    Case((700,), (20,), topk=129, used=129, num_heads=16, kv_lora=512, rope_dim=64, nope_dim=192, v_dim=256),
    # Lanes of the wgmma kernel; in one split its ring of two stages goes round twice. 64 heads, one padded head block, two.
    *(Case((330,), (3,), 290, 300, heads, 512, 64, 16, 16, padding=1, num_splits=1) for heads in (64, 8, 9, 72)),
    # Too few heads for it.
    Case((700,), (20,), 129, 129, 7, 512, 64, 16, 32),
]
GLM = Case((8000,), (4,), 2048, 2048, 64, 512, 64, 192, 256)
PRODUCTION = [
    GLM,
    replace(GLM, num_heads=8),  # of a rank of eight
    replace(GLM, contexts=(8000, 2049, 40, 7777, 1), rows=(4, 4, 4, 3, 1), padding=2),
    replace(GLM, contexts=(3000,), rows=(70,), num_splits=1),
    replace(GLM, contexts=(3000,), rows=(3,), used=100, num_splits=7),
    replace(GLM, num_heads=16),
    replace(GLM, contexts=(8000, 2049, 40, 7777, 1), rows=(4, 4, 4, 3, 1), padding=2, num_heads=32),
    replace(GLM, contexts=(3000,), rows=(70,), num_splits=1, num_heads=8),
]
# Rows enough for the products on warpgroups (128, in tiles of 128) and for widening an FP8 cache (512); several requests,
# tails, padding, and sizes that have the attention's kernel but not the products'.
WIDE = Case((700, 130, 65), (400, 100, 65), 129, 129, 8, 512, 64, 192, 256, padding=3)
MANY = [
    replace(WIDE, contexts=(150,), rows=(129,), padding=0),
    WIDE,
    replace(WIDE, num_heads=64, used=300, topk=300),
    replace(WIDE, num_heads=33, interleaved=False),
    replace(WIDE, num_heads=16, contexts=(3000, 1), rows=(128, 1), padding=1, num_splits=2),
    replace(WIDE, num_heads=32, contexts=(700, 40), rows=(700, 17)),
    replace(WIDE, nope_dim=16, v_dim=32),
]


@dataclass(frozen=True)
class Inputs:
    q: torch.Tensor
    latent: torch.Tensor
    weights: MlaWeights
    selection: torch.Tensor
    step: Step
    cache: torch.Tensor
    layer: int
    scale: float


def _lists(case: Case, positions: list[int], requests: list[int], generator: torch.Generator) -> torch.Tensor:
    selection = torch.full((len(positions), case.topk), -1, dtype=torch.int32, device="cuda")
    for row, (position, request) in enumerate(zip(positions, requests, strict=True)):
        used = min(case.used, position + 1)
        if request >= 0 and used > 0:
            order = torch.randperm(position + 1, device="cuda", generator=generator)[:used]
            selection[row, :used] = order.sort().values.int()
        # Hostile negative ids behind the list.
        selection[row, used::3] = -2_000_000_000
    return selection


def make_inputs(case: Case, fp8: bool, seed: int = 9) -> Inputs:
    """Random rows and lists; cache rows that no list names are NaN (bf16) or NaN bytes (FP8)."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    num_pages_each = max(-(-context // 64) for context in case.contexts) + 1
    num_pages, layer = len(case.contexts) * num_pages_each + 3, 1
    order = torch.randperm(num_pages - 1, device="cuda", generator=generator)[: num_pages - 3] + 1
    table = order.view(len(case.contexts), num_pages_each).int().contiguous()
    positions, requests = [], []
    for b, (context, rows) in enumerate(zip(case.contexts, case.rows, strict=True)):
        positions += list(range(context - rows, context))
        requests += [b] * rows
        table[b, -(-context // 64) :] = 0x7FFFFFF0
    positions += [123] * case.padding
    requests += [-1] * case.padding
    selection = _lists(case, positions, requests, generator)
    width = case.kv_lora + case.rope_dim
    rows_of_cache = torch.randn(num_pages * 64, width, device="cuda", generator=generator)
    named = torch.zeros(num_pages * 64, dtype=torch.bool, device="cuda")
    for row, request in enumerate(requests):
        if request >= 0:
            keys = selection[row][selection[row] >= 0].long()
            named[table[request, keys // 64].long() * 64 + keys % 64] = True
    packed = packed_latents(rows_of_cache, case.kv_lora, fp8)
    hostile = torch.full_like(packed, 0x7F if fp8 else float("nan"))
    pages = torch.where(named[:, None], packed, hostile).view(num_pages, 64, -1)
    cache = torch.stack((pages.flip(0), pages, pages.flip(0))).contiguous()
    total, h = len(positions), case.num_heads

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, device="cuda", generator=generator) * scale).bfloat16()

    weights = MlaWeights(
        (1 + 0.2 * torch.randn(case.kv_lora, device="cuda", generator=generator)).bfloat16(),
        normal(h, case.nope_dim, case.kv_lora, scale=case.kv_lora**-0.5),
        normal(h, case.v_dim, case.kv_lora, scale=case.kv_lora**-0.5),
    )
    step = Step(
        torch.tensor(positions, dtype=torch.int32, device="cuda"),
        torch.tensor(requests, dtype=torch.int32, device="cuda"),
        table,
    )
    return Inputs(
        normal(total, h * (case.nope_dim + case.rope_dim)),
        normal(total, case.column_offset + width + 8, scale=3.0),
        weights,
        selection,
        step,
        cache,
        layer,
        2.0 * (case.nope_dim + case.rope_dim) ** -0.5,
    )


def run(case: Case, inputs: Inputs, cache: torch.Tensor) -> torch.Tensor:
    return abi_attention.mla_attention(
        inputs.q, inputs.latent, inputs.weights, inputs.selection, inputs.step, cache, inputs.layer, inputs.scale,
        case.column_offset, case.interleaved, THETA, case.num_splits,
    )  # fmt: skip


def _part(inputs: Inputs, begin: int, end: int) -> Inputs:
    """The same call of rows begin .. end alone."""
    return replace(
        inputs, q=inputs.q[begin:end].contiguous(), latent=inputs.latent[begin:end].contiguous(),
        selection=inputs.selection[begin:end].contiguous(), step=inputs.step.rows(begin, end),
    )  # fmt: skip


def expected_latents(case: Case, inputs: Inputs) -> torch.Tensor:
    """float64 [T, kv_lora + rope] before rounding."""
    raw = inputs.latent[:, case.column_offset : case.column_offset + case.kv_lora + case.rope_dim].double()
    latent, rope = raw[:, : case.kv_lora], raw[:, case.kv_lora :]
    normed = latent / (latent.square().mean(1, keepdim=True) + 1e-6).sqrt() * inputs.weights.kv_norm.double()
    return torch.cat((normed, rotated(rope, inputs.step.positions, THETA, case.interleaved)), 1)


def expected_output(case: Case, inputs: Inputs, rows: torch.Tensor, rounded: bool, every: int = 1) -> torch.Tensor:
    """float64 [T, H, v] from the cache rows as written, one row at a time; `rounded`: the absorbed q in bf16. Rows between
    every `every`-th are left 0."""
    w_uk, w_uv = inputs.weights.w_uk.double(), inputs.weights.w_uv.double()
    q = inputs.q.double().unflatten(1, (case.num_heads, case.nope_dim + case.rope_dim))
    q_rope = rotated(q[..., case.nope_dim :], inputs.step.positions, THETA, case.interleaved)
    out = torch.zeros(q.shape[0], case.num_heads, case.v_dim, dtype=torch.float64, device="cuda")
    for row, request in list(enumerate(inputs.step.row_requests.tolist()))[::every]:
        entries = inputs.selection[row][inputs.selection[row] >= 0].long()
        if request < 0 or len(entries) == 0:
            continue
        keys = rows[inputs.step.block_table[request, entries // 64].long() * 64 + entries % 64]
        query = torch.cat((torch.einsum("hn,hnc->hc", q[row, :, : case.nope_dim], w_uk), q_rope[row]), 1)
        scores = (query.bfloat16().double() if rounded else query) @ keys.T
        attended = torch.softmax(scores * inputs.scale, 1) @ keys[:, : case.kv_lora]
        out[row] = torch.einsum("hc,hvc->hv", attended, w_uv)
    return out


def check(case: Case, fp8: bool, every: int = 1) -> None:
    """Written latents, untouched memory and the output; of that, every `every`-th row has an oracle."""
    inputs = make_inputs(case, fp8)
    cache = inputs.cache.clone()
    out = run(case, inputs, cache).unflatten(1, (case.num_heads, case.v_dim))

    rows = latent_rows(cache, inputs.layer, case.kv_lora)
    real = inputs.step.row_requests >= 0
    positions, requests = inputs.step.positions.long(), inputs.step.row_requests.long().clamp(min=0)
    slots = inputs.step.block_table[requests, positions // 64].long() * 64 + positions % 64
    expected = expected_latents(case, inputs)[real]
    found = rows[slots[real]]
    step = torch.full_like(expected, LATENT_STEP[False])
    step[:, : case.kv_lora] = LATENT_STEP[fp8]
    bound = expected.abs() * step + (
        expected[:, : case.kv_lora].abs().amax(1, keepdim=True) * 2.0**-17 if fp8 else 1e-5
    )
    assert bool(((found - expected).abs() <= bound).all()), "a written latent is off by more than its rounding"
    changed = (
        (cache.view(torch.int8) != inputs.cache.view(torch.int8))
        .flatten(0, 2)
        .view(3, -1, cache.shape[-1] * (2 if cache.dtype == torch.bfloat16 else 1))
        .any(2)
    )
    assert not bool(changed[[0, 2]].any()), "another layer was written"
    assert set(changed[1].nonzero().flatten().tolist()) <= set(slots[real].tolist()), "a foreign row was written"

    empty = ~real | (inputs.selection < 0).all(1)
    assert bool((out[empty] == 0).all()), "a row without entries must give 0"
    for rounded, limit in ((True, OUTPUT_LIMIT), (False, UNROUNDED_LIMIT)):
        reference = expected_output(case, inputs, rows, rounded, every)
        checked = ~empty & (torch.arange(len(empty), device="cuda") % every == 0)
        assert_close(out[checked].flatten(1), reference[checked].flatten(1), limit, f"output, rounded={rounded}")


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("case", mark_some(TINY, 1), ids=str)
def test_tiny(case: Case, fp8: bool) -> None:
    check(case, fp8)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("case", mark_some(CORNERS, 2, 4, 5, 6), ids=str)
def test_corners(case: Case, fp8: bool) -> None:
    check(case, fp8)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("case", PRODUCTION, ids=str)
def test_production(case: Case, fp8: bool) -> None:
    check(case, fp8)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("case", mark_some(MANY, 0), ids=str)
def test_many_rows(case: Case, fp8: bool) -> None:
    check(case, fp8)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize(
    "case", [TINY[1], replace(PRODUCTION[2], num_splits=4), replace(PRODUCTION[1], num_splits=8)], ids=str
)
def test_repeats_and_lone_rows_have_the_same_bits(case: Case, fp8: bool) -> None:
    inputs = make_inputs(case, fp8)
    cache = inputs.cache.clone()
    out = run(case, inputs, cache)
    assert torch.equal(out, run(case, inputs, inputs.cache.clone()))
    for row in range(0, out.shape[0], 3):
        assert torch.equal(run(case, _part(inputs, row, row + 1), cache.clone())[0], out[row])


def test_a_widened_cache_gives_the_same_bits() -> None:
    """Too few rows for widening read the FP8 rows themselves; a page that is out of range counts in neither."""
    case = replace(WIDE, nope_dim=16, v_dim=32, num_splits=1)
    inputs = make_inputs(case, True)
    inputs.step.block_table[0, 3] = -1
    inputs.step.block_table[1, 1] = inputs.cache.shape[1]
    cache = inputs.cache.clone()
    out = run(case, inputs, cache)
    for begin in range(0, out.shape[0], 200):
        part = _part(inputs, begin, begin + 200)
        assert torch.equal(run(case, part, cache.clone()), out[begin : begin + 200])


def test_workspace_grows_with_every_size() -> None:
    """TensorRT asks once, at the largest sizes of a profile."""
    case = Case((200,), (4,), 64, 64, 8, 512, 64, 192, 256)
    inputs = make_inputs(case, True)
    args = abi_attention.mla_args(
        inputs.q, inputs.latent, inputs.weights, inputs.selection, inputs.step, inputs.cache, inputs.layer,
        inputs.scale, case.column_offset, True, THETA, 0, inputs.q,
    )  # fmt: skip
    sizes = {}
    for args.num_rows in (4, 511, 512, 3000):
        for args.num_requests in (1, 7, 64):
            for args.pages_per_request in (1, 20, 3000):
                key = (args.num_rows, args.num_requests, args.pages_per_request)
                sizes[key] = abi_attention.workspace_bytes("glm_mla_attention", args)
    for low, small in sizes.items():
        for high, large in sizes.items():
            assert small <= large or any(a > b for a, b in zip(low, high, strict=True)), (low, high)
    assert sizes[511, 64, 3000] == sizes[511, 1, 1]
    assert sizes[3000, 64, 3000] - sizes[3000, 1, 1] == 32 * 3000 * 1152 - 64 * 1152


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("case", [Case((4300,), (4300,)), replace(WIDE, contexts=(4400,), rows=(4400,))], ids=str)
def test_many_rows_pass_in_blocks(case: Case, fp8: bool) -> None:
    """More rows than one block of the workspace (4224); the second block of the second case is wide too."""
    check(case, fp8, every=13)


def test_a_call_can_be_captured() -> None:
    case = replace(GLM, padding=1)
    inputs = make_inputs(case, False)
    expected = run(case, inputs, inputs.cache.clone())
    cache = inputs.cache.clone()
    out = torch.full_like(expected, float("nan"))
    args = abi_attention.mla_args(
        inputs.q, inputs.latent, inputs.weights, inputs.selection, inputs.step, cache, inputs.layer, inputs.scale,
        case.column_offset, case.interleaved, THETA, case.num_splits, out,
    )  # fmt: skip
    space = abi_attention.workspace("glm_mla_attention", args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        abi_attention.launch("glm_mla_attention", args, space)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"nope_dim": 24}, "multiples of 16"),
        ({"kv_lora": 96}, "kv_lora 96"),
        ({"kv_lora": 576}, "kv_lora 576"),
        ({"layer": -1}, "layer -1"),
        ({"num_splits": 65}, "num_splits"),
        ({"out": 0}, "out is null"),
        ({"column_offset": 4096}, "inside the row"),
    ],
    ids=str,
)
def test_refusals_say_what_is_wrong(change: dict[str, int], words: str) -> None:
    case = TINY[0]
    inputs = make_inputs(case, False)
    out = torch.empty(4, case.num_heads * case.v_dim, dtype=torch.bfloat16, device="cuda")
    args = abi_attention.mla_args(
        inputs.q, inputs.latent, inputs.weights, inputs.selection, inputs.step, inputs.cache, inputs.layer,
        inputs.scale, case.column_offset, True, THETA, 0, out,
    )  # fmt: skip
    space = abi_attention.workspace("glm_mla_attention", args)
    for name, value in change.items():
        setattr(args, name, value)
    with pytest.raises(KernelError, match=words):
        abi_attention.launch("glm_mla_attention", args, space)
