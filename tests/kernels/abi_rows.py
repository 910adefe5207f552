"""Bindings of rows.h, norm.h and sampling.h on torch CUDA tensors, with guarded and poisoned memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import abi
import torch
from abi_products import GuardedBuffer, KernelError


def _argument(value: object) -> object:
    if isinstance(value, torch.Tensor):
        assert value.is_contiguous()
        return ctypes.c_void_p(value.data_ptr())
    if value is None:
        return ctypes.c_void_p(0)
    return ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int(value)  # type: ignore[arg-type]


def call(entry: str, *arguments: object) -> None:
    """Runs an entry without workspace; the stream is torch's current one."""
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    status = getattr(abi.load(), entry)(*[_argument(a) for a in arguments], stream)
    if status != 0:
        raise KernelError(entry, status)


def _finish(outputs: Sequence[GuardedBuffer]) -> list[torch.Tensor]:
    torch.cuda.synchronize()
    for index, buffer in enumerate(outputs):
        buffer.check(f"output {index}")
    return [buffer.tensor for buffer in outputs]


def _int_buffers(*shapes: tuple[int, ...]) -> list[GuardedBuffer]:
    return [GuardedBuffer(shape, torch.int32) for shape in shapes]


def step_rows(
    token_ids: torch.Tensor, row_offsets: torch.Tensor, num_drafts: torch.Tensor, draft_tokens: torch.Tensor,
    cache_lengths: torch.Tensor, num_slots: int,
) -> list[torch.Tensor]:  # fmt: skip
    """[row_token_ids, positions, row_requests, logit_rows]."""
    rows, requests = token_ids.shape[0], num_drafts.shape[0]
    outputs = _int_buffers((rows,), (rows,), (rows,), (requests * num_slots,))
    call(
        "glm_step_rows", token_ids, row_offsets, num_drafts, draft_tokens, cache_lengths,
        *[b.tensor for b in outputs], rows, requests, num_slots, draft_tokens.shape[1],
    )  # fmt: skip
    return _finish(outputs)


