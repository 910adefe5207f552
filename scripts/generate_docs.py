"""Write the pages of docs/ that are derived from code, or with --check fail when one is stale.

Owns: PAGES, path under docs/ -> function that gives the page's text. A page is never edited by hand; what it says is changed
where it is said: docs/ops.md in the records of glm_mtp_export.ops.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from glm_mtp_export.ops import DOMAIN, HELPER_FUNCTIONS, OP_TABLE, OP_VERSION, PLUGIN_ATTRIBUTES
from glm_mtp_export.ops.record import OpRecord, Port

__all__ = ["PAGES", "main", "ops_page", "stale_pages"]

DOCS = Path(__file__).resolve().parent.parent / "docs"

_INTRODUCTION = f"""\
# The custom ops

Generated from the op table by `python scripts/generate_docs.py`; do not edit.

Every op lives in the ONNX domain `{DOMAIN}`, version {OP_VERSION}. A node states every attribute of its op, and besides
{", ".join(f'`{key}="{value}"`' for key, value in PLUGIN_ATTRIBUTES.items())}, by which TensorRT finds the plugin.
The model carries a function of the same name in plain opset-23 operators, which any other runtime executes.

Shapes: T token rows, B requests, P pages of a request, N pages of a pool, W columns of `draft_tokens`, V vocabulary.
`row_requests` is -1 on padding rows: nothing is written for them and their output is 0 (a list: all -1).

| type | portable | device |
|---|---|---|
| A, activations | float32 | bfloat16 |
| C, cache storage | float32 | bfloat16, or int8 for packed FP8 rows |
| F, result of a product | float32 | bfloat16, or float32 with `to_f32` |
"""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _port_row(port: Port, kind: str, alias: str | None) -> list[str]:
    notes = [*([f"`{alias}`, updated in place"] if alias else []), *([port.doc] if port.doc else [])]
    return [
        kind,
        f"`{port.name}`",
        port.type,
        "[" + ", ".join(str(size) for size in port.shape) + "]",
        "; ".join(notes),
    ]


def _section(record: OpRecord) -> str:
    rows = [_port_row(port, "in", None) for port in record.inputs]
    rows += [_port_row(port, "out", record.aliases.get(port.name)) for port in record.outputs]
    parts = [f"## {record.name}", record.doc, _table(["", "name", "type", "shape", "meaning"], rows)]
    if record.attributes:
        parts.append(
            _table(["attribute", "kind", "meaning"], [[f"`{a.name}`", a.kind, a.doc] for a in record.attributes])
        )
    if record.body is None:
        parts.append("Device dialect only: the op has no function body.")
    return "\n\n".join(parts)


def ops_page() -> str:
    """docs/ops.md: every op with its ports and attributes, in alphabetical order."""
    records = [OP_TABLE[name] for name in sorted(OP_TABLE)]
    index = "\n".join(f"- [{r.name}](#{r.name.lower()}): {r.doc}" for r in records)
    helpers = ", ".join(f"`{name}`" for name in sorted(function.name for function in HELPER_FUNCTIONS))
    end = f"## Functions that bodies share\n\n{helpers}. They are no ops of their own and have no plugin."
    return "\n\n".join([_INTRODUCTION.rstrip(), index, *(_section(record) for record in records), end]) + "\n"


PAGES: Mapping[str, Callable[[], str]] = {"ops.md": ops_page}


def stale_pages(folder: Path = DOCS) -> list[str]:
    """Pages of `folder` that are missing or differ from what the code says."""

    def written(name: str) -> str | None:
        path = folder / name
        return path.read_text(encoding="utf-8") if path.is_file() else None

    return [name for name, page in PAGES.items() if written(name) != page()]


def main(arguments: Sequence[str] | None = None, folder: Path = DOCS) -> int:
    """Exit code: 1 with --check and a stale page, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a page is stale")
    stale = stale_pages(folder)
    if parser.parse_args(arguments).check:
        for name in stale:
            print(f"docs/{name} is not what the code says. Run: python scripts/generate_docs.py")
        return int(bool(stale))
    folder.mkdir(exist_ok=True)
    for name in stale:
        (folder / name).write_text(PAGES[name](), encoding="utf-8")
        print(f"wrote docs/{name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
