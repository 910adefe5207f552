"""glm_experts in BF16, FP8 and NVFP4 against a float64 sum over slots, experts one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import abi_products
import pytest
import torch
from quantised_oracle import (
    assert_close,
    dequantise_blocks,
    dequantise_nvfp4,
    norm_error,
    quantise_rows,
    random_fp8_blocks,
    random_nvfp4,
)
from sanitized import mark_some, sanitized

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

FORMATS = ("bf16", "fp8", "nvfp4")
# (rows, hidden, intermediate, experts, top_k)
TINY = [
    (1, 256, 128, 16, 4),
    (5, 256, 128, 16, 4),
    (40, 256, 128, 16, 4),
    (200, 256, 128, 16, 4),
    (900, 256, 128, 16, 4),
    (360, 256, 128, 16, 4),
]
# Tails of K and of gate/up tiles; intermediate that is no multiple of 128 or 64; one expert; hidden below a tile; three
# tiles of 64 gate columns, whose last has no partner.
CORNERS = [(3, 288, 96, 4, 2), (9, 64, 32, 3, 1), (6, 544, 224, 5, 3), (21, 320, 160, 1, 1), (70, 32, 448, 2, 2),
           (200, 320, 192, 3, 2)]  # fmt: skip
PRODUCTION = [(1, 6144, 2048, 16, 8), (4, 6144, 2048, 32, 8), (32, 6144, 2048, 16, 8), (512, 6144, 2048, 16, 8)]

# (hidden, intermediate, rows of each expert): FP8 in tiles of up to 256 rows, in blocks of 64. No rows, one, full and partly
# filled blocks, one to four a tile, groups of several tiles; K of one step and more tiles than clusters; a popular expert;
# all rows on one expert, on the last of 40.
WIDE = [
    (256, 128, (0, 330, 288, 290)),
    (128, 64, (600,)),
    (320, 192, (0, 1000, 0, 20)),
    (256, 128, (0, 300, 288, 257, 33, 570, 1, 224, 64, 700)),
    (128, 2048, (257, 256, 290, 250, 263, 33, 576, 400, 240, 200, 270, 300)),
    (2048, 1024, (270, 254, 239, 290)),
    (256, 128, (*(0,) * 39, 10001)),
]
# NVFP4 in tiles of any number of tokens, up to 96 where experts have few rows and up to 144 where they have many: every
# width by its first and last number of rows, experts without rows, several tiles, rings that wrap, clusters with several
# tiles, all rows on one expert.
NVFP4_TILES = [
    (256, 256, (0, 33, 96, 1, 49)),
    (512, 256, (0, 145, 65, 129, 200)),
    (256, 512, (1, 16, 32, 33, 48, 49, 0, 64, 65, 80, 81, 96, 97, 150)),
    (768, 256, (0, 1, 64, 65, 80, 81, 96, 97, 112, 113, 128, 129, 144, 145, 290, 400)),
    (2048, 1024, (270, 254, 239, 290)),
    (1024, 2048, (70, 64, 50, 100)),
    (256, 256, (*(0,) * 39, 3001)),
]

# Roundings to bf16 (intermediate, slot result, output) of 2^-9 / sqrt(3) each in the norm.
BF16_LIMIT = 2.0**-8
# FP8 adds the e4m3 tensor core's 13 bits, and intermediates that a last-bit difference rounds to the neighbouring code.
FP8_LIMIT = 2.0**-7
# Against activations that were not quantised: e4m3 rounding of x and of the intermediate, 2^-4 / sqrt(12) each.
FP8_RAW_LIMIT = 0.08


@dataclass(frozen=True)
class Weights:
    """`tensors` in the entry's argument order; gate_up(e), down(e) in float64."""

    entry: str
    tensors: tuple[torch.Tensor, ...]
    gate_up: Callable[[int], torch.Tensor]
    down: Callable[[int], torch.Tensor]


