"""Shards and index: every damage is a CheckpointError that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glm_mtp_export.checkpoint import CheckpointView
from glm_mtp_export.checkpoint.index import INDEX_NAME, TensorStore, layer_number, read_header
from glm_mtp_export.checkpoint.synthetic import Tensor, write_safetensors, write_synthetic
from glm_mtp_export.errors import CheckpointError, GlmMtpError

GOOD = {
    "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    "b": {"dtype": "BF16", "shape": [1, 2], "data_offsets": [8, 12]},
}


def write_raw(path: Path, header: Any, payload: int = 12, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + bytes(payload))
    return path


def test_good_header(tmp_path: Path) -> None:
    tensors, headers_only = read_header(
        write_raw(tmp_path / "x.safetensors", GOOD | {"__metadata__": {"format": "pt"}})
    )
    assert not headers_only and set(tensors) == {"a", "b"}
    start = 8 + len(json.dumps(GOOD | {"__metadata__": {"format": "pt"}}))
    assert (tensors["b"].offset, tensors["b"].num_bytes, tensors["b"].num_values) == (start + 8, 4, 2)


def changed(name: str, **fields: Any) -> dict[str, Any]:
    return GOOD | {name: {k: v for k, v in (GOOD[name] | fields).items() if v is not ...}}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 20000, "not valid JSON"),
        (b'{"a": 1, "a": 2}', "occurs twice"),
        ([], "header is list"),
        ({"a": 3}, "lacks dtype, shape or data_offsets"),
        (changed("a", dtype=...), "lacks dtype"),
        (changed("a", dtype="F99"), "dtype 'F99'"),
        (changed("a", dtype=["F32"]), r"dtype \['F32'\]"),
        (changed("a", shape=[-2]), r"shape \[-2\]"),
        (changed("a", shape=[2.0]), r"shape \[2.0\]"),
        (changed("a", shape="2"), "shape '2'"),
        (changed("a", shape=[1 << 60]), "shape"),
        (changed("a", shape=[3]), "spans 8 bytes, expected 12 for F32"),
        (changed("a", shape=[1 << 40, 1 << 40]), "spans 8 bytes"),
        (changed("a", data_offsets=[8, 0]), "spans -8 bytes"),
        (changed("a", data_offsets=[0]), "data_offsets"),
        (changed("b", data_offsets=[4, 8]), "b begins at byte"),
        (changed("b", data_offsets=[16, 20]), "b begins at byte"),
        (changed("b", shape=[1, 3], data_offsets=[8, 14]), "bytes, expected"),
    ],
)
def test_damaged_headers_refuse(tmp_path: Path, header: Any, message: str) -> None:
    path = write_raw(tmp_path / "x.safetensors", header)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("length", [0, 5, 10**6, 1 << 63])
def test_wrong_header_length_refuses(tmp_path: Path, length: int) -> None:
    with pytest.raises(CheckpointError):
        read_header(write_raw(tmp_path / "x.safetensors", GOOD, length=length))


@pytest.mark.parametrize("size", [0, 3, 7, 8])
def test_stump_of_a_file_refuses(tmp_path: Path, size: int) -> None:
    path = write_raw(tmp_path / "x.safetensors", GOOD)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError, match="header length"):
        read_header(path)


@pytest.mark.parametrize("payload", [11, 13, 1])
def test_wrong_payload_size_refuses_with_both_sizes(tmp_path: Path, payload: int) -> None:
    with pytest.raises(CheckpointError, match=r"has \d+ bytes, expected \d+ from its header"):
        read_header(write_raw(tmp_path / "x.safetensors", GOOD, payload))


def test_file_that_ends_after_its_header_can_be_scanned_not_read(tmp_path: Path) -> None:
    write_raw(tmp_path / "x.safetensors", GOOD, payload=0)
    store = TensorStore.open(tmp_path)
    assert store.headers_only and "headers only" in store.notices[0]
    with pytest.raises(CheckpointError, match="a cannot be read"):
        store.read(store.tensors["a"])


def test_reading_gives_exactly_the_bytes(tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    write_safetensors(
        tmp_path / "x.safetensors",
        {"pad": Tensor("U8", (1,), np.zeros(1, np.uint8)), "v": Tensor("F32", (4, 3), values)},
    )
    store = TensorStore.open(tmp_path)
    info = store.tensors["v"]
    assert store.read(info).tobytes() == values.tobytes()
    assert np.array_equal(store.rows(info, 1, 3), values[1:3])
    buffer = np.full(8, 255, np.uint8)
    store.read_into(info, buffer, begin=4)
    assert buffer.tobytes() == values.tobytes()[4:12]


# Index


def edit_index(root: Path, **changes: Any) -> None:
    path = root / INDEX_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_missing_shard_refuses_by_name(tmp_path: Path) -> None:
    write_synthetic(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"names model-00002-of-00002\.safetensors, not in the folder"):
        CheckpointView.open(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({}, "has no weight_map"),
        ([], "has no weight_map"),
        ({"a": "../x.safetensors"}, "maps a to"),
        ({"a": "/etc/x.safetensors"}, "maps a to"),
        ({"a": "x.bin"}, "maps a to"),
        ({"a": 1}, "maps a to 1"),
        ({"a": "model-00001-of-00002.safetensors"}, "names a, not in their shards"),
    ],
)
def test_bad_index_refuses(tmp_path: Path, weight_map: Any, message: str) -> None:
    write_synthetic(tmp_path)
    edit_index(tmp_path, weight_map=weight_map)
    with pytest.raises(CheckpointError, match=message):
        CheckpointView.open(tmp_path)


def test_tensors_of_a_listed_file_that_the_index_forgot_are_used_with_a_notice(tmp_path: Path) -> None:
    write_synthetic(tmp_path)
    found = json.loads((tmp_path / INDEX_NAME).read_text())["weight_map"]
    found.pop("model.norm.weight")
    edit_index(tmp_path, weight_map=found)
    view = CheckpointView.open(tmp_path)
    assert "1 tensors are missing in" in view.notices[0]


def test_foreign_file_beside_the_index_is_ignored_with_a_notice(tmp_path: Path) -> None:
    write_synthetic(tmp_path)
    write_safetensors(tmp_path / "adapter.safetensors", {"lora": Tensor("U8", (1,), np.zeros(1, np.uint8))})
    assert "adapter.safetensors: 1 tensors ignored" in CheckpointView.open(tmp_path).notices[0]


def test_same_name_in_two_files_without_index_refuses(tmp_path: Path) -> None:
    write_synthetic(tmp_path, with_index=False)
    write_safetensors(tmp_path / "z.safetensors", {"model.norm.weight": Tensor("U8", (1,), np.zeros(1, np.uint8))})
    with pytest.raises(CheckpointError, match="is also in"):
        CheckpointView.open(tmp_path)


def test_other_containers_refuse(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        TensorStore.open(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="found none"):
        TensorStore.open(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"found pytorch_model\.bin"):
        TensorStore.open(tmp_path)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.12.mlp.gate.weight", 12),
        ("layers.0.x", 0),
        ("lm_head.weight", None),
        ("model.mylayers.3.x", None),
    ],
)
def test_layer_number(name: str, layer: int | None) -> None:
    assert layer_number(name) == layer


# Fuzz: any bytes in the place of a header, any JSON in the place of an index

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
_ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "F4", "X"]) | _JSON,
        "shape": st.lists(st.integers(-1, 5) | st.just(1 << 62), max_size=9) | _JSON,
        "data_offsets": st.lists(st.integers(-1, 64) | st.just(1 << 62), max_size=3) | _JSON,
    },
)
_HEADER = st.dictionaries(st.text(max_size=4), _ENTRY | _JSON, max_size=4) | _JSON
_FUZZ = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300, deadline=None)


def only_named_errors(root: Path) -> None:
    before = sorted(p.name for p in root.iterdir())
    try:
        CheckpointView.scan(root)
    except GlmMtpError as error:
        assert str(root) in str(error) and "\n" not in str(error)
    assert sorted(p.name for p in root.iterdir()) == before


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic(tmp_path_factory.mktemp("fuzz"), num_shards=1, num_hidden_layers=1, n_routed_experts=2)


@given(header=_HEADER, payload=st.integers(0, 70))
@_FUZZ
def test_any_header_is_read_or_refused(root: Path, header: Any, payload: int) -> None:
    (root / INDEX_NAME).unlink(missing_ok=True)
    write_raw(root / "model-00001-of-00001.safetensors", json.dumps(header).encode(), payload)
    only_named_errors(root)


@given(data=st.binary(max_size=200))
@_FUZZ
def test_any_bytes_are_read_or_refused(root: Path, data: bytes) -> None:
    (root / INDEX_NAME).unlink(missing_ok=True)
    (root / "model-00001-of-00001.safetensors").write_bytes(data)
    only_named_errors(root)


@given(index=st.fixed_dictionaries({"weight_map": st.dictionaries(st.text(max_size=5), _JSON, max_size=3)}) | _JSON)
@_FUZZ
def test_any_index_is_read_or_refused(root: Path, index: Any) -> None:
    (root / INDEX_NAME).write_text(json.dumps(index))
    only_named_errors(root)


@given(position=st.integers(0, 1 << 16), byte=st.integers(0, 255))
@_FUZZ
def test_one_flipped_byte_of_a_real_header_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, position: int, byte: int
) -> None:
    global _good
    if not _good:
        made = write_synthetic(tmp_path_factory.mktemp("good"), num_shards=1, num_hidden_layers=1, n_routed_experts=2)
        _good = [made, (made / "model-00001-of-00001.safetensors").read_bytes()]
    made, data = _good
    length = int.from_bytes(data[:8], "little")
    damaged = bytearray(data)
    damaged[position % (length + 8)] = byte
    (made / "model-00001-of-00001.safetensors").write_bytes(damaged)
    only_named_errors(made)


_good: list[Any] = []
