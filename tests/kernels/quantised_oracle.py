"""Quantised formats in plain torch, written from the checkpoint specification, and how far two results may differ.

FP8: e4m3 with one fp32 scale a 128x128 block (weights) or a row and 128 columns (activations).
NVFP4: two e2m1 a byte, low nibble = even column, one e4m3 scale a row and 16 columns, one fp32 scale a matrix.
"""

from __future__ import annotations

import torch

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def quantise_rows(x: torch.Tensor) -> torch.Tensor:
    """bf16/f64 [T,K] -> float64 [T,K], the values after 1x128 quantisation to e4m3 and back (scale = amax / 448)."""
    result = torch.empty(x.shape, dtype=torch.float64, device=x.device)
    for start in range(0, x.shape[1], 128):
        group = x[:, start : start + 128].float()
        scale = group.abs().amax(dim=1, keepdim=True).clamp(min=1e-10) / torch.tensor(448.0, device=x.device)
        codes = (group * (1.0 / scale)).to(torch.float8_e4m3fn)
        result[:, start : start + 128] = codes.double() * scale.double()
    return result


def random_fp8_blocks(rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A normal matrix quantised to (e4m3 [rows, columns], f32 [ceil(rows/128), ceil(columns/128)]), on the GPU."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    weight = torch.randn(rows, columns, device="cuda", generator=generator) * columns**-0.5
    padded_rows, padded_columns = -(-rows // 128) * 128, -(-columns // 128) * 128
    padded = torch.zeros(padded_rows, padded_columns, device="cuda")
    padded[:rows, :columns] = weight
    blocks = padded.view(padded_rows // 128, 128, padded_columns // 128, 128)
    # Scales away from a smooth pattern, so that a block mix-up shows: up to one half below the exact one.
    spread = 1.0 + torch.rand(blocks.shape[0], blocks.shape[2], device="cuda", generator=generator)
    scale = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-6) / 448.0 * spread
    codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    codes = codes.view(torch.uint8).reshape(padded_rows, padded_columns)[:rows, :columns].contiguous()
    return codes.view(torch.float8_e4m3fn), scale


def dequantise_blocks(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """(e4m3 [R,K], f32 [ceil(R/128), ceil(K/128)]) -> float64 [R,K]."""
    full = scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return codes.double() * full[: codes.shape[0], : codes.shape[1]]


def random_nvfp4(rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(u8 [rows, columns/2], u8 e4m3 bits [rows, columns/16]): every code, every positive scale, subnormals too.

    A row keeps scales of one magnitude (they differ in the mantissa): a wrong small scale is not drowned by a big one.
    """
    generator = torch.Generator(device="cuda").manual_seed(seed)
    packed = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device="cuda", generator=generator)
    magnitude = (torch.arange(rows, device="cuda") % 16)[:, None] * 8
    mantissa = torch.randint(0, 8, (rows, columns // 16), device="cuda", generator=generator)
    return packed, (magnitude + mantissa).clamp(1, 0x7E).to(torch.uint8)


def dequantise_nvfp4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """(u8 [R,K/2], u8 [R,K/16]) -> float64 [R,K] without the global scale."""
    table = torch.tensor(E2M1_VALUES, dtype=torch.float64, device=packed.device)
    values = torch.stack((table[(packed & 15).long()], table[(packed >> 4).long()]), dim=-1).flatten(1)
    return values * scale.view(torch.float8_e4m3fn).double().repeat_interleave(16, 1)


def norm_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """|found - expected| / |expected|; infinite when a NaN or inf is in one of them only."""
    found, expected = found.double(), expected.double()
    if not torch.equal(found.isfinite(), expected.isfinite()):
        return float("inf")
    mask = expected.isfinite()
    return float((found[mask] - expected[mask]).norm() / expected[mask].norm().clamp(min=1e-30))


def assert_close(found: torch.Tensor, expected: torch.Tensor, limit: float, what: str) -> None:
    """Norm-relative error below `limit`, over everything and over each row (a wrong row must not hide in the mean)."""
    error = norm_error(found, expected)
    row_errors = (found.double() - expected.double()).norm(dim=1) / expected.double().norm(dim=1).clamp(min=1e-30)
    worst = int(row_errors.nan_to_num(nan=float("inf")).argmax())
    column = int((found[worst].double() - expected[worst].double()).abs().nan_to_num(nan=float("inf")).argmax())
    message = (
        f"{what}: error {error:.3e}, worst row {worst} {float(row_errors[worst]):.3e}, there column {column} is "
        f"{float(found[worst, column]):.6g}, expected {float(expected[worst, column]):.6g}; limit {limit:.3e}"
    )
    assert error <= limit, message
    assert float(row_errors[worst]) <= 4 * limit, message
