"""Reading checkpoints: index and shards, stored formats, the name map, the weight plan and what a user wants to know
about them."""

from __future__ import annotations

from glm_mtp_export.checkpoint.plan import stored_dtype, weight_plan
from glm_mtp_export.checkpoint.view import CheckpointView
from glm_mtp_export.checkpoint.weights import materialise, stream, write_entry

__all__ = ["CheckpointView", "materialise", "stored_dtype", "stream", "weight_plan", "write_entry"]
