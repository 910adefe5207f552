"""Three writers and readers of one pool in a chain, as the step graph has them, with the pool updated in its own memory."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import onnxruntime
import pytest
from comparison import assert_close, assert_same
from onnx import TensorProto, helper
from onnx_case import model_of, reference, session
from oracle_mla import MlaConfig
from paged_batch import Paged, paged_batch
from test_mla_attention import call_inputs

from glm_mtp_export.ops import HELPER_FUNCTIONS, OP_TABLE, PLUGIN_ATTRIBUTES

LAYERS = 3
SHARED = ("kv_norm_weight", "w_uk", "w_uv", "positions", "row_requests", "block_table")
RECORD = OP_TABLE["GlmMlaAttention"]


def chain_model(arrays: list[np.ndarray], config: MlaConfig) -> onnx.ModelProto:
    """cache -> layer 0 -> layer 1 -> layer 2 -> cache_out; every layer has its own q, latent and selection.

    A layer's latent depends on the output of the layer before, as in the real graph: only then is each reader done before the
    next writer, and only then does ONNX Runtime write into the memory that was just read.
    """
    nodes, given, cache = [], {}, "cache"
    for layer in range(LAYERS):
        names = []
        for port, array in zip(RECORD.inputs, arrays, strict=True):
            name = cache if port.name == "cache" else port.name if port.name in SHARED else f"{port.name}_{layer}"
            names.append(name)
            if port.name != "cache" or layer == 0:
                given[name] = helper.make_tensor_value_info(
                    name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape
                )
        if layer > 0:
            latent = names.index(f"latent_{layer}")
            nodes.append(helper.make_node("ReduceSum", [f"out_{layer - 1}"], [f"sum_{layer}"], keepdims=0))
            nodes.append(helper.make_node("Sub", [f"sum_{layer}", f"sum_{layer}"], [f"zero_{layer}"]))
            nodes.append(helper.make_node("Add", [names[latent], f"zero_{layer}"], [f"later_latent_{layer}"]))
            names[latent] = f"later_latent_{layer}"
        cache = "cache_out" if layer == LAYERS - 1 else f"cache_{layer}"
        attributes = dataclasses.replace(config, layer=layer).attributes()
        nodes.append(
            helper.make_node(
                "GlmMlaAttention", names, [f"out_{layer}", cache], domain="glm", **attributes, **PLUGIN_ATTRIBUTES
            )
        )
    rows = arrays[0].shape[0]
    outputs = [
        helper.make_tensor_value_info(f"out_{layer}", TensorProto.FLOAT, [rows, config.num_heads * config.v_dim])
        for layer in range(LAYERS)
    ]
    pool = helper.make_tensor_value_info("cache_out", TensorProto.FLOAT, arrays[-1].shape)
    return model_of(nodes, list(given.values()), [*outputs, pool])


def chain_case() -> tuple[list[list[np.ndarray]], Paged, MlaConfig]:
    rng = np.random.default_rng(1)
    config = MlaConfig()
    batch = paged_batch(rng, [9, 70], [2, 3])
    first = call_inputs(rng, batch, config, 8)
    layers = []
    for _layer in range(LAYERS):
        arrays = call_inputs(rng, batch, config, 8)
        shared = [i for i, port in enumerate(RECORD.inputs) if port.name in SHARED]
        layers.append([first[i] if i in shared else a for i, a in enumerate(arrays)])
    pool = rng.standard_normal(first[-1].shape).astype(np.float32)
    return [[*arrays[:-1], pool] for arrays in layers], batch, config


def expected_chain(layers: list[list[np.ndarray]], config: MlaConfig) -> tuple[list[np.ndarray], np.ndarray]:
    outs, pool = [], layers[0][-1]
    for layer, arrays in enumerate(layers):
        out, pool = reference(
            "GlmMlaAttention", [*arrays[:-1], pool], **dataclasses.replace(config, layer=layer).attributes()
        )
        outs.append(out)
    return outs, pool


def feeds(layers: list[list[np.ndarray]]) -> dict[str, np.ndarray]:
    named = {}
    for layer, arrays in enumerate(layers):
        for port, array in zip(RECORD.inputs, arrays, strict=True):
            named[port.name if port.name in (*SHARED, "cache") else f"{port.name}_{layer}"] = array
    return named


def run_in_place(cases: list[list[list[np.ndarray]]], config: MlaConfig, pool: np.ndarray) -> list[list[np.ndarray]]:
    """Run the chain once per case on one OrtValue that is input and output at once; `pool` ends up as its content."""
    runner = session(chain_model(cases[0][0], config))
    memory = onnxruntime.OrtValue.ortvalue_from_numpy(pool)
    results = []
    for layers in cases:
        binding = runner.io_binding()
        for name, array in feeds(layers).items():
            if name != "cache":
                binding.bind_cpu_input(name, array)
        binding.bind_ortvalue_input("cache", memory)
        binding.bind_ortvalue_output("cache_out", memory)
        for layer in range(LAYERS):
            binding.bind_output(f"out_{layer}")
        runner.run_with_iobinding(binding)
        results.append([value.numpy() for value in binding.get_outputs()[1:]])  # in the order of binding
    pool[...] = memory.numpy()
    return results


def test_writers_use_the_operator_that_onnx_runtime_updates_in_place() -> None:
    """Measured with a pool of 61 MB: 8 us a writer with ScatterElements, 12 ms with ScatterND, which copies all layers."""
    (write,) = (function.to_function_proto() for function in HELPER_FUNCTIONS if function.name == "GlmCacheWrite")
    assert [node.op_type for node in write.node if node.op_type.startswith("Scatter")] == ["ScatterElements"]


def test_a_chain_in_separate_memory() -> None:
    layers, _batch, config = chain_case()
    outs, pool = expected_chain(layers, config)
    found = session(chain_model(layers[0], config)).run(None, feeds(layers))
    for layer in range(LAYERS):
        assert_close(found[layer], outs[layer], 2e-5, f"layer {layer}")
    assert_close(found[-1], pool, 1e-6, "cache_out")


@pytest.mark.parametrize("num_calls", [1, 4])
def test_a_chain_that_updates_its_own_input(num_calls: int) -> None:
    """The pool is bound as input and as output; call after call sees what the one before wrote."""
    cases = []
    first, batch, config = chain_case()
    rng = np.random.default_rng(2)
    for call in range(num_calls):
        moved = [list(arrays) for arrays in first]
        for arrays in moved:
            arrays[0] = arrays[0] + np.float32(0.1 * call)
            arrays[1] = np.concatenate((rng.permutation(arrays[1][:5]), arrays[1][5:]))
        cases.append(moved)
    pool = first[0][-1].copy()
    expected, content = [], pool
    for layers in cases:
        outs, content = expected_chain([[*arrays[:-1], content] for arrays in layers], config)
        expected.append(outs)
    found = run_in_place(cases, config, pool)
    for call, (actual, wanted) in enumerate(zip(found, expected, strict=True)):
        for layer in range(LAYERS):
            assert_close(actual[layer], wanted[layer], 2e-5, f"call {call}, layer {layer}")
    assert_close(pool, content, 1e-6, "pool")
    for layer in range(LAYERS):
        kept = batch.untouched(pool, layer)
        kept[[other for other in range(LAYERS) if other != layer]] = False
        assert_same(pool[kept].view(np.int32), first[0][-1][kept].view(np.int32), f"layer {layer}: slots of others")
