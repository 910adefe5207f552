"""Generated pages are what the code says, and a stale one is noticed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from glm_mtp_export.ops import OP_TABLE

SCRIPT = Path(__file__).parents[2] / "scripts" / "generate_docs.py"


@pytest.fixture(scope="module")
def generate_docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_docs", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_pages_in_the_repository_are_current(generate_docs: ModuleType) -> None:
    assert generate_docs.stale_pages() == [], "run: python scripts/generate_docs.py"


def test_the_ops_page_names_every_port_and_attribute(generate_docs: ModuleType) -> None:
    sections = dict(part.split("\n", 1) for part in generate_docs.ops_page().split("\n## ")[1:])
    assert set(OP_TABLE) <= set(sections)
    for name, record in OP_TABLE.items():
        for item in (*record.inputs, *record.outputs, *record.attributes):
            assert f"`{item.name}`" in sections[name]
        assert ("updated in place" in sections[name]) == bool(record.aliases)
        assert ("Device dialect only" in sections[name]) == (record.body is None)


def test_a_stale_or_missing_page_fails_the_check(
    generate_docs: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate_docs.main(["--check"], tmp_path) == 1
    assert generate_docs.main([], tmp_path) == 0
    assert generate_docs.main(["--check"], tmp_path) == 0
    page = tmp_path / "ops.md"
    page.write_text(page.read_text(encoding="utf-8").replace("GlmRouter", "GlmRooter"), encoding="utf-8")
    capsys.readouterr()
    assert generate_docs.main(["--check"], tmp_path) == 1
    assert capsys.readouterr().out == ("docs/ops.md is not what the code says. Run: python scripts/generate_docs.py\n")
