"""Acceptance: the sampler that verifies drafts.

Slot j of request b verifies draft j by drawing a token from the target distribution of that position, truncated by temperature,
top-k, top-p and min-p in this order; the draft is accepted if it is the token drawn. The draw depends on the request's seed and
on the position in its output alone, so text sampled with speculation equals text sampled without it, token by token.
"""

from __future__ import annotations

from typing import Sequence  # noqa: UP035  (the form onnxscript recognises)

import torch
from onnxscript import BOOL, FLOAT, INT32, INT64, script
from onnxscript.onnx_opset import opset23 as op
from onnxscript.values import Opset
from torch import Tensor

from glm_mtp_export.ops.record import Attribute, OpRecord, Port, define

__all__ = ["accept", "uniform"]

_MASK32 = 0xFFFFFFFF


def _product32(x: Tensor, factor: int) -> Tensor:
    """x * factor mod 2^32 for int64 x below 2^32, in halves so that nothing overflows."""
    high = (x * (factor >> 16)) & 0xFFFF
    return (high * 65536 + x * (factor & 0xFFFF)) & _MASK32


def _mixed(x: Tensor) -> Tensor:
    """The murmur3 finaliser on 32-bit values held in int64."""
    x = _product32(x ^ (x >> 16), 0x85EBCA6B)
    x = _product32(x ^ (x >> 13), 0xC2B2AE35)
    return x ^ (x >> 16)


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """A number in (0, 1) for each (seed int64, output position int), float64: 24 bits of a hash of both, and a half.

    float32 does not hold 24 bits and a half: the largest value would round to 1, past every running sum.
    """
    low, high = seed & _MASK32, (seed >> 32) & _MASK32
    bits = _mixed(_mixed(_mixed(low ^ 0x9E3779B9) ^ high) ^ position.long())
    return ((bits >> 8).to(torch.float64) + 0.5) * 2.0**-24


def _drawn(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, u: Tensor) -> Tensor:
    """One token a row of logits [R, V]; all parameters [R]. Rows below temperature 1e-5 take the argmax."""
    finite = logits.masked_fill(logits.isnan(), -torch.inf)
    order = torch.argsort(finite, dim=1, descending=True, stable=True)
    ranked = finite.gather(1, order)
    rank = torch.arange(logits.shape[1], device=logits.device)
    limit = torch.where(top_k <= 0, logits.shape[1], top_k)
    apart = (ranked - ranked[:, :1]) / temperature.clamp_min(1e-6)[:, None].to(logits.dtype)
    weight = (torch.exp(apart) * (rank[None] < limit[:, None])).double()
    before = weight.cumsum(1) - weight
    nucleus = (before < top_p[:, None] * weight.sum(1, keepdim=True)) | (top_p >= 1)[:, None]
    kept = nucleus & (weight >= min_p[:, None] * weight[:, :1])
    kept[:, 0] = True
    mass = torch.zeros_like(weight).scatter_(1, order, torch.where(kept, weight, 0.0))
    running = mass.cumsum(1)
    drawn = (running > u[:, None] * running[:, -1:]).int().argmax(1)
    return torch.where(temperature < 1e-5, finite.argmax(1), drawn)


