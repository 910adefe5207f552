#!/usr/bin/env python3
"""Draw the slice results as one picture: step time by batch, beside the roofline and the rival's published times.

python benchmarks/plot_results.py        reads benchmarks/results/gpu-check-h200.json, writes benchmarks/results/slice.svg
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
from gpu_tables import FORMATS, stages

plt.switch_backend("svg")
plt.rcParams["svg.hashsalt"] = "slice"  # equal input gives equal bytes

RESULTS = Path(__file__).with_name("results")
# vLLM 0.26.0, the same layers in FP8 on the same kind of card, 2026-11-29; not run side by side.
RIVAL_MS = {1: 9.6, 8: 19.1, 32: 25.6}
COLOURS = {"rival": "#b0b7c3", "fp8": "#1f6f8b", "nvfp4": "#e08e45", "nvfp4-draft": "#f2c38a"}


def rows(layout: str) -> dict[int, dict[str, float]]:
    """Rows of the slice by batch."""
    return {row["batch"]: row for row in stages()["slice"][layout]["result"]}


def main() -> None:
    """Write the picture."""
    figure, axes = plt.subplots(figsize=(7.6, 3.6), layout="constrained")
    width, batches = 0.21, list(RIVAL_MS)
    places = [i - 1.5 * width for i in range(3)]
    bars = axes.bar(places, RIVAL_MS.values(), width, color=COLOURS["rival"], label="vLLM 0.26, FP8")
    axes.bar_label(bars, fmt="%.1f", fontsize=8)
    for index, (layout, name) in enumerate(FORMATS.items()):
        found = rows(layout)
        places = [i + (index - 0.5) * width for i in range(3)]
        heights = [found[b]["step_ms_launched_ahead"] for b in batches]
        bars = axes.bar(places, heights, width, color=COLOURS[layout], label=f"ours, {name}")
        axes.bar_label(bars, fmt="%.1f", fontsize=8)
        for place, batch in zip(places, batches, strict=True):
            level = found[batch]["roofline_ms"]
            label = "roofline" if (index, batch) == (0, batches[0]) else None
            axes.plot([place - width / 2, place + width / 2], [level, level], color="black", linewidth=1.5, label=label)
    axes.set_xticks(range(3), [f"batch {b}" for b in batches])
    axes.set_ylabel("ms a step")
    axes.set_title("GLM-5.2 layers 0-8 + MTP, K = 3, 8k context, one H200: whole step, host included", fontsize=9)
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(RESULTS / "slice.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
