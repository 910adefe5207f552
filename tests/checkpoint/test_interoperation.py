"""Other readers of the format agree: the official library on bytes, transformers on names and shapes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from glm_mtp_export.checkpoint import CheckpointView
from glm_mtp_export.checkpoint.synthetic import write_synthetic


@pytest.mark.parametrize("layout", ["bf16", "fp8", "nvfp4"])
def test_the_official_library_reads_the_same_values(tmp_path: Path, layout: str) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    view = CheckpointView.open(write_synthetic(tmp_path, layout=layout))
    tensors = {n: t for path in tmp_path.glob("*.safetensors") for n, t in load_file(path).items()}
    assert tensors.keys() == view.store.tensors.keys()
    for name, tensor in tensors.items():
        info = view.store.tensors[name]
        assert info.shape == tuple(tensor.shape)
        assert view.store.read(info).tobytes() == tensor.reshape(-1).view(torch.uint8).numpy().tobytes(), name


def test_transformers_finds_every_weight_of_the_trunk(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    view = CheckpointView.open(write_synthetic(tmp_path))
    model, info = transformers.GlmMoeDsaForCausalLM.from_pretrained(tmp_path, dtype="float32", output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    assert all("layers.6." in key for key in info["unexpected_keys"])
    ours = view.weight("model.layers.2.mlp.experts.5.up_proj").floats(0, 32)
    theirs = model.model.layers[2].mlp.experts.gate_up_proj[5, 32:].detach().numpy()
    assert np.array_equal(ours, theirs)
