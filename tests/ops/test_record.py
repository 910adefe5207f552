"""Each record of the op table is consistent with itself: schema, fake, function body, translation, torch operator."""

from __future__ import annotations

import onnx
import pytest
import torch
from cases import CASES, example
from comparison import assert_close, assert_same
from onnx_case import one_node_model, reference, run

from glm_mtp_export import ops
from glm_mtp_export.ops import DOMAIN, OP_TABLE, PLUGIN_ATTRIBUTES, Attribute, OpRecord, Port

PORTABLE = [name for name, record in OP_TABLE.items() if record.body is not None]
DEVICE_ONLY = {"GlmLinearFp8", "GlmExpertsFp8", "GlmExpertsNvfp4"}


def _tensors(name: str) -> list[torch.Tensor]:
    """The example's inputs as torch tensors; bytes become e4m3 where the port says so."""
    record = OP_TABLE[name]
    values = [torch.from_numpy(array.copy()) for array in example(name).arrays]
    return [
        value.view(torch.float8_e4m3fn) if port.type == "float8_e4m3fn" else value
        for port, value in zip(record.inputs, values, strict=True)
    ]


def _operator(name: str) -> torch._ops.OpOverload:
    return getattr(torch.ops.glm, OP_TABLE[name].torch_name).default


def _attribute_values(name: str) -> list[object]:
    return [example(name).attributes[attribute.name] for attribute in OP_TABLE[name].attributes]


def test_every_op_has_an_example_and_only_quantised_ones_lack_a_portable_body() -> None:
    assert set(CASES) == set(OP_TABLE)
    assert {name for name in OP_TABLE if name not in PORTABLE} == DEVICE_ONLY


def test_no_op_takes_a_name_that_onnx_knows() -> None:
    known = {schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""}
    assert not known & {*OP_TABLE, *(function.name for function in ops.HELPER_FUNCTIONS)}


def test_aliases_name_the_caches_only() -> None:
    assert {name: dict(r.aliases) for name, r in OP_TABLE.items() if r.aliases} == {
        "GlmIndexer": {"cache_out": "cache"},
        "GlmMlaAttention": {"cache_out": "cache"},
    }


def test_a_record_refuses_an_alias_of_an_unknown_port() -> None:
    port = Port("x", "A", ("T",))
    with pytest.raises(ValueError, match="GlmNone: the name must start with Glm and aliases must name ports"):
        OpRecord("GlmNone", "", (port,), (port,), (), len, len, None, aliases={"x": "cache"})
    with pytest.raises(ValueError, match="op Attention"):
        OpRecord("Attention", "", (port,), (port,), (Attribute("eps", "float"),), len, len, None)


def test_a_device_op_has_no_function() -> None:
    with pytest.raises(ValueError, match="GlmLinearFp8 has no portable body"):
        OP_TABLE["GlmLinearFp8"].function_proto()


@pytest.mark.parametrize("name", OP_TABLE)
def test_the_registered_schema_states_ports_and_attributes(name: str) -> None:
    record, schema = OP_TABLE[name], onnx.defs.get_schema(name, 1, DOMAIN)
    assert [p.name for p in schema.inputs] == [p.name for p in record.inputs]
    assert [p.name for p in schema.outputs] == [p.name for p in record.outputs]
    assert set(schema.attributes) == {a.name for a in record.attributes} | set(PLUGIN_ATTRIBUTES)
    assert {key: schema.attributes[key].default_value.s.decode() for key in PLUGIN_ATTRIBUTES} == dict(
        PLUGIN_ATTRIBUTES
    )


@pytest.mark.parametrize("name", PORTABLE)
def test_the_function_takes_the_record_s_names(name: str) -> None:
    record, proto = OP_TABLE[name], OP_TABLE[name].function_proto()
    assert list(proto.input) == [p.name for p in record.inputs]
    assert len(proto.output) == len(record.outputs)
    assert set(proto.attribute) == {a.name for a in record.attributes} | set(PLUGIN_ATTRIBUTES)
    assert len(set(proto.attribute)) == len(proto.attribute)


@pytest.mark.parametrize("name", PORTABLE)
def test_shape_inference_gives_the_types_of_the_ports(name: str) -> None:
    model = onnx.shape_inference.infer_shapes(
        one_node_model(name, example(name).arrays, example(name).attributes), strict_mode=True
    )
    assert len(model.graph.output) == len(OP_TABLE[name].outputs)


@pytest.mark.parametrize("name", PORTABLE)
def test_the_body_agrees_with_the_reference(name: str) -> None:
    case = example(name)
    wanted = reference(name, case.arrays, **case.attributes)
    found = run(name, case.arrays, **case.attributes)
    for port, actual, expected in zip(OP_TABLE[name].outputs, found, wanted, strict=True):
        assert actual.dtype == expected.dtype
        if actual.dtype.kind == "f":
            assert_close(actual, expected, 2e-6 * max(1.0, float(abs(expected[abs(expected) < 1e30]).max())), port.name)
        else:
            assert_same(actual, expected, port.name)


@pytest.mark.parametrize("name", OP_TABLE)
def test_schema_and_fake_of_the_torch_operator(name: str) -> None:
    # torch's schema check compares its inputs before and after, which it cannot do for e4m3 ones.
    has_e4m3 = any(port.type == "float8_e4m3fn" for port in OP_TABLE[name].inputs)
    checks = ("test_faketensor",) if has_e4m3 else ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(_operator(name), (*_tensors(name), *_attribute_values(name)), test_utils=checks)


@pytest.mark.parametrize("name", OP_TABLE)
def test_bfloat16_activations_keep_the_dtypes_of_the_fake(name: str) -> None:
    record = OP_TABLE[name]
    values = [
        value.to(torch.bfloat16) if port.type in ("A", "C") else value
        for port, value in zip(record.inputs, _tensors(name), strict=True)
    ]
    torch.library.opcheck(_operator(name), (*values, *_attribute_values(name)), test_utils=("test_faketensor",))


@pytest.mark.parametrize("name", OP_TABLE)
def test_export_keeps_the_op_opaque(name: str) -> None:
    attributes = _attribute_values(name)

    class Call(torch.nn.Module):
        def forward(self, *values: torch.Tensor) -> object:
            return _operator(name)(*values, *attributes)

    program = torch.export.export(Call(), tuple(_tensors(name)))
    called = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert [target for target in called if target is _operator(name)] == [_operator(name)]
    assert all(target is _operator(name) or "getitem" in str(target) for target in called)
