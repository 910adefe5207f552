"""The run tower's base: sessions, paged caches, scheduler, sampling, streaming. Imports neither torch nor onnx."""

from __future__ import annotations

from glm_mtp_export.runtime.loop import DeltaStream, RequestHandle
from glm_mtp_export.runtime.request import Completion, Delta, GenerationResult
from glm_mtp_export.runtime.runtime import Runtime
from glm_mtp_export.runtime.sampling import SamplingParams, StructuredOutput

__all__ = [
    "Completion",
    "Delta",
    "DeltaStream",
    "GenerationResult",
    "RequestHandle",
    "Runtime",
    "SamplingParams",
    "StructuredOutput",
]
