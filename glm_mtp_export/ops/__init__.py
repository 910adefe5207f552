"""The custom ops of the step graph: one record each, in OP_TABLE, and the torch operators they define."""

from glm_mtp_export.ops.collectives import (
    all_gather_columns,
    all_reduce,
    all_reduce_add_rms_norm,
    best_of_ranks,
    communicating,
    head_best,
)
from glm_mtp_export.ops.draft_input import draft_input
from glm_mtp_export.ops.experts import experts, experts_fp8, experts_nvfp4
from glm_mtp_export.ops.head import GlmMaskedLogits, head_argmax, head_logits
from glm_mtp_export.ops.indexer import GlmIndexerHead, indexer
from glm_mtp_export.ops.linear import linear, linear_fp8, silu_mul
from glm_mtp_export.ops.logits import mask_logits, token_logprobs
from glm_mtp_export.ops.mla_attention import mla_attention
from glm_mtp_export.ops.norm import add_rms_norm, rms_norm
from glm_mtp_export.ops.paging import GlmCacheIndex, GlmCacheWrite, GlmRealRows
from glm_mtp_export.ops.penalties import penalties
from glm_mtp_export.ops.record import DOMAIN, OP_TABLE, OP_VERSION, PLUGIN_ATTRIBUTES, Attribute, OpRecord, Port
from glm_mtp_export.ops.rope import GlmRotate
from glm_mtp_export.ops.router import router
from glm_mtp_export.ops.rows import shift_rows, step_rows
from glm_mtp_export.ops.sampling import GlmDraw, GlmMix32, GlmNear, accept

__all__ = [
    "DOMAIN",
    "HELPER_FUNCTIONS",
    "OP_TABLE",
    "OP_VERSION",
    "PLUGIN_ATTRIBUTES",
    "Attribute",
    "OpRecord",
    "Port",
    "accept",
    "add_rms_norm",
    "all_gather_columns",
    "all_reduce",
    "all_reduce_add_rms_norm",
    "best_of_ranks",
    "communicating",
    "draft_input",
    "experts",
    "experts_fp8",
    "experts_nvfp4",
    "head_argmax",
    "head_best",
    "head_logits",
    "indexer",
    "linear",
    "linear_fp8",
    "mask_logits",
    "mla_attention",
    "penalties",
    "rms_norm",
    "router",
    "shift_rows",
    "silu_mul",
    "step_rows",
    "token_logprobs",
]

# ONNX functions that bodies call; they are no ops of their own and never plugins.
HELPER_FUNCTIONS = (
    GlmRotate,
    GlmIndexerHead,
    GlmCacheIndex,
    GlmCacheWrite,
    GlmRealRows,
    GlmMaskedLogits,
    GlmMix32,
    GlmDraw,
    GlmNear,
)
