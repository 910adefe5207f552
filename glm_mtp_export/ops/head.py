"""The output head: logits of chosen rows, and the draft's argmax, for which logits need never exist."""

from __future__ import annotations

import torch
from onnxscript import FLOAT, INT32, script
from onnxscript.onnx_opset import opset23 as op
from onnxscript.values import Opset
from torch import Tensor

from glm_mtp_export.ops.precision import widened
from glm_mtp_export.ops.record import Attribute, OpRecord, Port, define

__all__ = ["head_argmax", "head_logits"]


def _masked_logits(x: Tensor, weight: Tensor, valid_vocab: int) -> Tensor:
    logits = widened(x) @ widened(weight).T
    logits[:, valid_vocab:] = -torch.inf
    return logits


def _head_logits(x: Tensor, rows: Tensor, weight: Tensor, valid_vocab: int) -> Tensor:
    return _masked_logits(x[rows.long()], weight, valid_vocab)


@script(Opset("glm", 1))
def GlmMaskedLogits(x: FLOAT, weight: FLOAT, valid_vocab: int) -> FLOAT:
    """x weight^T with the columns from valid_vocab on at -inf."""
    logits = op.Gemm(x, weight, transB=1)
    length = op.Gather(op.Shape(weight), op.Constant(value_int=0))
    place = op.Range(op.Constant(value_int=0), length, op.Constant(value_int=1))
    inside = op.Less(place, op.Constant(value_int=valid_vocab))
    return op.Where(inside, logits, op.Constant(value_float=float("-inf")))


@script(Opset("glm", 1))
def _head_logits_body(x: FLOAT, rows: INT32, weight: FLOAT, valid_vocab: int) -> FLOAT:
    return GlmMaskedLogits(op.Gather(x, rows), weight, valid_vocab=valid_vocab)


_VALID = (Attribute("valid_vocab", "int", "length of the tokenizer; later rows of the weight are padding"),)

head_logits = define(
    OpRecord(
        "GlmHeadLogits",
        "float32 logits of chosen rows; padding columns are -inf.",
        (Port("x", "A", ("T", "H")), Port("rows", "int32", ("M",)), Port("weight", "A", ("V", "H"))),
        (Port("logits", "float32", ("M", "V")),),
        _VALID,
        _head_logits,
        lambda x, rows, weight, valid_vocab: x.new_empty(
            rows.shape[0], weight.shape[0], dtype=x.dtype if x.dtype == torch.float64 else torch.float32
        ),
        _head_logits_body,
    )
)


def _head_argmax(x: Tensor, weight: Tensor, valid_vocab: int) -> Tensor:
    logits = _masked_logits(x, weight, valid_vocab)
    return logits.masked_fill(logits.isnan(), -torch.inf).argmax(1).int()


@script(Opset("glm", 1))
def _head_argmax_body(x: FLOAT, weight: FLOAT, valid_vocab: int) -> INT32:
    logits = GlmMaskedLogits(x, weight, valid_vocab=valid_vocab)
    seen = op.Where(op.IsNaN(logits), op.Constant(value_float=float("-inf")), logits)
    return op.Cast(op.ArgMax(seen, axis=1, keepdims=0), to=6)


head_argmax = define(
    OpRecord(
        "GlmHeadArgmax",
        "Most likely token of each row, the lowest id on ties; NaN never wins.",
        (Port("x", "A", ("B", "H")), Port("weight", "A", ("V", "H"))),
        (Port("ids", "int32", ("B",)),),
        _VALID,
        _head_argmax,
        lambda x, weight, valid_vocab: x.new_empty(x.shape[0], dtype=torch.int32),
        _head_argmax_body,
    )
)
