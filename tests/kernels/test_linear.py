"""glm_linear and glm_linear_fp8 against float64 products; tiny, corner and production shapes."""

from __future__ import annotations

import abi_products
import pytest
import torch
from quantised_oracle import assert_close, dequantise_blocks, quantise_rows, random_fp8_blocks
from sanitized import mark_some

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# (rows, in, out). Tiny: the embedded model's, and one row either side of every tile width.
TINY = [(1, 16, 16), (1, 256, 288), (3, 256, 512), (4, 128, 256), (8, 256, 256), (9, 512, 288), (16, 256, 144),
        (17, 128, 1024), (32, 256, 288), (33, 256, 256), (64, 384, 256), (65, 256, 288), (128, 256, 256),
        (129, 272, 400), (300, 512, 528)]  # fmt: skip
# K and row tails of every block size, K split over a cluster with an uneven share.
CORNERS = [(5, 16, 4096), (5, 48, 16), (7, 144, 272), (2, 1040, 16), (33, 2064, 1168), (2, 7216, 112)]
# FP8 tiles of 128, 192 and 256 tokens, with tails and a last cluster of one CTA's weight rows.
TOKEN_TILES = [(384, 256, 5632), (2000, 272, 1040), (1700, 256, 2064)]
PRODUCTION = [(1, 6144, 2624), (4, 6144, 2624), (4, 2048, 16384), (4, 16384, 6144), (32, 16384, 6144),
              (64, 6144, 24576), (16, 12288, 6144), (2048, 12288, 6144), (8192, 6144, 2624)]  # fmt: skip

# bf16 output: one rounding to nearest, 2^-9 at most, 2^-9 / sqrt(3) in the norm.
BF16_LIMIT = 2.0**-9
# fp32 output: the tensor core adds 16 products at a time and cuts the sum to 24 bits: k / 16 cuts of 2^-24 at most.
F32_LIMIT_PER_K = 2.0**-24 / 16
# The e4m3 tensor core keeps about 13 bits below the largest product of 32: 2^-14 * sqrt(32) against sqrt(32) sums.
FP8_F32_LIMIT = 2.0**-10
# Two e4m3 roundings of 2^-4 / sqrt(12) each, and weight scales up to twice the exact one.
FP8_RAW_LIMIT = 0.06


def _inputs(rows: int, k: int, seed: int) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(rows, k, device="cuda", generator=generator)
    return (x * torch.exp(torch.randn(rows, 1, device="cuda", generator=generator))).bfloat16()


def _weight(features: int, k: int, seed: int) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return (torch.randn(features, k, device="cuda", generator=generator) * k**-0.5).bfloat16()


@pytest.mark.parametrize("shape", mark_some(TINY, 2, 5, 9, 13) + mark_some(CORNERS, 3, 5) + PRODUCTION, ids=str)
def test_linear_equals_float64_product(shape: tuple[int, int, int]) -> None:
    rows, k, features = shape
    x, weight = _inputs(rows, k, 1), _weight(features, k, 2)
    wide, narrow = abi_products.linear(x, weight, to_f32=True), abi_products.linear(x, weight)
    expected = x.double() @ weight.double().T
    assert_close(wide, expected, max(1e-6, k * F32_LIMIT_PER_K), f"linear {shape} f32")
    assert_close(narrow, expected, BF16_LIMIT, f"linear {shape} bf16")
    assert torch.equal(wide.bfloat16(), narrow)


