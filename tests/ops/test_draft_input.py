"""GlmDraftInput against float64 loops: which half is whose, and that each norm sees its own half alone."""

from __future__ import annotations

import numpy as np
import pytest
from comparison import U32, assert_close
from onnx_case import reference, run
from test_norm import rms_norm_oracle


@pytest.mark.parametrize("outputs", [run, reference])
def test_embedding_half_first_each_with_its_own_norm(outputs) -> None:
    rng = np.random.default_rng(5)
    table = rng.standard_normal((7, 8)).astype(np.float32) * 100  # a norm over both halves would show
    hidden = rng.standard_normal((5, 8)).astype(np.float32)
    token_ids = np.array([6, 0, 3, 3, 1], np.int32)
    token_norm, hidden_norm = (rng.uniform(0.5, 2, 8).astype(np.float32) for _ in range(2))
    eps = float(np.float32(1e-5))
    halves = (
        rms_norm_oracle(table[token_ids], token_norm, eps),
        rms_norm_oracle(hidden, hidden_norm, eps),
    )
    expected = np.concatenate(halves, axis=1)
    found = outputs("GlmDraftInput", [table, token_ids, hidden, token_norm, hidden_norm], eps=1e-5)[0]
    assert_close(found, expected, 8 * U32 * np.abs(expected) + 1e-38)
