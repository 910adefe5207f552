"""What tensor-parallel ranks say to each other: sums, gathered columns, and the best of a split vocabulary.

Every rank runs the same graph on its slice of the weights. Reference bodies reach the other ranks through the `Communicator` that
the calling thread installed with `communicating`; a group of one needs none. On a card the plugins use NCCL.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Protocol

import torch
from onnxscript import FLOAT, INT32, script
from onnxscript.onnx_opset import opset23 as op
from onnxscript.values import Opset
from torch import Tensor

from glm_mtp_export.ops.norm import normalised
from glm_mtp_export.ops.precision import widened
from glm_mtp_export.ops.record import Attribute, OpRecord, Port, define

__all__ = [
    "Communicator",
    "all_gather_columns",
    "all_reduce",
    "all_reduce_add_rms_norm",
    "best_of_ranks",
    "communicating",
    "head_best",
]


class Communicator(Protocol):
    """One rank's view of its group."""

    def gathered(self, x: Tensor) -> list[Tensor]:
        """x of every rank, in rank order; all ranks must call."""


_here = threading.local()


@contextlib.contextmanager
def communicating(communicator: Communicator) -> Iterator[None]:
    """Let reference bodies called by this thread reach the other ranks."""
    _here.communicator = communicator
    try:
        yield
    finally:
        del _here.communicator


def _gathered(x: Tensor, num_ranks: int) -> list[Tensor]:
    if num_ranks == 1:
        return [x]
    communicator = getattr(_here, "communicator", None)
    if communicator is None:
        raise RuntimeError(f"a collective over {num_ranks} ranks needs `communicating(...)` around the step")
    parts: list[Tensor] = communicator.gathered(x)
    return parts


_RANKS = (Attribute("num_ranks", "int", "size of the tensor-parallel group"),)


def _all_reduce(x: Tensor, num_ranks: int) -> Tensor:
    return torch.stack([widened(part) for part in _gathered(x, num_ranks)]).sum(0).to(x.dtype).clone()


@script(Opset("glm", 1))
def _all_reduce_body(x: FLOAT, num_ranks: int) -> FLOAT:
    """A group of one."""
    return op.Identity(x)


all_reduce = define(
    OpRecord(
        "GlmAllReduce",
        "Sum over the ranks, added in rank order in fp32, so that every rank has the same bits.",
        (Port("x", "A", ("T", "D")),),
        (Port("y", "A", ("T", "D")),),
        _RANKS,
        _all_reduce,
        lambda x, num_ranks: torch.empty_like(x),
        _all_reduce_body,
    )
)


def _all_reduce_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, num_ranks: int
) -> tuple[Tensor, Tensor]:
    total = _all_reduce(x, num_ranks) + residual
    return normalised(total, weight, eps), total


@script(Opset("glm", 1))
def _all_reduce_add_rms_norm_body(x: FLOAT, residual: FLOAT, weight: FLOAT, eps: float, num_ranks: int):
    """A group of one."""
    total = x + residual
    mean = op.ReduceMean(total * total, op.Constant(value_ints=[-1]), keepdims=1)
    y = total / op.Sqrt(mean + op.Constant(value_float=eps)) * weight
    return y, total


all_reduce_add_rms_norm = define(
    OpRecord(
        "GlmAllReduceAddRmsNorm",
        "Sum over the ranks as GlmAllReduce makes it, residual addition and the RMSNorm of that as in GlmAddRmsNorm.",
        (
            Port("x", "A", ("T", "D"), "this rank's part"),
            Port("residual", "A", ("T", "D"), "the same on every rank"),
            Port("weight", "A", ("D",)),
        ),
        (Port("y", "A", ("T", "D")), Port("sum", "A", ("T", "D"), "with the residual")),
        (Attribute("eps", "float"), *_RANKS),
        _all_reduce_add_rms_norm,
        lambda x, residual, weight, eps, num_ranks: (torch.empty_like(x), torch.empty_like(x)),
        _all_reduce_add_rms_norm_body,
    )
)


def _all_gather_columns(x: Tensor, num_ranks: int) -> Tensor:
    return torch.cat(_gathered(x, num_ranks), 1).clone()


