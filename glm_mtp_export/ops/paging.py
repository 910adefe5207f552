"""Access to paged pools [L, N, 64, D]: write rows, read rows at logical positions, and the packed FP8 forms (torch only).

A packed MLA row is kv_lora e4m3 values, one float32 scale per 128 of them, then the rotated key in bf16. A packed index page is
64 keys in e4m3, then 64 float32 scales. Both are int8 tensors, since that is a type every engine passes through untouched.
"""

from __future__ import annotations

import torch
from onnxscript import FLOAT, INT32, script
from onnxscript.onnx_opset import opset23 as op
from onnxscript.values import Opset
from torch import Tensor

from glm_mtp_export.ops.precision import E4M3_MAX

__all__ = [
    "GlmCacheIndex",
    "GlmCacheWrite",
    "GlmRealRows",
    "all_index_keys",
    "index_keys_written",
    "latent_rows",
    "latent_rows_written",
    "power_of_two",
    "real_rows",
]

PAGE = 64


def real_rows(positions: Tensor, row_requests: Tensor, block_table: Tensor) -> Tensor:
    """Which rows are no padding and lie within their request's pages: bool [T]."""
    return (row_requests >= 0) & (positions >= 0) & (positions < PAGE * block_table.shape[1])


def _slots(positions: Tensor, requests: Tensor, block_table: Tensor) -> tuple[Tensor, Tensor]:
    """Page and offset of logical `positions` [T] or [T, S] of the rows' requests [T]."""
    pages = block_table.long()[requests]
    flat = positions.long().view(positions.shape[0], positions.shape[1] if positions.dim() == 2 else 1)
    page = pages.gather(1, (flat // PAGE).clamp_max(pages.shape[1] - 1)).reshape(positions.shape)
    return page, positions.long() % PAGE


def power_of_two(amax: Tensor, floor: float) -> Tensor:
    """The smallest power of two s >= floor with amax <= 448 s, exact: 448 is 7/8 of a power of two."""
    mantissa, exponent = torch.frexp(amax / 512.0)
    fits = torch.where(mantissa <= E4M3_MAX / 512.0, exponent, exponent + 1)
    return torch.ldexp(torch.ones_like(amax), fits).masked_fill(amax == 0, floor).clamp_min(floor)


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int8)


def _packed_latent(rows: Tensor, kv_lora: int) -> Tensor:
    wide = rows.to(torch.float32)
    groups = torch.nn.functional.pad(wide[:, :kv_lora], (0, -kv_lora % 128)).unflatten(1, (-1, 128))
    scale = power_of_two(groups.abs().amax(-1), 2.0**-100)
    values = (groups / scale[..., None]).to(torch.float8_e4m3fn).flatten(1)[:, :kv_lora]
    return torch.cat((_bytes(values), _bytes(scale), _bytes(wide[:, kv_lora:].bfloat16())), 1)


def _unpacked_latent(rows: Tensor, kv_lora: int) -> Tensor:
    num_scales = -(-kv_lora // 128)
    values, scale, rotated = rows.split((kv_lora, 4 * num_scales, rows.shape[-1] - kv_lora - 4 * num_scales), -1)
    wide = values.contiguous().view(torch.float8_e4m3fn).to(torch.float32)
    scales = scale.contiguous().view(torch.float32).repeat_interleave(128, -1)[..., :kv_lora]
    return torch.cat((wide * scales, rotated.contiguous().view(torch.bfloat16).to(torch.float32)), -1)


def latent_rows_written(
    cache: Tensor, layer: int, rows: Tensor, kv_lora: int, positions: Tensor, row_requests: Tensor, block_table: Tensor
) -> Tensor:
    """A copy of `cache` with MLA `rows` [T, kv_lora + rope] at their positions; only `real_rows` are written."""
    updated, real = cache.clone(), real_rows(positions, row_requests, block_table)
    page, offset = _slots(positions[real], row_requests.long()[real], block_table)
    stored = _packed_latent(rows[real], kv_lora) if cache.dtype == torch.int8 else rows[real].to(cache.dtype)
    updated[layer, page, offset] = stored
    return updated


def latent_rows(
    cache: Tensor, layer: int, kv_lora: int, positions: Tensor, row_requests: Tensor, block_table: Tensor
) -> Tensor:
    """MLA rows at `positions` [T, S] (clamped at 0) of each row's request: [T, S, kv_lora + rope]."""
    page, offset = _slots(positions.clamp_min(0), row_requests.long().clamp_min(0), block_table)
    rows = cache[layer, page.clamp(0, cache.shape[1] - 1), offset]
    return _unpacked_latent(rows, kv_lora) if cache.dtype == torch.int8 else rows


def index_keys_written(
    cache: Tensor, layer: int, keys: Tensor, positions: Tensor, row_requests: Tensor, block_table: Tensor
) -> Tensor:
    """A copy of `cache` with index `keys` [T, Di] at their positions; only `real_rows` are written."""
    updated, real = cache.clone(), real_rows(positions, row_requests, block_table)
    page, offset = _slots(positions[real], row_requests.long()[real], block_table)
    if cache.dtype != torch.int8:
        updated[layer, page, offset] = keys[real].to(cache.dtype)
        return updated
    wide, width = keys[real].to(torch.float32), keys.shape[1]
    scale = power_of_two(wide.abs().amax(1), 2.0**-120)
    flat = updated[layer].view(cache.shape[1], -1)
    lane = torch.arange(width, device=keys.device)
    flat[page[:, None], offset[:, None] * width + lane] = _bytes((wide / scale[:, None]).to(torch.float8_e4m3fn))
    byte = torch.arange(4, device=keys.device)
    flat[page[:, None], PAGE * width + offset[:, None] * 4 + byte] = _bytes(scale[:, None])
    return updated


def all_index_keys(cache: Tensor, layer: int, width: int, row_requests: Tensor, block_table: Tensor) -> Tensor:
    """Every key of each row's request in logical order, valid or not: [T, P * 64, Di]."""
    known = block_table.long().clamp(0, cache.shape[1] - 1)
    pages = cache[layer, known[row_requests.long().clamp_min(0)]]
    if cache.dtype != torch.int8:
        return pages.flatten(1, 2)
    flat = pages.flatten(2)
    keys = (
        flat[..., : PAGE * width].contiguous().view(torch.float8_e4m3fn).to(torch.float32).unflatten(2, (PAGE, width))
    )
    scale = flat[..., PAGE * width :].contiguous().view(torch.float32)
    return (keys * scale[..., None]).flatten(1, 2)


@script(Opset("glm", 1))
def GlmCacheIndex(positions: INT32, row_requests: INT32, block_table: INT32, layer: int):
    """(layer, page, offset) of positions [T, S] of each row's request: int64 [T, S, 3]."""
    size = op.Constant(value_int=64)
    place = op.Cast(positions, to=7)
    pages = op.Gather(op.Cast(block_table, to=7), op.Cast(op.Max(row_requests, op.CastLike(0, row_requests)), to=7))
    last_page = op.Gather(op.Shape(block_table), op.Constant(value_int=1)) - 1
    # Positions outside the request's pages belong to rows and entries that are masked later; they only have to be legal.
    page = op.GatherElements(pages, op.Max(op.Min(place / size, last_page), op.Constant(value_int=0)), axis=1)
    layers = op.Expand(op.Constant(value_int=layer), op.Shape(page))
    axis = op.Constant(value_ints=[2])
    return op.Concat(
        op.Unsqueeze(layers, axis), op.Unsqueeze(page, axis), op.Unsqueeze(op.Mod(place, size), axis), axis=2
    )


@script(Opset("glm", 1))
def GlmRealRows(positions: INT32, row_requests: INT32, block_table: INT32):
    """Which rows are no padding and lie within their request's pages: bool [T]."""
    none = op.CastLike(0, row_requests)
    size = 64 * op.Gather(op.Shape(block_table), op.Constant(value_int=1))
    inside = op.And(op.GreaterOrEqual(positions, none), op.Less(op.Cast(positions, to=7), size))
    return op.And(op.GreaterOrEqual(row_requests, none), inside)


@script(Opset("glm", 1))
def GlmCacheWrite(cache: FLOAT, rows: FLOAT, positions: INT32, row_requests: INT32, block_table: INT32, layer: int):
    """Write real rows [T, D] at their positions. The others repeat the first real row's write; without any, a row is rewritten.

    ONNX Runtime updates ScatterElements in place and copies the whole pool for ScatterND, at every layer of it.
    """
    one = op.Constant(value_ints=[1])
    shape = op.Shape(cache)
    real = GlmRealRows(positions, row_requests, block_table)
    count = op.Squeeze(op.Shape(row_requests), op.Constant(value_ints=[0]))
    each = op.Range(op.Constant(value_int=0), count, op.Constant(value_int=1))
    source = op.Where(real, each, op.ArgMax(op.Cast(real, to=6), axis=0, keepdims=0))
    place = op.Unsqueeze(op.Gather(positions, source), one)
    index = op.Squeeze(GlmCacheIndex(place, op.Gather(row_requests, source), block_table, layer=layer), one)
    page_size = op.Constant(value_ints=[64])
    strides = op.Concat(op.Slice(shape, one, op.Constant(value_ints=[2])) * page_size, page_size, one, axis=0)
    slots = op.ReduceSum(index * strides, one, keepdims=1)
    width = op.Slice(shape, op.Constant(value_ints=[3]), op.Constant(value_ints=[4]))
    by_slot = op.Concat(op.Constant(value_ints=[-1]), width, axis=0)
    pool = op.Reshape(cache, by_slot)
    kept = op.Gather(pool, op.Squeeze(slots, one))
    values = op.Where(op.Unsqueeze(op.Gather(real, source), one), op.Gather(rows, source), kept)
    return op.Reshape(op.ScatterElements(pool, op.Expand(slots, op.Shape(rows)), values, axis=0), shape)
