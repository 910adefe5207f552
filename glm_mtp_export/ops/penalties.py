"""Logit bias and penalties, exact inside a block of drafts: slot j's history includes the drafts before it.

Order, as vLLM has it: bias, then repetition (over prompt and output), then frequency and presence (over output).
"""

from __future__ import annotations

import torch
from onnxscript import FLOAT, INT32, script
from onnxscript.onnx_opset import opset23 as op
from onnxscript.values import Opset
from torch import Tensor

from glm_mtp_export.ops.record import Attribute, OpRecord, Port, define

__all__ = ["penalties"]


def _penalties(
    logits: Tensor,
    draft_tokens: Tensor,
    presence_penalty: Tensor,
    frequency_penalty: Tensor,
    repetition_penalty: Tensor,
    output_counts: Tensor,
    prompt_mask: Tensor,
    logit_bias: Tensor,
    num_slots: int,
) -> Tensor:
    batch, vocab = output_counts.shape
    drafts = torch.nn.functional.pad(draft_tokens, (0, 1))[:, :num_slots].long()
    known = (drafts >= 0) & (drafts < vocab)
    drafted = torch.nn.functional.one_hot(drafts.clamp(0, vocab - 1), vocab) * known[..., None]
    counts = output_counts[:, None] + drafted.cumsum(1) - drafted
    seen = (counts > 0) | (prompt_mask[:, None] > 0)
    biased = logits.view(batch, num_slots, vocab) + logit_bias[:, None]
    factor = repetition_penalty[:, None, None].to(logits.dtype)
    repeated = torch.where(seen, torch.where(biased > 0, biased / factor, biased * factor), biased)
    lowered = repeated - frequency_penalty[:, None, None] * counts - presence_penalty[:, None, None] * (counts > 0)
    return lowered.view(-1, vocab).to(logits.dtype)


def _penalties_fake(
    logits: Tensor,
    draft_tokens: Tensor,
    presence_penalty: Tensor,
    frequency_penalty: Tensor,
    repetition_penalty: Tensor,
    output_counts: Tensor,
    prompt_mask: Tensor,
    logit_bias: Tensor,
    num_slots: int,
) -> Tensor:
    return torch.empty_like(logits)


@script(Opset("glm", 1))
def _penalties_body(
    logits: FLOAT,
    draft_tokens: INT32,
    presence_penalty: FLOAT,
    frequency_penalty: FLOAT,
    repetition_penalty: FLOAT,
    output_counts: INT32,
    prompt_mask: INT32,
    logit_bias: FLOAT,
    num_slots: int,
) -> FLOAT:
    zero = op.Constant(value_ints=[0])
    one = op.Constant(value_ints=[1])
    each = op.Constant(value_ints=[1, 2])
    count = op.Reshape(op.Constant(value_int=num_slots), one)
    vocab = op.Slice(op.Shape(output_counts), one, op.Constant(value_ints=[2]), zero)
    padded = op.Pad(op.Cast(draft_tokens, to=7), op.Constant(value_ints=[0, 0, 0, 1]))
    drafts = op.Slice(padded, zero, count, one)
    ids = op.Range(op.Constant(value_int=0), op.Squeeze(vocab, zero), op.Constant(value_int=1))
    drafted = op.Cast(op.Equal(op.Unsqueeze(drafts, op.Constant(value_ints=[2])), ids), to=6)
    earlier = op.CumSum(drafted, op.Constant(value_int=1), exclusive=1)
    counts = op.Unsqueeze(output_counts, one) + earlier
    none = op.CastLike(0, counts)
    used = op.Greater(counts, none)
    seen = op.Or(used, op.Greater(op.Unsqueeze(prompt_mask, one), none))
    shape = op.Concat(op.Constant(value_ints=[-1]), count, vocab, axis=0)
    biased = op.Reshape(logits, shape) + op.Unsqueeze(logit_bias, one)
    factor = op.Unsqueeze(repetition_penalty, each)
    positive = op.Greater(biased, op.Constant(value_float=0.0))
    repeated = op.Where(seen, op.Where(positive, biased / factor, biased * factor), biased)
    frequency = op.Unsqueeze(frequency_penalty, each) * op.Cast(counts, to=1)
    presence = op.Unsqueeze(presence_penalty, each) * op.Cast(used, to=1)
    return op.Reshape(repeated - frequency - presence, op.Shape(logits))


penalties = define(
    OpRecord(
        "GlmPenalties",
        "Logit bias, then repetition, frequency and presence penalties; a slot's history includes the drafts before it.",
        (
            Port("logits", "float32", ("B*num_slots", "V")),
            Port("draft_tokens", "int32", ("B", "W")),
            Port("presence_penalty", "float32", ("B",)),
            Port("frequency_penalty", "float32", ("B",)),
            Port("repetition_penalty", "float32", ("B",)),
            Port("output_counts", "int32", ("B", "V"), "how often each id was committed to the output"),
            Port("prompt_mask", "int32", ("B", "V"), "1 where the prompt has the id"),
            Port("logit_bias", "float32", ("B", "V")),
        ),
        (Port("adjusted", "float32", ("B*num_slots", "V")),),
        (Attribute("num_slots", "int", "K + 1"),),
        _penalties,
        _penalties_fake,
        _penalties_body,
    )
)