def _weights(kind: str, hidden: int, intermediate: int, num_experts: int) -> Weights:
    if kind == "bf16":
        generator = torch.Generator(device="cuda").manual_seed(41)
        w13 = torch.randn(num_experts, 2 * intermediate, hidden, device="cuda", generator=generator) * hidden**-0.5
        w2 = torch.randn(num_experts, hidden, intermediate, device="cuda", generator=generator) * intermediate**-0.5
        w13, w2 = w13.bfloat16(), w2.bfloat16()
        return Weights("glm_experts", (w13, w2), lambda e: w13[e].double(), lambda e: w2[e].double())
    if kind == "fp8":
        first = [random_fp8_blocks(2 * intermediate, hidden, 100 + e) for e in range(num_experts)]
        second = [random_fp8_blocks(hidden, intermediate, 200 + e) for e in range(num_experts)]
        tensors = tuple(torch.stack([pair[i] for pair in side]) for side in (first, second) for i in range(2))
        return Weights(
            "glm_experts_fp8", tensors, lambda e: dequantise_blocks(*first[e]), lambda e: dequantise_blocks(*second[e])
        )
    first = [random_nvfp4(2 * intermediate, hidden, 300 + e) for e in range(num_experts)]
    second = [random_nvfp4(hidden, intermediate, 400 + e) for e in range(num_experts)]
    generator = torch.Generator(device="cuda").manual_seed(43)
    spread = torch.rand(num_experts, 3, device="cuda", generator=generator) + 0.5
    w13_global = (spread[:, :2] * 0.05 * hidden**-0.5).contiguous()
    w2_global = (spread[:, 2:] * 0.05 * intermediate**-0.5).contiguous()
    stacked = [torch.stack([pair[i] for pair in side]) for side in (first, second) for i in range(2)]
    tensors = (stacked[0], stacked[1], w13_global, stacked[2], stacked[3], w2_global)
    return Weights(
        "glm_experts_nvfp4", tensors,
        lambda e: dequantise_nvfp4(*first[e]) * w13_global[e].double().repeat_interleave(intermediate)[:, None],
        lambda e: dequantise_nvfp4(*second[e]) * w2_global[e].double(),
    )  # fmt: skip


def _routing(rows: int, num_experts: int, top_k: int, seed: int = 44) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    scores = torch.rand(rows, num_experts, device="cuda", generator=generator)
    ids = scores.topk(top_k, dim=1).indices.int()
    weights = torch.rand(rows, top_k, device="cuda", generator=generator) + 0.1
    return ids.contiguous(), weights


def _activations(rows: int, hidden: int) -> torch.Tensor:
    return torch.randn(rows, hidden, device="cuda", generator=torch.Generator(device="cuda").manual_seed(45)).bfloat16()


def _oracle(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, parts: Weights, intermediate: int, quantise: bool
) -> torch.Tensor:
    """sum over slots of weight * down(silu(gate x) * up x) in float64; `quantise` puts e4m3 before both products."""
    out = torch.zeros(x.shape, dtype=torch.float64, device="cuda")
    rows = quantise_rows(x) if quantise else x.double()
    num_experts = parts.tensors[0].shape[0]
    for e in range(num_experts):
        token, slot = (ids == e).nonzero(as_tuple=True)
        if len(token) == 0:
            continue
        both = rows[token] @ parts.gate_up(e).T
        gate, up = both[:, :intermediate], both[:, intermediate:]
        inner = gate * torch.sigmoid(gate) * up
        inner = quantise_rows(inner) if quantise else inner
        out.index_put_((token,), (inner @ parts.down(e).T) * weights[token, slot].double()[:, None], accumulate=True)
    return out


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("case", mark_some(TINY, 1, 2, 3) + mark_some(CORNERS, 0, 2) + PRODUCTION, ids=str)
def test_experts_equal_float64_sum(kind: str, case: tuple[int, int, int, int, int]) -> None:
    rows, hidden, intermediate, num_experts, top_k = case
    parts = _weights(kind, hidden, intermediate, num_experts)
    x, (ids, weights) = _activations(rows, hidden), _routing(rows, num_experts, top_k)
    found = abi_products.experts(parts.entry, x, ids, weights, parts.tensors, intermediate, num_experts)
    tight = _oracle(x, ids, weights, parts, intermediate, quantise=kind == "fp8")
    assert_close(found, tight, FP8_LIMIT if kind == "fp8" else BF16_LIMIT, f"{kind} {case}")
    if kind == "fp8":
        raw = _oracle(x, ids, weights, parts, intermediate, quantise=False)
        assert_close(found, raw, FP8_RAW_LIMIT, f"{kind} {case} against raw activations")


