"""Index arithmetic of the ragged step: where each row sits, what the draft embeds, and which rows go on.

Request b has m rows: L = m - num_drafts[b] committed tokens, then its drafts. Row i sits at position cache_lengths[b] + i.
"""

from __future__ import annotations

import torch
from onnxscript import INT32, script
from onnxscript.onnx_opset import opset23 as op
from onnxscript.values import Opset
from torch import Tensor

from glm_mtp_export.ops.record import Attribute, OpRecord, Port, define

__all__ = ["shift_rows", "step_rows"]


def _requests(num_rows: int, row_offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Request of each row (clamped) and whether the row is padding; int64 [T], bool [T]."""
    rows = torch.arange(num_rows, device=row_offsets.device)
    request = (rows[:, None] >= row_offsets[None, 1:]).sum(1)
    return request.clamp_max(row_offsets.shape[0] - 2), request >= row_offsets.shape[0] - 1


def _step_rows(
    token_ids: Tensor,
    row_offsets: Tensor,
    num_drafts: Tensor,
    draft_tokens: Tensor,
    cache_lengths: Tensor,
    num_slots: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    offsets, drafts = row_offsets.long(), num_drafts.long()
    request, padding = _requests(token_ids.shape[0], offsets)
    local = torch.arange(token_ids.shape[0], device=token_ids.device) - offsets[request]
    slot = local - (offsets[request + 1] - offsets[request] - drafts[request])
    proposed = draft_tokens[request, slot.clamp(0, draft_tokens.shape[1] - 1)]
    ids = torch.where(slot >= 0, proposed, token_ids).masked_fill(padding, 0)
    positions = (cache_lengths.long()[request] + local).masked_fill(padding, 0)
    slots = torch.minimum(torch.arange(num_slots, device=token_ids.device)[None], drafts[:, None])
    logit_rows = (offsets[1:, None] - 1 - drafts[:, None] + slots).flatten()
    return ids, positions.int(), request.masked_fill(padding, -1).int(), logit_rows.int()


def _step_rows_fake(
    token_ids: Tensor,
    row_offsets: Tensor,
    num_drafts: Tensor,
    draft_tokens: Tensor,
    cache_lengths: Tensor,
    num_slots: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = [torch.empty_like(token_ids) for _ in range(3)]
    return rows[0], rows[1], rows[2], token_ids.new_empty(num_drafts.shape[0] * num_slots)


@script(Opset("glm", 1))
def _step_rows_body(
    token_ids: INT32,
    row_offsets: INT32,
    num_drafts: INT32,
    draft_tokens: INT32,
    cache_lengths: INT32,
    num_slots: int,
):
    zero = op.Constant(value_int=0)
    one = op.Constant(value_int=1)
    first = op.Constant(value_ints=[0])
    second = op.Constant(value_ints=[1])
    offsets = op.Cast(row_offsets, to=7)
    drafts = op.Cast(num_drafts, to=7)
    num_requests = op.Squeeze(op.Shape(num_drafts), first)
    rows = op.Range(zero, op.Squeeze(op.Shape(token_ids), first), one)
    ends = op.Slice(offsets, second, op.Shape(offsets), first)
    past = op.GreaterOrEqual(op.Unsqueeze(rows, second), op.Unsqueeze(ends, first))
    counted = op.ReduceSum(op.Cast(past, to=7), second, keepdims=0)
    padding = op.GreaterOrEqual(counted, num_requests)
    request = op.Min(counted, num_requests - one)
    start = op.Gather(offsets, request)
    local = rows - start
    slot = local - (op.Gather(ends, request) - start - op.Gather(drafts, request))
    width = op.Gather(op.Shape(draft_tokens), one)
    column = op.Max(op.Min(slot, width - one), zero)
    proposed = op.Gather(op.Reshape(draft_tokens, op.Constant(value_ints=[-1])), request * width + column)
    chosen = op.Where(op.GreaterOrEqual(slot, zero), proposed, token_ids)
    row_token_ids = op.Where(padding, op.CastLike(zero, token_ids), chosen)
    sum_positions = op.Cast(op.Gather(cache_lengths, request), to=7) + local
    positions = op.Cast(op.Where(padding, zero, sum_positions), to=6)
    row_requests = op.Cast(op.Where(padding, op.Constant(value_int=-1), request), to=6)
    slots = op.Range(zero, op.Constant(value_int=num_slots), one)
    used = op.Min(op.Unsqueeze(slots, first), op.Unsqueeze(drafts, second))
    last = op.Unsqueeze(ends - one - drafts, second) + used
    logit_rows = op.Cast(op.Reshape(last, op.Constant(value_ints=[-1])), to=6)
    return row_token_ids, positions, row_requests, logit_rows


step_rows = define(
    OpRecord(
        "GlmStepRows",
        "Fill draft rows from draft_tokens; give each row its position and request, and each slot its logit row.",
        (
            Port("token_ids", "int32", ("T",)),
            Port("row_offsets", "int32", ("B+1",)),
            Port("num_drafts", "int32", ("B",)),
            Port("draft_tokens", "int32", ("B", "W")),
            Port("cache_lengths", "int32", ("B",)),
        ),
        (
            Port("row_token_ids", "int32", ("T",)),
            Port("positions", "int32", ("T",)),
            Port("row_requests", "int32", ("T",), "-1 on padding rows"),
            Port("logit_rows", "int32", ("B*num_slots",), "slots beyond num_drafts repeat the last row"),
        ),
        (Attribute("num_slots", "int", "verified positions of a request, K + 1"),),
        _step_rows,
        _step_rows_fake,
        _step_rows_body,
    )
)


def _shift_rows(
    row_token_ids: Tensor,
    row_offsets: Tensor,
    num_drafts: Tensor,
    num_accepted: Tensor,
    committed: Tensor,
    next_prompt_token: Tensor,
    cache_lengths: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    offsets, drafts = row_offsets.long(), num_drafts.long()
    num_rows = row_token_ids.shape[0]
    request, padding = _requests(num_rows, offsets)
    rows = torch.arange(num_rows, device=row_token_ids.device)
    slot = rows - (offsets[request + 1] - 1 - drafts[request])
    following = row_token_ids[(rows + 1).clamp_max(num_rows - 1)]
    verified = committed[request, slot.clamp(0, committed.shape[1] - 1)]
    forced = next_prompt_token[request]
    at_end = (slot == 0) & (drafts[request] == 0) & (forced >= 0)
    shifted = (
        torch.where(at_end, forced, torch.where(slot >= 0, verified, following)).clamp_min(0).masked_fill(padding, 0)
    )
    num_new = offsets[1:] - offsets[:-1] - drafts
    last_rows = offsets[:-1] + num_new - 1 + num_accepted.long()
    next_positions = cache_lengths.long() + num_new + num_accepted.long()
    request_ids = torch.arange(num_drafts.shape[0], device=row_token_ids.device, dtype=torch.int32)
    return shifted, last_rows.int(), next_positions.int(), request_ids


def _shift_rows_fake(
    row_token_ids: Tensor,
    row_offsets: Tensor,
    num_drafts: Tensor,
    num_accepted: Tensor,
    committed: Tensor,
    next_prompt_token: Tensor,
    cache_lengths: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    per_request = [torch.empty_like(num_drafts) for _ in range(3)]
    return torch.empty_like(row_token_ids), per_request[0], per_request[1], per_request[2]


@script(Opset("glm", 1))
def _shift_rows_body(
    row_token_ids: INT32,
    row_offsets: INT32,
    num_drafts: INT32,
    num_accepted: INT32,
    committed: INT32,
    next_prompt_token: INT32,
    cache_lengths: INT32,
):
    zero = op.Constant(value_int=0)
    one = op.Constant(value_int=1)
    first = op.Constant(value_ints=[0])
    second = op.Constant(value_ints=[1])
    offsets = op.Cast(row_offsets, to=7)
    drafts = op.Cast(num_drafts, to=7)
    accepted = op.Cast(num_accepted, to=7)
    num_requests = op.Squeeze(op.Shape(num_drafts), first)
    num_rows = op.Squeeze(op.Shape(row_token_ids), first)
    rows = op.Range(zero, num_rows, one)
    starts = op.Slice(offsets, first, op.Shape(offsets) - second, first)
    ends = op.Slice(offsets, second, op.Shape(offsets), first)
    past = op.GreaterOrEqual(op.Unsqueeze(rows, second), op.Unsqueeze(ends, first))
    counted = op.ReduceSum(op.Cast(past, to=7), second, keepdims=0)
    padding = op.GreaterOrEqual(counted, num_requests)
    request = op.Min(counted, num_requests - one)
    slot = rows - (op.Gather(ends, request) - one - op.Gather(drafts, request))
    following = op.Gather(row_token_ids, op.Min(rows + one, num_rows - one))
    width = op.Gather(op.Shape(committed), one)
    column = op.Max(op.Min(slot, width - one), zero)
    verified = op.Gather(op.Reshape(committed, op.Constant(value_ints=[-1])), request * width + column)
    forced = op.Gather(next_prompt_token, request)
    none = op.CastLike(zero, row_token_ids)
    no_drafts = op.Equal(op.Gather(drafts, request), zero)
    at_end = op.And(op.And(op.Equal(slot, zero), no_drafts), op.GreaterOrEqual(forced, none))
    inner = op.Where(op.GreaterOrEqual(slot, zero), verified, following)
    chosen = op.Max(op.Where(at_end, forced, inner), none)
    shifted = op.Where(padding, none, chosen)
    num_new = ends - starts - drafts
    last_rows = op.Cast(starts + num_new - one + accepted, to=6)
    next_positions = op.Cast(op.Cast(cache_lengths, to=7) + num_new + accepted, to=6)
    request_ids = op.Cast(op.Range(zero, num_requests, one), to=6)
    return shifted, last_rows, next_positions, request_ids


shift_rows = define(
    OpRecord(
        "GlmShiftRows",
        "The token after each row, which the draft embeds beside the row's hidden state; and each request's last accepted row.",
        (
            Port("row_token_ids", "int32", ("T",)),
            Port("row_offsets", "int32", ("B+1",)),
            Port("num_drafts", "int32", ("B",)),
            Port("num_accepted", "int32", ("B",)),
            Port("committed", "int32", ("B", "num_slots")),
            Port("next_prompt_token", "int32", ("B",), "-1: use the committed token"),
            Port("cache_lengths", "int32", ("B",)),
        ),
        (
            Port("shifted", "int32", ("T",)),
            Port("last_rows", "int32", ("B",)),
            Port("next_positions", "int32", ("B",), "position of the row that the next draft step adds"),
            Port("request_ids", "int32", ("B",)),
        ),
        (),
        _shift_rows,
        _shift_rows_fake,
        _shift_rows_body,
    )
)
