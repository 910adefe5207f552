"""NVIDIA Triton front: a model repository over the runtime."""

from glm_mtp_export.serving.triton.repository import write_repository

__all__ = ["write_repository"]
