"""Weights by name: a prefix view over the mapping that a step receives, and the linear that fits what is stored.

Names are those of the weight plan (`checkpoint.plan`). A weight with a `<name>_scale` beside it is quantised; its dtype says how.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from glm_mtp_export import ops
from glm_mtp_export.config import ParallelConfig

__all__ = ["Weights"]


class Weights:
    """`Weights(tensors).scope("target.layers.3")["input_norm"]` is `tensors["target.layers.3.input_norm"]`."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        parallel: ParallelConfig | None = None,
        rank: Tensor | None = None,
        prefix: str = "",
    ) -> None:
        """`rank` i32 [1] is needed when the weights are one rank's slices."""
        self._tensors, self._prefix = tensors, prefix
        self.parallel, self._rank = parallel or ParallelConfig(), rank

    def scope(self, name: str) -> Weights:
        """The weights under `name`."""
        return Weights(self._tensors, self.parallel, self._rank, f"{self._prefix}{name}.")

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._prefix + name]

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self._tensors

    def linear(self, name: str, x: Tensor, to_f32: bool = False) -> Tensor:
        """x [T, I] times weight `name` [O, I], in the format the weight is stored in."""
        if f"{name}_scale" in self:
            return ops.linear_fp8(x, self[name], self[f"{name}_scale"], int(to_f32))
        return ops.linear(x, self[name], int(to_f32))

    def added_norm(self, branch: Tensor, residual: Tensor, name: str, eps: float) -> tuple[Tensor, Tensor]:
        """RMSNorm of branch + residual under weight `name`, and the sum itself, both [T, H].

        `branch` is a rank's part: a product over columns that the ranks share out, and summed over them here.
        """
        num_ranks = self.parallel.tensor_parallel_size
        if num_ranks == 1:
            return ops.add_rms_norm(branch, residual, self[name], eps)
        return ops.all_reduce_add_rms_norm(branch, residual, self[name], eps, num_ranks)

    def head_logits(self, hidden: Tensor, rows: Tensor, valid_vocab: int) -> Tensor:
        """float32 logits [M, V] of chosen rows of hidden [T, H], whole vocabulary, -inf from valid_vocab on."""
        num_ranks, head = self.parallel.tensor_parallel_size, self["target.lm_head"]
        if num_ranks == 1:
            return ops.head_logits(hidden, rows, head, valid_vocab)
        logits = ops.all_gather_columns(ops.head_logits(hidden, rows, head, head.shape[0]), num_ranks)
        inside = torch.arange(logits.shape[1], device=logits.device) < valid_vocab
        return torch.where(inside, logits, -torch.inf)

    def head_argmax(self, hidden: Tensor, name: str, valid_vocab: int) -> Tensor:
        """Likeliest token of each row of hidden [B, H] under head `name`: i32 [B]."""
        if self.parallel.tensor_parallel_size == 1:
            return ops.head_argmax(hidden, self[name], valid_vocab)
        assert self._rank is not None
        value, ids = ops.head_best(hidden, self[name], self._rank, valid_vocab)
        return ops.best_of_ranks(value, ids, self.parallel.tensor_parallel_size)

    def local_experts(self, expert_ids: Tensor) -> Tensor:
        """Ids within this rank's stack of experts; -1 for an expert of another rank."""
        if not self.parallel.expert_parallel:
            return expert_ids
        assert self._rank is not None
        count = self["w13"].shape[0]
        own = expert_ids - self._rank * count
        return torch.where((own >= 0) & (own < count), own, -1)

    def experts(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """Routed experts w13 and w2 in the format they are stored in."""
        expert_ids = self.local_experts(expert_ids)
        if "w13_global" in self:
            names = ("w13", "w13_scale", "w13_global", "w2", "w2_scale", "w2_global")
            return ops.experts_nvfp4(x, expert_ids, expert_weights, *(self[n] for n in names))
        if "w13_scale" in self:
            blocks = (self["w13"], self["w13_scale"], self["w2"], self["w2_scale"])
            return ops.experts_fp8(x, expert_ids, expert_weights, *blocks)
        return ops.experts(x, expert_ids, expert_weights, self["w13"], self["w2"])
