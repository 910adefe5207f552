"""Bindings of indexer.h and attention.h on torch CUDA tensors, with guarded and poisoned memory.

Caches are given as the raw tensors of the headers (bf16, or int8 for FP8) and changed in place. What may go wrong: a
refusal or CUDA error raises KernelError with the library's words.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import abi
import torch
from abi_products import GuardedBuffer, KernelError

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_float


def _fields(names: str, kind: type) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class IndexerArgs(ctypes.Structure):
    """GlmIndexerArgs."""

    _fields_ = (
        _fields("q key_gate k_norm_weight k_norm_bias positions row_requests block_table cache", _POINTER)
        + _fields("selection scores", _POINTER)
        + _fields("num_rows num_requests pages_per_request num_layers num_pages layer", _INT)
        + _fields("num_heads head_dim rope_dim index_topk interleaved cache_format", _INT)
        + _fields("rope_theta eps", _FLOAT)
    )


class MlaAttentionArgs(ctypes.Structure):
    """GlmMlaAttentionArgs."""

    _fields_ = (
        _fields("q latent kv_norm_weight w_uk w_uv selection positions row_requests block_table cache out", _POINTER)
        + _fields("num_rows num_requests pages_per_request num_layers num_pages layer", _INT)
        + _fields("num_heads nope_dim rope_dim v_dim kv_lora topk latent_width column_offset", _INT)
        + _fields("interleaved cache_format num_splits", _INT)
        + _fields("rope_theta scale eps", _FLOAT)
    )


@dataclass(frozen=True)
class Step:
    """Where the rows of a call stand: i32 positions [T], row_requests [T], block_table [B,P]."""

    positions: torch.Tensor
    row_requests: torch.Tensor
    block_table: torch.Tensor

    def rows(self, begin: int, end: int) -> Step:
        """The same batch with rows begin .. end alone."""
        return Step(self.positions[begin:end].contiguous(), self.row_requests[begin:end].contiguous(), self.block_table)


def _fill(args: ctypes.Structure, **values: Any) -> None:
    for name, value in values.items():
        setattr(args, name, value.data_ptr() if isinstance(value, torch.Tensor) else value)


def _step_fields(step: Step, cache: torch.Tensor, layer: int) -> dict[str, Any]:
    return {
        "positions": step.positions,
        "row_requests": step.row_requests,
        "block_table": step.block_table,
        "cache": cache,
        "num_rows": step.positions.shape[0],
        "num_requests": step.block_table.shape[0],
        "pages_per_request": step.block_table.shape[1],
        "num_layers": cache.shape[0],
        "num_pages": cache.shape[1],
        "layer": layer,
        "cache_format": int(cache.dtype == torch.int8),
    }


def workspace_bytes(entry: str, args: ctypes.Structure) -> int:
    """What the library asks for."""
    function = getattr(abi.load(), f"{entry}_workspace_bytes")
    function.restype = ctypes.c_size_t
    return int(function(ctypes.byref(args)))


def workspace(entry: str, args: ctypes.Structure) -> GuardedBuffer:
    """Poisoned memory of that size."""
    return GuardedBuffer((workspace_bytes(entry, args),), torch.uint8)


def launch(entry: str, args: ctypes.Structure, space: GuardedBuffer) -> None:
    """Enqueues the call on torch's current stream."""
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    size = ctypes.c_size_t(space.tensor.numel())
    status = getattr(abi.load(), entry)(ctypes.byref(args), ctypes.c_void_p(space.tensor.data_ptr()), size, stream)
    if status != 0:
        raise KernelError(entry, status)


def _run(entry: str, args: ctypes.Structure, **outputs: GuardedBuffer) -> None:
    space = workspace(entry, args)
    launch(entry, args, space)
    torch.cuda.synchronize()
    space.check("workspace")
    for name, buffer in outputs.items():
        buffer.check(name)


