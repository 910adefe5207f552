"""Multi-head latent attention over a selection list, absorbed form: write this call's latent rows, attend, expand the values.

A cache row is [rms_norm(latent) | rotated key]. Head h scores position s by scale * ((W_UK,h^T q_nope) . c_s + q_rope . k_s) and
returns W_UV,h (softmax . c). Entries outside 0 .. the row's own position never contribute; an empty list gives zero.
"""

from __future__ import annotations

import torch
from onnxscript import FLOAT, INT32, script
from onnxscript.onnx_opset import opset23 as op
from onnxscript.values import Opset
from torch import Tensor

from glm_mtp_export.ops.norm import normalised
from glm_mtp_export.ops.paging import (
    GlmCacheIndex,
    GlmCacheWrite,
    GlmRealRows,
    latent_rows,
    latent_rows_written,
    real_rows,
)
from glm_mtp_export.ops.precision import widened
from glm_mtp_export.ops.record import Attribute, OpRecord, Port, define
from glm_mtp_export.ops.rope import GlmRotate, rotated

__all__ = ["mla_attention"]


def _mla_attention(
    q: Tensor,
    latent: Tensor,
    kv_norm_weight: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    selection: Tensor,
    positions: Tensor,
    row_requests: Tensor,
    block_table: Tensor,
    cache: Tensor,
    layer: int,
    num_heads: int,
    nope_dim: int,
    rope_dim: int,
    v_dim: int,
    kv_lora: int,
    rope_theta: float,
    interleaved: int,
    scale: float,
    eps: float,
    column_offset: int,
) -> tuple[Tensor, Tensor]:
    raw = latent[:, column_offset : column_offset + kv_lora + rope_dim]
    compressed = normalised(raw[:, :kv_lora], kv_norm_weight, eps)
    key = rotated(widened(raw[:, kv_lora:]), positions, rope_theta, interleaved).to(raw.dtype)
    rows = torch.cat((compressed, key), 1)
    updated = latent_rows_written(cache, layer, rows, kv_lora, positions, row_requests, block_table)
    heads = widened(q).unflatten(1, (num_heads, nope_dim + rope_dim))
    absorbed = torch.einsum("thn,hnk->thk", heads[..., :nope_dim], w_uk.to(heads.dtype))
    query = torch.cat((absorbed, rotated(heads[..., nope_dim:], positions, rope_theta, interleaved)), -1)
    used = (selection >= 0) & (selection <= positions[:, None])
    places = selection.masked_fill(~used, 0)
    keys = latent_rows(updated, layer, kv_lora, places, row_requests, block_table).to(heads.dtype)
    keys = keys.masked_fill(~used[..., None], 0.0)  # 0 * NaN would be NaN
    listed = used[:, None]
    scores = (torch.einsum("thk,tsk->ths", query, keys) * scale).masked_fill(~listed, -torch.inf)
    weights = torch.softmax(scores, -1).masked_fill(~listed, 0.0)
    context = torch.einsum("ths,tsk->thk", weights, keys[..., :kv_lora])
    out = torch.einsum("thk,hvk->thv", context, w_uv.to(heads.dtype)).flatten(1)
    padding = ~real_rows(positions, row_requests, block_table)
    return out.masked_fill(padding[:, None], 0.0).to(q.dtype), updated


def _mla_attention_fake(
    q: Tensor,
    latent: Tensor,
    kv_norm_weight: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    selection: Tensor,
    positions: Tensor,
    row_requests: Tensor,
    block_table: Tensor,
    cache: Tensor,
    layer: int,
    num_heads: int,
    nope_dim: int,
    rope_dim: int,
    v_dim: int,
    kv_lora: int,
    rope_theta: float,
    interleaved: int,
    scale: float,
    eps: float,
    column_offset: int,
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape[0], num_heads * v_dim), torch.empty_like(cache)


