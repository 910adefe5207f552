"""Matrix products with weights [O, I]: bf16, FP8 with 128x128 block scales; and the SwiGLU between two of them."""

from __future__ import annotations

import torch
from onnxscript import FLOAT, script
from onnxscript.onnx_opset import opset23 as op
from onnxscript.values import Opset
from torch import Tensor

from glm_mtp_export.ops.precision import dequantised_blocks, quantised_rows, widened
from glm_mtp_export.ops.record import Attribute, OpRecord, Port, define

__all__ = ["linear", "linear_fp8", "silu_mul"]


def _output(x: Tensor, y: Tensor, to_f32: int) -> Tensor:
    return y if to_f32 else y.to(x.dtype)


def _linear(x: Tensor, weight: Tensor, to_f32: int) -> Tensor:
    return _output(x, widened(x) @ widened(weight).T, to_f32)


def _linear_fake(x: Tensor, weight: Tensor, to_f32: int) -> Tensor:
    dtype = torch.float32 if to_f32 and x.dtype != torch.float64 else x.dtype
    return x.new_empty(x.shape[0], weight.shape[0], dtype=dtype)


@script(Opset("glm", 1))
def _linear_body(x: FLOAT, weight: FLOAT, to_f32: int) -> FLOAT:
    return op.Gemm(x, weight, transB=1)


linear = define(
    OpRecord(
        "GlmLinear",
        "y = x weight^T, accumulated in fp32.",
        (Port("x", "A", ("T", "I")), Port("weight", "A", ("O", "I"))),
        (Port("y", "F", ("T", "O")),),
        (Attribute("to_f32", "int", "1: the output stays float32"),),
        _linear,
        _linear_fake,
        _linear_body,
    )
)


def _linear_fp8(x: Tensor, weight: Tensor, scale: Tensor, to_f32: int) -> Tensor:
    return _output(x, quantised_rows(x) @ dequantised_blocks(weight, scale).T, to_f32)


linear_fp8 = define(
    OpRecord(
        "GlmLinearFp8",
        "y = q(x) (weight scale)^T; x is quantised to e4m3 per row and 128 columns inside the op.",
        (
            Port("x", "A", ("T", "I")),
            Port("weight", "float8_e4m3fn", ("O", "I")),
            Port("scale", "float32", ("ceil(O/128)", "ceil(I/128)")),
        ),
        (Port("y", "F", ("T", "O")),),
        (Attribute("to_f32", "int", "1: the output stays float32"),),
        _linear_fp8,
        lambda x, weight, scale, to_f32: _linear_fake(x, weight, to_f32),
        None,
    )
)


def _silu_mul(x: Tensor) -> Tensor:
    gate, up = widened(x).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


@script(Opset("glm", 1))
def _silu_mul_body(x: FLOAT) -> FLOAT:
    gate, up = op.Split(x, num_outputs=2, axis=1)
    # ONNX Runtime's Sigmoid is off by 2.5e-4 of its value at -8; this is exact to a few roundings.
    return gate / (op.Exp(-gate) + 1.0) * up


silu_mul = define(
    OpRecord(
        "GlmSiluMul",
        "silu(first half of the columns) * second half.",
        (Port("x", "A", ("T", "2I")),),
        (Port("y", "A", ("T", "I")),),
        (),
        _silu_mul,
        lambda x: x.new_empty(x.shape[0], x.shape[1] // 2),
        _silu_mul_body,
    )
)