def indexer_args(
    q: torch.Tensor, key_gate: torch.Tensor, norm: tuple[torch.Tensor, torch.Tensor], step: Step, cache: torch.Tensor,
    layer: int, num_heads: int, rope_dim: int, index_topk: int, interleaved: bool, theta: float,
    selection: torch.Tensor, scores: torch.Tensor | None,
) -> IndexerArgs:  # fmt: skip
    """The filled struct; the caller keeps the tensors alive."""
    args = IndexerArgs()
    _fill(
        args, q=q, key_gate=key_gate, k_norm_weight=norm[0], k_norm_bias=norm[1], selection=selection,
        scores=0 if scores is None else scores, num_heads=num_heads, head_dim=q.shape[1] // num_heads,
        rope_dim=rope_dim, index_topk=index_topk, interleaved=int(interleaved), rope_theta=theta, eps=1e-6,
        **_step_fields(step, cache, layer),
    )  # fmt: skip
    return args


def indexer(
    q: torch.Tensor, key_gate: torch.Tensor, norm: tuple[torch.Tensor, torch.Tensor], step: Step, cache: torch.Tensor,
    layer: int, num_heads: int, rope_dim: int, index_topk: int, interleaved: bool = True, theta: float = 8e6,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """glm_indexer: (selection i32 [T,S], scores f32 [T, 64 P], NaN where nothing was scored)."""
    rows, keys = q.shape[0], step.block_table.shape[1] * 64
    selection = GuardedBuffer((rows, index_topk), torch.int32)
    scores = GuardedBuffer((rows, keys), torch.float32)
    args = indexer_args(
        q, key_gate, norm, step, cache, layer, num_heads, rope_dim, index_topk, interleaved, theta,
        selection.tensor, scores.tensor,
    )  # fmt: skip
    _run("glm_indexer", args, selection=selection, scores=scores)
    return selection.tensor, scores.tensor


@dataclass(frozen=True)
class MlaWeights:
    """bf16 kv_norm [C], w_uk [H,nope,C], w_uv [H,v,C]."""

    kv_norm: torch.Tensor
    w_uk: torch.Tensor
    w_uv: torch.Tensor


def mla_args(
    q: torch.Tensor, latent: torch.Tensor, weights: MlaWeights, selection: torch.Tensor, step: Step,
    cache: torch.Tensor, layer: int, scale: float, column_offset: int, interleaved: bool, theta: float,
    num_splits: int, out: torch.Tensor,
) -> MlaAttentionArgs:  # fmt: skip
    """The filled struct; the caller keeps the tensors alive."""
    num_heads, nope_dim, kv_lora = weights.w_uk.shape
    args = MlaAttentionArgs()
    _fill(
        args, q=q, latent=latent, kv_norm_weight=weights.kv_norm, w_uk=weights.w_uk, w_uv=weights.w_uv,
        selection=selection, out=out, num_heads=num_heads, nope_dim=nope_dim,
        rope_dim=q.shape[1] // num_heads - nope_dim, v_dim=weights.w_uv.shape[1], kv_lora=kv_lora,
        topk=selection.shape[1], latent_width=latent.shape[1], column_offset=column_offset,
        interleaved=int(interleaved), num_splits=num_splits, rope_theta=theta, scale=scale, eps=1e-6,
        **_step_fields(step, cache, layer),
    )  # fmt: skip
    return args


def mla_attention(
    q: torch.Tensor, latent: torch.Tensor, weights: MlaWeights, selection: torch.Tensor, step: Step,
    cache: torch.Tensor, layer: int, scale: float, column_offset: int = 0, interleaved: bool = True,
    theta: float = 8e6, num_splits: int = 0,
) -> torch.Tensor:  # fmt: skip
    """glm_mla_attention: bf16 [T, H*v]."""
    out = GuardedBuffer((q.shape[0], weights.w_uv.shape[0] * weights.w_uv.shape[1]), torch.bfloat16)
    args = mla_args(
        q, latent, weights, selection, step, cache, layer, scale, column_offset, interleaved, theta, num_splits,
        out.tensor,
    )  # fmt: skip
    _run("glm_mla_attention", args, out=out)
    return out.tensor
