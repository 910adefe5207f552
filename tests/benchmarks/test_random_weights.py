"""Ranks hold slices of one random model, whichever way it is cut."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from glm_mtp_export.artifact import WeightEntry
from glm_mtp_export.checkpoint.sharding import Cut, rank_cut
from glm_mtp_export.config import ParallelConfig

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import random_weights

WHOLE = Cut(None)


def entry(
    name: str, shape: tuple[int, ...], axis: int | None, recipe: str = "copy", dtype: str = "bfloat16"
) -> WeightEntry:
    return WeightEntry(name, dtype, shape, recipe, ("source",), shard_axis=axis)


def made(whole: WeightEntry, cut: Cut) -> torch.Tensor:
    pieces = list(random_weights.random_pieces(whole, cut, "cpu"))
    assert all(piece.is_contiguous() for piece in pieces)
    return torch.cat([piece.reshape(-1) for piece in pieces])


@pytest.mark.parametrize("chunk", [7, 40, 1 << 20])
@pytest.mark.parametrize("parallel", [ParallelConfig(2), ParallelConfig(4, True)], ids=["columns", "experts"])
@pytest.mark.parametrize(
    "whole",
    [
        entry("target.layers.3.moe.w13", (8, 16, 12), 1, "experts_gate_up"),
        entry("target.layers.3.moe.w2", (8, 12, 8), 2, "experts_down", "float8_e4m3fn"),
        entry("target.layers.0.mlp.gate_up", (16, 12), 0),
        entry("target.layers.0.attn.o", (12, 16), 1),
        entry("target.layers.0.attn.w_uk", (8, 6, 5), 0),
        entry("target.layers.0.attn.q_a_norm", (24,), None),
    ],
    ids=lambda e: e.name.rpartition(".")[2],
)
def test_slices_are_parts_of_the_whole(
    whole: WeightEntry, parallel: ParallelConfig, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random_weights, "_CHUNK_VALUES", chunk)
    if whole.dtype == "float8_e4m3fn":
        monkeypatch.setattr("glm_mtp_export.checkpoint.sharding.FP8_BLOCK", 1)
    full = made(whole, WHOLE).reshape(whole.shape)
    assert full.view(torch.uint8).float().std() > 0
    for rank in range(parallel.tensor_parallel_size):
        cut = rank_cut(whole, parallel, rank)
        expected = full
        if cut.axis is not None:
            expected = torch.cat([full.narrow(cut.axis, a, b - a) for a, b in cut.ranges], dim=cut.axis)
        assert torch.equal(made(whole, cut), expected.reshape(-1)), rank


def test_weights_differ_by_name_and_chunk_and_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_weights, "_CHUNK_VALUES", 24)
    one, other = entry("target.layers.0.attn.o", (4, 12), 1), entry("target.layers.1.attn.o", (4, 12), 1)
    values = made(one, WHOLE)
    assert torch.equal(values, made(one, WHOLE))
    assert not torch.equal(values, made(other, WHOLE))
    assert not torch.equal(values[:24], values[24:])
