"""Any edit of a checkpoint's tensors gives its exact weights or a one-line refusal, never a traceback or a wrong reading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glm_mtp_export.checkpoint import CheckpointView, materialise, weight_plan
from glm_mtp_export.checkpoint.index import ITEM_BITS
from glm_mtp_export.checkpoint.report import inspect_report
from glm_mtp_export.checkpoint.synthetic import Tensor, write_synthetic
from glm_mtp_export.errors import GlmMtpError

SIZES: dict[str, Any] = {"num_hidden_layers": 2, "n_routed_experts": 2, "num_shards": 1}
_EDITS = st.sampled_from(["drop", "rename", "dtype", "flatten", "transpose", "cut", "empty", "copy"])
_SUFFIXES = ["", ".weight", "_scale", "_scale_inv", "_scale_2", "_packed", ".k_scale", ".bias", "_global_scale"]
_SETTINGS = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)


def edited(tensor: Tensor, kind: str, dtype: str) -> Tensor:
    raw = np.frombuffer(np.ascontiguousarray(tensor.bits).tobytes(), np.uint8)
    if kind == "dtype":
        width = ITEM_BITS[dtype]
        count = raw.size * 8 // width
        return Tensor(dtype, (count,), raw[: count * width // 8])
    if kind == "flatten":
        return Tensor(tensor.dtype, (int(np.prod(tensor.shape)),), raw)
    if kind == "transpose":
        return Tensor(tensor.dtype, tensor.shape[::-1], raw)
    size = ITEM_BITS[tensor.dtype] // 8
    if kind == "cut":
        return Tensor(tensor.dtype, (1,), np.resize(raw, size))  # an empty one gets a zero
    return Tensor(tensor.dtype, (0, *tensor.shape[1:]), raw[:0])


@pytest.mark.parametrize("layout", ["bf16", "fp8", "nvfp4", "ct-nvfp4"])
@given(data=st.data())
@_SETTINGS
def test_any_edit_is_read_exactly_or_refused(
    tmp_path_factory: pytest.TempPathFactory, layout: str, data: st.DataObject
) -> None:
    changed: list[str] = []

    def edit(tensors: dict[str, Tensor]) -> None:
        for _ in range(data.draw(st.integers(1, 2))):
            name = data.draw(st.sampled_from(sorted(tensors)))
            kind = data.draw(_EDITS)
            changed.append(name)
            if kind in ("drop", "rename", "copy"):
                tensor = tensors[name] if kind == "copy" else tensors.pop(name)
                if kind != "drop":
                    new = name.removesuffix(".weight") + data.draw(st.sampled_from(_SUFFIXES))
                    changed.append(new)
                    tensors[new] = tensor
            else:
                tensors[name] = edited(tensors[name], kind, data.draw(st.sampled_from(sorted(set(ITEM_BITS) - {"F4"}))))

    root = tmp_path_factory.mktemp("fuzz")
    write_synthetic(root, layout=layout, edit=edit, **SIZES)
    plain = CheckpointView.open(_plain(tmp_path_factory, layout))
    try:
        inspect_report(root).to_json()
        view = CheckpointView.open(root)
        plan = weight_plan(view, "portable", None, view.has_draft)
        found = {e.name: (e, materialise(view, e)) for e in plan}
    except GlmMtpError as error:
        assert str(root) in str(error) and "\n" not in str(error)
        return
    for name, (entry, values) in found.items():
        touched = any(source in tensor for source in entry.sources for tensor in changed)
        if not touched:
            assert values.tobytes() == materialise(plain, entry).tobytes(), name


_made: dict[str, Path] = {}


def _plain(factory: pytest.TempPathFactory, layout: str) -> Path:
    if layout not in _made:
        _made[layout] = write_synthetic(factory.mktemp("plain"), layout=layout, **SIZES)
    return _made[layout]
