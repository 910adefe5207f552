"""Graph weights of every stored format against a float64 dequantised reading of the files."""

from __future__ import annotations

import io
import threading
from pathlib import Path

import numpy as np
import pytest
import stored_reference as reference

from glm_mtp_export.checkpoint import CheckpointView, materialise, parts, weight_plan, weights, write_entry
from glm_mtp_export.checkpoint.conversion import conversion_errors
from glm_mtp_export.checkpoint.formats import StoredWeight
from glm_mtp_export.checkpoint.index import TensorInfo, TensorStore
from glm_mtp_export.checkpoint.numeric import bf16_to_f32
from glm_mtp_export.checkpoint.plan import DTYPES
from glm_mtp_export.checkpoint.sharding import rank_cut, rank_entry
from glm_mtp_export.checkpoint.synthetic import FORMATS, T6_CONFIG, Tensor, write_synthetic
from glm_mtp_export.config import ParallelConfig
from glm_mtp_export.demo import nano_checkpoint
from glm_mtp_export.errors import CheckpointError, OptionError

BLOCK = (16, 16)


def expected_weights(directory: Path, block: tuple[int, int] = BLOCK) -> dict[str, reference.F64]:
    return reference.graph_weights(reference.read_all(directory), T6_CONFIG, block)


def check_portable(view: CheckpointView, expected: dict[str, reference.F64], bound: float = 2.0**-23) -> None:
    """Names equal; each value within `bound` relative: two float32 roundings (code x scale, x global scale)."""
    plan = weight_plan(view, "portable", None, with_draft=True)
    assert sorted(e.name for e in plan) == sorted(expected)
    for entry in plan:
        found = materialise(view, entry)
        assert found.dtype == np.float32 and found.shape == entry.shape == expected[entry.name].shape, entry.name
        difference = np.abs(found.astype(np.float64) - expected[entry.name])
        assert (difference <= bound * np.abs(expected[entry.name])).all(), entry.name


@pytest.mark.parametrize("layout", FORMATS)
def test_portable_weights_equal_the_dequantised_files(tmp_path: Path, layout: str) -> None:
    write_synthetic(tmp_path, layout=layout, block=BLOCK)
    check_portable(CheckpointView.open(tmp_path), expected_weights(tmp_path))


def test_packed_and_per_expert_layouts_give_the_same_bits(tmp_path: Path) -> None:
    per_expert = CheckpointView.open(write_synthetic(tmp_path / "a"))
    packed = CheckpointView.open(write_synthetic(tmp_path / "b", packed=True))
    assert packed.packed_experts and not per_expert.packed_experts
    for entry in weight_plan(per_expert, "portable", None, True):
        assert np.array_equal(materialise(per_expert, entry), materialise(packed, entry)), entry.name


