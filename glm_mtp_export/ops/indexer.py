"""The lightning indexer: write this call's index keys, score all visible ones, keep the best `index_topk`.

Score of key t for a row: sum over heads of gate_h * heads^-0.5 * relu(q_h . k_t * width^-0.5), in fp32. The list holds logical
positions in ascending order, then -1; equal scores go to the lower position. A NaN score counts as the best, so that a NaN key
reaches the logits and is seen instead of silently dropping out of the context.
"""

from __future__ import annotations

import torch
from onnxscript import FLOAT, INT32, script
from onnxscript.onnx_opset import opset23 as op
from onnxscript.values import Opset
from torch import Tensor

from glm_mtp_export.ops.paging import (
    GlmCacheWrite,
    GlmRealRows,
    all_index_keys,
    index_keys_written,
    power_of_two,
    real_rows,
)
from glm_mtp_export.ops.precision import widened
from glm_mtp_export.ops.record import Attribute, OpRecord, Port, define
from glm_mtp_export.ops.rope import GlmRotate, rotated

__all__ = ["INDEXER", "indexer"]

INDEXER = "GlmIndexer"


def _rotated_head(x: Tensor, positions: Tensor, rope_dim: int, theta: float, interleaved: int) -> Tensor:
    return torch.cat((rotated(x[..., :rope_dim], positions, theta, interleaved), x[..., rope_dim:]), -1)


def _best(scores: Tensor, index_topk: int) -> Tensor:
    """Ascending positions of the best scores, then -1: int32 [T, index_topk]."""
    ranked = scores.masked_fill(scores.isnan(), torch.inf)
    order = torch.argsort(ranked, dim=1, descending=True, stable=True)[:, :index_topk]
    unseen = scores.shape[1]
    chosen = order.masked_fill(ranked.gather(1, order) == -torch.inf, unseen)
    chosen = torch.nn.functional.pad(chosen, (0, index_topk - chosen.shape[1]), value=unseen).sort(dim=1).values
    return chosen.masked_fill(chosen == unseen, -1).int()


def _rounded_query(q: Tensor) -> Tensor:
    """q as the FP8 path sees it: e4m3 with one power-of-two scale a head."""
    wide = q.to(torch.float32)
    scale = power_of_two(wide.abs().amax(-1, keepdim=True), 2.0**-120)
    return (wide / scale).to(torch.float8_e4m3fn).to(torch.float32) * scale


