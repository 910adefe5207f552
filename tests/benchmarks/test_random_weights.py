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


def test_nvfp4_weights_have_no_direction_and_the_spread_of_their_fan_in() -> None:
    """Codes with a mean would give all rows one direction, and few experts all of them."""
    name, shape = "target.layers.3.moe.w13", (4, 64, 6144)
    codes = made(entry(name, (4, 64, 3072), 1, dtype="uint8"), WHOLE)
    scales, overall = (
        WeightEntry(f"{name}_{part}", dtype, size, "copy", ("source",), component, "nvfp4")
        for part, dtype, size, component in (
            ("scale", "uint8", (4, 64, 384), "group_scale"),
            ("global", "float32", (4, 2), "global_scale"),
        )
    )
    steps = made(scales, WHOLE).view(torch.float8_e4m3fn).float().reshape(4, 64, 384).repeat_interleave(16, -1)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    pairs = torch.stack([codes & 15, codes >> 4], -1).long()
    weights = values[pairs].reshape(shape) * steps * made(overall, WHOLE).reshape(4, 2).mean()
    count = weights.numel()
    assert weights.std() == pytest.approx(6144**-0.5, rel=0.02)
    assert abs(weights.mean()) < 4 * weights.std() / count**0.5
    low, high = (values[pairs[:, i]] for i in (0, 1))
    assert abs(torch.corrcoef(torch.stack([low, high]))[0, 1]) < 4 / (count / 2) ** 0.5
    assert len(codes.unique()) == 256


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
