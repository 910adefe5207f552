"""The loader's threads: the right bytes at the right place though copies are late, and an end without leftovers."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fake_card
import numpy as np
import pytest

from glm_mtp_export.artifact import WeightEntry
from glm_mtp_export.checkpoint import CheckpointView, weight_plan, write_entry
from glm_mtp_export.checkpoint.plan import DTYPES
from glm_mtp_export.checkpoint.sharding import rank_entry
from glm_mtp_export.checkpoint.synthetic import write_synthetic
from glm_mtp_export.config import ParallelConfig
from glm_mtp_export.errors import CheckpointError, EngineError
from glm_mtp_export.runtime.sessions.weight_loader import load_weights

SIZES = {
    "hidden_size": 192, "q_lora_rank": 128, "kv_lora_rank": 64, "moe_intermediate_size": 256, "intermediate_size": 256,
    "num_hidden_layers": 3, "n_routed_experts": 4, "v_head_dim": 64, "qk_nope_head_dim": 56,
}  # fmt: skip
WHOLE = ParallelConfig()


class LateStaging:
    """A copy happens as late as it may: when it is waited for. Until then its source must stay what it is."""

    made: list[LateStaging]

    def __init__(self, num_bytes: int) -> None:
        self.view = np.full(num_bytes, 0x5A, np.uint8)
        self.thread = threading.get_ident()
        self.is_open = True
        self._pending: Callable[[], None] | None = None
        LateStaging.made.append(self)

    def wait(self) -> None:
        """The copy reads its source now; afterwards the memory holds garbage."""
        assert self.thread == threading.get_ident() and self.is_open
        if self._pending:
            self._pending()
            self.view[:] = 0x5A
        self._pending = None

    def send(self, buffer: Any, num_bytes: int, offset: int) -> None:
        """One copy at a time."""
        assert self._pending is None

        def copy() -> None:
            buffer.view[offset : offset + num_bytes] = self.view[:num_bytes]

        self._pending = copy

    def close(self) -> None:
        """No copy is left behind."""
        self.wait()
        self.is_open = False


@pytest.fixture(autouse=True)
def _fresh() -> None:
    LateStaging.made = []


def load(
    view: CheckpointView,
    plan: Sequence[WeightEntry],
    parallel: ParallelConfig = WHOLE,
    rank: int = 0,
    staging: Any = LateStaging,
    num_threads: int = 3,
    staging_bytes: int = 9_000,
) -> tuple[dict[str, fake_card.Buffer], list[int]]:
    buffers = {entry.name: fake_card.Buffer(rank_entry(entry, parallel).num_bytes) for entry in plan}
    counts: list[int] = []
    load_weights(view, plan, buffers, parallel, rank, counts.append, staging, num_threads, staging_bytes)  # type: ignore[arg-type]
    return buffers, counts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["bf16", "fp8", "nvfp4", "nvfp4-fp8-dense", "ct-nvfp4", "ct-fp8"])
def test_every_format_and_rank_gets_the_bytes_of_write_entry(tmp_path: Path, layout: str, dtype: str) -> None:
    view = CheckpointView.open(write_synthetic(tmp_path, layout=layout, block=(128, 128), **SIZES))
    plan = weight_plan(view, "device", dtype, True)
    for parallel, rank in ((WHOLE, 0), (ParallelConfig(2), 1), (ParallelConfig(2, True), 1)):
        buffers, counts = load(view, plan, parallel, rank)
        for entry in plan:
            stream = io.BytesIO()
            write_entry(view, entry, stream, parallel=parallel, rank=rank)
            assert buffers[entry.name].view.tobytes() == stream.getvalue(), entry.name
        assert sum(counts) == sum(buffer.num_bytes for buffer in buffers.values())


def test_the_host_holds_two_stagings_a_thread(tmp_path: Path) -> None:
    view = CheckpointView.open(write_synthetic(tmp_path))
    before = threading.active_count()
    load(view, weight_plan(view, "device", "bfloat16", True), num_threads=4, staging_bytes=1 << 12)
    assert len(LateStaging.made) == 8 and {s.view.nbytes for s in LateStaging.made} == {1 << 12}
    assert not any(s.is_open for s in LateStaging.made) and threading.active_count() == before


def test_rows_larger_than_the_staging_go_in_pieces(tmp_path: Path) -> None:
    view = CheckpointView.open(write_synthetic(tmp_path))
    (entry,) = (e for e in weight_plan(view, "device", "bfloat16", False) if e.name == "target.lm_head")
    buffers, counts = load(view, [entry], staging_bytes=50)  # a row has 128 bytes
    stream = io.BytesIO()
    write_entry(view, entry, stream)
    assert buffers[entry.name].view.tobytes() == stream.getvalue() and set(counts) == {128}


def test_damage_stops_all_threads_and_names_file_and_tensor(tmp_path: Path) -> None:
    view = CheckpointView.open(write_synthetic(tmp_path))
    shard = view.weight("model.layers.4.mlp.experts.7.down_proj").values.file
    shard.write_bytes(shard.read_bytes()[:2000])
    with pytest.raises(CheckpointError, match=rf"{shard.name}: model\.layers\.\d.* cannot be read.*Fetch this shard"):
        load(view, weight_plan(view, "device", "bfloat16", True))
    assert LateStaging.made and not any(s.is_open for s in LateStaging.made)


def test_a_card_that_fails_ends_the_load(tmp_path: Path) -> None:
    view = CheckpointView.open(write_synthetic(tmp_path))
    plan, seen = weight_plan(view, "device", "bfloat16", True), []

    class Failing(LateStaging):
        def send(self, buffer: Any, num_bytes: int, offset: int) -> None:
            seen.append(num_bytes)
            raise EngineError("CUDA cuMemcpyHtoDAsync_v2 failed with 700: an illegal memory access was encountered.")

    with pytest.raises(EngineError, match="failed with 700"):
        load(view, plan, staging=Failing)
    assert len(seen) <= 3 and not any(s.is_open for s in LateStaging.made)

    def no_memory(num_bytes: int) -> LateStaging:
        raise EngineError("CUDA cuMemHostAlloc failed with 2: out of memory.")

    with pytest.raises(EngineError, match="cuMemHostAlloc failed"):
        load(view, plan, staging=no_memory)