def _indexer(
    q: Tensor,
    key_gate: Tensor,
    k_norm_weight: Tensor,
    k_norm_bias: Tensor,
    positions: Tensor,
    row_requests: Tensor,
    block_table: Tensor,
    cache: Tensor,
    layer: int,
    num_heads: int,
    head_dim: int,
    rope_dim: int,
    rope_theta: float,
    interleaved: int,
    index_topk: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    wide = widened(key_gate)
    normed = torch.nn.functional.layer_norm(
        wide[:, :head_dim], (head_dim,), k_norm_weight.to(wide.dtype), k_norm_bias.to(wide.dtype), eps
    )
    keys = _rotated_head(normed, positions, rope_dim, rope_theta, interleaved)
    updated = index_keys_written(cache, layer, keys, positions, row_requests, block_table)
    heads = _rotated_head(widened(q).unflatten(1, (num_heads, head_dim)), positions, rope_dim, rope_theta, interleaved)
    if cache.dtype == torch.int8:
        heads = _rounded_query(heads)
    context = widened(all_index_keys(updated, layer, head_dim, row_requests, block_table)).to(heads.dtype)
    products = torch.relu(torch.einsum("thd,tcd->thc", heads, context) * head_dim**-0.5)
    scores = torch.einsum("thc,th->tc", products, wide[:, head_dim:] * num_heads**-0.5)
    visible = torch.arange(context.shape[1], device=q.device)[None] <= positions[:, None]
    real = real_rows(positions, row_requests, block_table)
    scores = scores.masked_fill(~(visible & real[:, None]), -torch.inf)
    return _best(scores, index_topk), updated


def _indexer_fake(
    q: Tensor,
    key_gate: Tensor,
    k_norm_weight: Tensor,
    k_norm_bias: Tensor,
    positions: Tensor,
    row_requests: Tensor,
    block_table: Tensor,
    cache: Tensor,
    layer: int,
    num_heads: int,
    head_dim: int,
    rope_dim: int,
    rope_theta: float,
    interleaved: int,
    index_topk: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    return positions.new_empty(q.shape[0], index_topk), torch.empty_like(cache)


@script(Opset("glm", 1))
def GlmIndexerHead(x: FLOAT, positions: INT32, rope_dim: int, rope_theta: float, interleaved: int) -> FLOAT:
    """Rotate the first rope_dim lanes of x [T, H, d]."""
    split = op.Reshape(op.Constant(value_int=rope_dim), op.Constant(value_ints=[1]))
    last = op.Constant(value_ints=[2])
    first = op.Slice(x, op.Constant(value_ints=[0]), split, last)
    rest = op.Slice(x, split, op.Constant(value_ints=[9223372036854775807]), last)
    turned = GlmRotate(first, positions, rope_theta=rope_theta, interleaved=interleaved)
    return op.Concat(turned, rest, axis=2)


@script(Opset("glm", 1))
def _indexer_body(
    q: FLOAT,
    key_gate: FLOAT,
    k_norm_weight: FLOAT,
    k_norm_bias: FLOAT,
    positions: INT32,
    row_requests: INT32,
    block_table: INT32,
    cache: FLOAT,
    layer: int,
    num_heads: int,
    head_dim: int,
    rope_dim: int,
    rope_theta: float,
    interleaved: int,
    index_topk: int,
    eps: float,
):
    one = op.Constant(value_ints=[1])
    zero = op.Constant(value_ints=[0])
    end = op.Constant(value_ints=[9223372036854775807])
    width = op.Reshape(op.Constant(value_int=head_dim), one)
    heads = op.Reshape(op.Constant(value_int=num_heads), one)
    raw = op.Slice(key_gate, zero, width, one)
    gate = op.Slice(key_gate, width, end, one)
    centred = raw - op.ReduceMean(raw, op.Constant(value_ints=[-1]), keepdims=1)
    variance = op.ReduceMean(centred * centred, op.Constant(value_ints=[-1]), keepdims=1)
    normed = centred / op.Sqrt(variance + op.Constant(value_float=eps)) * k_norm_weight + k_norm_bias
    turned = GlmIndexerHead(
        op.Unsqueeze(normed, one), positions, rope_dim=rope_dim, rope_theta=rope_theta, interleaved=interleaved
    )
    keys = op.Squeeze(turned, one)
    cache_out = GlmCacheWrite(cache, keys, positions, row_requests, block_table, layer=layer)
    by_head = op.Reshape(q, op.Concat(zero, heads, width, axis=0))
    query = GlmIndexerHead(by_head, positions, rope_dim=rope_dim, rope_theta=rope_theta, interleaved=interleaved)
    request = op.Cast(op.Max(row_requests, op.CastLike(0, row_requests)), to=7)
    last_page = op.Gather(op.Shape(cache), one) - 1
    known = op.Max(op.Min(op.Cast(block_table, to=7), last_page), zero)
    pages = op.Gather(known, request)
    layers = op.Expand(op.Constant(value_int=layer), op.Shape(pages))
    axis = op.Constant(value_ints=[2])
    index = op.Concat(op.Unsqueeze(layers, axis), op.Unsqueeze(pages, axis), axis=2)
    context = op.Reshape(op.GatherND(cache_out, index), op.Concat(zero, op.Constant(value_ints=[-1]), width, axis=0))
    raw_scores = op.MatMul(query, op.Transpose(context, perm=[0, 2, 1]))
    products = op.Relu(raw_scores / op.Sqrt(op.Cast(width, to=1)))
    weights = op.Unsqueeze(gate / op.Sqrt(op.Cast(heads, to=1)), op.Constant(value_ints=[1]))
    scores = op.Squeeze(op.MatMul(weights, products), one)
    length = op.Squeeze(op.Slice(op.Shape(scores), one, axis), zero)
    place = op.Unsqueeze(op.Range(op.Constant(value_int=0), length, op.Constant(value_int=1)), zero)
    visible = op.LessOrEqual(place, op.Unsqueeze(op.Cast(positions, to=7), one))
    real = op.Unsqueeze(GlmRealRows(positions, row_requests, block_table), one)
    lowest = op.Constant(value_float=float("-inf"))
    ranked = op.Where(op.IsNaN(scores), op.Constant(value_float=float("inf")), scores)
    seen = op.Where(op.And(visible, real), ranked, lowest)
    top = op.Reshape(op.Constant(value_int=index_topk), one)
    filler = op.Expand(lowest, op.Concat(op.Shape(positions), top, axis=0))
    best, chosen = op.TopK(op.Concat(seen, filler, axis=1), top, axis=1)
    unseen = op.Constant(value_int=9223372036854775807)
    marked = op.Where(op.Equal(best, lowest), unseen, chosen)
    ascending, _order = op.TopK(marked, top, axis=1, largest=0)
    selection = op.Cast(op.Where(op.Equal(ascending, unseen), op.Constant(value_int=-1), ascending), to=6)
    return selection, cache_out


indexer = define(
    OpRecord(
        INDEXER,
        "Write index keys, score the visible ones and list the best positions of each row.",
        (
            Port("q", "A", ("T", "num_heads*head_dim"), "before rotation"),
            Port("key_gate", "float32", ("T", "head_dim+num_heads"), "key before its norm, then the head gates"),
            Port("k_norm_weight", "float32", ("head_dim",)),
            Port("k_norm_bias", "float32", ("head_dim",)),
            Port("positions", "int32", ("T",)),
            Port("row_requests", "int32", ("T",)),
            Port("block_table", "int32", ("B", "P")),
            Port("cache", "C", ("L", "N", 64, "Dc")),
        ),
        (
            Port("selection", "int32", ("T", "index_topk"), "ascending positions, then -1"),
            Port("cache_out", "C", ("L", "N", 64, "Dc")),
        ),
        (
            Attribute("layer", "int", "slot of the pool's first axis"),
            Attribute("num_heads", "int"),
            Attribute("head_dim", "int"),
            Attribute("rope_dim", "int", "lanes from the first on that rotate"),
            Attribute("rope_theta", "float"),
            Attribute("interleaved", "int"),
            Attribute("index_topk", "int"),
            Attribute("eps", "float", "of the key's LayerNorm"),
        ),
        _indexer,
        _indexer_fake,
        _indexer_body,
        aliases={"cache_out": "cache"},
    )
)
