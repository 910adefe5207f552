"""The packed FP8 cache rows seen from Python, written from the headers' text: reading and writing rows in float64.

e4m3 bytes with power-of-two fp32 scales, the smallest s with amax <= 448 s. Tensors are on the GPU.
"""

from __future__ import annotations

import torch


def power_of_two_scale(amax: torch.Tensor, smallest: float) -> torch.Tensor:
    """float64 amax [...] -> the smallest power of two s with amax <= 448 s, at least `smallest`."""
    exponent = torch.ceil(torch.log2(torch.clamp(amax, min=1e-300) / 448.0))
    return torch.clamp(2.0**exponent, min=smallest)


def index_page_keys(cache: torch.Tensor, layer: int, head_dim: int) -> torch.Tensor:
    """All keys of a layer as float64 [num_pages, 64, head_dim], from bf16 or packed int8 pages."""
    pages = cache[layer]
    if cache.dtype == torch.bfloat16:
        return pages.double()
    raw = pages.reshape(pages.shape[0], 64 * (head_dim + 4)).view(torch.uint8)
    codes = raw[:, : 64 * head_dim].contiguous().view(torch.float8_e4m3fn).view(-1, 64, head_dim)
    scales = raw[:, 64 * head_dim :].contiguous().view(torch.float32)
    return codes.double() * scales.double()[..., None]


def index_pages(keys: torch.Tensor, fp8: bool) -> torch.Tensor:
    """float [num_pages, 64, head_dim] -> one layer of a cache, bf16 or packed int8 [num_pages, 64, head_dim + 4]."""
    if not fp8:
        return keys.bfloat16()
    scale = power_of_two_scale(keys.double().abs().amax(-1), 2.0**-120)
    codes = (keys.double() / scale[..., None]).float().to(torch.float8_e4m3fn).view(torch.uint8)
    flat = torch.cat((codes.flatten(1), scale.float().contiguous().view(torch.uint8).flatten(1)), 1)
    return flat.view(torch.int8).view(keys.shape[0], 64, keys.shape[2] + 4)


def latent_rows(cache: torch.Tensor, layer: int, kv_lora: int) -> torch.Tensor:
    """All rows of a layer as float64 [num_pages * 64, kv_lora + rope]."""
    rows = cache[layer].flatten(0, 1)
    if cache.dtype == torch.bfloat16:
        return rows.double()
    raw = rows.contiguous().view(torch.uint8)
    groups = kv_lora // 128
    codes = raw[:, :kv_lora].contiguous().view(torch.float8_e4m3fn).double()
    scales = raw[:, kv_lora : kv_lora + 4 * groups].contiguous().view(torch.float32).double()
    rope = raw[:, kv_lora + 4 * groups :].contiguous().view(torch.bfloat16).double()
    return torch.cat((codes * scales.repeat_interleave(128, 1), rope), 1)


def packed_latents(rows: torch.Tensor, kv_lora: int, fp8: bool) -> torch.Tensor:
    """float [N, kv_lora + rope] -> bf16 rows or packed int8 rows."""
    if not fp8:
        return rows.bfloat16()
    latent = rows[:, :kv_lora].double().unflatten(1, (-1, 128))
    scale = power_of_two_scale(latent.abs().amax(-1), 2.0**-100)
    codes = (latent / scale[..., None]).float().to(torch.float8_e4m3fn).view(torch.uint8).flatten(1)
    rope = rows[:, kv_lora:].bfloat16().contiguous().view(torch.uint8)
    return torch.cat((codes, scale.float().contiguous().view(torch.uint8), rope), 1).view(torch.int8)


def rotated(x: torch.Tensor, positions: torch.Tensor, theta: float, interleaved: bool) -> torch.Tensor:
    """Rope of float64 x [T, ..., R] at positions [T]; pairs stay in place."""
    rope = x.shape[-1]
    frequency = theta ** (-torch.arange(0, rope, 2, dtype=torch.float64, device=x.device) / rope)
    angle = positions.double().view(-1, *[1] * (x.dim() - 1)) * frequency
    sine, cosine = angle.sin(), angle.cos()
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., : rope // 2], x[..., rope // 2 :])
    a, b = first * cosine - second * sine, second * cosine + first * sine
    return torch.stack((a, b), -1).flatten(-2) if interleaved else torch.cat((a, b), -1)


def assert_close(found: torch.Tensor, expected: torch.Tensor, limit: float, what: str) -> None:
    """||found - expected|| <= limit * ||expected|| for each last-dimension row; NaN never passes."""
    error = (found.double() - expected).norm(dim=-1)
    size = expected.norm(dim=-1).clamp(min=1e-6)
    ratio = error / size
    if ratio.numel() == 0:
        return
    worst = int(torch.where(ratio.isnan(), torch.inf, ratio).argmax())
    value = float(ratio.flatten()[worst])
    assert value <= limit, f"{what}: row {worst} is off by {value:.3e} of its norm, limit {limit:.1e}"
