"""Each cache of a step graph must be one thread: graph input, writer, writer, ..., graph output, nothing read stale.

A writer updates the pool in place and gives it a new name. A node that still reads the old name would see the new
bytes; an engine builder that notices copies the whole pool on every call. Raises `EngineError` naming the nodes.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx

from glm_mtp_export.errors import EngineError
from glm_mtp_export.ops import DOMAIN, OP_TABLE

__all__ = ["cache_writers", "check_cache_threads"]


def cache_writers(model: onnx.ModelProto, cache: str) -> list[onnx.NodeProto]:
    """The nodes that update `cache`, in order. Raises EngineError when they are not one thread to `<cache>_out`."""
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in model.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    thread: list[onnx.NodeProto] = []
    name = cache
    while name != f"{cache}_out":
        found = readers.get(name, [])
        if len(found) != 1:
            who = ", ".join(node.name or node.op_type for node in found) or "nobody"
            raise EngineError(
                f"cache {cache}: '{name}' is read by {who}, expected one writer up to '{cache}_out'. Export again."
            )
        thread.append(found[0])
        name = _updated(found[0], name, cache)
    return thread


def _updated(node: onnx.NodeProto, name: str, cache: str) -> str:
    """Name under which `node` gives the pool on."""
    if node.domain == DOMAIN and node.op_type in OP_TABLE:
        record = OP_TABLE[node.op_type]
        inputs, outputs = [p.name for p in record.inputs], [p.name for p in record.outputs]
        for output, source in record.aliases.items():
            if node.input[inputs.index(source)] == name:
                return str(node.output[outputs.index(output)])
    raise EngineError(
        f"cache {cache}: '{name}' goes into {node.name or node.op_type}, which does not update it. Export again."
    )


def check_cache_threads(model: onnx.ModelProto, caches: Iterable[str]) -> None:
    """`cache_writers` for every cache; all problems in one EngineError."""
    problems = []
    for cache in caches:
        try:
            cache_writers(model, cache)
        except EngineError as error:
            problems.append(str(error))
    if problems:
        raise EngineError("\n".join(problems))
