#!/usr/bin/env python3
"""Projects a decode step of GLM-5.2 in FP8 over several H200s from stages measured on one.

    python benchmarks/project_ranks.py             the tables of docs/eight-gpus.md

No several-card machine was measured. Every stage is a measured time, or 4 us and its bytes at a measured rate; the same arithmetic
is first held against the slice that was measured whole on one card. Sources: `benchmarks/kernels/RESULTS_gemm.md`,
`benchmarks/kernels/RESULTS_attention.md`, `benchmarks/results/README.md`. Times in us; 3 drafts, context 8192, greedy, FP8 caches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

BATCHES = (1, 8, 32)  # a request has four rows: the last token and three drafts
HIDDEN, Q_LORA, LATENT, VOCAB = 6144, 2048, 576, 154880
# By rows of the call. FP8 linears: 4 us + bytes / rate fits the measured ones within 15 %.
LINEAR_FIXED = 4.0
LINEAR_RATE = {1: 3.9, 4: 3.9, 8: 3.9, 32: 3.6, 128: 2.17}  # TB/s; 32 rows are between two measurements
EXPERTS = {1: 83.6, 4: 279.0, 8: 497.0, 32: 1418.0, 128: 2179.0}  # of which EXPERTS_FIXED are four launches
EXPERTS_FIXED = 9.4
ROUTER = {1: 8.8, 4: 8.8, 8: 8.8, 32: 9.5, 128: 11.0}
ATTENTION = {1: 33.6, 4: 33.6, 8: 33.6, 32: 62.0, 128: 161.6}  # whole op, 64 heads
ATTENTION_WEIGHTS = 29.4e6  # bytes of W_UK and W_UV inside it, cut by heads
INDEXER = {1: 18.6, 4: 18.6, 8: 18.6, 32: 32.0, 128: 61.6}
NORM, SILU, ADD = 2.8, 2.5, 1.5
ACCEPT = {1: 6.4, 8: 14.0, 32: 36.2}
HEAD = {4: 440.0, 32: 465.0, 128: 499.0}
HEAD_ARGMAX = 439.0
BF16_RATE, HBM, NVLINK = 4.0, 4.3, 0.374  # TB/s
# NCCL's all-reduce of [rows, 6144] bf16 between two H200s in a CUDA graph, and our ordered sum after the gather.
ALL_REDUCE = {1: 10.3, 4: 10.2, 8: 10.0, 32: 11.8, 128: 20.2}
ORDERED_SUM = 3.0
SLICE_MEASURED = {1: 5920.0, 8: 12700.0, 32: 21920.0}  # layers 0-8 and three draft steps on one card, host included


@dataclass(frozen=True)
class Model:
    """Layers by kind: with dense or sparse feed-forward, and how many own an indexer."""

    dense: int
    sparse: int
    indexers: int


SLICE, WHOLE = Model(3, 6, 4), Model(3, 75, 21)


def linear(num_bytes: float, rows: int, ranks: int = 1) -> float:
    """An FP8 product, its weight cut over the ranks."""
    return LINEAR_FIXED + num_bytes / ranks / LINEAR_RATE[rows] * 1e-6


def reduced(rows: int, ranks: int) -> float:
    """A sum over the ranks."""
    return 0.0 if ranks == 1 else ALL_REDUCE[rows] + ORDERED_SUM


def attention_block(rows: int, out_rows: int, ranks: int) -> float:
    """Norms, projections and sparse attention of a layer, without an indexer. Cache reads and scores are not taken to shrink."""
    weights = ATTENTION_WEIGHTS * (1 - 1 / ranks) / HBM * 1e-6
    return (
        2 * NORM + NORM
        + linear((Q_LORA + LATENT) * HIDDEN, rows)
        + linear(Q_LORA * 16384, rows, ranks)
        + ATTENTION[rows] - weights
        + linear(HIDDEN * 16384, out_rows, ranks)
    )  # fmt: skip


def indexer(rows: int) -> float:
    """Replicated on every rank."""
    return linear(4096 * Q_LORA, rows) + LINEAR_FIXED + 0.5 + INDEXER[rows]


def dense_block(rows: int, ranks: int) -> float:
    """The feed-forward of the first layers."""
    return linear(2 * 12288 * HIDDEN, rows, ranks) + SILU + linear(12288 * HIDDEN, rows, ranks)


def sparse_block(rows: int, ranks: int) -> float:
    """Router, routed and shared experts."""
    routed = EXPERTS_FIXED + (EXPERTS[rows] - EXPERTS_FIXED) / ranks
    shared = linear(2 * 2048 * HIDDEN, rows, ranks) + SILU + linear(2048 * HIDDEN, rows, ranks)
    return ROUTER[rows] + routed + shared + ADD


def stages(model: Model, batch: int, ranks: int) -> Iterator[tuple[str, float]]:
    """The step, stage by stage."""
    rows = 4 * batch
    layers = model.dense + model.sparse
    yield "attention", layers * attention_block(rows, rows, ranks)
    yield "indexers", model.indexers * indexer(rows)
    yield "dense layers", model.dense * dense_block(rows, ranks)
    yield "routers and experts", model.sparse * sparse_block(rows, ranks)
    gather = 0.0
    if ranks > 1:
        logits = 4.0 * rows * VOCAB
        gather = 10.0 + logits * (1 - 1 / ranks) / NVLINK * 1e-6 + 2 * logits / HBM * 1e-6
    yield "head and acceptance", HEAD[rows] / ranks + gather + ACCEPT[batch]
    projection = LINEAR_FIXED + 2 * 2 * HIDDEN * HIDDEN / BF16_RATE * 1e-6
    block = sparse_block(batch, ranks) + NORM + HEAD_ARGMAX / ranks + (ALL_REDUCE[1] if ranks > 1 else 0.0)
    first = projection + attention_block(rows, batch, ranks) + indexer(rows) + block
    later = projection + attention_block(batch, batch, ranks) + block
    yield "three drafts", first + 2 * later
    yield "sums between ranks", 2 * layers * reduced(rows, ranks) + 6 * reduced(batch, ranks)


def host(batch: int) -> float:
    """What the measured slice took beyond its stages: host, copies, gaps, less what launches overlap."""
    return SLICE_MEASURED[batch] - sum(time for _, time in stages(SLICE, batch, 1))


def table() -> str:
    """Both tables in Markdown, times in ms."""
    lines = ["| slice on one card, ms | " + " | ".join(f"batch {b}" for b in BATCHES) + " |", "|---|---|---|---|"]
    for rank_count, model, title in ((1, SLICE, ""), (8, WHOLE, "| whole model on eight cards, ms |")):
        if title:
            lines += ["", title + " | ".join(f" batch {b}" for b in BATCHES) + " |", "|---|---|---|---|"]
        found = {batch: dict(stages(model, batch, rank_count)) for batch in BATCHES}
        for name in found[1]:
            if any(found[b][name] for b in BATCHES):
                lines.append(f"| {name} | " + " | ".join(f"{found[b][name] / 1e3:.2f}" for b in BATCHES) + " |")
        sums = {b: sum(found[b].values()) for b in BATCHES}
        lines.append("| sum of the stages | " + " | ".join(f"{sums[b] / 1e3:.2f}" for b in BATCHES) + " |")
        if not title:
            lines.append("| measured whole | " + " | ".join(f"{SLICE_MEASURED[b] / 1e3:.2f}" for b in BATCHES) + " |")
            continue
        extra = {b: max(host(b), 0.0) for b in BATCHES}
        lines.append(
            "| beyond the stages, as measured on one card | "
            + " | ".join(f"{extra[b] / 1e3:.2f}" for b in BATCHES)
            + " |"
        )
        steps = {b: (sums[b] + extra[b]) / 1e3 for b in BATCHES}
        lines.append("| **projected step** | " + " | ".join(f"**{steps[b]:.1f}**" for b in BATCHES) + " |")
        for accepted in (2.5, 3.0):
            per_user = " | ".join(
                f"{accepted / steps[b] * 1e3:.0f} / {b * accepted / steps[b] * 1e3:,.0f}" for b in BATCHES
            )
            lines.append(f"| tokens/s a user / all, {accepted} tokens a step | {per_user} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