@script(Opset("glm", 1))
def _all_gather_columns_body(x: FLOAT, num_ranks: int) -> FLOAT:
    """A group of one."""
    return op.Identity(x)


all_gather_columns = define(
    OpRecord(
        "GlmAllGatherColumns",
        "Columns of all ranks side by side: logits of a head that is split by vocabulary.",
        (Port("x", "float32", ("M", "V")),),
        (Port("y", "float32", ("M", "V*num_ranks")),),
        _RANKS,
        _all_gather_columns,
        lambda x, num_ranks: x.new_empty(x.shape[0], x.shape[1] * num_ranks),
        _all_gather_columns_body,
    )
)


def _head_best(x: Tensor, weight: Tensor, rank: Tensor, valid_vocab: int) -> tuple[Tensor, Tensor]:
    logits = widened(x) @ widened(weight).T
    ids = rank.long() * weight.shape[0] + torch.arange(weight.shape[0], device=x.device)
    seen = logits.masked_fill(logits.isnan() | (ids >= valid_vocab), -torch.inf)
    best = seen.argmax(1)
    return seen.gather(1, best[:, None])[:, 0], ids[best].int()


@script(Opset("glm", 1))
def _head_best_body(x: FLOAT, weight: FLOAT, rank: INT32, valid_vocab: int):
    logits = op.Gemm(x, weight, transB=1)
    length = op.Gather(op.Shape(weight), op.Constant(value_int=0))
    columns = op.Range(op.Constant(value_int=0), length, op.Constant(value_int=1))
    ids = op.Cast(rank, to=7) * length + columns
    outside = op.GreaterOrEqual(ids, op.Constant(value_int=valid_vocab))
    lowest = op.Constant(value_float=float("-inf"))
    seen = op.Where(op.Or(op.IsNaN(logits), outside), lowest, logits)
    best = op.ArgMax(seen, axis=1, keepdims=1)
    value = op.Squeeze(op.GatherElements(seen, best, axis=1), op.Constant(value_ints=[1]))
    return value, op.Cast(op.Gather(ids, op.Squeeze(best, op.Constant(value_ints=[1]))), to=6)


head_best = define(
    OpRecord(
        "GlmHeadBest",
        "The likeliest token of this rank's vocabulary slice and its logit; the lowest id on ties, NaN never wins.",
        (
            Port("x", "A", ("B", "H")),
            Port("weight", "A", ("V", "H"), "rows rank*V .. rank*V+V-1 of the head"),
            Port("rank", "int32", (1,)),
        ),
        (Port("value", "float32", ("B",)), Port("ids", "int32", ("B",), "ids of the whole vocabulary")),
        (Attribute("valid_vocab", "int", "length of the tokenizer"),),
        _head_best,
        lambda x, weight, rank, valid_vocab: (
            x.new_empty(x.shape[0], dtype=x.dtype if x.dtype == torch.float64 else torch.float32),
            x.new_empty(x.shape[0], dtype=torch.int32),
        ),
        _head_best_body,
    )
)


def _best_of_ranks(value: Tensor, ids: Tensor, num_ranks: int) -> Tensor:
    values = torch.stack(_gathered(value, num_ranks))
    chosen = torch.stack(_gathered(ids, num_ranks))
    # Slices are in vocabulary order, so the first rank with the largest value has the lowest id.
    return chosen.gather(0, values.argmax(0)[None])[0].clone()


@script(Opset("glm", 1))
def _best_of_ranks_body(value: FLOAT, ids: INT32, num_ranks: int) -> INT32:
    """A group of one."""
    return op.Identity(ids)


best_of_ranks = define(
    OpRecord(
        "GlmBestOfRanks",
        "Of each rank's best token the one with the largest logit, the lowest id on ties.",
        (Port("value", "float32", ("B",)), Port("ids", "int32", ("B",))),
        (Port("best", "int32", ("B",)),),
        _RANKS,
        _best_of_ranks,
        lambda value, ids, num_ranks: torch.empty_like(ids),
        _best_of_ranks_body,
    )
)
