"""What the draft layer's first projection reads: the normed embedding of the next token beside the normed hidden state."""

from __future__ import annotations

import torch
from onnxscript import FLOAT, INT32, script
from onnxscript.onnx_opset import opset23 as op
from onnxscript.values import Opset
from torch import Tensor

from glm_mtp_export.ops.norm import normalised
from glm_mtp_export.ops.record import Attribute, OpRecord, Port, define

__all__ = ["draft_input"]


def _draft_input(
    table: Tensor, token_ids: Tensor, hidden: Tensor, token_norm: Tensor, hidden_norm: Tensor, eps: float
) -> Tensor:
    embedded = torch.nn.functional.embedding(token_ids, table)
    return torch.cat((normalised(embedded, token_norm, eps), normalised(hidden, hidden_norm, eps)), dim=1)


def _draft_input_fake(
    table: Tensor, token_ids: Tensor, hidden: Tensor, token_norm: Tensor, hidden_norm: Tensor, eps: float
) -> Tensor:
    return hidden.new_empty(hidden.shape[0], 2 * hidden.shape[1])


@script(Opset("glm", 1))
def _draft_input_body(
    table: FLOAT, token_ids: INT32, hidden: FLOAT, token_norm: FLOAT, hidden_norm: FLOAT, eps: float
) -> FLOAT:
    last = op.Constant(value_ints=[-1])
    small = op.Constant(value_float=eps)
    embedded = op.Gather(table, token_ids)
    token_half = embedded / op.Sqrt(op.ReduceMean(embedded * embedded, last, keepdims=1) + small) * token_norm
    hidden_half = hidden / op.Sqrt(op.ReduceMean(hidden * hidden, last, keepdims=1) + small) * hidden_norm
    return op.Concat(token_half, hidden_half, axis=1)


# One op rather than a gather, two norms and a concatenation: TensorRT-RTX lets the producers of a concatenation write into
# strides that a plugin never learns of, so a plugin's output must not go into a native Concat.
draft_input = define(
    OpRecord(
        "GlmDraftInput",
        "RMSNorm of each token's embedding, then RMSNorm of its hidden state, side by side.",
        (
            Port("table", "A", ("V", "H")),
            Port("token_ids", "int32", ("T",)),
            Port("hidden", "A", ("T", "H")),
            Port("token_norm", "A", ("H",)),
            Port("hidden_norm", "A", ("H",)),
        ),
        (Port("joined", "A", ("T", "2H"), "embedding half first"),),
        (Attribute("eps", "float"),),
        _draft_input,
        _draft_input_fake,
        _draft_input_body,
    )
)
