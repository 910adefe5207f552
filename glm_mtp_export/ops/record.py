"""The record of one custom op, from which everything else about the op is derived.

A record says what the op takes and gives (ports), its attributes, which outputs are its inputs updated in place (aliases), and
carries three bodies: `reference`, which computes in torch; `fake`, which gives shapes; `body`, the same computation as an ONNX
function in plain FP32 operators. `define` turns a record into a torch operator and enters it in `OP_TABLE`; `export` and the
plugin generator read the table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx
import torch
from onnxscript.values import OnnxFunction, Opset

__all__ = [
    "ACTIVATION",
    "DOMAIN",
    "OP_TABLE",
    "OP_VERSION",
    "PLUGIN_ATTRIBUTES",
    "Attribute",
    "OpRecord",
    "Port",
    "define",
]

DOMAIN = "glm"
OP_VERSION = 1
ACTIVATION = "A"  # float32 in the portable dialect, bfloat16 in the device dialect
# TensorRT finds a plugin by these two attributes; other runtimes ignore them.
PLUGIN_ATTRIBUTES: Mapping[str, str] = {"plugin_namespace": DOMAIN, "plugin_version": str(OP_VERSION)}

_ONNX_TYPES = {
    "bool": "tensor(bool)",
    "bfloat16": "tensor(bfloat16)",
    "float32": "tensor(float)",
    "float8_e4m3fn": "tensor(float8e4m3fn)",
    "int8": "tensor(int8)",
    "int32": "tensor(int32)",
    "int64": "tensor(int64)",
    "uint8": "tensor(uint8)",
}
_TYPE_VARIABLES = {
    ACTIVATION: ("float32", "bfloat16"),
    "C": ("float32", "bfloat16", "int8"),
    "F": ("float32", "bfloat16"),
}
_ATTRIBUTE_KINDS = {"int": onnx.defs.OpSchema.AttrType.INT, "float": onnx.defs.OpSchema.AttrType.FLOAT}
_ATTRIBUTE_KINDS["ints"] = onnx.defs.OpSchema.AttrType.INTS


@dataclass(frozen=True)
class Port:
    """One input or output. `type` is a dtype or a type variable: A activations, C cache storage, F float32 or activations."""

    name: str
    type: str
    shape: tuple[int | str, ...]
    doc: str = ""


@dataclass(frozen=True)
class Attribute:
    """One attribute; every node states every attribute, so there are no defaults to disagree about."""

    name: str
    kind: str  # int, float, ints
    doc: str = ""


@dataclass(frozen=True)
class OpRecord:
    """See the module docstring. `aliases` maps an output's name to the input that it is, updated."""

    name: str
    doc: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    attributes: tuple[Attribute, ...]
    reference: Callable[..., Any]
    fake: Callable[..., Any]
    body: OnnxFunction | None  # None: only the device dialect has this op
    aliases: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = {port.name for port in self.inputs}
        outputs = {port.name for port in self.outputs}
        if (
            not self.name.startswith("Glm")
            or not set(self.aliases.values()) <= names
            or not set(self.aliases) <= outputs
        ):
            raise ValueError(f"op {self.name}: the name must start with Glm and aliases must name ports")

    @property
    def torch_name(self) -> str:
        """Name under `torch.ops.glm`."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", self.name.removeprefix("Glm")).lower()

    def schema(self) -> onnx.defs.OpSchema:
        """The ONNX schema of the op."""
        parameter = onnx.defs.OpSchema.FormalParameter
        used = sorted({p.type for p in (*self.inputs, *self.outputs)} & set(_TYPE_VARIABLES))
        return onnx.defs.OpSchema(
            self.name,
            DOMAIN,
            OP_VERSION,
            self.doc,
            inputs=[parameter(p.name, _ONNX_TYPES.get(p.type, p.type), p.doc) for p in self.inputs],
            outputs=[parameter(p.name, _ONNX_TYPES.get(p.type, p.type), p.doc) for p in self.outputs],
            type_constraints=[(v, [_ONNX_TYPES[t] for t in _TYPE_VARIABLES[v]], "") for v in used],
            attributes=[
                *(onnx.defs.OpSchema.Attribute(a.name, _ATTRIBUTE_KINDS[a.kind], a.doc) for a in self.attributes),
                *(
                    onnx.defs.OpSchema.Attribute(key, onnx.helper.make_attribute(key, value), "plugin look-up")
                    for key, value in PLUGIN_ATTRIBUTES.items()
                ),
            ],
        )

    def translation(self) -> Callable[..., Any]:
        """The function that emits this op's node when the torch operator is exported."""
        opset = Opset(DOMAIN, OP_VERSION)
        num_inputs, attributes = len(self.inputs), self.attributes

        def emit(*arguments: Any) -> Any:
            values = {a.name: v for a, v in zip(attributes, arguments[num_inputs:], strict=True)}
            return getattr(opset, self.name)(*arguments[:num_inputs], **values, **PLUGIN_ATTRIBUTES)

        return emit

    def function_proto(self) -> onnx.FunctionProto:
        """The ONNX function that runtimes without our kernels execute."""
        if self.body is None:
            raise ValueError(f"op {self.name} has no portable body")
        proto = self.body.to_function_proto()
        proto.domain, proto.name = DOMAIN, self.name
        declared = set(proto.attribute)
        proto.attribute.extend(a.name for a in self.attributes if a.name not in declared)
        proto.attribute.extend(PLUGIN_ATTRIBUTES)
        proto.doc_string = ""
        return proto


OP_TABLE: dict[str, OpRecord] = {}


def define(record: OpRecord) -> Callable[..., Any]:
    """Register `record` with torch and onnx, enter it in OP_TABLE and return the torch operator."""
    operator = torch.library.custom_op(f"{DOMAIN}::{record.torch_name}", record.reference, mutates_args=())
    operator.register_fake(record.fake)
    if not onnx.defs.has(record.name, DOMAIN):
        onnx.defs.register_schema(record.schema())
    OP_TABLE[record.name] = record
    return operator
