"""Token ids of histories and biases, and the rows of the vocabulary that they make."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fake_model import fake_manifest
from harness import bench

from glm_mtp_export.runtime.histories import bias_fields, dense_rows, extended, history_fields
from glm_mtp_export.runtime.masks import constant
from glm_mtp_export.runtime.sampling import SamplingParams
from glm_mtp_export.runtime.session import HISTORY_FIELDS, StepInputs

_PROMPT = [4, 5, 4, 6]


def _ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def _inputs(num_requests: int, **fields: object) -> StepInputs:
    none = dict.fromkeys(StepInputs.__dataclass_fields__)
    return StepInputs(**{**none, "num_drafts": np.zeros(num_requests, np.int32), **fields})  # type: ignore[arg-type]


def test_rows_count_output_and_mark_prompts() -> None:
    given = history_fields([_ids(1, 1, 3, 3, 3), _ids(), _ids(0)], [2, 5, 0]) | bias_fields(
        [{}, {2: -np.inf, 4: 0.5}, {}]
    )
    rows = dense_rows(_inputs(3, **given), 5)
    assert rows["output_counts"].tolist() == [[0, 0, 0, 3, 0], [0] * 5, [1, 0, 0, 0, 0]]
    assert rows["prompt_mask"].tolist() == [[0, 1, 0, 0, 0], [0] * 5, [0] * 5]
    assert rows["logit_bias"].tolist() == [[0.0] * 5, [0.0, 0.0, -np.inf, 0.0, 0.5], [0.0] * 5]
    assert {name: str(row.dtype) for name, row in rows.items()} == {
        "output_counts": "int32", "prompt_mask": "int32", "logit_bias": "float32",
    }  # fmt: skip


def test_ids_of_no_token_are_left_out() -> None:
    rows = dense_rows(_inputs(1, **history_fields([_ids(-1, 2, 5, 9, -7, 1)], [3])), 5)
    assert rows["prompt_mask"].tolist() == [[0, 0, 1, 0, 0]] and rows["output_counts"].tolist() == [[0, 1, 0, 0, 0]]


def test_where_nobody_asks_rows_take_no_memory() -> None:
    given = history_fields([_ids(), _ids()], [3, 4]) | bias_fields([{}, {}])
    for rows in (dense_rows(_inputs(2, **given), 7), dense_rows(_inputs(2), 7)):
        assert rows["output_counts"] is constant((2, 7), 0) and rows["prompt_mask"] is constant((2, 7), 0)
        assert rows["logit_bias"] is constant((2, 7), 0, np.float32)


def test_further_tokens_join_existing_histories_only() -> None:
    given = _inputs(3, **history_fields([_ids(1, 2), _ids(), _ids(3)], [2, 1, 1]))
    found = extended(given, {0: [7, 8], 1: [9], 2: []})
    assert found.history_ids is not None and found.history_ids.tolist() == [1, 2, 7, 8, 3]
    assert found.history_offsets is not None and found.history_offsets.tolist() == [0, 4, 4, 5]
    assert found.history_prompts is not None and found.history_prompts.tolist() == [2, 1, 1]
    nothing = _inputs(1)
    assert extended(nothing, {0: [1]}) is nothing


@pytest.mark.parametrize("launch_ahead", [False, True])
def test_a_call_tells_all_tokens_of_who_asks_and_none_of_others(launch_ahead: bool) -> None:
    """Also after more tokens than the first array held; the cost of a call does not grow with the vocabulary."""
    b = bench(launch_ahead=launch_ahead)
    seen: list[StepInputs] = []
    b.session.before_run = seen.append
    params = SamplingParams(temperature=0.0, max_tokens=30, seed=0, ignore_eos=True)
    b.add("plain", _PROMPT, params)
    b.add("asks", _PROMPT[::-1], replace(params, presence_penalty=0.1, logit_bias={3: 1.5}))
    b.run()
    known = [*_PROMPT[::-1], *b.ids("asks")]
    asked = [inputs for inputs in seen if inputs.presence_penalty is not None and inputs.presence_penalty.any()]
    for inputs in asked:
        assert inputs.presence_penalty is not None and inputs.history_ids is not None
        (place,) = np.flatnonzero(inputs.presence_penalty)
        assert inputs.history_offsets is not None and inputs.history_prompts is not None
        told = inputs.history_ids[inputs.history_offsets[place] : inputs.history_offsets[place + 1]].tolist()
        assert told == known[: len(told)] and told == inputs.history_ids.tolist()
        assert inputs.history_prompts[place] == len(_PROMPT)
        assert inputs.bias_ids is not None and inputs.bias_ids.tolist() == [3]
        assert inputs.bias_values is not None and inputs.bias_values.tolist() == [1.5]
        # A decode row is told everything up to the token that it feeds.
        assert len(told) >= int(inputs.cache_lengths[place]) + 1
    lengths = [len(inputs.history_ids) for inputs in asked if inputs.history_ids is not None]
    assert len(asked) > 5 and lengths == sorted(lengths) and lengths[0] == len(_PROMPT)


def test_a_build_without_penalties_is_told_nothing() -> None:
    manifest = fake_manifest(penalties=False)
    b = bench(manifest=manifest)
    seen: list[StepInputs] = []
    b.session.before_run = seen.append
    b.add("r", _PROMPT, SamplingParams(temperature=0.0, max_tokens=5))
    b.run()
    assert seen and all(getattr(inputs, name) is None for inputs in seen for name in HISTORY_FIELDS)
