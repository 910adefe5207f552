"""Random tiny models through the exported graph: drafts change no id, and every end id of the checkpoint's files ends a text."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from glm_mtp_export.checkpoint.synthetic import write_synthetic
from glm_mtp_export.config import SpeculationConfig
from glm_mtp_export.export import ExportOptions, export_checkpoint
from glm_mtp_export.runtime import Runtime, SamplingParams


def loaded(checkpoint: Path, out: Path, num_drafts: int) -> Runtime:
    export_checkpoint(checkpoint, out, ExportOptions(speculation=SpeculationConfig(num_drafts)))
    return Runtime.load(out)


def ids_of(runtime: Runtime, prompts: list[list[int]], params: SamplingParams) -> list[tuple[int, ...]]:
    return [result.completions[0].token_ids for result in runtime.generate(prompts, params)]


SHORT: list[dict[str, Any]] = [{"index_topk": 3, "num_hidden_layers": 4}]
LONG: list[dict[str, Any]] = [{}, {"seed": 5, "num_hidden_layers": 8}, {"index_share_for_mtp_iteration": False}]


@pytest.mark.slow
@pytest.mark.parametrize("options", SHORT + LONG, ids=str)
def test_fifty_prompts_of_a_hundred_tokens_equal_decoding_without_drafts(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    checkpoint, rng = write_synthetic(tmp_path / "c", **options), random.Random(1)
    prompts = [[rng.randrange(300) for _ in range(rng.choice((1, 2, 7, 8, 9, 40, 70)))] for _ in range(50)]
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    with loaded(checkpoint, tmp_path / "0", 0) as runtime:
        expected = ids_of(runtime, prompts, params)
    assert {len(ids) for ids in expected} == {100}
    for num_drafts in (1, 3, 7):
        with loaded(checkpoint, tmp_path / f"{num_drafts}", num_drafts) as runtime:
            assert ids_of(runtime, prompts, params) == expected, num_drafts


def test_ids_of_config_and_generation_config_end_a_text(tmp_path: Path) -> None:
    """The ids are chosen from what the model says anyway; each must end it wherever it stands in a block of drafts."""
    checkpoint = write_synthetic(tmp_path / "c", num_hidden_layers=2)
    params = SamplingParams(temperature=0.0, max_tokens=60)
    with loaded(checkpoint, tmp_path / "free", 3) as runtime:
        (free,) = ids_of(runtime, [[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    firsts = [token for i, token in enumerate(free) if i >= 3 and token not in free[:i]]
    assert len(firsts) >= 2
    early, late = firsts[0], firsts[1]
    raw = json.loads((checkpoint / "config.json").read_text())
    unused = next(i for i in range(300) if i not in free)
    for config, generation, end in (([unused, late], None, late), (unused, early, early), ([late], [early], early)):
        (checkpoint / "config.json").write_text(json.dumps(raw | {"eos_token_id": config}))
        if generation is not None:
            (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
        with loaded(checkpoint, tmp_path / f"{config}-{generation}", 3) as runtime:
            (result,) = runtime.generate([[1, 2, 3]], params)
        completion = result.completions[0]
        assert completion.finish_reason == "stop"
        assert completion.token_ids == free[: free.index(end) + 1]
