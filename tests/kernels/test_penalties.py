"""glm_penalties against the rule of penalties.h, one float32 operation at a time: equal bit for bit."""

from __future__ import annotations

import abi_rows
import numpy as np
import pytest
import torch
from abi_products import GuardedBuffer
from sanitized import mark_some

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ARRAYS = (
    "logits", "draft_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty", "output_counts",
    "prompt_mask", "logit_bias",
)  # fmt: skip


def call(values: dict[str, np.ndarray], num_slots: int) -> np.ndarray:
    """Run the kernel between guards."""
    tensors = [torch.from_numpy(values[name]).cuda() for name in ARRAYS]
    adjusted = GuardedBuffer(values["logits"].shape, torch.float32)
    batch, vocab = values["output_counts"].shape
    width = values["draft_tokens"].shape[1]
    abi_rows.call("glm_penalties", *tensors, adjusted.tensor, batch, num_slots, vocab, width)
    torch.cuda.synchronize()
    adjusted.check("adjusted")
    return adjusted.tensor.cpu().numpy()


def expected(values: dict[str, np.ndarray], num_slots: int) -> np.ndarray:
    """The same in loops over requests, slots and ids."""
    one = np.float32
    out = values["logits"].copy()
    for b, counts in enumerate(values["output_counts"].tolist()):
        for slot in range(num_slots):
            row = out[b * num_slots + slot]
            for v in range(len(row)):
                x = one(row[v] + values["logit_bias"][b, v])
                if counts[v] > 0 or values["prompt_mask"][b, v] > 0:
                    factor = values["repetition_penalty"][b]
                    x = one(x / factor) if x > 0 else one(x * factor)
                x = one(x - one(values["frequency_penalty"][b] * one(counts[v])))
                row[v] = one(x - values["presence_penalty"][b]) if counts[v] > 0 else x
            if slot + 1 < num_slots and 0 <= (draft := int(values["draft_tokens"][b, slot])) < len(row):
                counts[draft] += 1
    return out


@pytest.mark.parametrize(
    ("batch", "num_slots", "vocab"), mark_some([(1, 1, 1), (3, 4, 320), (2, 3, 1000)], 1, unpack=True)
)
def test_penalties(batch: int, num_slots: int, vocab: int) -> None:
    rng = np.random.default_rng(batch * 100 + num_slots)
    width = max(num_slots - 1, 1)
    drafts = rng.integers(0, vocab, (batch, width)).astype(np.int32)
    drafts[0, 0] = vocab  # counts for no id
    drafts[-1, :] = drafts[-1, -1]  # the same id again and again
    values = {
        "logits": rng.standard_normal((batch * num_slots, vocab)).astype(np.float32) * 5,
        "draft_tokens": drafts,
        "presence_penalty": rng.uniform(-2, 2, batch).astype(np.float32),
        "frequency_penalty": rng.uniform(-2, 2, batch).astype(np.float32),
        "repetition_penalty": rng.uniform(0.5, 2, batch).astype(np.float32),
        "output_counts": rng.integers(0, 3, (batch, vocab)).astype(np.int32),
        "prompt_mask": rng.integers(0, 2, (batch, vocab)).astype(np.int32),
        "logit_bias": np.where(rng.random((batch, vocab)) < 0.1, -np.inf, 0.5).astype(np.float32),
    }
    np.testing.assert_array_equal(call(values, num_slots), expected(values, num_slots))
