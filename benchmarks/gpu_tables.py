#!/usr/bin/env python3
"""The tables of benchmarks/results/README.md that come from scripts/gpu_check.py: between its marks, from gpu-check-h200.json.

    python benchmarks/gpu_tables.py           print the sections
    python benchmarks/gpu_tables.py --write   put them into the page

Sections: `slice` (steps and prefill of a slice of GLM-5.2), `decode` and `prefill` (where their time goes), `nano` (the embedded
model in three formats), `ahead` (calls launched before the results of the one before are read).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import marked_page

RESULTS = Path(__file__).with_name("results")
PAGE, FILE = RESULTS / "README.md", RESULTS / "gpu-check-h200.json"
FORMATS = {"fp8": "FP8", "nvfp4": "NVFP4 experts, bf16 draft", "nvfp4-draft": "NVFP4 experts, the draft's too"}
SHORT = {"fp8": "FP8", "nvfp4": "NVFP4", "nvfp4-draft": "draft too"}


def stages() -> dict[str, Any]:
    """Stages of the run."""
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))["stages"]
    return found


def _table(head: str, rows: Iterable[str]) -> str:
    return "\n".join([head, "|---" * (head.count("|") - 1) + "|", *rows]) + "\n"


def slice_table() -> str:
    """Whole steps, by weights and batch."""
    lines = []
    for layout, words in FORMATS.items():
        for row in stages()["slice"][layout]["result"]:
            ahead, least = row["step_ms_launched_ahead"], row["roofline_ms"]
            cells = f"{ahead:.2f} | {row['step_ms']:.2f} | {least:.2f} | {100 * least / ahead:.0f} %"
            lines.append(f"| {words} | {row['batch']} | {cells} | {row['prefill_tokens_per_s']:,} |")
    head = "| weights | batch | launched ahead, ms | one after the other, ms | roofline, ms | of roofline | prefill, tokens/s |"
    return _table(head, lines)


def decode_table() -> str:
    """Stages of decode steps in FP8 and NVFP4, at every batch."""
    columns = [(layout, row) for layout in FORMATS for row in stages()["slice"][layout]["result"]]
    cells: dict[tuple[str, str], list[str]] = {}
    for place, (_layout, row) in enumerate(columns):
        for found in row["decode_stages"]:
            cell = f"{found['ms']:.2f}"
            if found["work"]:
                cell += f" ({found['work'] / found['ms'] * 1e-9:.1f}, {100 * found['of_ceiling']:.0f} %)"
            cells.setdefault((found["part"], found["stage"]), ["-"] * len(columns))[place] = cell
    names = " | ".join(f"{SHORT[layout]} {row['batch']}" for layout, row in columns)
    return _table(
        f"| stage | {names} |", (f"| {part}: {stage} | {' | '.join(c)} |" for (part, stage), c in cells.items())
    )


def prefill_table() -> str:
    """Stages of the prefill of one prompt."""
    cells: dict[tuple[str, str], list[str]] = {}
    for place, layout in enumerate(FORMATS):
        for found in stages()["slice"][layout]["result"][0]["prefill_stages"]:
            cell = f"{found['ms']:.1f}"
            if found["work"]:
                cell += f" ({found['work'] / found['ms'] * 1e-9:.0f}, {100 * found['of_ceiling']:.0f} %)"
            cells.setdefault((found["part"], found["stage"]), ["-"] * len(FORMATS))[place] = cell
    head = "| stage | " + " | ".join(FORMATS.values()) + " |"
    return _table(head, (f"| {part}: {stage} | {' | '.join(c)} |" for (part, stage), c in cells.items()))


def nano_table() -> str:
    """The embedded model against the portable dialect."""
    lines = []
    for found in stages()["nano"].values():
        parted, exams = found["differences"], found["exams"]
        words = f"{exams - len(parted)} of {exams}"
        if parted:
            words += f", margin {max(p['margin'] for p in parted):.4f}"
        worst = " / ".join(f"{max(found['cache_errors'][name]):.3f}" for name in found["cache_errors"])
        first, last = found["long_tokens_per_call"]
        times = " / ".join(f"{row['step_ms']:.2f}" for row in found["rows"])
        lines.append(
            f"| {found['dtype']}, {found['cache_dtype']} | {words} | {found['right_percent']:.0f} % | {worst} | "
            f"{first:.2f}, {last:.2f} | {times} | {found['tokens_per_second']:,.0f} |"
        )
    head = (
        "| weights, caches | ids of the oracle | exams right | largest error of target MLA / index, draft MLA / index cache | "
        "tokens a call, first and last third | step at batch 1 / 4 / 16, ms | tokens/s |"
    )
    return _table(head, lines)


def ahead_table() -> str:
    """A decode call of the embedded model, four ways."""
    rows = stages()["ahead"]["result"]["rows"]
    names = ("run_ms", "ahead_ms", "late_mask_ms", "penalties_ms")
    lines = (f"| {r['batch']} | {' | '.join(f'{r[name]:.3f}' for name in names)} |" for r in rows)
    return _table(
        "| batch | run and waited for, ms | launched ahead, ms | its mask comes while it runs, ms | with penalties, ms |",
        lines,
    )


SECTIONS = {
    "slice": slice_table,
    "decode": decode_table,
    "prefill": prefill_table,
    "nano": nano_table,
    "ahead": ahead_table,
}


if __name__ == "__main__":
    marked_page.main(__doc__, PAGE, SECTIONS)