def test_packed_fp8_experts_use_the_scales_of_their_own_expert(tmp_path: Path) -> None:
    """transformers names them `gate_up_proj_scale_inv`; 32 rows a projection are two blocks of 16."""
    expected = expected_weights(write_synthetic(tmp_path / "a", layout="fp8", block=BLOCK))

    def pack(tensors: dict[str, Tensor]) -> None:
        for layer in range(1, 7):
            prefix = f"model.layers.{layer}.mlp.experts"
            for joint, names in {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.items():
                for stored, suffix in {"weight": "", "weight_scale_inv": "_scale_inv"}.items():
                    rows = [
                        np.concatenate([tensors.pop(f"{prefix}.{e}.{n}.{stored}").bits for n in names])
                        for e in range(8)
                    ]
                    bits = np.stack(rows)
                    dtype = "F8_E4M3" if stored == "weight" else "F32"
                    tensors[f"{prefix}.{joint}{suffix}"] = Tensor(dtype, bits.shape, bits)

    write_synthetic(tmp_path / "b", layout="fp8", block=BLOCK, edit=pack)
    check_portable(CheckpointView.open(tmp_path / "b"), expected)


def test_gate_and_up_keep_their_own_global_scales(tmp_path: Path) -> None:
    """All nibbles 1.0, block scales 1.0, gate 0.25, up 0.5; then swapped."""
    for gate, up in ((0.25, 0.5), (0.5, 0.25)):

        def edit(tensors: dict[str, Tensor], gate: float = gate, up: float = up) -> None:
            for name, overall in (("gate_proj", gate), ("up_proj", up)):
                prefix = f"model.layers.1.mlp.experts.0.{name}"
                tensors[f"{prefix}.weight"].bits[:] = 0x22
                tensors[f"{prefix}.weight_scale"].bits[:] = 0x38
                tensors[f"{prefix}.weight_scale_2"].bits[...] = overall

        view = CheckpointView.open(write_synthetic(tmp_path / f"{gate}", layout="nvfp4", edit=edit))
        plan = {e.name: e for e in weight_plan(view, "portable", None, False)}
        w13 = materialise(view, plan["target.layers.1.moe.w13"])[0]
        assert (w13[:32] == gate).all() and (w13[32:] == up).all()
        device = {e.name: e for e in weight_plan(view, "device", "float4_e2m1fnx2", False)}
        assert list(materialise(view, device["target.layers.1.moe.w13_global"])[0]) == [gate, up]


@pytest.mark.parametrize(
    ("layout", "name", "overall"), [("nvfp4", "weight_scale_2", 0.25), ("ct-nvfp4", "weight_global_scale", 4.0)]
)
def test_global_scale_multiplies_or_divides_by_dialect(tmp_path: Path, layout: str, name: str, overall: float) -> None:
    """Byte 0x2A is -1, +1; with block scale 2 and 0.25 (or 1 / 4) that is -0.5, +0.5."""

    def edit(tensors: dict[str, Tensor]) -> None:
        prefix = "model.layers.1.mlp.experts.0.down_proj"
        tensors[f"{prefix}.weight{'_packed' if layout == 'ct-nvfp4' else ''}"].bits[:] = 0x2A
        tensors[f"{prefix}.weight_scale"].bits[:] = 0x40
        tensors[f"{prefix}.{name}"].bits[...] = overall

    view = CheckpointView.open(write_synthetic(tmp_path, layout=layout, edit=edit))
    plan = {e.name: e for e in weight_plan(view, "portable", None, False)}
    w2 = materialise(view, plan["target.layers.1.moe.w2"])[0]
    assert (w2[:, 0::2] == -0.5).all() and (w2[:, 1::2] == 0.5).all()


@pytest.mark.parametrize("quantised_draft", [False, True])
@pytest.mark.parametrize("silent", [False, True])
def test_mtp_layer_precision_is_read_from_disk(tmp_path: Path, quantised_draft: bool, silent: bool) -> None:
    """NVFP4 trunk; MTP layer bf16 or quantised, listed in `ignore` or not."""

    def edit_config(raw: dict[str, object]) -> None:
        recipe = raw["quantization_config"]
        assert isinstance(recipe, dict)
        recipe["ignore"] = [entry for entry in recipe["ignore"] if not (silent and "layers.6" in entry)]

    write_synthetic(tmp_path, layout="nvfp4", quantised_draft=quantised_draft, edit_config=edit_config)
    view = CheckpointView.open(tmp_path)
    stored = view.precision("model.layers.6.mlp.experts.0.up_proj")
    assert stored == ("nvfp4" if quantised_draft else "bfloat16")
    disagreements = [n for n in view.notices if "covers modules" in n]
    assert len(disagreements) == (silent and not quantised_draft)
    check_portable(view, expected_weights(tmp_path))


@pytest.mark.parametrize("block", [(16, 16), (16, 32), (32, 64), (128, 128)])
def test_fp8_blocks_of_any_size_with_partial_edges(tmp_path: Path, block: tuple[int, int]) -> None:
    """kv_a has 40 rows: 2.5 blocks of 16; every scale of the partial block is used."""
    write_synthetic(tmp_path, layout="fp8", block=block)
    view = CheckpointView.open(tmp_path)
    check_portable(view, expected_weights(tmp_path, block))
    scale = view.store.tensors["model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"]
    assert scale.shape == (-(-40 // block[0]), -(-64 // block[1]))


def test_merged_weights_keep_the_scale_rows_of_each(tmp_path: Path) -> None:
    """80 and 72 rows in blocks of 32: three scale rows each, the last one partial. Of 152 rows there would be only five."""
    sizes = {"hidden_size": 200, "q_lora_rank": 80, "kv_lora_rank": 64, "num_hidden_layers": 2}
    block = (32, 64)
    write_synthetic(tmp_path, layout="fp8", block=block, **sizes)
    view = CheckpointView.open(tmp_path)
    names = [f"model.layers.0.self_attn.{n}.weight_scale_inv" for n in ("q_a_proj", "kv_a_proj_with_mqa")]
    assert [view.store.tensors[name].shape for name in names] == [(3, 4), (3, 4)]
    expected = reference.graph_weights(reference.read_all(tmp_path), T6_CONFIG | sizes, block)
    check_portable(view, expected)
    (entry,) = (e for e in weight_plan(view, "portable", None, False) if e.name == "target.layers.0.attn.qkv_a")
    parts_of_it = [view.weight(source) for source in entry.sources]
    merged = np.concatenate([part.floats(0, part.num_rows) for part in parts_of_it])
    assert merged.shape == (152, 200) and np.array_equal(materialise(view, entry), merged)


def test_odd_row_windows_pick_the_right_blocks(tmp_path: Path) -> None:
    write_synthetic(tmp_path, layout="fp8", block=(16, 32))
    weight = CheckpointView.open(tmp_path).weight("model.layers.0.self_attn.kv_b_proj")
    whole = weight.floats(0, weight.num_rows)
    for start, stop in ((0, 1), (15, 17), (16, 32), (31, 128), (127, 128)):
        assert np.array_equal(weight.floats(start, stop), whole[start:stop])


def test_small_pieces_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    view = CheckpointView.open(write_synthetic(tmp_path, layout="nvfp4"))
    plan = weight_plan(view, "portable", None, True)
    whole = [materialise(view, e).tobytes() for e in plan]
    monkeypatch.setattr(parts, "PIECE_BYTES", 700)
    for entry, expected in zip(plan, whole, strict=True):
        stream, seen = io.BytesIO(), []
        assert write_entry(view, entry, stream, seen.append) == entry.num_bytes == sum(seen)
        assert stream.getvalue() == expected, entry.name
        assert max(seen) <= max(700, 4 * 128)


def test_expert_stacks_are_written_without_holding_them(tmp_path: Path) -> None:
    view = CheckpointView.open(write_synthetic(tmp_path))
    entry = next(e for e in weight_plan(view, "portable", None, False) if e.name.endswith("1.moe.w13"))
    sizes = [piece.nbytes for piece in weights.pieces(view, entry)]
    assert len(sizes) == 16 and max(sizes) * 16 == entry.num_bytes


# Device dialect: a T6 whose sizes fit the kernels' blocks

WIDE = {
    "hidden_size": 192,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "moe_intermediate_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "n_routed_experts": 3,
}  # fmt: skip


def decode_device(view: CheckpointView, dtype: str) -> dict[str, reference.F64]:
    """Undo the device layout in float64, from the shapes in the plan."""
    plan = {e.name: e for e in weight_plan(view, "device", dtype, True)}
    arrays = {name: materialise(view, e) for name, e in plan.items()}
    found = {}
    for name, entry in plan.items():
        if entry.component != "values":
            continue
        bits = arrays[name]
        assert bits.shape == entry.shape
        if entry.dtype == "bfloat16":
            found[name] = bf16_to_f32(bits).astype(np.float64)
        elif entry.dtype == "float8_e4m3fn":
            scale = arrays[f"{name}_scale"].astype(np.float64)
            values = reference.decode("F8_E4M3", bits.tobytes(), list(bits.shape))
            rows, cols = (np.arange(n) // 128 for n in values.shape[-2:])
            found[name] = values * scale[..., rows[:, None], cols[None, :]]
        elif entry.dtype == "uint8":
            codes = np.stack([bits & 15, bits >> 4], -1).reshape(*bits.shape[:-1], -1)
            groups = reference.decode("F8_E4M3", arrays[f"{name}_scale"].tobytes(), list(plan[f"{name}_scale"].shape))
            overall = arrays[f"{name}_global"].astype(np.float64)
            per_row = np.repeat(overall, bits.shape[1] // overall.shape[1], axis=1)
            found[name] = reference.E2M1[codes] * np.repeat(groups, 16, axis=2) * per_row[:, :, None]
        else:
            found[name] = bits.astype(np.float64)
    return found


def expected_wide(directory: Path) -> dict[str, reference.F64]:
    return reference.graph_weights(reference.read_all(directory), T6_CONFIG | WIDE, (128, 128))


def check_device(found: dict[str, reference.F64], expected: dict[str, reference.F64], bounds: dict[str, float]) -> None:
    """`bounds`: largest relative error by end of name, '' for the rest; 0 means equal to a float32 rounding."""
    assert sorted(found) == sorted(expected)
    for name, values in expected.items():
        bound = next(b for end, b in bounds.items() if name.endswith(end))
        worst = np.abs(found[name] - values).max() / np.abs(values).max()
        assert worst <= bound + 2.0**-23, f"{name}: {worst} > {bound}"


def test_bf16_device_weights_are_the_stored_bits(tmp_path: Path) -> None:
    write_synthetic(tmp_path, **WIDE)
    view = CheckpointView.open(tmp_path)
    check_device(decode_device(view, "bfloat16"), expected_wide(tmp_path), {"": 0})


def test_fp8_device_weights_pass_through(tmp_path: Path) -> None:
    write_synthetic(tmp_path, layout="fp8", block=(128, 128), **WIDE)
    view = CheckpointView.open(tmp_path)
    # kv_b and the index key are rounded to bf16 (half a step of its 7-bit mantissa); everything else is exact.
    rounded = dict.fromkeys(("w_uk", "w_uv", "wk_gate"), 2.0**-8)
    check_device(decode_device(view, "float8_e4m3fn"), expected_wide(tmp_path), rounded | {"": 0})
    plan = {e.name: e for e in weight_plan(view, "device", "float8_e4m3fn", True)}
    assert plan["target.layers.0.attn.qkv_a"].shape == (128 + 72, 192)
    assert plan["target.layers.0.attn.qkv_a_scale"].shape == (2, 2)
    assert plan["draft.layers.0.moe.w13_scale"].shape == (3, 2, 2)
    stored = view.store.tensors["model.layers.0.self_attn.q_a_proj.weight"]
    assert materialise(view, plan["target.layers.0.attn.qkv_a"])[:128].tobytes() == view.store.read(stored).tobytes()


def test_nvfp4_device_weights_pass_through_and_the_rest_stays(tmp_path: Path) -> None:
    write_synthetic(tmp_path, layout="nvfp4", **WIDE)
    view = CheckpointView.open(tmp_path)
    check_device(decode_device(view, "float4_e2m1fnx2"), expected_wide(tmp_path), {"": 0})
    formats = {e.name: (e.dtype, e.format) for e in weight_plan(view, "device", "float4_e2m1fnx2", True)}
    assert formats["target.layers.1.moe.w2"] == ("uint8", "nvfp4")
    assert formats["draft.layers.0.moe.w2"] == ("bfloat16", "plain")
    assert formats["target.layers.1.attn.o"] == ("bfloat16", "plain")


@pytest.mark.parametrize("layout", ["bf16", "nvfp4", "ct-fp8"])
def test_conversion_to_fp8_blocks(tmp_path: Path, layout: str) -> None:
    write_synthetic(tmp_path, layout=layout, **WIDE)
    view = CheckpointView.open(tmp_path)
    # half a step of a 3-bit mantissa
    check_device(decode_device(view, "float8_e4m3fn"), expected_wide(tmp_path), {"": 2.0**-4})


@pytest.mark.parametrize("layout", ["bf16", "fp8"])
def test_conversion_to_nvfp4(tmp_path: Path, layout: str) -> None:
    write_synthetic(tmp_path, layout=layout, block=(128, 128), **WIDE)
    view = CheckpointView.open(tmp_path)
    # 4 to 6 is the widest gap: half of it over 6, and 1/16 for the rounded group scale
    experts = dict.fromkeys(("w13", "w2"), 1 / 6 + 1 / 16)
    rounded = dict.fromkeys(("w_uk", "w_uv", "wk_gate"), 2.0**-8)
    found = decode_device(view, "float4_e2m1fnx2")
    check_device(found, expected_wide(tmp_path), rounded | experts | {"": 0})
    formats = {e.name: e.format for e in weight_plan(view, "device", "float4_e2m1fnx2", True)}
    assert formats["target.layers.2.moe.w13"] == "nvfp4"
    assert formats["draft.layers.0.moe.w13"] == ("plain" if layout == "bf16" else "fp8_block")


def float32_device(view: CheckpointView, dtype: str) -> dict[str, np.ndarray]:
    """The device plan dequantised in float32 as kernels do: code x scale; for NVFP4 (e2m1 x group) x global."""
    arrays = {e.name: (e, materialise(view, e)) for e in weight_plan(view, "device", dtype, True)}
    found = {}
    for name, (entry, bits) in arrays.items():
        if entry.component != "values":
            continue
        if entry.format == "plain":
            found[name] = bf16_to_f32(bits) if entry.dtype == "bfloat16" else bits
        elif entry.format == "fp8_block":
            codes = reference.decode("F8_E4M3", bits.tobytes(), list(bits.shape)).astype(np.float32)
            rows, cols = (np.arange(n) // 128 for n in bits.shape[-2:])
            found[name] = codes * arrays[f"{name}_scale"][1][..., rows[:, None], cols[None, :]]
        else:
            scale, overall = arrays[f"{name}_scale"][1], arrays[f"{name}_global"][1]
            nibbles = np.stack([bits & 15, bits >> 4], -1).reshape(*bits.shape[:-1], -1)
            codes = np.copysign(reference.E2M1[nibbles], np.where(nibbles & 8, -1.0, 1.0))  # code 8 is -0
            groups = reference.decode("F8_E4M3", scale.tobytes(), list(scale.shape))
            steps = (codes * np.repeat(groups, 16, axis=2)).astype(np.float32)
            found[name] = steps * np.repeat(overall, bits.shape[1] // overall.shape[1], axis=1)[:, :, None]
    return found


def check_portable_rounds_as_the_device_does(view: CheckpointView, dtype: str) -> None:
    expected, plan = float32_device(view, dtype), weight_plan(view, "portable", dtype, True)
    assert [e.name for e in plan] == list(expected)
    for entry in plan:
        found = materialise(view, entry)
        assert found.dtype == np.float32 and found.shape == entry.shape == expected[entry.name].shape, entry.name
        assert (found.view(np.uint32) == expected[entry.name].view(np.uint32)).all(), entry.name
        assert entry.rounded_to == "" or entry.rounded_to in ("bfloat16", "fp8_block", "nvfp4")
    # what the conversion costs is stated alike in both dialects
    device = weight_plan(view, "device", dtype, True)
    assert conversion_errors(view, plan) == conversion_errors(view, device)


@pytest.mark.parametrize("layout", ["bf16", "fp8", "nvfp4", "nvfp4-fp8-dense", "ct-fp8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_portable_weights_of_a_dtype_are_those_of_the_device(tmp_path: Path, layout: str, dtype: str) -> None:
    write_synthetic(tmp_path, layout=layout, block=(128, 128), **WIDE)
    check_portable_rounds_as_the_device_does(CheckpointView.open(tmp_path), dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float4_e2m1fnx2"])
def test_portable_weights_of_t6_are_those_of_the_device(tmp_path: Path, dtype: str) -> None:
    check_portable_rounds_as_the_device_does(CheckpointView.open(write_synthetic(tmp_path)), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_portable_weights_of_the_shipped_model_are_those_of_the_device(dtype: str) -> None:
    check_portable_rounds_as_the_device_does(CheckpointView.open(nano_checkpoint()), dtype)


def test_rounding_changes_values_and_small_pieces_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    view = CheckpointView.open(write_synthetic(tmp_path, **WIDE))
    for dtype in ("float8_e4m3fn", "float4_e2m1fnx2"):
        plan = {e.name: e for e in weight_plan(view, "portable", dtype, True)}
        stored = {e.name: e for e in weight_plan(view, "portable", None, True)}
        name = "target.layers.1.moe.w13"
        whole = materialise(view, plan[name])
        assert (whole != materialise(view, stored[name])).any()
        with monkeypatch.context() as patch:
            patch.setattr(parts, "PIECE_BYTES", 700)
            assert materialise(view, plan[name]).tobytes() == whole.tobytes()
        parallel = ParallelConfig(2)
        for rank in range(2):
            cut = rank_cut(plan[name], parallel, rank)
            expected = np.concatenate([np.take(whole, range(a, b), cut.axis) for a, b in cut.ranges], cut.axis)
            assert np.array_equal(materialise(view, plan[name], parallel, rank), expected)


def test_portable_rounding_refuses_what_the_device_cannot_hold(tmp_path: Path) -> None:
    view = CheckpointView.open(write_synthetic(tmp_path))
    with pytest.raises(CheckpointError, match=r"has 32 rows, FP8 stacking.*the portable dialect without --dtype\.$"):
        weight_plan(view, "portable", "float8_e4m3fn", True)
    with pytest.raises(OptionError, match="--dtype is 'int8', expected one of bfloat16"):
        weight_plan(view, "portable", "int8", True)
    with pytest.raises(OptionError, match="--dtype is None"):
        weight_plan(view, "device", None, True)


@pytest.mark.parametrize("layout", ["fp8", "nvfp4", "nvfp4-fp8-dense", "ct-nvfp4", "ct-fp8"])
def test_conversion_to_bf16(tmp_path: Path, layout: str) -> None:
    write_synthetic(tmp_path, layout=layout, block=(128, 128), **WIDE)
    view = CheckpointView.open(tmp_path)
    check_device(decode_device(view, "bfloat16"), expected_wide(tmp_path), {"": 2.0**-8})


def test_per_tensor_fp8_becomes_equal_blocks(tmp_path: Path) -> None:
    write_synthetic(tmp_path, layout="nvfp4-fp8-dense", **WIDE)
    view = CheckpointView.open(tmp_path)
    assert view.precision("model.layers.0.mlp.up_proj") == "fp8_tensor"
    plan = {e.name: e for e in weight_plan(view, "device", "float4_e2m1fnx2", True)}
    assert plan["target.layers.0.mlp.gate_up"].format == "fp8_block"
    scale = materialise(view, plan["target.layers.0.mlp.gate_up_scale"])
    assert scale.shape == (4, 2) and len(np.unique(scale[:2])) == 1 and scale[0, 0] != scale[2, 0]


def test_reading_a_fresh_array_leaves_the_file_alone(tmp_path: Path) -> None:
    view = CheckpointView.open(write_synthetic(tmp_path))
    weight: StoredWeight = view.weight("lm_head")
    first = weight.bf16(0, 4)
    first[:] = 0
    assert weight.bf16(0, 4).any()


def test_damage_found_by_a_reader_thread_reaches_the_caller(tmp_path: Path) -> None:
    view = CheckpointView.open(write_synthetic(tmp_path))
    entry = next(e for e in weight_plan(view, "portable", None, False) if e.name.endswith("4.moe.w2"))
    shard = view.weight("model.layers.4.mlp.experts.7.down_proj").values.file
    shard.write_bytes(shard.read_bytes()[:2000])
    with pytest.raises(CheckpointError, match=r"layers\.4\.mlp\.experts\.\d\.down_proj\.weight cannot be read"):
        materialise(view, entry)


def test_a_caller_that_stops_early_leaves_no_thread(tmp_path: Path) -> None:
    view = CheckpointView.open(write_synthetic(tmp_path))
    entry = next(e for e in weight_plan(view, "portable", None, False) if e.name.endswith("4.moe.w2"))
    before = threading.active_count()
    stream = weights.pieces(view, entry)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


def test_fill_refuses_a_buffer_of_another_size(tmp_path: Path) -> None:
    view = CheckpointView.open(write_synthetic(tmp_path))
    entry = weight_plan(view, "portable", None, False)[0]
    with pytest.raises(ValueError, match=r"target\.embed: buffer is uint8 \(3,\), expected uint8 \(81920,\)"):
        weights.fill(view, entry, np.empty(3, np.uint8))


# Tensor-parallel ranks


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        ("bf16", "bfloat16"),
        ("fp8", "float8_e4m3fn"),
        ("bf16", "float8_e4m3fn"),
        ("nvfp4", "float4_e2m1fnx2"),
        ("bf16", "float4_e2m1fnx2"),
        ("ct-nvfp4", "float4_e2m1fnx2"),
    ],
)
@pytest.mark.parametrize("expert_parallel", [False, True])
def test_a_rank_reads_exactly_its_slice_of_every_weight(
    tmp_path: Path, layout: str, dtype: str, expert_parallel: bool
) -> None:
    sizes = WIDE | {"moe_intermediate_size": 256, "n_routed_experts": 4, "v_head_dim": 64, "qk_nope_head_dim": 56}
    write_synthetic(tmp_path, layout=layout, block=(128, 128), **sizes)
    view, parallel = CheckpointView.open(tmp_path), ParallelConfig(2, expert_parallel)
    cut_weights = 0
    for entry in weight_plan(view, "device", dtype, True):
        whole = materialise(view, entry)
        for rank in range(2):
            cut = rank_cut(entry, parallel, rank)
            expected = whole
            if cut.axis is not None:
                cut_weights += 1
                expected = np.concatenate([np.take(whole, range(a, b), cut.axis) for a, b in cut.ranges], cut.axis)
            found = materialise(view, entry, parallel, rank)
            assert found.shape == expected.shape == rank_entry(entry, parallel).shape, entry.name
            assert np.array_equal(found, expected), entry.name
    assert cut_weights > 20


def test_a_rank_does_not_read_the_rows_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    view, seen = CheckpointView.open(write_synthetic(tmp_path)), []
    honest = TensorStore.read_into

    def counted(self: TensorStore, info: TensorInfo, buffer: np.ndarray, begin: int = 0) -> None:
        seen.append(len(buffer))
        honest(self, info, buffer, begin)

    monkeypatch.setattr(TensorStore, "read_into", counted)
    plan = {e.name: e for e in weight_plan(view, "device", "bfloat16", True)}
    for name in (
        "target.layers.1.moe.w13",
        "target.layers.1.attn.w_uk",
        "target.lm_head",
        "target.layers.0.mlp.gate_up",
    ):
        seen.clear()
        materialise(view, plan[name], ParallelConfig(4), 3)
        assert sum(seen) == plan[name].num_bytes // 4, name
