"""The plugin library driven through its C++ interface, without TensorRT and without a card."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from glm_mtp_export.ops import OP_TABLE
from glm_mtp_export.plugin_library import PluginLibrary

PLUGINS = Path(__file__).parents[2] / "plugins"
CUDA_INCLUDE = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"


@pytest.fixture(scope="module")
def lines(plugin_library: PluginLibrary, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the probe prints."""
    program = tmp_path_factory.mktemp("probe") / "skin_probe"
    command = ["g++", "-std=c++17", "-Wall", "-Werror", f"-I{PLUGINS}", f"-isystem{CUDA_INCLUDE}"]
    source = Path(__file__).parent / "skin_probe.cpp"
    subprocess.run([*command, str(source), "-ldl", "-o", str(program)], check=True)
    library = str(plugin_library.path.resolve())
    found = subprocess.run([str(program), library], check=True, capture_output=True, text=True)
    return found.stdout.splitlines()


def after(lines: list[str], start: str) -> list[str]:
    """The rest of every line that begins with `start`."""
    return [line.removeprefix(start).strip() for line in lines if line.startswith(f"{start} ")]


def test_a_creator_for_every_op_with_its_attributes(lines: list[str]) -> None:
    expected = [f"{name} 1 glm PLUGIN CREATOR_V3ONE {len(OP_TABLE[name].attributes)}" for name in sorted(OP_TABLE)]
    assert after(lines, "creator") == expected


def test_state_survives_serialising_cloning_and_the_death_of_the_original(lines: list[str]) -> None:
    assert after(lines, "state") == ["num_slots 4", "relaxed_topk 10", "thinking_end_ids 7 11"]
    assert after(lines, "core") == ["GlmAccept 1 glm"]


def test_missing_and_misshapen_attributes_are_refused_with_their_names(lines: list[str]) -> None:
    assert after(lines, "missing") == ["refused"]
    assert after(lines, "two values") == ["refused"]
    messages = after(lines, "log 1 glm_mtp_plugins: GlmRmsNorm:")
    assert messages[0].startswith("attributes missing: eps, column_offset;")
    assert messages[1] == "field eps has 2 values, expected 1"


def test_output_type_follows_the_attribute_and_only_linear_tensors_of_the_right_type_pass(lines: list[str]) -> None:
    assert after(lines, "type") == ["0"]  # kFLOAT
    assert after(lines, "format") == [f"{slot} 1 0 0" for slot in range(4)]
    assert after(lines, "counts") == ["0"]


def test_shapes_that_break_the_op_table_are_refused_before_anything_runs(lines: list[str]) -> None:
    assert after(lines, "shapes") == ["0"]
    assert after(lines, "scale shape") == ["-1"]
    assert after(lines, "scale rank") == ["-1"]
    assert "log 1 glm_mtp_plugins: GlmLinearFp8: scale is [2, 2], expected [2, 3]" in lines


def test_caches_alias_and_two_buffers_are_refused(lines: list[str]) -> None:
    assert after(lines, "alias") == ["-1 7 -1"]
    assert after(lines, "cache shapes") == ["0"]
    assert after(lines, "workspace") == ["some"]
    assert after(lines, "two buffers") == ["1"]
    assert any(
        "output cache_out must have the address of input cache: bind one buffer to both" in line for line in lines
    )
    assert "layer=1" in after(lines, "metadata")[0]


def test_a_mask_is_waited_for_at_run_time_only(lines: list[str]) -> None:
    assert after(lines, "wait") == ["0", "-1"]
    assert any("one of mask_turn and mask_ready is null" in line for line in after(lines, "log 1 glm_mtp_plugins:"))


def test_library_needs_no_tensorrt_and_shows_only_its_entry_points(plugin_library: PluginLibrary) -> None:
    def symbols(option: str) -> set[str]:
        text = subprocess.run(
            ["nm", "-D", option, str(plugin_library.path)], check=True, capture_output=True, text=True
        ).stdout
        return {line.split()[-1].split("@")[0] for line in text.splitlines()}

    assert not [name for name in symbols("--undefined-only") if re.search("nvinfer|NvInfer|getPluginRegistry", name)]
    entries = {name for name in symbols("--defined-only") if not name.startswith("_Z")}
    own = {name for name in entries if not name.startswith("glm_mtp_collectives_")}  # of tensor-parallel ranks
    around_a_step = {
        f"glm_mtp_{name}" for name in ("spread_histories", "follow_step", "carry_step", "step_ahead_last_error")
    }
    assert own == {"setLoggerFinder", "getCreators", "glm_mtp_plugins_info"} | around_a_step
    needed = subprocess.run(["readelf", "-d", str(plugin_library.path)], check=True, capture_output=True, text=True)
    libraries = set(re.findall(r"NEEDED.*\[(.*?)\]", needed.stdout))
    assert not [name for name in libraries if not re.match(r"lib(stdc\+\+|m|gcc_s|c|dl|pthread|rt)\.so|ld-linux", name)]
