"""Turns a traced model into the file of an artifact: named dimensions, function bodies, external weights.

In: the model that `trace` gives. Out: the same model, finished in place. In the portable dialect each weight input becomes an
initializer whose bytes lie in the weights file at a recorded offset; in the device dialect weights stay inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import onnx

from glm_mtp_export.artifact import TensorSpec, WeightEntry
from glm_mtp_export.ops import DOMAIN, HELPER_FUNCTIONS, OP_TABLE

__all__ = [
    "WEIGHT_ALIGNMENT",
    "op_counts",
    "weight_offsets",
    "with_bodies",
    "with_external_weights",
    "with_named_dimensions",
]

WEIGHT_ALIGNMENT = 4096  # so that a runtime may map the file


def op_counts(model: onnx.ModelProto) -> dict[str, int]:
    """Custom ops of the graph and how many nodes use each, by name."""
    return dict(sorted(Counter(n.op_type for n in model.graph.node if n.domain == DOMAIN).items()))


def with_named_dimensions(model: onnx.ModelProto, specs: Sequence[TensorSpec]) -> None:
    """Give symbolic dimensions the names of the step contract, and drop what only the tracer needs."""
    wanted = {s.name: s.shape for s in specs}
    for value in (*model.graph.input, *model.graph.output):
        for dim, extent in zip(value.type.tensor_type.shape.dim, wanted.get(value.name, ()), strict=False):
            if isinstance(extent, str):
                dim.dim_param = extent
    del model.graph.value_info[:]
    del model.metadata_props[:]
    for node in model.graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
    for item in (*model.graph.input, *model.graph.output, *model.graph.initializer):
        del item.metadata_props[:]
        item.doc_string = ""
    model.graph.name, model.producer_name, model.producer_version = "step", "glm_mtp_export", ""


def with_bodies(model: onnx.ModelProto) -> None:
    """Append the function of every custom op in the graph, and the helpers they call."""
    functions = [OP_TABLE[name].function_proto() for name in op_counts(model)]
    for helper in HELPER_FUNCTIONS:
        proto = helper.to_function_proto()
        proto.domain, proto.doc_string = DOMAIN, ""
        functions.append(proto)
    del model.functions[:]
    model.functions.extend(functions)


def weight_offsets(weights: Iterable[WeightEntry]) -> tuple[dict[str, int], int]:
    """Offset of each weight in the weights file, and the file's size.

    Weights made of the same stored tensors in the same way, such as the embedding and a tied head, lie there once.
    """
    offsets, end = {}, 0
    places: dict[WeightEntry, int] = {}
    for entry in weights:
        made_of = replace(entry, name="", shard_axis=None)
        if made_of not in places:
            places[made_of] = end
            end += -(-entry.num_bytes // WEIGHT_ALIGNMENT) * WEIGHT_ALIGNMENT
        offsets[entry.name] = places[made_of]
    return offsets, end


def with_external_weights(model: onnx.ModelProto, weights: Sequence[WeightEntry], location: str) -> None:
    """Turn weight inputs into initializers that point into file `location` beside the model."""
    by_name = {w.name: w for w in weights}
    offsets, _ = weight_offsets(weights)
    kept = [value for value in model.graph.input if value.name not in by_name]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    for entry in weights:
        tensor = model.graph.initializer.add()
        tensor.name, tensor.data_type = entry.name, onnx.TensorProto.FLOAT
        tensor.dims.extend(entry.shape)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        places = {"location": location, "offset": offsets[entry.name], "length": entry.num_bytes}
        for key, value in places.items():
            tensor.external_data.add(key=key, value=str(value))
