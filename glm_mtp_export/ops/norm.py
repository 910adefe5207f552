"""RMSNorm ops: alone, over a range of columns, and fused with the residual addition before it."""

from __future__ import annotations

import torch
from onnxscript import FLOAT, script
from onnxscript.onnx_opset import opset23 as op
from onnxscript.values import Opset
from torch import Tensor

from glm_mtp_export.ops.precision import widened
from glm_mtp_export.ops.record import Attribute, OpRecord, Port, define

__all__ = ["add_rms_norm", "normalised", "rms_norm"]


def normalised(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis as Hugging Face orders it: reduce wide, round to x's dtype, then multiply by the weight."""
    wide = widened(x)
    return weight.to(x.dtype) * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def _rms_norm(x: Tensor, weight: Tensor, eps: float, column_offset: int) -> Tensor:
    return normalised(x[:, column_offset : column_offset + weight.shape[0]], weight, eps)


@script(Opset("glm", 1))
def _rms_norm_body(x: FLOAT, weight: FLOAT, eps: float, column_offset: int) -> FLOAT:
    start = op.Constant(value_int=column_offset)
    begin = op.Reshape(start, op.Constant(value_ints=[1]))
    part = op.Slice(x, begin, begin + op.Shape(weight), op.Constant(value_ints=[1]))
    mean = op.ReduceMean(part * part, op.Constant(value_ints=[-1]), keepdims=1)
    return part / op.Sqrt(mean + op.Constant(value_float=eps)) * weight


rms_norm = define(
    OpRecord(
        "GlmRmsNorm",
        "RMSNorm of the columns from column_offset on, as many as the weight has; the reduction is in fp32.",
        (Port("x", "A", ("T", "C")), Port("weight", "A", ("D",))),
        (Port("y", "A", ("T", "D")),),
        (Attribute("eps", "float"), Attribute("column_offset", "int")),
        _rms_norm,
        lambda x, weight, eps, column_offset: x.new_empty(x.shape[0], weight.shape[0]),
        _rms_norm_body,
    )
)


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return normalised(total, weight, eps), total


@script(Opset("glm", 1))
def _add_rms_norm_body(x: FLOAT, residual: FLOAT, weight: FLOAT, eps: float):
    total = x + residual
    mean = op.ReduceMean(total * total, op.Constant(value_ints=[-1]), keepdims=1)
    y = total / op.Sqrt(mean + op.Constant(value_float=eps)) * weight
    return y, total


add_rms_norm = define(
    OpRecord(
        "GlmAddRmsNorm",
        "Residual addition and the RMSNorm of the sum.",
        (Port("x", "A", ("T", "D")), Port("residual", "A", ("T", "D")), Port("weight", "A", ("D",))),
        (Port("y", "A", ("T", "D")), Port("sum", "A", ("T", "D"))),
        (Attribute("eps", "float"),),
        _add_rms_norm,
        lambda x, residual, weight, eps: (torch.empty_like(x), torch.empty_like(x)),
        _add_rms_norm_body,
    )
)
