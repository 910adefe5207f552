"""The feed-forward half of a layer: a SwiGLU, or routed experts with a shared one."""

from __future__ import annotations

from torch import Tensor

from glm_mtp_export import ops
from glm_mtp_export.config import ModelConfig
from glm_mtp_export.graph.weights import Weights

__all__ = ["feed_forward"]


def _swiglu(weights: Weights, prefix: str, x: Tensor) -> Tensor:
    return weights.linear(f"{prefix}down", ops.silu_mul(weights.linear(f"{prefix}gate_up", x)))


def feed_forward(config: ModelConfig, weights: Weights, x: Tensor, sparse: bool) -> Tensor:
    """x [T, H] -> [T, H], of which a rank has its part. The shared expert is neither weighted nor scaled."""
    if not sparse:
        return _swiglu(weights.scope("mlp"), "", x)
    scope = weights.scope("moe")
    expert_ids, expert_weights = ops.router(
        x,
        scope["router"],
        scope["router_bias"],
        config.num_experts_per_tok,
        config.n_group,
        config.topk_group,
        int(config.norm_topk_prob),
        config.routed_scaling_factor,
    )
    routed = scope.experts(x, expert_ids, expert_weights)
    if config.n_shared_experts:
        routed = routed + _swiglu(scope, "shared_", x)
    return routed