def _accept(
    logits: Tensor,
    draft_tokens: Tensor,
    num_drafts: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    sample_offset: Tensor,
    in_thinking_phase: Tensor,
    relaxed_delta: Tensor,
    num_slots: int,
    relaxed_topk: int,
    thinking_end_ids: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    batch, vocab = num_drafts.shape[0], logits.shape[1]
    slots = torch.arange(num_slots, device=logits.device)[None]
    u = uniform(seed[:, None].expand(-1, num_slots), sample_offset[:, None] + slots).flatten()
    each = [p.repeat_interleave(num_slots) for p in (temperature, top_k, top_p, min_p)]
    sample = _drawn(logits, each[0], each[1], each[2], each[3], u).view(batch, num_slots)
    drafts = torch.nn.functional.pad(draft_tokens, (0, 1))[:, :num_slots].long()
    is_draft = slots < num_drafts[:, None]
    rejected, recovered = drafts != sample, sample
    if relaxed_topk > 0:
        ended = torch.isin(drafts, torch.tensor(thinking_end_ids, device=logits.device)).cumsum(1) > 0
        relaxed = (in_thinking_phase & (temperature >= 1e-5))[:, None] & ~ended
        finite = logits.masked_fill(logits.isnan(), -torch.inf)
        order = torch.argsort(finite, dim=1, descending=True, stable=True)[:, : min(relaxed_topk, vocab)]
        best = torch.softmax(finite, 1).gather(1, order)
        near = (order == drafts.reshape(-1, 1)) & (best >= best[:, :1] - relaxed_delta)
        rejected = torch.where(relaxed, ~near.any(1).view(batch, num_slots), rejected)
        recovered = torch.where(relaxed, order[:, 0].view(batch, num_slots), recovered)
    accepted = (rejected | ~is_draft).int().argmax(1)
    committed = torch.where(is_draft, torch.where(rejected, recovered, drafts), sample)
    committed = committed.masked_fill(slots > num_drafts[:, None], 0)
    broken = (logits.isnan().any(1).view(batch, num_slots) & (slots <= num_drafts[:, None])).any(1)
    following = committed.gather(1, accepted[:, None])[:, 0].masked_fill(broken, -1)
    committed = committed.masked_fill(broken[:, None], 0)
    return accepted.masked_fill(broken, 0).int(), following.int(), committed.int()


def _accept_fake(
    logits: Tensor,
    draft_tokens: Tensor,
    num_drafts: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    sample_offset: Tensor,
    in_thinking_phase: Tensor,
    relaxed_delta: Tensor,
    num_slots: int,
    relaxed_topk: int,
    thinking_end_ids: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(num_drafts),
        torch.empty_like(num_drafts),
        num_drafts.new_empty(num_drafts.shape[0], num_slots),
    )


@script(Opset("glm", 1))
def GlmMix32(x: INT64) -> INT64:
    """`_mixed` without shifts: operands stay below 2^63."""
    word = op.Constant(value_int=4294967296)
    half = op.Constant(value_int=65536)
    a = op.BitwiseXor(x, x / half)
    b = op.Mod(op.Mod(a * op.Constant(value_int=34283), half) * half + a * op.Constant(value_int=51819), word)
    c = op.BitwiseXor(b, b / op.Constant(value_int=8192))
    d = op.Mod(op.Mod(c * op.Constant(value_int=49842), half) * half + c * op.Constant(value_int=44597), word)
    return op.BitwiseXor(d, d / half)


@script(Opset("glm", 1))
def GlmDraw(logits: FLOAT, temperature: FLOAT, top_k: INT32, top_p: FLOAT, min_p: FLOAT, u: FLOAT):
    """`_drawn` in ONNX; logits [R, V] without NaN, parameters [R, 1], u in double."""
    one = op.Constant(value_ints=[1])
    vocab = op.Slice(op.Shape(logits), one, op.Constant(value_ints=[2]), op.Constant(value_ints=[0]))
    ranked, order = op.TopK(logits, vocab, axis=1)
    first = op.Slice(ranked, op.Constant(value_ints=[0]), one, one)
    rank = op.Range(op.Constant(value_int=0), op.Squeeze(vocab, op.Constant(value_ints=[0])), op.Constant(value_int=1))
    asked = op.Cast(top_k, to=7)
    limit = op.Where(op.LessOrEqual(asked, op.Constant(value_int=0)), vocab, asked)
    none = op.Constant(value_float=0.0)
    apart = (ranked - first) / op.Max(temperature, op.Constant(value_float=1e-6))
    # Sums in double: in float32 the tail of a large vocabulary would fall past top_p = 1.
    weight = op.Cast(op.Where(op.Less(rank, limit), op.Exp(apart), none), to=11)
    nothing = op.Cast(none, to=11)
    before = op.CumSum(weight, op.Constant(value_int=1)) - weight
    share = op.Cast(top_p, to=11)
    everything = op.GreaterOrEqual(top_p, op.Constant(value_float=1.0))
    nucleus = op.Or(op.Less(before, share * op.ReduceSum(weight, one, keepdims=1)), everything)
    best = op.Slice(weight, op.Constant(value_ints=[0]), one, one)
    inside = op.And(nucleus, op.GreaterOrEqual(weight, op.Cast(min_p, to=11) * best))
    kept = op.Or(inside, op.Equal(rank, op.Constant(value_int=0)))
    mass = op.ScatterElements(op.Expand(nothing, op.Shape(logits)), order, op.Where(kept, weight, nothing), axis=1)
    running = op.CumSum(mass, op.Constant(value_int=1))
    total = op.Slice(running, op.Constant(value_ints=[-1]), vocab, one)
    past = op.Greater(running, u * total)
    drawn = op.ArgMax(op.Cast(past, to=6), axis=1, keepdims=1)
    greedy = op.ArgMax(logits, axis=1, keepdims=1)
    return op.Where(op.Less(temperature, op.Constant(value_float=1e-5)), greedy, drawn)


@script(Opset("glm", 1))
def GlmNear(logits: FLOAT, drafts: INT64, relaxed_delta: FLOAT, relaxed_topk: int):
    """Whether drafts [R, 1] are among the likeliest tokens within relaxed_delta of the best, and the best: [R, 1] each."""
    one = op.Constant(value_ints=[1])
    vocab = op.Slice(op.Shape(logits), one, op.Constant(value_ints=[2]), op.Constant(value_ints=[0]))
    width = op.Min(op.Max(op.Reshape(op.Constant(value_int=relaxed_topk), one), one), vocab)
    _best, order = op.TopK(logits, width, axis=1)
    best = op.GatherElements(op.Softmax(logits, axis=-1), order, axis=1)
    first = op.Slice(best, op.Constant(value_ints=[0]), one, one)
    hit = op.And(op.Equal(order, drafts), op.GreaterOrEqual(best, first - relaxed_delta))
    near = op.ReduceMax(op.Cast(hit, to=6), one, keepdims=1)
    return op.Cast(near, to=9), op.Slice(order, op.Constant(value_ints=[0]), one, one)


@script(Opset("glm", 1))
def _accept_body(
    logits: FLOAT,
    draft_tokens: INT32,
    num_drafts: INT32,
    temperature: FLOAT,
    top_k: INT32,
    top_p: FLOAT,
    min_p: FLOAT,
    seed: INT64,
    sample_offset: INT32,
    in_thinking_phase: BOOL,
    relaxed_delta: FLOAT,
    num_slots: int,
    relaxed_topk: int,
    thinking_end_ids: Sequence[int],
):
    zero = op.Constant(value_ints=[0])
    one = op.Constant(value_ints=[1])
    count = op.Reshape(op.Constant(value_int=num_slots), one)
    per_slot = op.Concat(one, count, axis=0)
    by_request = op.Concat(op.Constant(value_ints=[-1]), count, axis=0)
    column = op.Constant(value_ints=[-1, 1])
    slots = op.Unsqueeze(
        op.Range(op.Constant(value_int=0), op.Constant(value_int=num_slots), op.Constant(value_int=1)), zero
    )
    word = op.Constant(value_int=4294967296)
    low = op.Mod(seed, word)
    high = op.Mod((seed - low) / word, word)
    start = GlmMix32(op.BitwiseXor(low, op.Constant(value_int=2654435769)))
    stream = GlmMix32(op.BitwiseXor(start, high))
    position = op.Unsqueeze(op.Cast(sample_offset, to=7), one) + slots
    bits = GlmMix32(op.BitwiseXor(op.Unsqueeze(stream, one), position))
    # In double, as float32 does not hold 24 bits and a half.
    halves = op.Cast(bits / op.Constant(value_int=256), to=11) * 2.0 + 1.0
    u = halves * op.Cast(op.Constant(value_float=2.9802322387695312e-08), to=11)
    is_nan = op.IsNaN(logits)
    finite = op.Where(is_nan, op.Constant(value_float=float("-inf")), logits)
    flat_temperature = op.Reshape(op.Expand(op.Unsqueeze(temperature, one), per_slot), column)
    flat_top_k = op.Reshape(op.Expand(op.Unsqueeze(top_k, one), per_slot), column)
    flat_top_p = op.Reshape(op.Expand(op.Unsqueeze(top_p, one), per_slot), column)
    flat_min_p = op.Reshape(op.Expand(op.Unsqueeze(min_p, one), per_slot), column)
    flat_u = op.Reshape(u, column)
    sample = op.Reshape(GlmDraw(finite, flat_temperature, flat_top_k, flat_top_p, flat_min_p, flat_u), by_request)
    drafts = op.Slice(op.Pad(op.Cast(draft_tokens, to=7), op.Constant(value_ints=[0, 0, 0, 1])), zero, count, one)
    verified = op.Unsqueeze(op.Cast(num_drafts, to=7), one)
    is_draft = op.Less(slots, verified)
    near, likeliest = GlmNear(finite, op.Reshape(drafts, column), relaxed_delta, relaxed_topk=relaxed_topk)
    ends = op.Constant(value_ints=thinking_end_ids)
    last = op.Constant(value_ints=[2])
    is_end = op.ReduceMax(op.Cast(op.Equal(op.Unsqueeze(drafts, last), ends), to=6), last, keepdims=0)
    before_end = op.Equal(op.CumSum(is_end, op.Constant(value_int=1)), op.CastLike(0, is_end))
    warm = op.GreaterOrEqual(temperature, op.Constant(value_float=1e-5))
    compiled = op.Greater(op.Constant(value_int=relaxed_topk), op.Constant(value_int=0))
    eligible = op.Unsqueeze(op.And(op.And(in_thinking_phase, warm), compiled), one)
    relaxed = op.And(eligible, before_end)
    differs = op.Not(op.Equal(drafts, sample))
    far = op.Not(op.Reshape(near, by_request))
    # ONNX Runtime has no Where on booleans.
    rejected = op.Or(op.And(relaxed, far), op.And(op.Not(relaxed), differs))
    recovered = op.Where(relaxed, op.Reshape(likeliest, by_request), sample)
    stops = op.Or(rejected, op.Not(is_draft))
    accepted = op.ArgMax(op.Cast(stops, to=6), axis=1, keepdims=1)
    tried = op.Where(is_draft, op.Where(rejected, recovered, drafts), sample)
    committed = op.Where(op.LessOrEqual(slots, verified), tried, op.Constant(value_int=0))
    row_broken = op.Reshape(op.ReduceMax(op.Cast(is_nan, to=6), one, keepdims=1), by_request)
    used_broken = op.Where(op.LessOrEqual(slots, verified), row_broken, op.CastLike(0, row_broken))
    broken = op.Cast(op.ReduceMax(used_broken, one, keepdims=1), to=9)
    following = op.GatherElements(committed, accepted, axis=1)
    next_tokens = op.Cast(op.Squeeze(op.Where(broken, op.Constant(value_int=-1), following), one), to=6)
    num_accepted = op.Cast(op.Squeeze(op.Where(broken, op.Constant(value_int=0), accepted), one), to=6)
    return num_accepted, next_tokens, op.Cast(op.Where(broken, op.Constant(value_int=0), committed), to=6)


accept = define(
    OpRecord(
        "GlmAccept",
        "Verify each request's drafts against its target distribution; give the count accepted and the token that follows.",
        (
            Port("logits", "float32", ("B*num_slots", "V")),
            Port("draft_tokens", "int32", ("B", "W")),
            Port("num_drafts", "int32", ("B",)),
            Port("temperature", "float32", ("B",)),
            Port("top_k", "int32", ("B",)),
            Port("top_p", "float32", ("B",)),
            Port("min_p", "float32", ("B",)),
            Port("seed", "int64", ("B",)),
            Port("sample_offset", "int32", ("B",)),
            Port("in_thinking_phase", "bool", ("B",)),
            Port("relaxed_delta", "float32", (1,)),
        ),
        (
            Port("num_accepted", "int32", ("B",)),
            Port("next_tokens", "int32", ("B",), "-1: a NaN in the request's logits"),
            Port(
                "committed", "int32", ("B", "num_slots"), "accepted drafts and recovered tokens, then the bonus, then 0"
            ),
        ),
        (
            Attribute("num_slots", "int", "K + 1"),
            Attribute("relaxed_topk", "int", "0: relaxed acceptance is off"),
            Attribute("thinking_end_ids", "ints", "tokens that end the thinking phase; [-1] for none"),
        ),
        _accept,
        _accept_fake,
        _accept_body,
    )
)
