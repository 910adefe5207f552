"""Models shared by the graph tests, built once."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

# The modules beside the tests are imported by name; importlib mode keeps test folders off the path.
for name in ("reference", "oracle"):
    if f"graph_{name}" not in sys.modules:
        spec = importlib.util.spec_from_file_location(f"graph_{name}", Path(__file__).with_name(f"{name}.py"))
        module = importlib.util.module_from_spec(spec)
        sys.modules[f"graph_{name}"] = module
        spec.loader.exec_module(module)

from graph_reference import TINY, graph_weights, transformers_model  # noqa: E402


@pytest.fixture(scope="session")
def tiny_model():
    """transformers' model of TINY in float64."""
    return transformers_model(TINY)


@pytest.fixture(scope="session")
def tiny_weights(tiny_model) -> dict[str, torch.Tensor]:
    """Its weights, and a random MTP layer, in float64."""
    return graph_weights(tiny_model, TINY)