def test_gates_of_any_size() -> None:
    """Rows from nothing to gates whose exponential overflows, in tiles of many tokens; each row counts by itself."""
    parts = _weights("fp8", 256, 128, 4)
    x, (ids, weights) = _activations(400, 256), _routing(400, 4, 2)
    x = (x.float() * torch.logspace(-30, 4, 400, device="cuda")[:, None]).bfloat16()
    x[7] = 0
    found = abi_products.experts(parts.entry, x, ids, weights, parts.tensors, 128, 4).double()
    expected = _oracle(x, ids, weights, parts, 128, quantise=True)
    assert bool(found.isfinite().all()) and bool((found[7] == 0).all())
    size = expected.norm(dim=1, keepdim=True)
    kept = (size > 1e-3)[:, 0]  # below, scales end at 1e-10 and products at bf16's smallest
    assert_close(found[kept] / size[kept], expected[kept] / size[kept], FP8_LIMIT, "gates of any size")


@sanitized
def test_nvfp4_small_scales_are_decoded_exactly() -> None:
    """Each output column of w2 has scales of one magnitude, down to e4m3 subnormals; every column's error counts."""
    parts = _weights("nvfp4", 256, 256, 2)
    x, (ids, weights) = _activations(64, 256), _routing(64, 2, 1)
    found = abi_products.experts(parts.entry, x, ids, weights, parts.tensors, 256, 2)
    expected = _oracle(x, ids, weights, parts, 256, quantise=False)
    assert_close(found.T, expected.T, BF16_LIMIT, "columns of nvfp4 experts")


@sanitized
@pytest.mark.parametrize("kind", FORMATS)
def test_skipped_ids_and_padding_rows(kind: str) -> None:
    parts = _weights(kind, 256, 128, 16)
    x, (ids, weights) = _activations(30, 256), _routing(30, 16, 4)
    ids[3] = -1
    ids[7, 1], ids[8, 0], ids[9, 3] = -1, 16, 2**30
    ids[11:20] = -1
    weights[3] = float("nan")  # weights of skipped slots are not read into the sum
    weights[11:20] = float("nan")
    x[11:20] = float("nan")
    found = abi_products.experts(parts.entry, x, ids, weights, parts.tensors, 128, 16)
    assert bool((found[3] == 0).all()) and bool((found[11:20] == 0).all())
    kept = [row for row in range(30) if row != 3 and not 11 <= row < 20]
    expected = _oracle(x[kept], ids[kept], weights[kept], parts, 128, quantise=kind == "fp8")
    assert_close(found[kept], expected, FP8_LIMIT if kind == "fp8" else BF16_LIMIT, f"{kind} with skipped ids")
    nothing = torch.full_like(ids, -1)
    assert bool((abi_products.experts(parts.entry, x, nothing, weights, parts.tensors, 128, 16) == 0).all())


@pytest.mark.parametrize("kind", FORMATS)
def test_all_rows_on_one_expert(kind: str) -> None:
    parts = _weights(kind, 256, 128, 16)
    x, (ids, weights) = _activations(77, 256), _routing(77, 16, 1)
    ids[:] = 15
    found = abi_products.experts(parts.entry, x, ids, weights, parts.tensors, 128, 16)
    expected = _oracle(x, ids, weights, parts, 128, quantise=kind == "fp8")
    assert_close(found, expected, FP8_LIMIT if kind == "fp8" else BF16_LIMIT, f"{kind} on one expert")


