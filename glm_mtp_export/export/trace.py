"""From the torch step to an ONNX model whose weights are graph inputs.

In: configuration and the names, dtypes and shapes of the weights. Out: an `onnx.ModelProto` with one node per custom op, inputs and
outputs as `artifact` lists them. No weight is allocated: tracing runs on fake tensors, so size does not matter.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import onnx
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from glm_mtp_export.artifact import CacheSpec, TensorSpec, WeightEntry, step_inputs, step_outputs
from glm_mtp_export.config import ModelConfig, ParallelConfig, SpeculationConfig
from glm_mtp_export.graph.unified import UnifiedStep
from glm_mtp_export.ops import OP_TABLE

__all__ = ["OPSET", "traced_step"]

OPSET = 23
_DTYPES = {
    "bool": torch.bool,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
}
# Extents of the traced example. All differ, so that no two dimensions can be mistaken for one another, and none is 0 or 1.
_EXAMPLE = {"B": 3, "B+1": 4, "T": 11, "P": 5, "N": 17}


def _fake(spec: TensorSpec | WeightEntry) -> torch.Tensor:
    shape = [_EXAMPLE[extent] if isinstance(extent, str) else extent for extent in spec.shape]
    return torch.empty(shape, dtype=_DTYPES[spec.dtype])


def _dynamic_shapes(specs: Sequence[TensorSpec]) -> dict[str, dict[int, object]]:
    batch = torch.export.Dim("B", min=2)
    dims: dict[str, object] = {"B": batch, "B+1": batch + 1}
    dims |= {name: torch.export.Dim(name, min=2) for name in ("T", "P", "N")}
    return {
        s.name: {axis: dims[extent] for axis, extent in enumerate(s.shape) if isinstance(extent, str)} for s in specs
    }


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter prints progress and version notes that say nothing about the user's model."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnx_ir", "onnxscript")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def traced_step(
    config: ModelConfig,
    speculation: SpeculationConfig,
    caches: tuple[CacheSpec, ...],
    weights: Sequence[WeightEntry],
    valid_vocab: int,
    thinking_end_ids: tuple[int, ...],
    parallel: ParallelConfig,
    dialect: str,
) -> onnx.ModelProto:
    """Trace the step; weights become graph inputs under their plan names, after the step's own inputs."""
    inputs = step_inputs(config, speculation, caches, parallel, dialect)
    outputs = step_outputs(speculation, caches)
    step = UnifiedStep(config, speculation, valid_vocab, thinking_end_ids, parallel)
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        example = {s.name: _fake(s) for s in inputs}
        bound = {w.name: _fake(w) for w in weights}
    shapes = {"inputs": _dynamic_shapes(inputs), "weights": {w.name: {} for w in weights}}
    table: dict[Callable[..., Any], Callable[..., Any]] = {
        getattr(torch.ops.glm, record.torch_name).default: record.translation() for record in OP_TABLE.values()
    }
    with _quiet(), torch.no_grad():
        program = torch.export.export(step, (example, bound), dynamic_shapes=shapes, strict=False)
        converted = torch.onnx.export(
            program,
            (),
            dynamo=True,
            opset_version=OPSET,
            custom_translation_table=table,
            input_names=[*(s.name for s in inputs), *(w.name for w in weights)],
            output_names=[s.name for s in outputs],
            optimize=True,
            verbose=False,
        )
        assert converted is not None
        return converted.model_proto
