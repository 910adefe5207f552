"""Memory plan: exact cache bytes, weights per rank, limits and their reasons."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from glm_mtp_export.checkpoint import CheckpointView, weight_plan
from glm_mtp_export.checkpoint.layouts import GLM_5_2_CONFIG, RELEASES, T6_CONFIG
from glm_mtp_export.checkpoint.memory_plan import (
    FLOAT4_CACHE,
    GIB,
    MemoryPlan,
    cache_bytes_per_token,
    draw,
    plan_memory,
    rank_weight_bytes,
    render,
    workspace_bytes,
)
from glm_mtp_export.checkpoint.synthetic import write_stand_in, write_synthetic
from glm_mtp_export.config import ParallelConfig, parse_config
from glm_mtp_export.errors import OptionError

BIG = parse_config(GLM_5_2_CONFIG, "config")
SMALL = parse_config(T6_CONFIG, "config")
PAGE = 64


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> CheckpointView:
    root = tmp_path_factory.mktemp("fp8")
    return CheckpointView.open(write_stand_in(root, RELEASES["glm-5.2-fp8"].config, "fp8", filling="headers"))


@pytest.fixture(scope="module")
def t6(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic(tmp_path_factory.mktemp("t6"))


def planned(root: CheckpointView | Path, **changes: Any) -> MemoryPlan:
    return plan_memory(root, **{"gpus": 8, "gpu_memory": 141.0, "max_batch": 32, **changes})


@pytest.mark.parametrize(
    ("cache_dtype", "target", "draft"),
    [
        ("bfloat16", 95_232, 1_408),
        ("float8_e4m3fn", 78 * 656 + 21 * 132, 656 + 132),
        (FLOAT4_CACHE, 78 * 432 + 21 * 132, 432 + 132),
    ],
)
def test_cache_bytes_of_glm_5_2(cache_dtype: str, target: int, draft: int) -> None:
    found = cache_bytes_per_token(BIG, cache_dtype)
    assert found["target_mla"] + found["target_indexer"] == target
    assert found["draft_mla"] + found["draft_indexer"] == draft
    assert sum(found.values()) == {"bfloat16": 96_640, "float8_e4m3fn": 54_728, FLOAT4_CACHE: 37_032}[cache_dtype]
    assert sum(cache_bytes_per_token(BIG, cache_dtype, num_draft_modules=0).values()) == target


def test_cache_bytes_of_t6() -> None:
    found = cache_bytes_per_token(SMALL, "bfloat16")
    assert found == {"target_mla": 480, "target_indexer": 96, "draft_mla": 80, "draft_indexer": 32}
    with pytest.raises(OptionError, match="--cache-dtype is 'int8'"):
        cache_bytes_per_token(SMALL, "int8")


def test_one_rank_holds_every_weight_and_more_ranks_hold_less(t6: Path) -> None:
    plan = weight_plan(CheckpointView.open(t6), "device", "bfloat16", True)
    total = sum(e.num_bytes for e in plan)
    replicated = sum(e.num_bytes for e in plan if e.shard_axis is None)
    assert rank_weight_bytes(plan, ParallelConfig(1)) == total
    for expert_parallel in (False, True):
        found = rank_weight_bytes(plan, ParallelConfig(4, expert_parallel))
        assert found == replicated + (total - replicated) // 4
    with pytest.raises(OptionError, match=r"--gpus 3: target\.layers\.0\..* cannot be cut into 3 equal parts"):
        rank_weight_bytes(plan, ParallelConfig(3))


def test_fp8_on_eight_cards(fp8: CheckpointView) -> None:
    """About 89.4 GiB a GPU are published for another stack, which keeps kv_b in FP8 and cuts the embedding."""
    plan = planned(fp8)
    rank = plan.ranks[0]
    assert len(plan.ranks) == 8 and len({(r.target_weights, r.caches) for r in plan.ranks}) == 1
    assert 89 * GIB < rank.target_weights + rank.draft_weights < 92 * GIB
    parts = rank.target_weights + rank.draft_weights + rank.workspace + rank.reserve + rank.caches + rank.free
    assert parts == plan.gpu_memory_bytes == 141 * GIB and rank.free >= 0
    assert plan.dtype == "float8_e4m3fn" and plan.fits and plan.context_limit == "GPU memory"
    assert rank.caches == plan.num_pages_needed * PAGE * plan.bytes_per_token


def test_largest_context_is_the_largest(fp8: CheckpointView) -> None:
    plan = planned(fp8)
    assert planned(fp8, max_tokens=plan.largest_context).fits
    assert not planned(fp8, max_tokens=plan.largest_context + 1).fits
    wished = planned(fp8, max_tokens=8192)
    assert planned(fp8, max_tokens=8192, max_batch=wished.largest_batch).fits
    assert not planned(fp8, max_tokens=8192, max_batch=wished.largest_batch + 1).fits


def test_drafts_reserve_slots_beyond_the_last_position(t6: Path) -> None:
    for drafts, tokens, pages in ((0, 64, 1), (1, 63, 1), (1, 64, 2), (3, 59, 1), (3, 60, 2)):
        plan = planned(t6, gpus=1, num_speculative_tokens=drafts, max_tokens=tokens, max_batch=5)
        assert plan.num_pages_needed == 5 * pages


def test_small_model_is_limited_by_its_positions_and_rows(t6: Path) -> None:
    plan = planned(t6, gpus=1, max_num_batched_tokens=256)
    assert (plan.largest_context, plan.context_limit) == (1024, "max_position_embeddings (1,024)")
    assert (plan.largest_batch, plan.batch_limit) == (256, "max_num_batched_tokens (256)")


def test_a_cap_on_the_batchs_total_context_limits_what_the_scheduler_would_hold_back(t6: Path) -> None:
    free = planned(t6, gpus=1, max_batch=4)
    plan = planned(t6, gpus=1, max_batch=4, max_total_context=1000)
    assert free.largest_context == 1024 and free.max_total_context == 0
    assert (plan.largest_context, plan.context_limit) == (250, "max_total_context (1,000)")
    assert plan.fits and plan.max_tokens == 250 and plan.largest_context_alone == 1000
    plan = planned(t6, gpus=1, max_batch=4, max_tokens=300, max_total_context=1000)
    assert not plan.fits and plan.num_pages_needed <= plan.num_pages
    assert (plan.largest_batch, plan.batch_limit) == (3, "max_total_context (1,000)")


def test_weights_that_do_not_fit_say_so(fp8: CheckpointView) -> None:
    plan = planned(fp8, gpus=4)
    assert not plan.fits and plan.largest_context == 0 and plan.context_limit == "the weights alone do not fit"
    assert plan.ranks[0].free < 0


def test_without_the_mtp_layer_there_are_two_caches(tmp_path: Path) -> None:
    plan = planned(write_synthetic(tmp_path, with_draft=False), gpus=1)
    assert set(plan.cache_bytes_per_token) == {"target_mla", "target_indexer"}
    assert plan.ranks[0].draft_weights == 0 and "without the MTP layer" in plan.notices[-1]


def test_workspace_grows_with_everything_it_depends_on() -> None:
    base = {"num_gpus": 8, "max_batch": 8, "max_tokens": 4096, "num_slots": 4, "num_rows": 64}
    size = workspace_bytes(BIG, **base)
    for name, larger in (("max_batch", 9), ("num_slots", 5), ("num_rows", 65)):
        assert workspace_bytes(BIG, **base | {name: larger}) > size
    assert workspace_bytes(BIG, **base | {"max_tokens": 1 << 20}) > size
    assert workspace_bytes(BIG, **base | {"num_gpus": 4}) > size
    more_slots = workspace_bytes(BIG, **base | {"num_slots": 5}) - size
    assert more_slots == 2 * 4 * 8 * 154880


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpus": 0}, "--gpus is 0"),
        ({"gpu_memory": -1.0}, "--gpu-memory is -1.0"),
        ({"max_batch": 0}, "--max-batch is 0"),
        ({"max_total_context": -1}, "--max-total-context is -1"),
        ({"max_tokens": 1025}, "at most max_position_embeddings = 1024"),
        ({"dtype": "int4"}, "--dtype is 'int4'"),
    ],
)
def test_bad_options_refuse(t6: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        planned(t6, **{"gpus": 1, **changes})


def test_json_and_table(t6: Path) -> None:
    from io import StringIO

    from rich.console import Console

    plan = planned(t6, gpus=2)
    found = json.loads(plan.to_json())
    assert found["bytes_per_token"] == 688 and len(found["ranks"]) == 2
    stream = StringIO()
    Console(file=stream, width=140).print(render(plan))
    assert "32 requests of 1,024 tokens: fits" in stream.getvalue() and "688" in stream.getvalue()


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_picture(t6: Path, tmp_path: Path, suffix: str, magic: bytes) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plan{suffix}"
    draw(planned(t6, gpus=2), path)
    assert path.read_bytes().startswith(magic)
    with pytest.raises(OptionError, match=r"ends in \.png or \.svg"):
        draw(planned(t6, gpus=1), tmp_path / "plan.jpg")
