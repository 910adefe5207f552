"""Acceptance in float64 and plain Python: the hash, one truncated draw, strict and relaxed verdicts, one request at a time.

Every result comes with a margin: the smallest distance of a decision from its border, relative to the sum it is about. A float32
implementation has to agree wherever the margin is larger than its rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Relaxed", "Sampling", "accept_oracle", "draw", "fmix32", "ranked", "uniform"]

_WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class Sampling:
    """Parameters of one request."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    sample_offset: int = 0
    in_thinking_phase: bool = False


@dataclass(frozen=True)
class Relaxed:
    """Compiled-in relaxed acceptance; topk 0 is off."""

    topk: int = 0
    delta: float = 0.6
    end_ids: tuple[int, ...] = (-1,)


def fmix32(x: int) -> int:
    """murmur3's finaliser."""
    x ^= x >> 16
    x = x * 0x85EBCA6B & _WORD
    x ^= x >> 13
    x = x * 0xC2B2AE35 & _WORD
    return x ^ x >> 16


def uniform(seed: int, position: int) -> float:
    """(24 bits of the hash + 1/2) * 2^-24, exact in a double."""
    h = fmix32((seed & _WORD) ^ 0x9E3779B9)
    h = fmix32(h ^ (seed >> 32 & _WORD))
    h = fmix32(h ^ position)
    return ((h >> 8) + 0.5) * 2.0**-24


def ranked(logits: Sequence[float]) -> list[int]:
    """Ids by descending logit, equal logits by id."""
    return sorted(range(len(logits)), key=lambda v: (-logits[v], v))


def draw(logits: Sequence[float], sampling: Sampling, u: float) -> tuple[int, float]:
    """The token drawn, and the margin."""
    order = ranked(logits)
    if sampling.temperature < 1e-5:
        return order[0], math.inf
    top = logits[order[0]]
    weight = {v: math.exp((logits[v] - top) / sampling.temperature) for v in order}
    margin = math.inf
    kept = order if sampling.top_k <= 0 else order[: sampling.top_k]
    total = math.fsum(weight[v] for v in kept)
    if sampling.top_p < 1:
        nucleus = []
        for v in kept:
            before = math.fsum(weight[w] for w in nucleus) / total
            if nucleus and before != 0:
                margin = min(margin, abs(before - sampling.top_p))
            if nucleus and before >= sampling.top_p:
                break
            nucleus.append(v)
        kept = nucleus
    if sampling.min_p > 0:
        margin = min([margin, *(abs(weight[v] - sampling.min_p) for v in kept[1:])])
        kept = [v for i, v in enumerate(kept) if i == 0 or weight[v] >= sampling.min_p * weight[order[0]]]
    total = math.fsum(weight[v] for v in kept)
    running = 0.0
    chosen = None
    for v in sorted(kept):
        running += weight[v]
        margin = min(margin, abs(running - u * total) / total)
        if chosen is None and running > u * total:
            chosen = v
    assert chosen is not None
    return chosen, margin


def accept_oracle(
    rows: Sequence[Sequence[float]], drafts: Sequence[int], sampling: Sampling, relaxed: Relaxed, num_slots: int
) -> tuple[int, int, list[int], float]:
    """num_accepted, next token, committed row and margin of one request; rows are its num_slots rows of logits."""
    used = rows[: len(drafts) + 1]
    if any(math.isnan(x) for row in used for x in row):
        return 0, -1, [0] * num_slots, math.inf
    margin = math.inf
    rejected, committed = [], []
    thinking = relaxed.topk > 0 and sampling.in_thinking_phase and sampling.temperature >= 1e-5
    for slot, row in enumerate(used):
        sample, row_margin = draw(row, sampling, uniform(sampling.seed, sampling.sample_offset + slot))
        if slot == len(drafts):
            committed.append(sample)
            margin = min(margin, row_margin)
            break
        draft = drafts[slot]
        thinking = thinking and draft not in relaxed.end_ids
        if thinking:
            order = ranked(row)
            total = math.fsum(math.exp(x - row[order[0]]) for x in row)
            best = 1 / total
            near = draft in order[: relaxed.topk]
            probability = math.exp(row[draft] - row[order[0]]) / total if near else 0.0
            margin = min(margin, abs(probability - (best - relaxed.delta))) if near else margin
            good = near and probability >= best - relaxed.delta
            recovered = order[0]
        else:
            good, recovered = draft == sample, sample
            margin = min(margin, row_margin)
        rejected.append(not good)
        committed.append(draft if good else recovered)
    num_accepted = rejected.index(True) if True in rejected else len(drafts)
    return num_accepted, committed[num_accepted], committed + [0] * (num_slots - len(committed)), margin