@pytest.mark.parametrize(
    "kind, hidden, intermediate, counts",
    mark_some([("fp8", *case) for case in WIDE], 0, 1, unpack=True)
    + mark_some([("nvfp4", *case) for case in NVFP4_TILES], 0, 1, unpack=True),
    ids=lambda value: str(len(value)) if isinstance(value, tuple) else str(value),
)
def test_tiles_of_many_rows(kind: str, hidden: int, intermediate: int, counts: tuple[int, ...]) -> None:
    """Experts with given numbers of rows against the float64 sum; some rows again without the others, to the last bit."""
    parts = _weights(kind, hidden, intermediate, len(counts))
    rows = sum(counts)
    generator = torch.Generator(device="cuda").manual_seed(46)
    ids = torch.repeat_interleave(torch.arange(len(counts), device="cuda"), torch.tensor(counts, device="cuda"))
    ids = ids[torch.randperm(rows, device="cuda", generator=generator)].int()[:, None].contiguous()
    x, weights = _activations(rows, hidden), torch.rand(rows, 1, device="cuda", generator=generator) + 0.1
    found = abi_products.experts(parts.entry, x, ids, weights, parts.tensors, intermediate, len(counts))
    expected = _oracle(x, ids, weights, parts, intermediate, quantise=kind == "fp8")
    if kind == "fp8":
        # One slot a row and few columns: a neighbouring code of a value that dominates its row is an eighth of that row.
        assert norm_error(found, expected) <= FP8_LIMIT
        assert float(((found.double() - expected).norm(dim=1) / expected.norm(dim=1)).max()) <= 2.0**-3
    else:
        assert_close(found, expected, BF16_LIMIT, f"{kind} {counts}")
    for start in range(0, rows, -(-rows // 4)):
        some = slice(start, start + 97)
        arguments = (x[some].contiguous(), ids[some].contiguous(), weights[some].contiguous())
        alone = abi_products.experts(parts.entry, *arguments, parts.tensors, intermediate, len(counts))
        assert torch.equal(alone, found[some]), f"rows from {start}"


@pytest.mark.parametrize("kind", FORMATS)
def test_row_alone_equals_row_in_batch_and_repeats(kind: str) -> None:
    parts = _weights(kind, 512, 256, 16)
    x, (ids, weights) = _activations(400, 512), _routing(400, 16, 4)

    def run(rows: int) -> torch.Tensor:
        arguments = (x[:rows].contiguous(), ids[:rows].contiguous(), weights[:rows].contiguous())
        return abi_products.experts(parts.entry, *arguments, parts.tensors, 256, 16)

    together = run(400)
    for rows in (1, 4, 16, 60, 160, 400):
        assert torch.equal(run(rows), together[:rows]), f"{rows} rows"


@pytest.mark.parametrize("kind", FORMATS)
def test_captured_in_a_graph_with_new_routing(kind: str) -> None:
    """The routing is read on the device: a replay follows ids written after the capture."""
    parts = _weights(kind, 256, 128, 16)
    x, (ids, weights) = _activations(6, 256), _routing(6, 16, 4)
    out = abi_products.GuardedBuffer((6, 256), torch.bfloat16)
    sizes = (6, 256, 128, 16, 4)
    workspace = abi_products.GuardedBuffer((abi_products.workspace_bytes("glm_experts", *sizes),), torch.uint8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(2):
            abi_products.call(parts.entry, x, ids, weights, *parts.tensors, out.tensor, *sizes, workspace=workspace)
    for seed in (51, 52, 53):
        new_ids, new_weights = _routing(6, 16, 4, seed)
        ids.copy_(new_ids)
        weights.copy_(new_weights)
        out.tensor.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out.tensor, abi_products.experts(parts.entry, x, ids, weights, parts.tensors, 128, 16))
    out.check("out")


def test_refuses_what_the_header_excludes() -> None:
    parts = _weights("nvfp4", 256, 128, 16)
    x, (ids, weights) = _activations(2, 256), _routing(2, 16, 4)
    with pytest.raises(abi_products.KernelError, match="multiples of 32"):
        abi_products.experts(parts.entry, x, ids, weights, parts.tensors, 112, 16)
    with pytest.raises(abi_products.KernelError, match="num_experts 4096"):
        abi_products.experts(parts.entry, x, ids, weights, parts.tensors, 128, 4096)
