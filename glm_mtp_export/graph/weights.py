"""Weights by name: a prefix view over the mapping that a step receives, and the linear that fits what is stored.

Names are those of the weight plan (`checkpoint.plan`). A weight with a `<name>_scale` beside it is quantised; its dtype says how.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from glm_mtp_export import ops

__all__ = ["Weights"]


class Weights:
    """`Weights(tensors).scope("target.layers.3")["input_norm"]` is `tensors["target.layers.3.input_norm"]`."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
        self._tensors, self._prefix = tensors, prefix

    def scope(self, name: str) -> Weights:
        """The weights under `name`."""
        return Weights(self._tensors, f"{self._prefix}{name}.")

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._prefix + name]

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self._tensors

    def linear(self, name: str, x: Tensor, to_f32: bool = False) -> Tensor:
        """x [T, I] times weight `name` [O, I], in the format the weight is stored in."""
        if f"{name}_scale" in self:
            return ops.linear_fp8(x, self[name], self[f"{name}_scale"], int(to_f32))
        return ops.linear(x, self[name], int(to_f32))

    def experts(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """Routed experts w13 and w2 in the format they are stored in."""
        if "w13_global" in self:
            names = ("w13", "w13_scale", "w13_global", "w2", "w2_scale", "w2_global")
            return ops.experts_nvfp4(x, expert_ids, expert_weights, *(self[n] for n in names))
        if "w13_scale" in self:
            blocks = (self["w13"], self["w13_scale"], self["w2"], self["w2_scale"])
            return ops.experts_fp8(x, expert_ids, expert_weights, *blocks)
        return ops.experts(x, expert_ids, expert_weights, self["w13"], self["w2"])
