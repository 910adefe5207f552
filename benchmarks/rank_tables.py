#!/usr/bin/env python3
"""The tables of docs/eight-gpus.md that come from measurements: between its marks, from the JSON files in benchmarks/results.

    python benchmarks/rank_tables.py           print the sections
    python benchmarks/rank_tables.py --write   put them into the page; after a new run, that is all there is to do

Sections: `sums` (sums between two cards, by size), `slice` (a slice of GLM-5.2 on one and on two cards), `ids` (choices on the
same tokens), `nano` (the embedded model), `projection` (project_ranks.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import marked_page
import project_ranks
from project_ranks import document, line

PAGE = Path(__file__).parents[1] / "docs" / "eight-gpus.md"
PARITY_FILE = "parity-2xh200.json"
SPLITS = ("one", "columns", "experts")
CARDS = ("one card", "two by columns", "two by experts")


def sums_table() -> str:
    """Microseconds of a sum of [rows, 6144] between two cards, by path."""
    names = {
        "direct": "sum, direct",
        "gathered": "sum, gather",
        "swapped": "sum, swap",
        "in shares": "sum, shares",
    }
    times = project_ranks.sums()
    run = document(project_ranks.SUMS_FILE)
    rivals = {(row["kernel"], row["shape"]): row["rival_us"] for row in run["rows"]}
    lines = [
        line("rows", [*names, "NCCL's all-reduce", "sum and norm, as a step runs them", "the two apart"]),
        "|---" * 8 + "|",
    ]
    for count in sorted({count for _, count in times}):
        shape = f"2 x [{count}, {project_ranks.HIDDEN}]"
        keys = [*((name, count) for name in names.values())]
        cells = [f"{times[key]:.1f}" if key in times else "-" for key in keys]
        cells.append(f"{rivals['sum, gather', shape]:.1f}")
        fused = times.get(("sum and norm", count))
        cells += [f"{fused:.1f}", f"{rivals['sum and norm', shape]:.1f}"] if fused else ["-", "-"]
        lines.append(line(f"{count:,}", cells))
    notes = ["", run["note"]] if "note" in run else []
    return "\n".join([*lines, *notes]) + "\n"


def split_of(row: Mapping[str, Any]) -> str:
    """Which of SPLITS a row of the slice is."""
    return "one" if row["ranks"] == 1 else SPLITS[1 + row["expert_parallel"]]


def slice_table() -> str:
    """Step times of the slice, launched ahead and one after the other, the roofline of a rank, and prefill."""
    run = document(project_ranks.SLICE_FILE)
    found = {(split_of(row), row["batch"]): row for row in run["rows"]}
    batches = sorted({batch for _, batch in found})
    heads = [*(f"{name}, ms" for name in CARDS), "one over columns", "roofline of a rank, of it by columns"]
    lines = [line("batch", heads), "|---" * 6 + "|"]
    for batch in batches:
        ahead, apart = ([found[name, batch][key] for name in SPLITS] for key in ("step_ms_launched_ahead", "step_ms"))
        roofline = found["columns", batch]["roofline_ms"]
        cells = [f"{first:.2f} ({second:.2f})" for first, second in zip(ahead, apart, strict=True)]
        cells += [f"{ahead[0] / ahead[1]:.2f}", f"{roofline:.2f} ms, {100 * roofline / ahead[1]:.0f} %"]
        lines.append(line(str(batch), cells))
    prefill = [statistics.median(found[name, batch]["prefill_tokens_per_s"] for batch in batches) for name in SPLITS]
    rates = ", ".join(f"{rate:,.0f} {name}" for rate, name in zip(prefill, CARDS, strict=True))
    notes = ["", run["note"]] if "note" in run else []
    return "\n".join([*lines, "", f"Prefill of one 8k prompt, tokens/s: {rates}.", *notes]) + "\n"


def slice_name(of: Mapping[str, Any]) -> str:
    """A slice of results/parity-*.json in words."""
    weights = {"float8_e4m3fn": "FP8", "bfloat16": "bf16"}[of["dtype"]]
    return f"{weights}, {of['layers']} layers and MTP"


def ids_table() -> str:
    """Choices of changed weights and of two ranks against one card's, on the same tokens."""
    heads = [
        "ids that differ",
        "largest margin there, nats",
        "margins moved, nats: median, most",
        "drafts that differ",
        "within the rule",
    ]
    lines = []
    for of in document(PARITY_FILE)["slices"]:
        lines += ["", line(slice_name(of), heads), "|---" * 6 + "|"]
        for row in of["rows"]:
            found = row["parity"]
            cells = [
                f"{found['different']} of {found['positions']:,}",
                f"{found['largest_margin']:.2f}",
                f"{found['moved_median']:.3f}, {found['moved_most']:.2f}",
                f"{found['different_drafts']} of {found['drafts']}",
                "yes" if row["follows_rule"] else "no",
            ]
            lines.append(line(found["name"], cells))
    return "\n".join(lines[1:]) + "\n"


def nano_table() -> str:
    """Exams and step times of the embedded model."""
    found = document("nano-2xh200.json")
    lines = [
        line(
            "weights",
            ["ids as on one card: columns, experts", "ms one card", "by columns", "by experts", "calls in a row"],
        ),
        "|---" * 6 + "|",
    ]
    for run in [*found["runs"], *found.get("earlier_runs", [])]:
        steps = [" / ".join(f"{run['step_ms'][name][batch]:.2f}" for batch in ("1", "4", "16")) for name in SPLITS]
        equal = ", ".join(f"{42 - len(run['differences'][name])} of 42" for name in SPLITS[1:])
        calls = min(run["long_calls"][name] for name in SPLITS[1:])
        lines.append(line(run["dtype"], [equal, *steps, f"{calls:,}"]))
    return "\n".join(lines) + "\n"


SECTIONS = {
    "sums": sums_table,
    "slice": slice_table,
    "ids": ids_table,
    "nano": nano_table,
    "projection": project_ranks.table,
}


if __name__ == "__main__":
    marked_page.main(__doc__, PAGE, SECTIONS)
