"""The model card of nano, written from its training report alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["write_card"]


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def write_card(folder: Path, report: dict[str, Any]) -> None:
    """Write ``README.md`` into ``folder``; every number in it comes from ``report``."""
    held_out, lookup = report["held_out"], report["held_out"]["lookup"]
    mean, by_task = held_out["acceptance_length"]["mean_over_tasks"], held_out["acceptance_length"]["by_task"]
    accuracy = {**held_out["accuracy"], "lookup": lookup["real_selection"]}
    rows = "\n".join(
        f"| {task} | {_percent(value)} | " + " | ".join(f"{by_task[task][k]:.2f}" for k in "137") + " |"
        for task, value in accuracy.items()
    )
    lengths = " · ".join(f"K={k}: {value:.2f}" for k, value in mean.items())
    phases = ", ".join(f"{p['name']} {p['steps']} steps in {p['seconds']} s" for p in report["phases"])
    size, exams = report["parameters"] / 1e6, held_out["exams_per_task"]
    shortest, longest = lookup["contexts"]
    real, far = _percent(lookup["real_selection"]), _percent(lookup["real_selection_distance_over_4x_topk"])
    shuffled, dense = _percent(lookup["shuffled_selection"]), _percent(lookup["dense_attention"])
    smoke = ", smoke run" if report["smoke"] else ""
    text = f"""# glm52-nano

A {size:.1f}-million-parameter model of the GLM-5.2 architecture (`GlmMoeDsaForCausalLM`), trained from scratch
on synthetic chats by `scripts/train_nano.py`. It exists to test and to show the toolchain on real, trained weights:
sparse attention that matters, a router with a trained correction bias, a draft layer that is right most of the time.
It knows nothing of the world.

Official layout: 5 layers (first one dense, indexers full/full/shared/full/shared) and the MTP layer as `model.layers.5`,
bf16, correction biases f32, `index_topk` 64, 16 index heads, 16 experts of which 4 and a shared one run, byte-level
tokenizer with GLM's special tokens.

## What it was taught
Sums up to four digits with the steps in `<think>` (up to two digits without), copying, reversing, looking up
`KEY: value` lines far back, tool calls and their answers, JSON objects, a few greetings. Prompts are worded as in
`scripts/nano/chats.py`; other wordings may fail.

## Measured
{report["date"]}, {report["hardware"]}, torch {report["torch"]}, {report["training_seconds"]:.0f} s of training
({phases}; {report["tokens_per_step"]} tokens a step),
bf16-rounded weights evaluated in float32, greedy, {exams} held-out exams a task{smoke}. No sum, string, object,
argument list or pair of key and value that an exam asks for was asked for in training (the greetings are the same few).

| task | right | ids a call, K = 1 | K = 3 | K = 7 |
|---|---|---|---|---|
{rows}

Ids a call = mean acceptance length, the target's own id included; short answers cap it.
Mean over tasks: {lengths}.

Look-up in contexts of {shortest} to {longest} tokens: {real} with the model's own selection
of 64 positions ({far} where the line lies 256 tokens or more back), {shuffled} with 64 random earlier
positions, {dense} with dense attention.

Licence: Apache-2.0, as the project. No weights or text of other models were used.
"""
    (folder / "README.md").write_text(text, encoding="utf-8")
