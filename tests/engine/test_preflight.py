"""The list of custom ops before a build, and what is refused by it."""

from __future__ import annotations

import onnx
import pytest
from onnx import TensorProto, helper

from glm_mtp_export.engine.cache_threads import cache_writers, check_cache_threads
from glm_mtp_export.engine.preflight import preflight
from glm_mtp_export.errors import EngineError
from glm_mtp_export.tensorrt_toolchain import Creator

PLUGIN = {"domain": "glm", "plugin_namespace": "glm", "plugin_version": "1"}
OURS = Creator("GlmRouter", "1", "glm")


def model(nodes: list[onnx.NodeProto], bodies: tuple[str, ...] = ()) -> onnx.ModelProto:
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("glm", 1)]
    functions = [helper.make_function("glm", name, ["a"], ["b"], [], opsets) for name in bodies]
    return helper.make_model(helper.make_graph(nodes, "g", [value], [value]), opset_imports=opsets, functions=functions)


def router(name: str = "r", **attributes: str) -> onnx.NodeProto:
    return helper.make_node("GlmRouter", ["x"], ["y"], name=name, **{**PLUGIN, **attributes})


def test_a_loaded_plugin_takes_its_ops() -> None:
    report = preflight(model([router(), router(), helper.make_node("Add", ["x", "x"], ["z"])]), [OURS], "lib.so")
    assert [(f.name, f.num_nodes, f.runs_as) for f in report.findings] == [("GlmRouter", 2, "plugin")]
    report.require(strict=True)


def test_without_the_library_a_body_serves_unless_plugins_are_strict() -> None:
    report = preflight(model([router()], ("GlmRouter",)), [], "/tried/lib.so")
    report.require(strict=False)
    with pytest.raises(EngineError) as error:
        report.require(strict=True)
    assert "plugin library: /tried/lib.so" in str(error.value)
    assert "GlmRouter (namespace glm, version 1; 1 node): function body" in str(error.value)
    assert "glm-mtp build-plugins" in str(error.value)


@pytest.mark.parametrize(
    "offered", [Creator("GlmRouter", "2", "glm"), Creator("GlmRouter", "1", "other")], ids=["version", "namespace"]
)
def test_a_near_miss_is_named(offered: Creator) -> None:
    report = preflight(model([router()]), [offered], "lib.so")
    with pytest.raises(EngineError) as error:
        report.require(strict=False)
    wanted = f"nothing; the library offers version {offered.version} in namespace {offered.namespace}"
    assert wanted in str(error.value)


def test_all_missing_ops_come_together() -> None:
    nodes = [router(), helper.make_node("GlmLinear", ["x"], ["y"], **PLUGIN)]
    with pytest.raises(EngineError) as error:
        preflight(model(nodes), [], "lib.so").require(strict=False)
    assert str(error.value).index("GlmLinear") < str(error.value).index("GlmRouter")


def indexer(name: str, cache: str, out: str) -> onnx.NodeProto:
    inputs = ["q", "key_gate", "weight", "bias", "positions", "row_requests", "block_table", cache]
    return helper.make_node("GlmIndexer", inputs, [f"{name}_selection", out], name=name, **PLUGIN)


def test_a_cache_is_followed_through_its_writers() -> None:
    graph = model([indexer("b", "c1", "pool_out"), indexer("a", "pool", "c1")])
    assert [node.name for node in cache_writers(graph, "pool")] == ["a", "b"]


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([indexer("a", "pool", "c1"), indexer("b", "pool", "pool_out")], "'pool' is read by a, b, expected one writer"),
        ([indexer("a", "pool", "c1")], "'c1' is read by nobody"),
        ([helper.make_node("Identity", ["pool"], ["pool_out"], name="i")], "goes into i, which does not update it"),
    ],
    ids=["stale read", "lost", "copied"],
)
def test_broken_threads_are_refused(nodes: list[onnx.NodeProto], message: str) -> None:
    with pytest.raises(EngineError) as error:
        check_cache_threads(model(nodes), ["pool"])
    assert message in str(error.value)