@pytest.mark.parametrize(
    "shape",
    mark_some(TINY, 2, 5, 9, 13) + mark_some(CORNERS, 3, 5) + mark_some(TOKEN_TILES, 1, 2) + PRODUCTION,
    ids=str,
)
def test_linear_fp8_equals_float64_product(shape: tuple[int, int, int]) -> None:
    rows, k, features = shape
    x = _inputs(rows, k, 3)
    codes, scale = random_fp8_blocks(features, k, 4)
    wide, narrow = abi_products.linear_fp8(x, codes, scale, to_f32=True), abi_products.linear_fp8(x, codes, scale)
    weight = dequantise_blocks(codes, scale)
    assert_close(wide, quantise_rows(x) @ weight.T, FP8_F32_LIMIT, f"linear_fp8 {shape} f32")
    assert torch.equal(wide.bfloat16(), narrow)
    assert_close(wide, x.double() @ weight.T, FP8_RAW_LIMIT, f"linear_fp8 {shape} against raw activations")


def test_zero_rows_of_activations_give_zeros() -> None:
    codes, scale = random_fp8_blocks(288, 256, 5)
    x = torch.zeros(3, 256, dtype=torch.bfloat16, device="cuda")
    x[1] = 1e-12  # below the smallest scale: rounds to zero, not to NaN
    out = abi_products.linear_fp8(x, codes, scale, to_f32=True)
    assert float(out.abs().max()) < 1e-9


@pytest.mark.parametrize(("k", "features"), [(256, 288), (6144, 2624), (2048, 16384)])
def test_row_alone_equals_row_in_batch(k: int, features: int) -> None:
    x, weight = _inputs(64, k, 6), _weight(features, k, 7)
    codes, scale = random_fp8_blocks(features, k, 8)
    for run in (
        lambda rows: abi_products.linear(rows, weight),
        lambda rows: abi_products.linear_fp8(rows, codes, scale),
    ):
        together = run(x)
        for rows in (1, 8, 9, 17, 40):
            assert torch.equal(run(x[:rows].contiguous()), together[:rows]), f"{rows} rows"


def test_repeats_are_bitwise_equal() -> None:
    x, weight = _inputs(33, 6144, 9), _weight(2624, 6144, 10)
    codes, scale = random_fp8_blocks(2624, 6144, 11)
    first, first_fp8 = abi_products.linear(x, weight), abi_products.linear_fp8(x, codes, scale)
    for _ in range(20):
        assert torch.equal(abi_products.linear(x, weight), first)
        assert torch.equal(abi_products.linear_fp8(x, codes, scale), first_fp8)


def test_captured_in_a_graph() -> None:
    x = _inputs(4, 6144, 12)
    codes, scale = random_fp8_blocks(2624, 6144, 13)
    expected = abi_products.linear_fp8(x, codes, scale)
    out = abi_products.GuardedBuffer((4, 2624), torch.bfloat16)
    size = abi_products.workspace_bytes("glm_linear_fp8", 4, 6144, 2624)
    workspace = abi_products.GuardedBuffer((size,), torch.uint8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            abi_products.call("glm_linear_fp8", x, codes, scale, out.tensor, 4, 6144, 2624, 0, workspace=workspace)
    for _ in range(5):
        out.tensor.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out.tensor, expected)
    out.check("out")


@pytest.mark.parametrize(
    ("rows", "k", "features", "words"),
    [(1, 24, 16, "multiples of 16"), (1, 16, 8, "multiples of 16"), (-1, 16, 16, "num_rows -1")],
)
def test_refuses_shapes(rows: int, k: int, features: int, words: str) -> None:
    buffer = torch.zeros(64, 64, dtype=torch.bfloat16, device="cuda")
    workspace = abi_products.GuardedBuffer((64,), torch.uint8)
    with pytest.raises(abi_products.KernelError, match=words):
        abi_products.call("glm_linear", buffer, buffer, buffer, rows, k, features, 0, workspace=workspace)


def test_refuses_a_small_workspace() -> None:
    x = _inputs(4, 256, 14)
    codes, scale = random_fp8_blocks(256, 256, 15)
    workspace = abi_products.GuardedBuffer((64,), torch.uint8)
    with pytest.raises(abi_products.KernelError, match="workspace has 64 bytes"):
        abi_products.call("glm_linear_fp8", x, codes, scale, x, 4, 256, 256, 0, workspace=workspace)
