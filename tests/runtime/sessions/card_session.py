"""The card's session over a card of host memory."""

from __future__ import annotations

from pathlib import Path

import fake_card
from step_calls import PROFILE, K

from glm_mtp_export.artifact import Manifest
from glm_mtp_export.runtime.sessions import tensorrt
from glm_mtp_export.runtime.thinking import ThinkingIds
from glm_mtp_export.tensorrt_toolchain import Toolchain

__all__ = ["MOST_COLUMNS", "session_on"]

MOST_COLUMNS = 3


def session_on(card: fake_card.Card, artifact: Path, manifest: Manifest) -> tensorrt.TensorRtSession:
    """One over an artifact's graph, under a manifest that may promise more."""
    rows = (PROFILE.max_rows, PROFILE.max_batch * (K + 1))
    engine = fake_card.Engine(artifact, manifest, rows, MOST_COLUMNS, card)
    kernels = fake_card.Kernels(
        manifest.speculation.draft_width, manifest.config.vocab_size, ThinkingIds.of(manifest.thinking_token_ids)
    )
    made = tensorrt.TensorRtSession(Toolchain("fake", fake_card, None), engine, manifest, PROFILE, kernels)
    made._allocate(tensorrt.CheckpointFiller(manifest))
    return made
