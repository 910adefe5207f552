"""One-node ONNX models of the custom ops, run by ONNX Runtime through the op's function body.

In: an op record, numpy inputs in port order, every attribute by name. Out: numpy outputs in port order. A model that the ONNX
checker refuses, or a node that ONNX Runtime cannot inline, raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper

from glm_mtp_export.ops import DOMAIN, HELPER_FUNCTIONS, OP_TABLE, OP_VERSION, PLUGIN_ATTRIBUTES

__all__ = ["OPSET", "functions", "model_of", "one_node_model", "reference", "run", "session"]

OPSET = 23
_CACHED_SESSIONS: dict[bytes, onnxruntime.InferenceSession] = {}


def functions(names: Sequence[str]) -> list[onnx.FunctionProto]:
    """Function bodies of the ops among `names`, then the helper functions that bodies call."""
    helpers = []
    for helper_function in HELPER_FUNCTIONS:
        proto = helper_function.to_function_proto()
        proto.domain = DOMAIN
        helpers.append(proto)
    return [*(OP_TABLE[name].function_proto() for name in dict.fromkeys(names) if name in OP_TABLE), *helpers]


def model_of(
    nodes: Sequence[onnx.NodeProto], inputs: Sequence[onnx.ValueInfoProto], outputs: Sequence[onnx.ValueInfoProto]
) -> onnx.ModelProto:
    """A checked model of `nodes` with the functions that they need."""
    graph = helper.make_graph(list(nodes), "case", list(inputs), list(outputs))
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, OP_VERSION)],
        functions=functions([node.op_type for node in nodes if node.domain == DOMAIN]),
        ir_version=10,
    )
    onnx.checker.check_model(model)
    return model


def one_node_model(name: str, arrays: Sequence[np.ndarray], attributes: dict[str, Any]) -> onnx.ModelProto:
    """The op `name` as a model whose inputs have the types and ranks of `arrays`; all dimensions stay symbolic."""
    record = OP_TABLE[name]
    stated = {attribute.name for attribute in record.attributes}
    if stated != set(attributes):
        raise ValueError(f"{name}: attributes {sorted(attributes)} given, {sorted(stated)} declared")
    given = [
        helper.make_tensor_value_info(
            port.name,
            helper.np_dtype_to_tensor_dtype(array.dtype),
            [f"{port.name}_{axis}" for axis in range(array.ndim)],
        )
        for port, array in zip(record.inputs, arrays, strict=True)
    ]
    wanted = [
        helper.make_tensor_value_info(
            port.name, _element_type(port.type), [f"{port.name}_{a}" for a in range(len(port.shape))]
        )
        for port in record.outputs
    ]
    node = helper.make_node(
        name,
        [port.name for port in record.inputs],
        [port.name for port in record.outputs],
        name="node",
        domain=DOMAIN,
        **attributes,
        **PLUGIN_ATTRIBUTES,
    )
    return model_of([node], given, wanted)


def _element_type(port_type: str) -> int:
    """Element type of a port in the portable dialect, where every type variable is float32."""
    return {"int32": TensorProto.INT32, "int64": TensorProto.INT64, "bool": TensorProto.BOOL}.get(
        port_type, TensorProto.FLOAT
    )


def session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    """A single-threaded CPU session; the same model bytes give the same session."""
    key = model.SerializeToString(deterministic=True)
    if key not in _CACHED_SESSIONS:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        _CACHED_SESSIONS[key] = onnxruntime.InferenceSession(key, options, providers=["CPUExecutionProvider"])
    return _CACHED_SESSIONS[key]


def run(name: str, arrays: Sequence[np.ndarray], **attributes: Any) -> list[np.ndarray]:
    """Outputs of the op's ONNX body."""
    feeds = {port.name: array for port, array in zip(OP_TABLE[name].inputs, arrays, strict=True)}
    return session(one_node_model(name, arrays, attributes)).run(None, feeds)


def reference(name: str, arrays: Sequence[np.ndarray], **attributes: Any) -> list[np.ndarray]:
    """Outputs of the op's torch reference body on the same inputs."""
    record = OP_TABLE[name]
    values = [torch.from_numpy(np.array(array)) for array in arrays]
    result = record.reference(*values, *(attributes[a.name] for a in record.attributes))
    return [tensor.numpy() for tensor in (result if isinstance(result, tuple) else (result,))]
