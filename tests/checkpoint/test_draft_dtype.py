"""`--draft-dtype`: the MTP layers in a format of their own, the target untouched."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm_mtp_export.artifact import DEVICE, PORTABLE, WeightEntry
from glm_mtp_export.checkpoint import CheckpointView
from glm_mtp_export.checkpoint.memory_plan import plan_memory
from glm_mtp_export.checkpoint.plan import DTYPES, weight_plan
from glm_mtp_export.checkpoint.synthetic import write_synthetic
from glm_mtp_export.errors import OptionError

WIDE = {"hidden_size": 128, "q_lora_rank": 128, "moe_intermediate_size": 128, "num_hidden_layers": 3}


@pytest.fixture(scope="module", params=["bf16", "fp8", "nvfp4"])
def view(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CheckpointView:
    folder = tmp_path_factory.mktemp(request.param)
    return CheckpointView.open(write_synthetic(folder, layout=request.param, block=(128, 128), **WIDE))


def split(plan: tuple[WeightEntry, ...]) -> tuple[list[WeightEntry], dict[str, WeightEntry]]:
    draft = {e.name.removeprefix("draft.layers.0."): e for e in plan if e.name.startswith("draft.")}
    return [e for e in plan if e.name.startswith("target.")], draft


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("draft_dtype", DTYPES)
def test_the_target_is_planned_as_without_it(view: CheckpointView, dtype: str, draft_dtype: str) -> None:
    target, _ = split(weight_plan(view, DEVICE, dtype, True, None, draft_dtype))
    assert target == split(weight_plan(view, DEVICE, dtype, True))[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_draft_is_planned_as_asked(view: CheckpointView, dtype: str) -> None:
    stored_fp8 = "attn.o_scale" in split(weight_plan(view, DEVICE, "float4_e2m1fnx2", True))[1]
    for draft_dtype, experts, linears in (
        ("bfloat16", "bfloat16", "bfloat16"),
        ("float8_e4m3fn", "float8_e4m3fn", "float8_e4m3fn"),
        ("float4_e2m1fnx2", "uint8", "float8_e4m3fn" if stored_fp8 else "bfloat16"),
    ):
        _, draft = split(weight_plan(view, DEVICE, dtype, True, None, draft_dtype))
        assert {draft[name].dtype for name in ("moe.w13", "moe.w2")} == {experts}
        assert ("moe.w13_global" in draft) == (experts == "uint8")
        linear = {draft[name].dtype for name in ("attn.qkv_a", "attn.q_b", "attn.o", "moe.shared_gate_up")}
        assert linear == {linears}
        assert {draft[name].dtype for name in ("eh_proj", "moe.router", "attn.w_uk", "enorm")} == {"bfloat16"}


def test_the_portable_draft_alone_is_rounded(view: CheckpointView) -> None:
    target, draft = split(weight_plan(view, PORTABLE, None, True, None, "float4_e2m1fnx2"))
    assert {e.rounded_to for e in target} == {""}
    assert {draft[name].rounded_to for name in ("moe.w13", "moe.w2")} == {"nvfp4"}


def test_a_wrong_format_is_refused_by_the_options_name(view: CheckpointView) -> None:
    with pytest.raises(OptionError, match="--draft-dtype is 'int4', expected one of bfloat16, float8_e4m3fn"):
        weight_plan(view, DEVICE, "bfloat16", True, None, "int4")


def test_a_plan_of_memory_counts_the_draft_in_its_format(tmp_path: Path) -> None:
    checkpoint = write_synthetic(tmp_path, **WIDE)
    sizes = {"gpus": 1, "gpu_memory": 80.0, "max_batch": 1}
    stored, small = (plan_memory(checkpoint, draft_dtype=d, **sizes) for d in (None, "float4_e2m1fnx2"))
    assert small.ranks[0].target_weights == stored.ranks[0].target_weights
    assert small.ranks[0].draft_weights < stored.ranks[0].draft_weights
    assert small.dtypes == "bfloat16, the draft's as float4_e2m1fnx2" and stored.dtypes == "bfloat16"
    with pytest.raises(OptionError, match="--draft-dtype would change nothing: this plan has no draft"):
        plan_memory(checkpoint, draft_dtype="bfloat16", num_speculative_tokens=0, **sizes)
