"""Plugins are told no strides, so a builder that gives them gaps must be found out."""

from __future__ import annotations

import pytest

from glm_mtp_export.engine.tensorrt import strided_tensors
from glm_mtp_export.tensorrt_toolchain import LogLine

FORMAT = "Datatype: BFloat16, Format: (Linear) Row major linear format"


def listing(kind: str, tensor: str) -> list[LogLine]:
    """The builder's list of layers with one layer and one tensor."""
    text = f"Layers:\nName: n, LayerType: {kind}, Inputs: [ {{ {tensor}, {FORMAT} }}], Outputs: [], Metadata: "
    return [LogLine(3, "something else"), LogLine(4, text)]


@pytest.mark.parametrize(
    ("extents", "strides", "is_strided"),
    [
        ("-1,256", "256,1", False),
        ("-1,256", "512,1", True),  # half of a concatenation, as TensorRT-RTX 1.6.1 lists it
        ("-1,256", "1,4", True),
        ("4,16,64", "1024,64,1", False),
        ("4,16,64", "2048,64,1", True),
        ("-1,-1,64", "-1,64,1", False),
        ("-1,1", "1,7", False),  # the stride of an extent of one never matters ...
        ("1,256", "512,1", False),
        ("-1,1", "3,3", True),  # ... but this is a column of a stack
    ],
)
def test_gaps_are_seen(extents: str, strides: str, is_strided: bool) -> None:
    tensor = f"Name: cat.1, Dimensions: [{extents}], Strides: [{strides}], StrideOrder: [1,0]"
    expected = [f"n: cat.1 [{extents}] strides [{strides}]"] if is_strided else []
    assert strided_tensors(listing("custom_layer", tensor)) == expected


def test_native_layers_may_have_gaps() -> None:
    tensor = "Name: cat.1, Dimensions: [-1,256], Strides: [512,1], StrideOrder: [1,0]"
    assert strided_tensors(listing("kgen", tensor)) == []
