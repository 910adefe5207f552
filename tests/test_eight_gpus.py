"""The page about eight cards: its commands parse, its tables are what the tools print."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from glm_mtp_export.checkpoint.layouts import RELEASES
from glm_mtp_export.checkpoint.memory_plan import GIB, plan_memory
from glm_mtp_export.checkpoint.synthetic import write_stand_in
from glm_mtp_export.cli import main
from glm_mtp_export.engine.profile import load_profile

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "eight-gpus.md").read_text(encoding="utf-8")


def commands() -> list[list[str]]:
    """Words behind the program's name, of every command of ours in a code block."""
    blocks = re.findall(r"```bash\n(.*?)```", PAGE, re.S)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    found = [re.split(r"(?:^|\s)(?:glm-mtp|-m glm_mtp_export)\s", line, maxsplit=1) for line in lines]
    return [shlex.split(parts[1]) for parts in found if len(parts) == 2]


@pytest.mark.parametrize("words", commands(), ids=lambda words: words[0])
def test_commands_parse(words: list[str]) -> None:
    command = main.commands[words[0]]
    command.make_context(words[0], words[1:]).close()


def test_profiles_exist_and_are_for_eight_ranks() -> None:
    names = {words[words.index("--profile") + 1] for words in commands() if "--profile" in words}
    assert names == {"glm-5.2-fp8-h200x8", "glm-5.2-fp8-check"}
    profile = load_profile("glm-5.2-fp8-h200x8")
    assert profile.tensor_parallel_size == 8
    assert f"{profile.num_pages * 64:,} cached positions" in PAGE and f"{profile.max_context:,} tokens" in PAGE


def test_sizes_are_those_of_the_plan(tmp_path: Path) -> None:
    release = RELEASES["glm-5.2-fp8"]
    write_stand_in(tmp_path, release.config, release.layout, num_shards=1, filling="headers")
    plan = plan_memory(tmp_path, gpus=8, gpu_memory=140, max_batch=32, cache_dtype="float8_e4m3fn")
    rank = plan.ranks[0]
    assert f"{rank.target_weights / GIB:.2f} target, {rank.draft_weights / GIB:.2f} draft" in PAGE
    assert f"{(rank.target_weights + rank.draft_weights) / 1e9:.1f} GB" in PAGE
    assert f"{plan.bytes_per_token:,} bytes a token; {rank.caches / GIB:.1f} GiB" in PAGE
    assert f"{plan.largest_context_alone:,} tokens for one request, {plan.largest_context:,} for each of 32" in PAGE


def test_measured_tables_are_what_the_script_makes_of_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for name in ("project_ranks", "rank_tables", "marked_page"):
        sys.modules.pop(name, None)
    import marked_page
    import rank_tables

    assert marked_page.rewritten(PAGE, rank_tables.SECTIONS) == PAGE, "run: python benchmarks/rank_tables.py --write"
    assert rank_tables.SECTIONS.keys() == set(re.findall(r"<!-- (\w+):begin -->", PAGE))
