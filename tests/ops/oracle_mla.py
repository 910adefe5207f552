"""Latent attention in float64, in the explicit form: keys and values are expanded per position, nothing is absorbed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from oracle_rope import turned
from paged_batch import Paged

__all__ = ["MlaConfig", "attend", "cache_row", "written_rows"]


@dataclass(frozen=True)
class MlaConfig:
    """Attributes of GlmMlaAttention, named as the op names them."""

    layer: int = 1
    num_heads: int = 3
    nope_dim: int = 16
    rope_dim: int = 8
    v_dim: int = 12
    kv_lora: int = 32
    rope_theta: float = 8e6
    interleaved: int = 1
    scale: float = 24**-0.5
    eps: float = 1e-6
    column_offset: int = 5

    def attributes(self) -> dict[str, float]:
        return dict(vars(self))


def cache_row(latent: np.ndarray, weight: np.ndarray, position: int, config: MlaConfig) -> np.ndarray:
    """[rms_norm of the latent | rotated key] of a raw kv_a row."""
    start = config.column_offset
    values = [float(v) for v in latent[start : start + config.kv_lora]]
    root = math.sqrt(math.fsum(v * v for v in values) / len(values) + config.eps)
    normed = [v / root * float(w) for v, w in zip(values, weight, strict=True)]
    key = latent[start + config.kv_lora : start + config.kv_lora + config.rope_dim]
    return np.concatenate((normed, turned(key, position, config.rope_theta, bool(config.interleaved))))


def written_rows(
    latent: np.ndarray, weight: np.ndarray, pool: np.ndarray, batch: Paged, config: MlaConfig
) -> np.ndarray:
    """float64 copy of the pool with every row in its slot."""
    out = pool.astype(np.float64)
    for row, request, position in batch.rows:
        out[(config.layer, *batch.slot(request, position))] = cache_row(latent[row], weight, position, config)
    return out


def attend(
    q: np.ndarray,
    w_uk: np.ndarray,
    w_uv: np.ndarray,
    listed: list[int],
    pool: np.ndarray,
    batch: Paged,
    request: int,
    position: int,
    config: MlaConfig,
) -> tuple[np.ndarray, np.ndarray]:
    """Output [H * v] of one row and, per element, the size of what its error scales with."""
    rows = [pool[(config.layer, *batch.slot(request, t))] for t in listed]
    out, size = np.zeros((config.num_heads, config.v_dim)), np.zeros((config.num_heads, config.v_dim))
    for h, head in enumerate(np.asarray(q, np.float64).reshape(config.num_heads, -1)):
        if not rows:
            continue
        nope = head[: config.nope_dim]
        rope = turned(head[config.nope_dim :], position, config.rope_theta, bool(config.interleaved))
        keys = [np.concatenate((w_uk[h] @ row[: config.kv_lora], row[config.kv_lora :])) for row in rows]
        query = np.concatenate((nope, rope))
        scores = [config.scale * float(query @ key) for key in keys]
        top = max(scores)
        weights = [math.exp(s - top) for s in scores]
        values = [w_uv[h] @ row[: config.kv_lora] for row in rows]
        out[h] = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
        reach = max(
            float(
                np.abs(nope) @ np.abs(w_uk[h]) @ np.abs(row[: config.kv_lora])
                + np.abs(rope) @ np.abs(row[config.kv_lora :])
            )
            for row in rows
        )
        largest = np.max([np.abs(w_uv[h]) @ np.abs(row[: config.kv_lora]) for row in rows], axis=0)
        size[h] = (1 + config.scale * reach) * largest
    return out.ravel(), size.ravel()
