"""What the load benchmark counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_model import FakeSession, fake_manifest, hashed_errors
from harness import TOKENIZER

from glm_mtp_export.errors import OptionError
from glm_mtp_export.runtime.engine import Engine
from glm_mtp_export.runtime.load_bench import LoadOptions, LoadReport, RequestTimes, read_prompts, run_load
from glm_mtp_export.runtime.runtime import Runtime


def _runtime() -> Runtime:
    session = FakeSession(fake_manifest(3, max_position_embeddings=100), 64, hashed_errors(30, 1))
    return Runtime(session, TOKENIZER, Engine(session, TOKENIZER))


def test_every_request_is_answered_and_counted(tmp_path: Path) -> None:
    with _runtime() as runtime:
        report = run_load(runtime, LoadOptions(rate=200.0, num_requests=20, prompt_tokens=(5, 40), max_tokens=12))
        assert report.num_failed == 0
        assert sum(r.num_tokens for r in report.requests) == runtime.statistics.num_output_tokens
        assert report.tokens_per_call == runtime.statistics.tokens_per_call > 1.2
        arrivals = [r.arrival for r in report.requests]
        assert arrivals == sorted(arrivals) and all(
            r.first is not None and r.first >= r.arrival for r in report.requests
        )
        parsed = json.loads(report.to_json())
        assert parsed["requests"] == 20 and parsed["time_to_first_token"]["p50"] > 0
        assert "goodput_requests_per_second" in report.text()
        pytest.importorskip("matplotlib")
        report.plot(tmp_path / "load.png")
        assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")


def test_refused_requests_are_failures_not_fast_ones() -> None:
    with _runtime() as runtime:
        report = run_load(runtime, LoadOptions(rate=500.0, num_requests=5, prompt_tokens=(200, 200)))
        assert report.num_failed == 5 and report.goodput == 0.0
        assert "context limit" in (report.requests[0].failure or "")
        assert (
            report.text().splitlines()[-1].startswith("first failure: The prompt has 200 tokens, the context limit is ")
        )


def test_prompts_come_from_the_lines_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\ntwo words\n", encoding="utf-8")
    assert read_prompts(path) == ("one", "two words")
    for content, message in ((b"\n\n", "holds no prompt"), (b"a\xff\n", r"not valid UTF-8 \(byte 1\)")):
        path.write_bytes(content)
        with pytest.raises(OptionError, match=message):
            read_prompts(path)


def test_goodput_needs_both_goals() -> None:
    options = LoadOptions(first_token_goal=1.0, per_token_goal=0.1)
    times = [
        RequestTimes(0.0, first=0.9, last=1.8, num_tokens=10),
        RequestTimes(0.0, first=1.1, last=1.2, num_tokens=10),
        RequestTimes(0.0, first=0.5, last=1.5, num_tokens=10),
        RequestTimes(0.0, first=0.5, last=0.5, num_tokens=1),
        RequestTimes(0.0, first=0.5, last=0.6, num_tokens=9, failure="abort"),
    ]
    report = LoadReport(options, tuple(times), 10.0, 2.0)
    assert [report.met_goals(t) for t in times] == [True, False, False, True, False]
    assert report.goodput == pytest.approx(0.2) and report.output_tokens_per_second == pytest.approx(4.0)
    assert report.percentiles()["time_to_first_token"] == {"p50": 0.5, "p90": 1.1, "p99": 1.1}


def test_options_out_of_range() -> None:
    with pytest.raises(OptionError, match=r"rate is 0, expected above 0; prompt_tokens is 5\.\.4"):
        LoadOptions(rate=0, prompt_tokens=(5, 4))
