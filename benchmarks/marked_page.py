"""A page whose tables are made from result files: each lies between `<!-- name:begin -->` and `<!-- name:end -->`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

__all__ = ["Sections", "main", "rewritten"]

Sections = Mapping[str, Callable[[], str]]
"""Name of a section to what makes its text."""


def _filled(text: str, mark: re.Match[str]) -> str:
    return f"{mark[1]}{text}{mark[2]}"


def rewritten(page: str, sections: Sections) -> str:
    """The page with every section anew. ValueError when one is missing or there twice."""
    for name, section in sections.items():
        mark = re.compile(rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)", re.S)
        page, count = mark.subn(partial(_filled, section()), page)
        if count != 1:
            raise ValueError(f"the page has {count} sections {name}, expected 1")
    return page


def main(description: str | None, page: Path, sections: Sections) -> None:
    """The command: print the sections, or with --write put them into the page."""
    cli = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--write", action="store_true")
    if not cli.parse_args().write:
        print("\n".join(section() for section in sections.values()), end="")
        return
    page.write_text(rewritten(page.read_text(encoding="utf-8"), sections), encoding="utf-8")
