"""Routed experts: y = sum over a row's experts of weight * down(silu(gate x) * up x), in three weight formats.

w13 holds the gate rows of an expert first, then its up rows. Expert id -1 is skipped.
"""

from __future__ import annotations

import torch
from onnxscript import FLOAT, INT32, script
from onnxscript.onnx_opset import opset23 as op
from onnxscript.values import Opset
from torch import Tensor

from glm_mtp_export.ops.precision import dequantised_blocks, dequantised_groups, quantised_rows, widened
from glm_mtp_export.ops.record import OpRecord, Port, define

__all__ = ["experts", "experts_fp8", "experts_nvfp4"]


def _mixture(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, quantise: bool = False) -> Tensor:
    """The sum above with wide weights [E, 2I, H] and [E, H, I]; `quantise` rounds both inputs to e4m3 as the FP8 kernel does."""
    wide = quantised_rows(x) if quantise else widened(x)
    out = torch.zeros_like(wide)
    for expert in range(w13.shape[0]):
        row, slot = (ids == expert).nonzero(as_tuple=True)
        if row.numel() == 0:
            continue
        gate, up = (wide[row] @ w13[expert].to(wide.dtype).T).chunk(2, -1)
        inner = torch.nn.functional.silu(gate) * up
        inner = quantised_rows(inner) if quantise else inner
        out.index_add_(0, row, (inner @ w2[expert].to(wide.dtype).T) * weights[row, slot, None].to(wide.dtype))
    return out.to(x.dtype)


def _experts(x: Tensor, expert_ids: Tensor, expert_weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    return _mixture(x, expert_ids, expert_weights, widened(w13), widened(w2))


@script(Opset("glm", 1))
def _experts_body(x: FLOAT, expert_ids: INT32, expert_weights: FLOAT, w13: FLOAT, w2: FLOAT) -> FLOAT:
    """Every expert sees every row and the routing weights pick: plain operators, no loop, all experts in the graph."""
    one = op.Constant(value_ints=[1])
    shape = op.Shape(w2)
    num_experts = op.Slice(shape, op.Constant(value_ints=[0]), one, op.Constant(value_ints=[0]))
    hidden = op.Slice(shape, one, op.Constant(value_ints=[2]), op.Constant(value_ints=[0]))
    rest = op.Constant(value_ints=[-1])
    inner = op.Gemm(x, op.Reshape(w13, op.Concat(rest, hidden, axis=0)), transB=1)
    by_expert = op.Reshape(inner, op.Concat(op.Constant(value_ints=[0]), num_experts, rest, axis=0))
    gate, up = op.Split(by_expert, num_outputs=2, axis=2)
    active = gate / (op.Exp(-gate) + 1.0) * up  # see GlmSiluMul for why not Sigmoid
    each = op.Range(
        op.Constant(value_int=0), op.Squeeze(num_experts, op.Constant(value_ints=[0])), op.Constant(value_int=1)
    )
    hit = op.Equal(op.Unsqueeze(expert_ids, op.Constant(value_ints=[2])), op.Cast(each, to=6))
    none = op.Constant(value_float=0.0)
    weight = op.ReduceSum(
        op.Where(hit, op.Unsqueeze(expert_weights, op.Constant(value_ints=[2])), none), one, keepdims=0
    )
    used = op.Greater(op.ReduceSum(op.Cast(hit, to=6), one, keepdims=0), op.CastLike(0, expert_ids))
    last = op.Constant(value_ints=[2])
    weighted = op.Where(op.Unsqueeze(used, last), active * op.Unsqueeze(weight, last), none)
    down = op.Reshape(op.Transpose(w2, perm=[1, 0, 2]), op.Concat(hidden, rest, axis=0))
    return op.Gemm(op.Reshape(weighted, op.Constant(value_ints=[0, -1])), down, transB=1)


_ROUTED = (
    Port("x", "A", ("T", "H")),
    Port("expert_ids", "int32", ("T", "k")),
    Port("expert_weights", "float32", ("T", "k")),
)
_OUTPUT = (Port("y", "A", ("T", "H")),)

experts = define(
    OpRecord(
        "GlmExperts",
        "Routed experts with weights in the activation dtype.",
        (*_ROUTED, Port("w13", "A", ("E", "2I", "H")), Port("w2", "A", ("E", "H", "I"))),
        _OUTPUT,
        (),
        _experts,
        lambda x, *_: torch.empty_like(x),
        _experts_body,
    )
)


def _experts_fp8(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
) -> Tensor:
    wide13, wide2 = dequantised_blocks(w13, w13_scale), dequantised_blocks(w2, w2_scale)
    return _mixture(x, expert_ids, expert_weights, wide13, wide2, quantise=True)


experts_fp8 = define(
    OpRecord(
        "GlmExpertsFp8",
        "Routed experts with e4m3 weights and 128x128 block scales; activations are quantised per 128 columns inside.",
        (
            *_ROUTED,
            Port("w13", "float8_e4m3fn", ("E", "2I", "H")),
            Port("w13_scale", "float32", ("E", "ceil(2I/128)", "ceil(H/128)")),
            Port("w2", "float8_e4m3fn", ("E", "H", "I")),
            Port("w2_scale", "float32", ("E", "ceil(H/128)", "ceil(I/128)")),
        ),
        _OUTPUT,
        (),
        _experts_fp8,
        lambda x, *_: torch.empty_like(x),
        None,
    )
)


def _experts_nvfp4(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w13_global: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    w2_global: Tensor,
) -> Tensor:
    halves = w13_global.repeat_interleave(w13.shape[1] // 2, 1)[..., None]
    wide13 = dequantised_groups(w13, w13_scale, halves)
    return _mixture(x, expert_ids, expert_weights, wide13, dequantised_groups(w2, w2_scale, w2_global[..., None]))


experts_nvfp4 = define(
    OpRecord(
        "GlmExpertsNvfp4",
        "Routed experts with NVFP4 weights, exact: 16-wide groups with e4m3 scales; gate and up have a global scale each.",
        (
            *_ROUTED,
            Port("w13", "uint8", ("E", "2I", "H/2"), "low nibble: even column"),
            Port("w13_scale", "uint8", ("E", "2I", "H/16"), "e4m3 bits"),
            Port("w13_global", "float32", ("E", 2), "of gate, of up"),
            Port("w2", "uint8", ("E", "H", "I/2")),
            Port("w2_scale", "uint8", ("E", "H", "I/16")),
            Port("w2_global", "float32", ("E", 1)),
        ),
        _OUTPUT,
        (),
        _experts_nvfp4,
        lambda x, *_: torch.empty_like(x),
        None,
    )
)
