"""Calls on the small synthetic checkpoint with two drafts, and a profile for it."""

from __future__ import annotations

from typing import Any

import numpy as np

from glm_mtp_export.engine_manifest import EngineProfile
from glm_mtp_export.runtime.session import StepInputs

__all__ = ["PROFILE", "K", "calls"]

K = 2
PROFILE = EngineProfile("t6", "onnxruntime", num_pages=9, max_batch=8, max_rows=256, max_context=128, threads=1)


def calls(generator: np.random.Generator) -> list[StepInputs]:
    """A prompt call of three requests, then decode calls with 2, 0 and 1 drafts."""
    pages = np.array([[4, 1], [7, 0], [2, 3]], dtype=np.int32)
    lengths = np.array([70, 3, 9], dtype=np.int32)
    first = np.zeros(3, dtype=np.int32)
    prompt = _inputs(generator, lengths, first, first, pages)
    decode = _inputs(generator, np.ones(3, np.int32), np.array([2, 0, 1], np.int32), lengths, pages)
    return [prompt, decode]


def _inputs(generator: np.random.Generator, fed: Any, drafts: Any, lengths: Any, pages: Any) -> StepInputs:
    rows = fed + drafts
    num = len(rows)
    return StepInputs(
        token_ids=generator.integers(0, 300, rows.sum()).astype(np.int32),
        row_offsets=np.concatenate([[0], np.cumsum(rows)]).astype(np.int32),
        num_drafts=drafts.astype(np.int32),
        draft_tokens=generator.integers(0, 300, (num, K)).astype(np.int32),
        cache_lengths=lengths,
        block_table=pages,
        next_prompt_token=np.full(num, -1, dtype=np.int32),
        temperature=np.array([0.0, 0.9, 0.0], dtype=np.float32)[:num],
        top_k=np.zeros(num, dtype=np.int32),
        top_p=np.ones(num, dtype=np.float32),
        min_p=np.zeros(num, dtype=np.float32),
        seed=np.arange(num, dtype=np.int64),
        sample_offset=np.zeros(num, dtype=np.int32),
        in_thinking_phase=np.zeros(num, dtype=np.bool_),
    )
