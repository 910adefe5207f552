"""Chunks of a weight give `write_entry`'s bytes, in any order and of any size, and touch no number that is stored as wanted."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

from glm_mtp_export.artifact import WeightEntry
from glm_mtp_export.checkpoint import CheckpointView, chunks, weight_plan, write_entry
from glm_mtp_export.checkpoint.chunks import Chunk, ChunkWriter, weight_chunks
from glm_mtp_export.checkpoint.layouts import RELEASES
from glm_mtp_export.checkpoint.plan import DTYPES
from glm_mtp_export.checkpoint.reading import FileReader
from glm_mtp_export.checkpoint.sharding import rank_entry
from glm_mtp_export.checkpoint.synthetic import FORMATS, write_stand_in, write_synthetic
from glm_mtp_export.config import ParallelConfig
from glm_mtp_export.errors import CheckpointError

# Two ranks can cut it, and FP8 blocks of 128 fit; 192 columns are one and a half blocks.
WIDE = {
    "hidden_size": 192,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "moe_intermediate_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "n_routed_experts": 4,
    "v_head_dim": 64,
    "qk_nope_head_dim": 56,
}  # fmt: skip
WHOLE, COLUMNS, EXPERTS = ParallelConfig(), ParallelConfig(2), ParallelConfig(2, True)
# What a stored format cannot give as it is. w_uk and w_uv are rows of kv_b that begin inside an FP8 block; wk_gate joins an FP8
# and a plain matrix.
DEQUANTISED = ("attn.w_uk", "attn.w_uv", "indexer.wk_gate", "indexer.k_norm_weight", "indexer.k_norm_bias")


def written(chunk_list: list[Chunk], num_bytes: int, seed: int) -> bytes:
    """All chunks in an arbitrary order, into memory that held something else."""
    memory = np.full(num_bytes, 0xA5, np.uint8)
    order = np.random.default_rng(seed).permutation(len(chunk_list))
    with FileReader() as reader:
        writer = ChunkWriter(reader)
        for index in order:
            chunk = chunk_list[index]
            writer.write(chunk, memory[chunk.offset : chunk.offset + chunk.num_bytes])
    return memory.tobytes()


def check(view: CheckpointView, plan: tuple[WeightEntry, ...], most_bytes: int, parallel: ParallelConfig) -> None:
    for entry in plan:
        for rank in range(parallel.tensor_parallel_size):
            stream = io.BytesIO()
            write_entry(view, entry, stream, parallel=parallel, rank=rank)
            found = list(weight_chunks(view, entry, most_bytes, parallel, rank))
            assert written(found, rank_entry(entry, parallel).num_bytes, rank) == stream.getvalue(), (entry.name, rank)


@pytest.mark.parametrize("parallel", [WHOLE, COLUMNS, EXPERTS], ids=["whole", "columns", "experts"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", FORMATS)
def test_chunks_give_the_bytes_of_write_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, dtype: str, parallel: ParallelConfig
) -> None:
    """9,000 bytes end inside experts, rows of blocks and heads; a scratch of 700 bytes holds two or three rows."""
    monkeypatch.setattr(chunks, "_SCRATCH_BYTES", 700)
    write_synthetic(tmp_path, layout=layout, block=(128, 128), **WIDE)
    view = CheckpointView.open(tmp_path)
    plan = weight_plan(view, "device", dtype, True)
    check(view, plan, 9_000, parallel)


@pytest.mark.parametrize("layout", ["bf16", "fp8", "fp32"])
def test_portable_and_packed_weights_too(tmp_path: Path, layout: str) -> None:
    write_synthetic(tmp_path, layout=layout, block=(16, 16), packed=layout == "bf16")
    view = CheckpointView.open(tmp_path)
    for dtype in (None, "bfloat16"):
        check(view, weight_plan(view, "portable", dtype, True), 1 << 14, WHOLE)


def test_chunks_are_full_and_in_order(tmp_path: Path) -> None:
    view = CheckpointView.open(write_synthetic(tmp_path))
    entry = next(e for e in weight_plan(view, "device", "bfloat16", False) if e.name.endswith("4.moe.w13"))
    found = list(weight_chunks(view, entry, 1 << 14))
    assert [chunk.offset for chunk in found] == list(range(0, entry.num_bytes, 1 << 14))
    assert {chunk.num_bytes for chunk in found} == {1 << 14}
    assert [len(chunk.parts) for chunk in weight_chunks(view, entry, entry.num_bytes)] == [16]


def test_a_row_larger_than_the_buffer_is_a_chunk_of_its_own(tmp_path: Path) -> None:
    view = CheckpointView.open(write_synthetic(tmp_path))
    entry = weight_plan(view, "device", "bfloat16", False)[0]
    assert {chunk.num_bytes for chunk in weight_chunks(view, entry, 10)} == {entry.num_bytes // entry.shape[0]}
    check(view, (entry,), 10, WHOLE)


@pytest.mark.parametrize(
    ("name", "dtype", "computed"),
    [
        ("glm-5.2-slice-bf16", "bfloat16", {"indexer.k_norm_weight", "indexer.k_norm_bias"}),
        ("glm-5.2-slice-fp8", "float8_e4m3fn", set(DEQUANTISED)),
        ("glm-5.2-slice-nvfp4", "float4_e2m1fnx2", {*DEQUANTISED[3:], "moe.w13_global", "moe.w2_global"}),
    ],
)
@pytest.mark.parametrize("parallel", [WHOLE, ParallelConfig(8), ParallelConfig(8, True)])
def test_released_formats_are_copied_but_for_what_must_be_dequantised(
    tmp_path: Path, name: str, dtype: str, computed: set[str], parallel: ParallelConfig
) -> None:
    """At the real widths, where chunks end inside matrices."""
    release = RELEASES[name]
    view = CheckpointView.open(write_stand_in(tmp_path, release.config, release.layout))
    found, size = set(), 0
    for entry in weight_plan(view, "device", dtype, True):
        for chunk in weight_chunks(view, entry, 16 << 20, parallel, 5 % parallel.tensor_parallel_size):
            assert chunk.num_bytes <= 16 << 20, entry.name
            if any(part.stored(entry) is None for part in chunk.parts):
                found.add(".".join(entry.name.split(".")[-2:]))
                size += chunk.num_bytes
    assert found == computed and size < 100e6


def test_a_file_that_was_cut_is_named_with_its_tensor(tmp_path: Path) -> None:
    view = CheckpointView.open(write_synthetic(tmp_path))
    entry = next(e for e in weight_plan(view, "device", "bfloat16", False) if e.name.endswith("4.moe.w2"))
    shard = view.weight("model.layers.4.mlp.experts.7.down_proj").values.file
    shard.write_bytes(shard.read_bytes()[:2000])
    with pytest.raises(
        CheckpointError, match=rf"{shard.name}: .*layers\.4\.mlp\.experts\.\d\.down_proj\.weight cannot be"
    ):
        written(list(weight_chunks(view, entry, 1 << 14)), entry.num_bytes, 0)
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"down_proj\.weight cannot be read \(.*No such file"):
        written(list(weight_chunks(view, entry, 1 << 14)), entry.num_bytes, 0)


def test_a_reader_opens_each_file_once_and_closes_it(tmp_path: Path) -> None:
    view = CheckpointView.open(write_synthetic(tmp_path))
    before = len(list(Path("/proc/self/fd").iterdir()))
    with FileReader() as reader:
        for _ in range(3):
            for info in view.store.tensors.values():
                reader.read_into(info, np.empty(info.num_bytes, np.uint8))
        assert len(list(Path("/proc/self/fd").iterdir())) == before + len(view.store.files)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_of_the_full_fp8_model_a_third_of_a_percent_is_computed(tmp_path: Path) -> None:
    """The numbers of docs/engines.md and docs/eight-gpus.md."""
    release = RELEASES["glm-5.2-fp8"]
    view = CheckpointView.open(write_stand_in(tmp_path, release.config, release.layout, num_shards=release.num_shards))
    plan = weight_plan(view, "device", "float8_e4m3fn", True)
    for parallel, expected in ((WHOLE, 2_354_075_648), (ParallelConfig(8, True), 324_556_800)):
        computed = 0
        for entry in plan:
            for chunk in weight_chunks(view, entry, 8 << 20, parallel, 3 % parallel.tensor_parallel_size):
                sizes = [part.made_shape(entry) for part in chunk.parts if part.stored(entry) is None]
                computed += sum(rows * columns for rows, columns in sizes) * entry.item_bytes
        assert computed == expected
