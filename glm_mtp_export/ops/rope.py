"""Rotary embedding in place: pair j is lanes (2j, 2j+1) when interleaved, (j, j + d/2) when not."""

from __future__ import annotations

import math

import torch
from onnx import TensorProto, helper
from onnxscript import FLOAT, INT32, script
from onnxscript.onnx_opset import opset23 as op
from onnxscript.values import Opset
from torch import Tensor

__all__ = ["GlmRotate", "rotated"]

# A literal in a function body would be a float32: 1.7e-7 off a turn is 0.03 rad at position 2^20.
_TURN = helper.make_tensor("turn", TensorProto.DOUBLE, [], [2 * math.pi])


def rotated(x: Tensor, positions: Tensor, theta: float, interleaved: int) -> Tensor:
    """Rotate the last axis of `x` [T, ..., d] by angle position * theta^(-2j/d).

    Angles are formed in float64 from integer positions, since positions reach 2^20; results keep x's dtype.
    """
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float64, device=x.device) * 2 / x.shape[-1])
    angle = positions.to(torch.float64).reshape(-1, *([1] * (x.dim() - 1))) * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    if interleaved:
        first, second = x[..., 0::2], x[..., 1::2]
        return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@script(Opset("glm", 1))
def GlmRotate(x: FLOAT, positions: INT32, rope_theta: float, interleaved: int) -> FLOAT:
    """`rotated` for x [T, H, d] in ONNX: y = x * cos + sign * x[partner] * sin, angles reduced to one turn in double."""
    width = op.Gather(op.Shape(x), op.Constant(value_int=2))
    half = width / 2
    lane = op.Range(op.Constant(value_int=0), width, op.Constant(value_int=1))
    layout = op.Constant(value_int=interleaved)
    other = 1 - layout
    pair = layout * (lane / 2) + other * op.Mod(lane, half)
    second = layout * op.Mod(lane, op.Constant(value_int=2)) + other * (lane / half)
    partner = layout * (lane + 1 - 2 * second) + other * op.Mod(lane + half, width)
    exponent = -2.0 * op.Cast(pair, to=11) / op.Cast(width, to=11)
    frequency = op.Pow(op.Cast(op.Constant(value_float=rope_theta), to=11), exponent)
    angle = op.Cast(op.Unsqueeze(positions, op.Constant(value_ints=[1, 2])), to=11) * frequency
    turn = op.Constant(value=_TURN)
    reduced = op.Cast(angle - op.Round(angle / turn) * turn, to=1)
    sign = op.Cast(2 * second - 1, to=1)
    return x * op.Cos(reduced) + op.Gather(x, partner, axis=2) * (sign * op.Sin(reduced))
