"""The loading benchmark measures what it says, at a size that a test can write."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from glm_mtp_export.checkpoint import CheckpointView, stored_dtype, weight_plan
from glm_mtp_export.checkpoint.synthetic import T6_CONFIG

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import load_speed


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(load_speed, "cuda_device", lambda: None)
    monkeypatch.setattr(
        load_speed, "three_layers", lambda experts, vocabulary: T6_CONFIG | {"n_routed_experts": experts}
    )
    return tmp_path


def options(**changed: object) -> argparse.Namespace:
    return argparse.Namespace(**({"experts": 4, "vocabulary": 320, "rounds": 1, "sweep": False} | changed))


def test_without_a_card_disk_and_loader_are_measured(small: Path) -> None:
    """128-wide blocks do not fit T6 in FP8, so the plan is the stored one."""
    load_speed.write_checkpoint(small / "checkpoint", T6_CONFIG, "bf16", 2)
    result = load_speed.run(small, options(sweep=True))
    json.dumps(result)
    assert result["card"] == "none" and "bus_gb_per_s" not in result
    (row,) = result["rounds"]
    assert row["direct_gb_per_s"] > 0 and {"cold", "warm"} < set(row) and len(result["warm_by_threads_and_mib"]) == 9
    shown = load_speed.table(result)
    assert "loader, cold cache (1)" in shown and "warm, 8 x 2 x 16 MiB" in shown and "pinned" not in shown


def test_weights_are_finite_and_fill_the_files(small: Path) -> None:
    for layout in ("fp8", "bf16"):
        load_speed.write_checkpoint(small / layout, T6_CONFIG, layout, 2)
        view = CheckpointView.open(small / layout)
        assert not view.store.headers_only and stored_dtype(view) == (
            "float8_e4m3fn" if layout == "fp8" else "bfloat16"
        )
        for module in ("model.layers.1.mlp.experts.3.up_proj", "model.layers.0.self_attn.kv_b_proj", "lm_head"):
            values = view.weight(module).floats(0, 4)
            assert np.isfinite(values).all() and len(np.unique(values)) > 20


def test_a_difference_on_the_card_ends_the_benchmark(small: Path) -> None:
    load_speed.write_checkpoint(small / "checkpoint", T6_CONFIG, "bf16", 2)
    view = CheckpointView.open(small / "checkpoint")
    plan = weight_plan(view, "device", "bfloat16", True)

    class Held:
        def __init__(self, num_bytes: int) -> None:
            self.bytes = np.zeros(num_bytes, np.uint8)

        def upload(self, source: np.ndarray, num_bytes: int, stream: object, offset: int) -> None:
            self.bytes[offset : offset + num_bytes] = source[:num_bytes]

        def read(self) -> np.ndarray:
            return self.bytes

    class Staging(load_speed.HostStaging):
        def send(self, buffer: Held, num_bytes: int, offset: int) -> None:
            buffer.upload(self.view, num_bytes, None, offset)

    load = load_speed.Load(small / "checkpoint", plan, {e.name: Held(e.num_bytes) for e in plan}, Staging)
    load.timed()
    whole = sum(entry.num_bytes for entry in plan)
    assert load_speed.check_bytes(load, whole) == whole and load_speed.check_bytes(load, whole // 2) < whole // 2
    load.buffers[plan[-1].name].bytes[-1] ^= 1
    with pytest.raises(SystemExit, match=rf"{plan[-1].name}: the card holds other bytes"):
        load_speed.check_bytes(load, whole)