def shift_rows(
    row_token_ids: torch.Tensor, row_offsets: torch.Tensor, num_drafts: torch.Tensor, num_accepted: torch.Tensor,
    committed: torch.Tensor, next_prompt_token: torch.Tensor, cache_lengths: torch.Tensor,
) -> list[torch.Tensor]:  # fmt: skip
    """[shifted, last_rows, next_positions, request_ids]."""
    rows, (requests, num_slots) = row_token_ids.shape[0], committed.shape
    outputs = _int_buffers((rows,), (requests,), (requests,), (requests,))
    call(
        "glm_shift_rows", row_token_ids, row_offsets, num_drafts, num_accepted, committed, next_prompt_token,
        cache_lengths, *[b.tensor for b in outputs], rows, requests, num_slots,
    )  # fmt: skip
    return _finish(outputs)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, column_offset: int = 0) -> torch.Tensor:
    """bf16 [T,C], [D] -> [T,D]."""
    out = GuardedBuffer((x.shape[0], weight.shape[0]), torch.bfloat16)
    call("glm_rms_norm", x, weight, out.tensor, x.shape[0], x.shape[1], column_offset, weight.shape[0], eps)
    return _finish([out])[0]


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, sum)."""
    outputs = [GuardedBuffer(x.shape, torch.bfloat16) for _ in range(2)]
    call("glm_add_rms_norm", x, residual, weight, *[b.tensor for b in outputs], *x.shape, eps)
    y, total = _finish(outputs)
    return y, total


def draft_input(
    table: torch.Tensor, token_ids: torch.Tensor, hidden: torch.Tensor, token_norm: torch.Tensor,
    hidden_norm: torch.Tensor, eps: float,
) -> torch.Tensor:  # fmt: skip
    """bf16 [V,D], i32 [T], bf16 [T,D], [D], [D] -> [T,2D]."""
    rows, width = hidden.shape
    out = GuardedBuffer((rows, 2 * width), torch.bfloat16)
    call("glm_draft_input", table, token_ids, hidden, token_norm, hidden_norm, out.tensor, rows, len(table), width, eps)
    return _finish([out])[0]


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """bf16 [T,2I] -> [T,I]."""
    out = GuardedBuffer((x.shape[0], x.shape[1] // 2), torch.bfloat16)
    call("glm_silu_mul", x, out.tensor, x.shape[0], x.shape[1] // 2)
    return _finish([out])[0]


def mask_logits(logits: torch.Tensor, bitmask: torch.Tensor, tickets: torch.Tensor | None = None) -> torch.Tensor:
    """f32 [B*(K+1),V], i32 [B,K+1,W32], mask_turn and mask_ready i32 [2] or none -> f32."""
    out = queued_mask(logits, bitmask, tickets)
    return _finish([out])[0]


def queued_mask(logits: torch.Tensor, bitmask: torch.Tensor, tickets: torch.Tensor | None) -> GuardedBuffer:
    """The same, not waited for."""
    out = GuardedBuffer(logits.shape, torch.float32)
    turn, ready = (None, None) if tickets is None else (tickets[:1], tickets[1:])
    sizes = (bitmask.shape[0], bitmask.shape[1], logits.shape[1])
    call("glm_mask_logits", logits, bitmask, turn, ready, out.tensor, *sizes)
    return out


def token_logprobs(logits: torch.Tensor, committed: torch.Tensor, top_n: int) -> list[torch.Tensor]:
    """[logprobs [B,K+1], top_ids [B,K+1,max(top_n,1)], top_logprobs]."""
    wide = (*committed.shape, max(top_n, 1))
    outputs = [
        GuardedBuffer(tuple(committed.shape), torch.float32),
        GuardedBuffer(wide, torch.int32),
        GuardedBuffer(wide, torch.float32),
    ]
    call(
        "glm_token_logprobs", logits, committed, *[b.tensor for b in outputs], *committed.shape, logits.shape[1], top_n
    )
    return _finish(outputs)


def _fields(names: str, kind: type) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class AcceptArgs(ctypes.Structure):
    """GlmAcceptArgs."""

    _fields_ = (
        _fields("logits draft_tokens num_drafts temperature top_k top_p min_p seed", ctypes.c_void_p)
        + _fields("sample_offset in_thinking_phase relaxed_delta num_accepted next_tokens committed", ctypes.c_void_p)
        + _fields("num_requests num_slots vocab_size draft_width relaxed_topk num_thinking_end_ids", ctypes.c_int32)
        + [("thinking_end_ids", ctypes.c_int32 * 8)]
    )


def accept_args(
    inputs: dict[str, torch.Tensor], num_slots: int, outputs: Sequence[torch.Tensor], relaxed_topk: int = 0,
    thinking_end_ids: Sequence[int] = (),
) -> AcceptArgs:  # fmt: skip
    """The filled struct; `inputs` by the header's names."""
    args = AcceptArgs()
    values: dict[str, Any] = {name: tensor.data_ptr() for name, tensor in inputs.items()}
    values |= dict(zip(("num_accepted", "next_tokens", "committed"), (o.data_ptr() for o in outputs), strict=True))
    values |= {
        "num_requests": inputs["num_drafts"].shape[0],
        "num_slots": num_slots,
        "vocab_size": inputs["logits"].shape[1],
        "draft_width": inputs["draft_tokens"].shape[1],
        "relaxed_topk": relaxed_topk,
        "num_thinking_end_ids": len(thinking_end_ids),
    }
    for name, value in values.items():
        setattr(args, name, value)
    for index, token in enumerate(thinking_end_ids):
        args.thinking_end_ids[index] = token
    return args


def accept(
    inputs: dict[str, torch.Tensor], num_slots: int, relaxed_topk: int = 0, thinking_end_ids: Sequence[int] = ()
) -> list[torch.Tensor]:
    """glm_accept: [num_accepted [B], next_tokens [B], committed [B,K+1]]."""
    library, requests = abi.load(), inputs["num_drafts"].shape[0]
    library.glm_accept_workspace_bytes.restype = ctypes.c_size_t
    space = GuardedBuffer((int(library.glm_accept_workspace_bytes(requests, num_slots)),), torch.uint8)
    outputs = _int_buffers((requests,), (requests,), (requests, num_slots))
    args = accept_args(inputs, num_slots, [b.tensor for b in outputs], relaxed_topk, thinking_end_ids)
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    size = ctypes.c_size_t(space.tensor.numel())
    status = library.glm_accept(ctypes.byref(args), ctypes.c_void_p(space.tensor.data_ptr()), size, stream)
    if status != 0:
        raise KernelError("glm_accept", status)
    torch.cuda.synchronize()
    space.check("workspace")
    return _finish(outputs)
