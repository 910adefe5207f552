"""What happens to logits beside sampling: grammar masks before it, log-probabilities of what was committed after it."""

from __future__ import annotations

import torch
from onnxscript import FLOAT, INT32, script
from onnxscript.onnx_opset import opset23 as op
from onnxscript.values import Opset
from torch import Tensor

from glm_mtp_export.ops.record import Attribute, OpRecord, Port, define

__all__ = ["mask_logits", "token_logprobs"]


def _mask_logits(logits: Tensor, token_bitmask: Tensor, mask_turn: Tensor, mask_ready: Tensor) -> Tensor:
    words = token_bitmask.reshape(logits.shape[0], -1, 1)
    bits = (words >> torch.arange(32, device=logits.device, dtype=torch.int32)) & 1
    allowed = bits.flatten(1)[:, : logits.shape[1]].bool()
    usable = allowed | ~allowed.any(1, keepdim=True)
    return torch.where(usable | logits.isnan(), logits, -torch.inf)


@script(Opset("glm", 1))
def _mask_logits_body(logits: FLOAT, token_bitmask: INT32, mask_turn: INT32, mask_ready: INT32) -> FLOAT:
    one = op.Constant(value_ints=[1])
    vocab = op.Slice(op.Shape(logits), one, op.Constant(value_ints=[2]), op.Constant(value_ints=[0]))
    rows = op.Slice(op.Shape(logits), op.Constant(value_ints=[0]), one, op.Constant(value_ints=[0]))
    low = op.Cast(
        op.Pow(
            op.Constant(value_float=2.0),
            op.Cast(op.Range(op.Constant(value_int=0), op.Constant(value_int=31), op.Constant(value_int=1)), to=1),
        ),
        to=6,
    )
    powers = op.Concat(low, op.Cast(op.Constant(value_ints=[-2147483648]), to=6), axis=0)
    words = op.Reshape(token_bitmask, op.Concat(rows, op.Constant(value_ints=[-1, 1]), axis=0))
    shared = op.BitwiseAnd(words, powers)
    allowed = op.Not(op.Equal(shared, op.CastLike(0, shared)))
    flat = op.Slice(
        op.Reshape(allowed, op.Concat(rows, op.Constant(value_ints=[-1]), axis=0)),
        op.Constant(value_ints=[0]),
        vocab,
        one,
    )
    any_allowed = op.Cast(op.ReduceMax(op.Cast(flat, to=6), one, keepdims=1), to=9)
    usable = op.Or(flat, op.Not(any_allowed))
    return op.Where(op.Or(usable, op.IsNaN(logits)), logits, op.Constant(value_float=float("-inf")))


mask_logits = define(
    OpRecord(
        "GlmMaskLogits",
        "Put tokens that a grammar forbids at -inf; a row that forbids everything is left as it is, and NaN stays NaN.",
        (
            Port("logits", "float32", ("B*num_slots", "V")),
            Port("token_bitmask", "int32", ("B", "num_slots", "ceil(V/32)")),
            Port(
                "mask_turn",
                "int32",
                (1,),
                "0: token_bitmask is there; else the kernel waits for it, other bodies do not",
            ),
            Port("mask_ready", "int32", (1,), "token_bitmask is there once mask_ready - mask_turn >= 0, modulo 2^32"),
        ),
        (Port("masked", "float32", ("B*num_slots", "V")),),
        (),
        _mask_logits,
        lambda logits, token_bitmask, mask_turn, mask_ready: torch.empty_like(logits),
        _mask_logits_body,
    )
)


def _token_logprobs(logits: Tensor, committed: Tensor, top_n: int) -> tuple[Tensor, Tensor, Tensor]:
    logprobs = torch.log_softmax(logits, 1).view(*committed.shape, -1)
    chosen = logprobs.gather(2, committed.long().clamp_min(0)[..., None])[..., 0]
    if top_n == 0:
        return chosen, torch.full_like(committed, -1)[..., None], torch.zeros_like(chosen)[..., None]
    missing = max(top_n - logits.shape[1], 0)
    order = torch.argsort(logits.view_as(logprobs), dim=2, descending=True, stable=True)[..., :top_n]
    best = torch.nn.functional.pad(logprobs.gather(2, order), (0, missing), value=-torch.inf)
    return chosen, torch.nn.functional.pad(order, (0, missing), value=-1).int(), best


def _token_logprobs_fake(logits: Tensor, committed: Tensor, top_n: int) -> tuple[Tensor, Tensor, Tensor]:
    shape = (*committed.shape, max(top_n, 1))
    return logits.new_empty(committed.shape), committed.new_empty(shape), logits.new_empty(shape)


@script(Opset("glm", 1))
def _token_logprobs_body(logits: FLOAT, committed: INT32, top_n: int):
    one = op.Constant(value_ints=[1])
    shape = op.Concat(op.Shape(committed), op.Constant(value_ints=[-1]), axis=0)
    logprobs = op.Reshape(op.LogSoftmax(logits, axis=1), shape)
    index = op.Unsqueeze(op.Cast(op.Max(committed, op.CastLike(0, committed)), to=7), op.Constant(value_ints=[2]))
    chosen = op.Squeeze(op.GatherElements(logprobs, index, axis=2), op.Constant(value_ints=[2]))
    wanted = op.Reshape(op.Constant(value_int=top_n), one)
    width = op.Max(wanted, one)
    vocab = op.Slice(op.Shape(logits), one, op.Constant(value_ints=[2]), op.Constant(value_ints=[0]))
    known = op.Min(width, vocab)
    # Ranked by logits: rounding makes log-probabilities equal where logits are not.
    _best, order = op.TopK(op.Reshape(logits, shape), known, axis=2)
    best = op.GatherElements(logprobs, order, axis=2)
    # Columns past the vocabulary, and the one column that top_n = 0 leaves, name nobody.
    fill = op.Concat(op.Constant(value_ints=[0, 0, 0, 0, 0]), width - known, axis=0)
    padded = op.Pad(best, fill, op.Constant(value_float=float("-inf")))
    ids = op.Pad(op.Cast(order, to=6), fill, op.Cast(op.Constant(value_int=-1), to=6))
    off = op.Equal(wanted, op.Constant(value_ints=[0]))
    top_ids = op.Where(off, op.CastLike(-1, ids), ids)
    return chosen, top_ids, op.Where(off, op.Constant(value_float=0.0), padded)


token_logprobs = define(
    OpRecord(
        "GlmTokenLogprobs",
        "Log-softmax of the unmasked logits at committed tokens, and the likeliest tokens of each slot (none: id -1).",
        (Port("logits", "float32", ("B*num_slots", "V")), Port("committed", "int32", ("B", "num_slots"))),
        (
            Port("logprobs", "float32", ("B", "num_slots")),
            Port("top_ids", "int32", ("B", "num_slots", "max(top_n,1)")),
            Port("top_logprobs", "float32", ("B", "num_slots", "max(top_n,1)")),
        ),
        (Attribute("top_n", "int"),),
        _token_logprobs,
        _token_logprobs_fake,
        _token_logprobs_body,
    )
)
