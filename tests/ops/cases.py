"""One small, valid call of every op: inputs in port order and all attributes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["CASES", "Case", "example"]

_ROWS = np.array([0, 0, 0, 1, 2, 2, 2, 2, -1, -1], np.int32)
_POSITIONS = np.array([10, 11, 12, 0, 62, 63, 64, 65, 0, 0], np.int32)
_PAGES = np.array([[1, 0], [4, 0], [5, 6]], np.int32)
_OFFSETS = np.array([0, 3, 4, 8], np.int32)
_NUM_DRAFTS = np.array([2, 0, 3], np.int32)
_LENGTHS = np.array([10, 0, 62], np.int32)


@dataclass(frozen=True)
class Case:
    """Arguments of one call."""

    name: str
    arrays: tuple[Any, ...]
    attributes: dict[str, Any]


def _floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def _bytes(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(0, 120, shape).astype(np.uint8)


def _step_rows(rng: np.random.Generator) -> Case:
    ids, drafts = np.arange(100, 110, dtype=np.int32), np.arange(9, dtype=np.int32).reshape(3, 3)
    return Case("GlmStepRows", (ids, _OFFSETS, _NUM_DRAFTS, drafts, _LENGTHS), {"num_slots": 4})


def _shift_rows(rng: np.random.Generator) -> Case:
    ids, committed = np.arange(100, 110, dtype=np.int32), np.arange(12, dtype=np.int32).reshape(3, 4)
    accepted, forced = np.array([1, 0, 3], np.int32), np.array([-1, 77, -1], np.int32)
    return Case("GlmShiftRows", (ids, _OFFSETS, _NUM_DRAFTS, accepted, committed, forced, _LENGTHS), {})


def _indexer(rng: np.random.Generator) -> Case:
    arrays = (_floats(rng, 10, 64), _floats(rng, 10, 20), _floats(rng, 16), _floats(rng, 16))
    attributes = dict(
        layer=1, num_heads=4, head_dim=16, rope_dim=8, rope_theta=8e6, interleaved=1, index_topk=8, eps=1e-6
    )
    return Case("GlmIndexer", (*arrays, _POSITIONS, _ROWS, _PAGES, _floats(rng, 2, 7, 64, 16)), attributes)


def _mla_attention(rng: np.random.Generator) -> Case:
    selection = np.full((10, 8), -1, np.int32)
    for row, position in enumerate(_POSITIONS):
        count = min(8, int(position) + 1)
        selection[row, :count] = np.sort(rng.choice(int(position) + 1, count, replace=False))
    tensors = (
        _floats(rng, 10, 96),
        _floats(rng, 10, 45),
        _floats(rng, 32),
        _floats(rng, 4, 16, 32),
        _floats(rng, 4, 12, 32),
    )
    attributes = dict(
        layer=1, num_heads=4, nope_dim=16, rope_dim=8, v_dim=12, kv_lora=32, rope_theta=8e6, interleaved=1
    )
    attributes |= dict(scale=0.2, eps=1e-6, column_offset=5)
    cache = _floats(rng, 2, 7, 64, 40)
    return Case("GlmMlaAttention", (*tensors, selection, _POSITIONS, _ROWS, _PAGES, cache), attributes)


def _router(rng: np.random.Generator) -> Case:
    attributes = dict(top_k=2, n_group=2, topk_group=1, norm_topk_prob=1, routed_scaling_factor=2.5)
    return Case("GlmRouter", (_floats(rng, 5, 16), _floats(rng, 8, 16), _floats(rng, 8)), attributes)


def _routed(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    ids = np.array([[0, 1], [1, -1], [3, 2], [-1, -1]], np.int32)
    return _floats(rng, 4, 32), ids, rng.random((4, 2)).astype(np.float32)


def _experts_fp8(rng: np.random.Generator) -> Case:
    w13, w13_scale = _bytes(rng, 4, 32, 32), _floats(rng, 4, 1, 1)
    return Case("GlmExpertsFp8", (*_routed(rng), w13, w13_scale, _bytes(rng, 4, 32, 16), _floats(rng, 4, 1, 1)), {})


def _experts_nvfp4(rng: np.random.Generator) -> Case:
    w13, w2 = _bytes(rng, 4, 32, 16), _bytes(rng, 4, 32, 8)
    w13_scale, w2_scale = _bytes(rng, 4, 32, 2), _bytes(rng, 4, 32, 1)
    globals_ = _floats(rng, 4, 2), _floats(rng, 4, 1)
    return Case("GlmExpertsNvfp4", (*_routed(rng), w13, w13_scale, globals_[0], w2, w2_scale, globals_[1]), {})


def _accept(rng: np.random.Generator) -> Case:
    drafts = np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]], np.int32)
    temperature, top_k = np.array([0, 1, 0.7], np.float32), np.array([0, 5, 0], np.int32)
    top_p, min_p = np.array([1, 0.9, 0.9], np.float32), np.array([0, 0.1, 0], np.float32)
    seed, offset = np.array([5, -7, 2**40 + 3], np.int64), np.array([0, 3, 9], np.int32)
    thinking, delta = np.array([True, False, True]), np.array([0.6], np.float32)
    arrays = (
        _floats(rng, 12, 50),
        drafts,
        _NUM_DRAFTS,
        temperature,
        top_k,
        top_p,
        min_p,
        seed,
        offset,
        thinking,
        delta,
    )
    return Case("GlmAccept", arrays, dict(num_slots=4, relaxed_topk=3, thinking_end_ids=[8, 20]))


def _penalties(rng: np.random.Generator) -> Case:
    drafts = np.array([[1, 1, 3], [4, 5, 6], [7, 8, 9]], np.int32)
    scalars = tuple(np.array(v, np.float32) for v in ([0.5, 0, -0.5], [0.25, 1, 0], [1.0, 1.5, 0.5]))
    counts, prompt = rng.integers(0, 3, (3, 50)).astype(np.int32), rng.integers(0, 2, (3, 50)).astype(np.int32)
    arrays = (_floats(rng, 12, 50), drafts, *scalars, counts, prompt, _floats(rng, 3, 50))
    return Case("GlmPenalties", arrays, {"num_slots": 4})


def _simple(name: str, shapes: list[tuple[int, ...]], **attributes: Any) -> Callable[[np.random.Generator], Case]:
    return lambda rng: Case(name, tuple(_floats(rng, *shape) for shape in shapes), attributes)


def _tickets() -> tuple[np.ndarray, np.ndarray]:
    """A mask that is there, as the turn of the kernel and the last one that is ready."""
    return np.array([5], np.int32), np.array([7], np.int32)


CASES: dict[str, Callable[[np.random.Generator], Case]] = {
    "GlmStepRows": _step_rows,
    "GlmRmsNorm": _simple("GlmRmsNorm", [(5, 12), (6,)], eps=1e-5, column_offset=4),
    "GlmAddRmsNorm": _simple("GlmAddRmsNorm", [(5, 12), (5, 12), (12,)], eps=1e-5),
    "GlmDraftInput": lambda rng: Case(
        "GlmDraftInput",
        (_floats(rng, 9, 12), np.array([8, 0, 0, 5], np.int32), _floats(rng, 4, 12), *_floats(rng, 2, 12)),
        {"eps": 1e-5},
    ),
    "GlmLinear": _simple("GlmLinear", [(5, 12), (7, 12)], to_f32=1),
    "GlmLinearFp8": lambda rng: Case(
        "GlmLinearFp8", (_floats(rng, 5, 160), _bytes(rng, 144, 160), _floats(rng, 2, 2)), {"to_f32": 0}
    ),
    "GlmSiluMul": _simple("GlmSiluMul", [(5, 12)]),
    "GlmIndexer": _indexer,
    "GlmMlaAttention": _mla_attention,
    "GlmRouter": _router,
    "GlmExperts": lambda rng: Case("GlmExperts", (*_routed(rng), _floats(rng, 4, 20, 32), _floats(rng, 4, 32, 10)), {}),
    "GlmExpertsFp8": _experts_fp8,
    "GlmExpertsNvfp4": _experts_nvfp4,
    "GlmHeadLogits": lambda rng: Case(
        "GlmHeadLogits", (_floats(rng, 6, 16), np.array([1, 5, 5], np.int32), _floats(rng, 33, 16)), {"valid_vocab": 30}
    ),
    "GlmHeadArgmax": _simple("GlmHeadArgmax", [(6, 16), (33, 16)], valid_vocab=30),
    "GlmMaskLogits": lambda rng: Case(
        "GlmMaskLogits",
        (_floats(rng, 12, 50), rng.integers(-(2**31), 2**31, (3, 4, 2)).astype(np.int32), *_tickets()),
        {},
    ),
    "GlmPenalties": _penalties,
    "GlmAccept": _accept,
    "GlmTokenLogprobs": lambda rng: Case(
        "GlmTokenLogprobs", (_floats(rng, 12, 50), rng.integers(0, 50, (3, 4)).astype(np.int32)), {"top_n": 5}
    ),
    "GlmShiftRows": _shift_rows,
    "GlmAllReduce": _simple("GlmAllReduce", [(5, 12)], num_ranks=1),
    "GlmAllReduceAddRmsNorm": _simple("GlmAllReduceAddRmsNorm", [(5, 12), (5, 12), (12,)], eps=1e-5, num_ranks=1),
    "GlmAllGatherColumns": _simple("GlmAllGatherColumns", [(5, 12)], num_ranks=1),
    "GlmHeadBest": lambda rng: Case(
        "GlmHeadBest",
        (_floats(rng, 6, 16), _floats(rng, 11, 16), np.array([2], np.int32)),
        {"valid_vocab": 30},
    ),
    "GlmBestOfRanks": lambda rng: Case(
        "GlmBestOfRanks", (_floats(rng, 6), np.arange(6, dtype=np.int32)), {"num_ranks": 1}
    ),
}


def example(name: str) -> Case:
    """The case of op `name`, always the same numbers. Inputs of type float8_e4m3fn are given as their bytes."""
    return CASES[name](np.random.default_rng(20))
