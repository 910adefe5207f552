"""The sigmoid router: choose experts by biased score, weigh them by the unbiased one, everything in fp32."""

from __future__ import annotations

import torch
from onnxscript import FLOAT, script
from onnxscript.onnx_opset import opset23 as op
from onnxscript.values import Opset
from torch import Tensor

from glm_mtp_export.ops.precision import widened
from glm_mtp_export.ops.record import Attribute, OpRecord, Port, define

__all__ = ["router"]


def _first_largest(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest along the last axis, best first, ties to the lower index."""
    return torch.argsort(scores, dim=-1, descending=True, stable=True)[..., :count]


def _router(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    top_k: int,
    n_group: int,
    topk_group: int,
    norm_topk_prob: int,
    routed_scaling_factor: float,
) -> tuple[Tensor, Tensor]:
    scores = torch.sigmoid(widened(x) @ widened(weight).to(widened(x).dtype).T)
    biased = scores + bias.to(scores.dtype)
    groups = biased.unflatten(1, (n_group, -1))
    best_pair = groups.sort(-1, descending=True).values[..., :2].sum(-1)
    kept = torch.zeros_like(best_pair, dtype=torch.bool).scatter_(1, _first_largest(best_pair, topk_group), True)
    allowed = groups.masked_fill(~kept[..., None], -torch.inf).flatten(1)
    ids = _first_largest(allowed, top_k)
    weights = scores.gather(1, ids)
    if norm_topk_prob:
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    return ids.int(), weights * routed_scaling_factor


def _router_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    top_k: int,
    n_group: int,
    topk_group: int,
    norm_topk_prob: int,
    routed_scaling_factor: float,
) -> tuple[Tensor, Tensor]:
    dtype = x.dtype if x.dtype == torch.float64 else torch.float32
    return x.new_empty(x.shape[0], top_k, dtype=torch.int32), x.new_empty(x.shape[0], top_k, dtype=dtype)


@script(Opset("glm", 1))
def _router_body(
    x: FLOAT,
    weight: FLOAT,
    bias: FLOAT,
    top_k: int,
    n_group: int,
    topk_group: int,
    norm_topk_prob: int,
    routed_scaling_factor: float,
):
    zero = op.Constant(value_ints=[0])
    one = op.Constant(value_ints=[1])
    rest = op.Constant(value_ints=[-1])
    two = op.Constant(value_ints=[2])
    groups = op.Reshape(op.Constant(value_int=n_group), one)
    scores = 1.0 / (op.Exp(-op.Gemm(x, weight, transB=1)) + 1.0)  # see GlmSiluMul for why not Sigmoid
    by_group = op.Reshape(scores + bias, op.Concat(zero, groups, rest, axis=0))
    size = op.Slice(op.Shape(by_group), two, op.Constant(value_ints=[3]), zero)
    pair, _pair_index = op.TopK(by_group, op.Min(size, two), axis=2)
    strength = op.ReduceSum(pair, two, keepdims=0)
    _best, group_ids = op.TopK(strength, op.Reshape(op.Constant(value_int=topk_group), one), axis=1)
    each = op.Reshape(
        op.Range(op.Constant(value_int=0), op.Constant(value_int=n_group), op.Constant(value_int=1)),
        op.Constant(value_ints=[1, -1, 1]),
    )
    hits = op.Cast(op.Equal(each, op.Unsqueeze(group_ids, one)), to=6)
    kept = op.Unsqueeze(op.Greater(op.ReduceSum(hits, two, keepdims=0), op.CastLike(0, hits)), two)
    allowed = op.Where(kept, by_group, op.Constant(value_float=float("-inf")))
    flat = op.Reshape(allowed, op.Constant(value_ints=[0, -1]))
    _value, ids = op.TopK(flat, op.Reshape(op.Constant(value_int=top_k), one), axis=1)
    chosen = op.GatherElements(scores, ids, axis=1)
    total = op.ReduceSum(chosen, one, keepdims=1) + 1e-20
    normed = op.Cast(op.Constant(value_int=norm_topk_prob), to=9)
    weights = op.Where(normed, chosen / total, chosen) * op.Constant(value_float=routed_scaling_factor)
    return op.Cast(ids, to=6), weights


router = define(
    OpRecord(
        "GlmRouter",
        "Experts of each row, best biased score first, and their weights.",
        (
            Port("x", "A", ("T", "H")),
            Port("weight", "A", ("E", "H")),
            Port("bias", "float32", ("E",), "e_score_correction_bias: for choosing only"),
        ),
        (Port("expert_ids", "int32", ("T", "top_k")), Port("expert_weights", "float32", ("T", "top_k"))),
        (
            Attribute("top_k", "int"),
            Attribute("n_group", "int"),
            Attribute("topk_group", "int"),
            Attribute("norm_topk_prob", "int"),
            Attribute("routed_scaling_factor", "float"),
        ),
        _router,
        _router_fake,
        _router_body,
    )
)
