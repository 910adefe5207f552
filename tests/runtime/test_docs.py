"""The runtime's page names every sampling parameter, and its Python block is valid."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

from glm_mtp_export.runtime import sampling

_PAGE = (Path(__file__).parents[2] / "docs" / "runtime.md").read_text(encoding="utf-8")


def test_every_parameter_is_on_the_page() -> None:
    table = _PAGE[_PAGE.index("| parameter |") : _PAGE.index("`StructuredOutput`")]
    for field in dataclasses.fields(sampling.SamplingParams):
        assert f"`{field.name}`" in table, field.name
    for field in dataclasses.fields(sampling.StructuredOutput):
        assert f"`{field.name}`" in _PAGE, field.name


def test_python_blocks_parse() -> None:
    blocks = re.findall(r"```python\n(.*?)```", _PAGE, re.S)
    assert blocks
    for block in blocks:
        ast.parse(block)
