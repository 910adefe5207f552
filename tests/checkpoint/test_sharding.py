"""Slices of the ranks against the whole weights, in every stored format and every graph format."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from glm_mtp_export.artifact import DEVICE
from glm_mtp_export.checkpoint import CheckpointView, materialise, weight_plan
from glm_mtp_export.checkpoint.layouts import RELEASES
from glm_mtp_export.checkpoint.memory_plan import rank_weight_bytes
from glm_mtp_export.checkpoint.plan import BFLOAT16, DTYPES, FLOAT4, FLOAT8
from glm_mtp_export.checkpoint.sharding import rank_cut, rank_plan
from glm_mtp_export.checkpoint.synthetic import FORMATS, write_stand_in, write_synthetic
from glm_mtp_export.config import ParallelConfig
from glm_mtp_export.errors import CheckpointError

# Two layers with widths of whole FP8 blocks at eight ranks: what is cut is eight blocks wide.
WIDE = {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "qk_nope_head_dim": 96,
    "qk_rope_head_dim": 32,
    "qk_head_dim": 128,
    "v_head_dim": 128,
    "q_lora_rank": 128,
    "intermediate_size": 1024,
    "moe_intermediate_size": 1024,
    "index_head_dim": 64,
}
NANO = Path(__file__).parents[2] / "glm_mtp_export" / "data" / "glm52-nano"


def check_all(view: CheckpointView, dtype: str, parallel: ParallelConfig) -> None:
    """The ranks' slices put where the cuts say make the whole weight, every element once."""
    for entry in weight_plan(view, DEVICE, dtype, with_draft=True):
        whole = materialise(view, entry)
        seen = np.zeros(whole.shape, np.int8)
        for rank in range(parallel.tensor_parallel_size):
            found, cut = materialise(view, entry, parallel, rank), rank_cut(entry, parallel, rank)
            if cut.axis is None:
                assert np.array_equal(found, whole), entry.name
                continue
            place = np.concatenate([np.arange(*bounds) for bounds in cut.ranges])
            assert np.array_equal(found, whole.take(place, cut.axis)), f"{entry.name} rank {rank}"
            seen[(slice(None),) * cut.axis + (place,)] += 1
        assert seen.max() == seen.min() and seen.max() <= 1, entry.name


# Every format with a split of each kind; how many ranks there are only moves the cuts, so one format shows that.
CASES = [(layout, split) for layout in FORMATS for split in (ParallelConfig(8), ParallelConfig(4, True))]
CASES += [
    ("fp8", ParallelConfig(size, by_expert)) for size, by_expert in ((2, False), (4, False), (2, True), (8, True))
]


@pytest.mark.parametrize(("layout", "parallel"), CASES, ids=str)
def test_slices_make_the_whole_in_every_format(tmp_path: Path, layout: str, parallel: ParallelConfig) -> None:
    block = (
        (128, 128) if parallel.expert_parallel else (64, 64)
    )  # scales that pass through, and scales that are made here
    write_synthetic(tmp_path, layout=layout, block=block, **WIDE)
    view = CheckpointView.open(tmp_path)
    for dtype in DTYPES:
        check_all(view, dtype, parallel)


def test_packed_experts_are_cut_alike(tmp_path: Path) -> None:
    view = CheckpointView.open(write_synthetic(tmp_path, packed=True, **WIDE))
    check_all(view, BFLOAT16, ParallelConfig(4))
    check_all(view, FLOAT8, ParallelConfig(4, True))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_embedded_model(size: int) -> None:
    view = CheckpointView.open(NANO)
    check_all(view, BFLOAT16, ParallelConfig(size))
    check_all(view, FLOAT4, ParallelConfig(size, True))


def test_rows_of_other_ranks_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    view = CheckpointView.open(write_synthetic(tmp_path, layout="fp8", block=(128, 128), **WIDE))
    store, read = view.store, []
    rows = type(store).rows

    def recorded(self, info, start, stop):  # type: ignore[no-untyped-def]
        read.append((info.name, start, stop))
        return rows(self, info, start, stop)

    monkeypatch.setattr(type(store), "rows", recorded)
    entries = {e.name: e for e in weight_plan(view, DEVICE, FLOAT8, with_draft=True)}
    materialise(view, entries["target.layers.0.attn.q_b"], ParallelConfig(8), 5)
    assert read == [("model.layers.0.self_attn.q_b_proj.weight", 640, 768)]
    read.clear()
    materialise(view, entries["target.layers.1.moe.w13"], ParallelConfig(8, True), 5)
    names = {name for name, _, _ in read}
    assert names == {f"model.layers.1.mlp.experts.5.{p}_proj.weight" for p in ("gate", "up")}


@pytest.mark.parametrize(
    ("changes", "parallel", "message"),
    [
        ({"moe_intermediate_size": 512}, ParallelConfig(8), r"moe\.w13: 512 rows .* 8 equal parts .* blocks of 128"),
        ({"intermediate_size": 384}, ParallelConfig(2), r"layers\.0\.mlp\.gate_up: 384 rows .* 2 equal parts"),
        ({"num_attention_heads": 6, "num_key_value_heads": 6}, ParallelConfig(4), r"layers\.0\.attn\.q_b: 768 rows"),
        ({"n_routed_experts": 6}, ParallelConfig(4, True), r"moe\.w13: 6 experts cannot be cut into 4"),
    ],
    ids=["experts", "dense", "heads", "whole experts"],
)
def test_a_cut_through_a_block_names_the_weight(
    tmp_path: Path, changes: dict[str, int], parallel: ParallelConfig, message: str
) -> None:
    view = CheckpointView.open(write_synthetic(tmp_path, layout="fp8", block=(128, 128), **(WIDE | changes)))
    with pytest.raises(CheckpointError, match=message):
        rank_plan(weight_plan(view, DEVICE, FLOAT8, with_draft=True), parallel)


def test_a_cut_through_a_group_of_sixteen_names_the_weight(tmp_path: Path) -> None:
    sizes = WIDE | {"moe_intermediate_size": 64}
    view = CheckpointView.open(write_synthetic(tmp_path, layout="nvfp4", **sizes))
    with pytest.raises(CheckpointError, match=r"moe\.w2: 32 columns .* 8 equal parts of whole columns in groups of 16"):
        rank_plan(weight_plan(view, DEVICE, FLOAT4, with_draft=True), ParallelConfig(8))


@pytest.mark.parametrize("name", ["glm-5.2-fp8", "glm-5.2-nvfp4"])
def test_full_size_ranks_hold_what_the_memory_plan_says(tmp_path: Path, name: str) -> None:
    release = RELEASES[name]
    write_stand_in(tmp_path, release.config, release.layout, num_shards=1, filling="headers")
    view = CheckpointView.open(tmp_path)
    dtype = FLOAT8 if name.endswith("fp8") else FLOAT4
    entries = weight_plan(view, DEVICE, dtype, with_draft=True)
    whole = sum(entry.num_bytes for entry in entries)
    for size in (1, 2, 4, 8):
        held = sum(e.num_bytes for e in rank_plan(entries, ParallelConfig(size)))
        assert held == rank_weight_bytes(entries, ParallelConfig(size))
        if name.endswith("fp8"):  # whole experts weigh the same as columns of all
            assert rank_weight_bytes(entries, ParallelConfig(size, True)) == held
        assert whole / size <= held < whole / size + 8e9  # what is replicated
