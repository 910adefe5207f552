"""What penalties and biases of a call are about, without a row of the vocabulary for every request.

A graph with penalties takes `output_counts`, `prompt_mask` and `logit_bias` [B, V]. The host tells them as the token ids that they
are made of: `StepInputs.history_ids` and `bias_ids`, of the requests that ask, one after another. `dense_rows` makes the arrays, as
`glm_spread_histories` does on a card; `extended` adds tokens that a call before has found, as `glm_follow_step` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm_mtp_export.runtime.masks import constant
from glm_mtp_export.runtime.session import Int32, StepInputs

__all__ = ["DENSE_INPUTS", "bias_fields", "dense_rows", "extended", "history_fields"]

DENSE_INPUTS = ("output_counts", "prompt_mask", "logit_bias")


def history_fields(ids: Items[Int32], num_prompt: Items[int]) -> dict[str, Any]:
    """Fields of `StepInputs` from the ids of each request, none of one without penalties."""
    return {
        "history_ids": np.concatenate(ids, dtype=np.int32, casting="same_kind"),
        "history_offsets": _offsets(len(of) for of in ids),
        "history_prompts": np.array(num_prompt, dtype=np.int32),
    }


def bias_fields(biases: Items[Mapping[int, float]]) -> dict[str, Any]:
    """Fields of `StepInputs` from the biases of each request, by token id."""
    return {
        "bias_ids": np.array([token for of in biases for token in of], dtype=np.int32),
        "bias_values": np.array([value for of in biases for value in of.values()], dtype=np.float32),
        "bias_offsets": _offsets(len(of) for of in biases),
    }


def _offsets(lengths: Iterable[int]) -> Int32:
    return np.cumsum([0, *lengths], dtype=np.int32)


def dense_rows(inputs: StepInputs, vocab_size: int) -> dict[str, NDArray[Any]]:
    """The graph's three inputs; read-only constants where nobody asks for anything. Ids of no token are left out."""
    shape = (inputs.num_requests, vocab_size)
    counts = prompt = constant(shape, 0)
    bias: NDArray[Any] = constant(shape, 0, np.float32)
    if inputs.history_ids is not None and inputs.history_ids.size:
        assert inputs.history_offsets is not None and inputs.history_prompts is not None
        counts, prompt = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        for b, num_prompt in enumerate(inputs.history_prompts):
            ids = inputs.history_ids[inputs.history_offsets[b] : inputs.history_offsets[b + 1]]
            known = (ids >= 0) & (ids < vocab_size)
            prompt[b, ids[:num_prompt][known[:num_prompt]]] = 1
            counts[b] = np.bincount(ids[num_prompt:][known[num_prompt:]], minlength=vocab_size)
    if inputs.bias_ids is not None and inputs.bias_ids.size:
        assert inputs.bias_offsets is not None
        bias = np.zeros(shape, np.float32)
        for b in range(shape[0]):
            part = slice(inputs.bias_offsets[b], inputs.bias_offsets[b + 1])
            bias[b, inputs.bias_ids[part]] = inputs.bias_values[part]  # type: ignore[index]
    return dict(zip(DENSE_INPUTS, (counts, prompt, bias), strict=True))


def extended(inputs: StepInputs, more: Mapping[int, Items[int]]) -> StepInputs:
    """`inputs` with further output tokens of some requests, of those among them that have a history."""
    if inputs.history_ids is None or not inputs.history_ids.size:
        return inputs
    assert inputs.history_offsets is not None and inputs.history_prompts is not None
    parts = np.split(inputs.history_ids, inputs.history_offsets[1:-1])
    for b, tokens in more.items():
        if parts[b].size:
            parts[b] = np.concatenate([parts[b], np.array(tokens, dtype=np.int32)])
    return replace(inputs, **history_fields(parts, inputs.history_prompts.tolist()))
