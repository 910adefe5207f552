"""The lightning indexer in float64, key by key and head by head."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from oracle_rope import turned
from paged_batch import Paged

__all__ = ["IndexerConfig", "best_positions", "index_key", "scores_of_row", "written_keys"]


@dataclass(frozen=True)
class IndexerConfig:
    """Attributes of GlmIndexer, named as the op names them."""

    layer: int = 1
    num_heads: int = 4
    head_dim: int = 16
    rope_dim: int = 8
    rope_theta: float = 8e6
    interleaved: int = 1
    index_topk: int = 8
    eps: float = 1e-6

    def attributes(self) -> dict[str, float]:
        return dict(vars(self))


def _rotated_first(vector: np.ndarray, position: int, config: IndexerConfig) -> np.ndarray:
    head = turned(vector[: config.rope_dim], position, config.rope_theta, bool(config.interleaved))
    return np.concatenate((head, np.asarray(vector[config.rope_dim :], np.float64)))


def index_key(
    raw: np.ndarray, weight: np.ndarray, bias: np.ndarray, position: int, config: IndexerConfig
) -> np.ndarray:
    """LayerNorm with weight and bias, then rotation of the first rope_dim lanes."""
    values = [float(v) for v in raw]
    mean = math.fsum(values) / len(values)
    variance = math.fsum((v - mean) ** 2 for v in values) / len(values)
    normed = np.array(
        [
            (v - mean) / math.sqrt(variance + config.eps) * float(w) + float(b)
            for v, w, b in zip(values, weight, bias, strict=True)
        ]
    )
    return _rotated_first(normed, position, config)


def written_keys(
    key_gate: np.ndarray, weight: np.ndarray, bias: np.ndarray, pool: np.ndarray, batch: Paged, config: IndexerConfig
) -> np.ndarray:
    """float64 copy of the pool with every row's key in its slot."""
    out = pool.astype(np.float64)
    for row, request, position in batch.rows:
        key = index_key(key_gate[row, : config.head_dim], weight, bias, position, config)
        out[(config.layer, *batch.slot(request, position))] = key
    return out


def scores_of_row(
    q: np.ndarray, gate: np.ndarray, pool: np.ndarray, batch: Paged, request: int, position: int, config: IndexerConfig
) -> list[float]:
    """Scores of positions 0 .. own: sum_h gate_h heads^-0.5 relu(q_h . k head_dim^-0.5)."""
    heads = [_rotated_first(head, position, config) for head in q.reshape(config.num_heads, config.head_dim)]
    scores = []
    for t in range(position + 1):
        key = pool[(config.layer, *batch.slot(request, t))]
        total = 0.0
        for head, head_gate in zip(heads, gate, strict=True):
            dot = float(np.dot(head, key)) * config.head_dim**-0.5
            total += float(head_gate) * config.num_heads**-0.5 * (dot if math.isnan(dot) else max(dot, 0.0))
        scores.append(total)
    return scores


def best_positions(scores: list[float], index_topk: int) -> list[int]:
    """The list: best scores, equal ones by lower position, NaN before all; ascending, then -1."""
    order = sorted(
        range(len(scores)), key=lambda t: (not math.isnan(scores[t]), -scores[t] if scores[t] == scores[t] else 0, t)
    )
    chosen = sorted(order[:index_topk])
    return chosen + [-1] * (index_topk - len(chosen))
