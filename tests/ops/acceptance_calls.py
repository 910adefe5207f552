"""Calls of GlmAccept from lists: inputs in port order, both bodies, and the comparison with the oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from onnx_case import reference, run
from oracle_sampling import Relaxed, Sampling, accept_oracle

__all__ = ["both", "check", "inputs"]

CLEAR = 1e-5  # a margin that float32 exponentials and sums cannot cross


def inputs(
    logits: np.ndarray, drafts: Sequence[Sequence[int]], samplings: Sequence[Sampling], relaxed: Relaxed, num_slots: int
) -> list[np.ndarray]:
    table = np.full((len(drafts), max(num_slots - 1, 1)), 1, np.int32)  # stale ids beyond num_drafts
    for row, given_drafts in zip(table, drafts, strict=True):
        row[: len(given_drafts)] = given_drafts
    counts = np.array([len(d) for d in drafts], np.int32)

    def column(name: str, dtype: type) -> np.ndarray:
        return np.array([getattr(s, name) for s in samplings], dtype)

    return [
        logits.astype(np.float32),
        table,
        counts,
        column("temperature", np.float32),
        column("top_k", np.int32),
        column("top_p", np.float32),
        column("min_p", np.float32),
        column("seed", np.int64),
        column("sample_offset", np.int32),
        column("in_thinking_phase", np.bool_),
        np.array([relaxed.delta], np.float32),
    ]


def both(arrays: list[np.ndarray], relaxed: Relaxed, num_slots: int) -> list[list[np.ndarray]]:
    attributes = dict(num_slots=num_slots, relaxed_topk=relaxed.topk, thinking_end_ids=list(relaxed.end_ids))
    return [call("GlmAccept", arrays, **attributes) for call in (run, reference)]


def _rounded(sampling: Sampling) -> Sampling:
    """The parameters as the float32 inputs hold them."""
    floats = {name: float(np.float32(getattr(sampling, name))) for name in ("temperature", "top_p", "min_p")}
    return dataclasses.replace(sampling, **floats)


def check(
    logits: np.ndarray,
    drafts: Sequence[Sequence[int]],
    samplings: Sequence[Sampling],
    relaxed: Relaxed = Relaxed(),  # noqa: B008  (frozen)
    num_slots: int = 4,
) -> int:
    """Compare with the oracle wherever its decisions are clear; return how many requests were compared."""
    exact = [_rounded(s) for s in samplings]
    rows = logits.astype(np.float32).astype(np.float64).reshape(len(drafts), num_slots, -1)
    wanted = [accept_oracle(r.tolist(), d, s, relaxed, num_slots) for r, d, s in zip(rows, drafts, exact, strict=True)]
    clear = [b for b, result in enumerate(wanted) if result[3] > CLEAR]
    for num_accepted, next_tokens, committed in both(
        inputs(logits, drafts, samplings, relaxed, num_slots), relaxed, num_slots
    ):
        for b in clear:
            found = (int(num_accepted[b]), int(next_tokens[b]), committed[b].tolist())
            assert found == wanted[b][:3], (
                f"request {b}: {found}, expected {wanted[b]}; {samplings[b]}, drafts {drafts[b]}"
            )
    return len(clear)
