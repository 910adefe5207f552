"""The tables of measured numbers are those of the committed run, which passed all of its bounds."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu_tables
import marked_page


def test_the_page_holds_the_numbers_of_the_file() -> None:
    page = gpu_tables.PAGE.read_text(encoding="utf-8")
    assert marked_page.rewritten(page, gpu_tables.SECTIONS) == page, "run: python benchmarks/gpu_tables.py --write"
    assert gpu_tables.SECTIONS.keys() == set(re.findall(r"<!-- (\w+):begin -->", page))


def test_the_committed_run_passed_and_says_where_and_when() -> None:
    report = json.loads(gpu_tables.FILE.read_text(encoding="utf-8"))
    assert report["date"] and report["commit"] and report["card"]["name"]
    for name, stage in report["stages"].items():
        parts = stage.values() if name in ("nano", "slice") else (stage,)
        assert all(part["passed"] for part in parts), name
    for layout in gpu_tables.FORMATS:
        for row in report["stages"]["slice"][layout]["result"]:
            assert {"batch", "step_ms", "dtype", "context", "card", "date", "decode_stages"} <= row.keys()