@script(Opset("glm", 1))
def _mla_attention_body(
    q: FLOAT,
    latent: FLOAT,
    kv_norm_weight: FLOAT,
    w_uk: FLOAT,
    w_uv: FLOAT,
    selection: INT32,
    positions: INT32,
    row_requests: INT32,
    block_table: INT32,
    cache: FLOAT,
    layer: int,
    num_heads: int,
    nope_dim: int,
    rope_dim: int,
    v_dim: int,
    kv_lora: int,
    rope_theta: float,
    interleaved: int,
    scale: float,
    eps: float,
    column_offset: int,
):
    zero = op.Constant(value_ints=[0])
    one = op.Constant(value_ints=[1])
    two = op.Constant(value_ints=[2])
    rest = op.Constant(value_ints=[-1])
    begin = op.Reshape(op.Constant(value_int=column_offset), one)
    rank = op.Reshape(op.Constant(value_int=kv_lora), one)
    rope = op.Reshape(op.Constant(value_int=rope_dim), one)
    nope = op.Reshape(op.Constant(value_int=nope_dim), one)
    heads = op.Reshape(op.Constant(value_int=num_heads), one)
    raw = op.Slice(latent, begin, begin + rank, one)
    raw_key = op.Unsqueeze(op.Slice(latent, begin + rank, begin + rank + rope, one), one)
    mean = op.ReduceMean(raw * raw, rest, keepdims=1)
    compressed = raw / op.Sqrt(mean + op.Constant(value_float=eps)) * kv_norm_weight
    key = op.Squeeze(GlmRotate(raw_key, positions, rope_theta=rope_theta, interleaved=interleaved), one)
    rows = op.Concat(compressed, key, axis=1)
    cache_out = GlmCacheWrite(cache, rows, positions, row_requests, block_table, layer=layer)
    by_head = op.Reshape(q, op.Concat(zero, heads, nope + rope, axis=0))
    plain = op.Slice(by_head, zero, nope, two)
    turned = GlmRotate(
        op.Slice(by_head, nope, nope + rope, two), positions, rope_theta=rope_theta, interleaved=interleaved
    )
    absorbed = op.Transpose(op.MatMul(op.Transpose(plain, perm=[1, 0, 2]), w_uk), perm=[1, 0, 2])
    query = op.Concat(absorbed, turned, axis=2)
    none = op.CastLike(0, selection)
    listed = op.And(op.GreaterOrEqual(selection, none), op.LessOrEqual(selection, op.Unsqueeze(positions, one)))
    index = GlmCacheIndex(op.Where(listed, selection, none), row_requests, block_table, layer=layer)
    nothing = op.Constant(value_float=0.0)
    keys = op.Where(op.Unsqueeze(listed, two), op.GatherND(cache_out, index), nothing)  # 0 * NaN would be NaN
    products = op.MatMul(query, op.Transpose(keys, perm=[0, 2, 1])) * op.Constant(value_float=scale)
    mask = op.Unsqueeze(listed, one)
    scores = op.Where(mask, products, op.Constant(value_float=float("-inf")))
    weights = op.Where(mask, op.Softmax(scores, axis=-1), nothing)
    context = op.MatMul(weights, op.Slice(keys, zero, rank, two))
    expanded = op.MatMul(op.Transpose(context, perm=[1, 0, 2]), op.Transpose(w_uv, perm=[0, 2, 1]))
    flat = op.Reshape(op.Transpose(expanded, perm=[1, 0, 2]), op.Constant(value_ints=[0, -1]))
    out = op.Where(op.Unsqueeze(GlmRealRows(positions, row_requests, block_table), one), flat, nothing)
    return out, cache_out


mla_attention = define(
    OpRecord(
        "GlmMlaAttention",
        "Write latent rows, attend over the listed positions in the latent space, expand the values.",
        (
            Port("q", "A", ("T", "num_heads*(nope_dim+rope_dim)"), "before rotation"),
            Port("latent", "A", ("T", "C"), "raw kv_a output from column_offset on"),
            Port("kv_norm_weight", "A", ("kv_lora",)),
            Port("w_uk", "A", ("num_heads", "nope_dim", "kv_lora")),
            Port("w_uv", "A", ("num_heads", "v_dim", "kv_lora")),
            Port("selection", "int32", ("T", "S"), "logical positions, -1 unused"),
            Port("positions", "int32", ("T",)),
            Port("row_requests", "int32", ("T",)),
            Port("block_table", "int32", ("B", "P")),
            Port("cache", "C", ("L", "N", 64, "Dc")),
        ),
        (Port("out", "A", ("T", "num_heads*v_dim")), Port("cache_out", "C", ("L", "N", 64, "Dc"))),
        (
            Attribute("layer", "int", "slot of the pool's first axis"),
            Attribute("num_heads", "int"),
            Attribute("nope_dim", "int"),
            Attribute("rope_dim", "int"),
            Attribute("v_dim", "int"),
            Attribute("kv_lora", "int"),
            Attribute("rope_theta", "float"),
            Attribute("interleaved", "int"),
            Attribute("scale", "float", "softmax scale"),
            Attribute("eps", "float", "of the latent norm"),
            Attribute("column_offset", "int"),
        ),
        _mla_attention,
        _mla_attention_fake,
        _mla_attention_body,
        aliases={"cache_out": "cache"},
    )
)
