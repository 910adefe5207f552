#!/usr/bin/env python3
"""Projects a decode step of GLM-5.2 in FP8 over several H200s from stages measured on one, and sums measured between two.

    python benchmarks/project_ranks.py             the tables of docs/eight-gpus.md

Every stage is a measured time, or 4 us and its bytes at a measured rate; the same arithmetic is first held against the slice of
nine layers, which was measured whole on one card and on two. Sources: `benchmarks/kernels/RESULTS_gemm.md`,
`benchmarks/kernels/RESULTS_attention.md`, and of `benchmarks/results` the files named below, which are read here. Times in us; 3
drafts, context 8192, greedy, FP8 caches.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
SUMS_FILE, SLICE_FILE = "collectives-2xh200.json", "slice-fp8-2xh200.json"
BATCHES = (1, 8, 32)  # a request has four rows: the last token and three drafts
HIDDEN, Q_LORA, LATENT, VOCAB = 6144, 2048, 576, 154880
# By rows of the call. FP8 linears: 4 us + bytes / rate fits the measured ones within 15 %.
LINEAR_FIXED = 4.0
LINEAR_RATE = {1: 3.9, 4: 3.9, 8: 3.9, 32: 3.6, 128: 2.17}  # TB/s; 32 rows are between two measurements
EXPERTS = {1: 83.6, 4: 279.0, 8: 497.0, 32: 1418.0, 128: 2179.0}  # of which EXPERTS_FIXED are four launches
EXPERTS_FIXED = 9.4
ROUTER = {1: 8.8, 4: 8.8, 8: 8.8, 32: 9.5, 128: 11.0}
# Whole op, by ranks: 64, 32 and 8 heads each.
ATTENTION = {
    1: {1: 32.7, 4: 32.7, 8: 32.7, 32: 54.1, 128: 114.4},
    2: {1: 24.3, 4: 24.3, 8: 24.3, 32: 41.4, 128: 112.8},
    8: {1: 20.4, 4: 20.4, 8: 20.4, 32: 34.9, 128: 97.2},
}
INDEXER = {1: 18.5, 4: 18.5, 8: 18.5, 32: 32.1, 128: 62.0}
NORM, SILU, ADD = 2.8, 2.5, 1.5
ACCEPT = {1: 6.4, 8: 14.0, 32: 36.2}
HEAD = {4: 440.0, 32: 465.0, 128: 499.0}
HEAD_ARGMAX, BEST_OF_RANKS = 439.0, 4.1  # the second as a direct sum of one row
BF16_RATE, HBM, NVLINK = 4.0, 4.3, 0.374  # TB/s


def document(name: str) -> dict[str, Any]:
    """A file of measurements."""
    found: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return found


def sums() -> dict[tuple[str, int], float]:
    """Time of a sum between two cards, by kernel and rows of 6144."""
    shape = [(row["kernel"], row["shape"], row["time_us"]) for row in document(SUMS_FILE)["rows"]]
    return {(kernel, int(text.split("[")[1].split(",")[0])): time for kernel, text, time in shape}


def slice_steps(ranks: int) -> dict[int, float]:
    """The slice measured whole, each call launched ahead, on one card or by columns on two, by batch."""
    rows = [row for row in document(SLICE_FILE)["rows"] if row["ranks"] == ranks and not row["expert_parallel"]]
    return {row["batch"]: row["step_ms_launched_ahead"] * 1e3 for row in rows}


SUMS = sums()


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
    """What a sum over the ranks adds to the residual norm that reads it. Between more than two ranks: the same path between two,
    and the further bytes that leave or reach a card."""
    payload = 2.0 * rows * HIDDEN
    if ranks == 1:
        return 0.0
    if ranks == 2:
        return summed_and_normed(rows) - NORM
    if payload <= min(512 << 10, (2 << 20) // (ranks - 1)):  # direct, in packets of twice the bytes
        return summed_and_normed(rows) - NORM + 2 * payload * (ranks - 2) / NVLINK * 1e-6
    if payload * (ranks - 1) <= 4 << 20:
        return SUMS["sum, gather", rows] + payload * (ranks - 2) / NVLINK * 1e-6
    return (
        SUMS.get(("sum, shares", rows), SUMS["sum, gather", rows])
        + payload * (2 * (ranks - 1) / ranks - 1) / NVLINK * 1e-6
    )


def summed_and_normed(rows: int) -> float:
    """Between two cards."""
    return SUMS["sum and norm", rows]


def attention_block(rows: int, out_rows: int, ranks: int) -> float:
    """Norms, projections and sparse attention of a layer, without an indexer."""
    return (
        2 * NORM + NORM
        + linear((Q_LORA + LATENT) * HIDDEN, rows)
        + linear(Q_LORA * 16384, rows, ranks)
        + ATTENTION[ranks][rows]
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
    block = sparse_block(batch, ranks) + NORM + HEAD_ARGMAX / ranks + (BEST_OF_RANKS if ranks > 1 else 0.0)
    first = projection + attention_block(rows, batch, ranks) + indexer(rows) + block
    later = projection + attention_block(batch, batch, ranks) + block
    yield "three drafts", first + 2 * later
    yield "sums between ranks", 2 * layers * reduced(rows, ranks) + 6 * reduced(batch, ranks)


def beyond(batch: int) -> float:
    """Share of a step beyond its stages (host, gaps, narrow matrices): the larger of one card's and two cards', if positive."""
    return max(0.0, *(slice_steps(n)[batch] / sum(time for _, time in stages(SLICE, batch, n)) - 1 for n in (1, 2)))


def line(name: str, cells: list[str]) -> str:
    """A row of a Markdown table."""
    return f"| {name} | " + " | ".join(cells) + " |"


def staged(title: str, model: Model, ranks: int) -> tuple[list[str], dict[int, float]]:
    """Lines of a table of stages in ms, and their sums in us by batch."""
    lines = [line(title, [f"batch {b}" for b in BATCHES]), "|---|---|---|---|"]
    found = {batch: dict(stages(model, batch, ranks)) for batch in BATCHES}
    for name in found[1]:
        if any(found[b][name] for b in BATCHES):
            lines.append(line(name, [f"{found[b][name] / 1e3:.2f}" for b in BATCHES]))
    sums = {b: sum(found[b].values()) for b in BATCHES}
    lines.append(line("sum of the stages", [f"{sums[b] / 1e3:.2f}" for b in BATCHES]))
    return lines, sums


def table() -> str:
    """The slice on one and on two cards against its measurements, and the whole model on eight, in Markdown."""
    lines: list[str] = []
    for ranks, cards in ((1, "one card"), (2, "two cards, by columns")):
        found, sums = staged(f"slice on {cards}, ms", SLICE, ranks)
        measured = slice_steps(ranks)
        found.append(line("measured whole, launched ahead", [f"{measured[b] / 1e3:.2f}" for b in BATCHES]))
        found.append(line("stages against it", [f"{100 * (sums[b] / measured[b] - 1):+.0f} %" for b in BATCHES]))
        lines += [*found, ""]
    found, sums = staged("whole model on eight cards, ms", WHOLE, 8)
    extra = {b: beyond(b) * sums[b] for b in BATCHES}
    found.append(line("beyond the stages, the larger share of above", [f"{extra[b] / 1e3:.2f}" for b in BATCHES]))
    steps = {b: (sums[b] + extra[b]) / 1e3 for b in BATCHES}
    found.append(line("**projected step**", [f"**{steps[b]:.1f}**" for b in BATCHES]))
    for accepted in (2.5, 3.0):
        rates = [f"{accepted / steps[b] * 1e3:.0f} / {b * accepted / steps[b] * 1e3:,.0f}" for b in BATCHES]
        found.append(line(f"tokens/s a user / all, {accepted} tokens a step", rates))
    return "\n".join([*lines, *found]) + "\n"


if __name__ == "__main__":
    print(table(), end="")
