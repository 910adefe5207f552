"""The op table as the plugin library sees it: two files of `plugins/tensorrt`, generated from `ops.OP_TABLE`.

In: the op records. Out: op_table.inc, C++ initialisers with each op's ports, attributes, aliases, and the rules for its
dimensions; op_slots.inc, enumerators that name the ports, so that an adapter cannot mistake one for another.

A dimension such as `B*num_slots` or `ceil(O/128)` is written in postfix, over attribute names and symbols; a symbol is
one dimension of one input, possibly scaled and shifted (`2I` gives I = extent / 2, `B+1` gives B = extent - 1). Names
that nothing binds raise ValueError here, so that the library never meets them.

    python -m glm_mtp_export.engine.plugin_table            write the files
    python -m glm_mtp_export.engine.plugin_table --check    fail when they are out of date
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from glm_mtp_export.ops import OP_TABLE
from glm_mtp_export.ops.record import OpRecord

__all__ = ["SKIN", "Symbol", "generated", "main", "postfix", "symbols"]

SKIN = Path(__file__).parents[2] / "plugins" / "tensorrt"
_NOTICE = "// Generated from the op table by `python -m glm_mtp_export.engine.plugin_table`; do not edit."

_TYPES = {
    "A": "Type::kActivation",
    "C": "Type::kCache",
    "F": "Type::kActivationOrFloat",
    "bfloat16": "Type::kBfloat16",
    "bool": "Type::kBool",
    "float32": "Type::kFloat",
    "float8_e4m3fn": "Type::kFloat8",
    "int8": "Type::kInt8",
    "int32": "Type::kInt32",
    "int64": "Type::kInt64",
    "uint8": "Type::kUint8",
}
_KINDS = {"int": "Kind::kInt", "float": "Kind::kFloat", "ints": "Kind::kInts"}
_TOKEN = re.compile(r"\s*(\d+|[A-Za-z_]\w*|[-+*/(),])")
_LINEAR_DIM = re.compile(r"(\d+)?\*?([A-Za-z_]\w*)([+-]\d+)?")


@dataclass(frozen=True)
class Symbol:
    """value = (extent of axis `axis` of input `slot` - offset) / scale."""

    name: str
    slot: int
    axis: int
    scale: int
    offset: int


def symbols(record: OpRecord) -> tuple[Symbol, ...]:
    """What each free name in the record's input shapes stands for; the plainest dimension that gives it wins."""
    attributes = {a.name for a in record.attributes if a.kind == "int"}
    found: dict[str, Symbol] = {}
    for slot, port in enumerate(record.inputs):
        for axis, dim in enumerate(port.shape):
            match = _LINEAR_DIM.fullmatch(str(dim))
            if not match or match[2] in attributes:
                continue
            symbol = Symbol(match[2], slot, axis, int(match[1] or 1), int(match[3] or 0))
            known = found.get(symbol.name)
            if known is None or (symbol.scale, abs(symbol.offset)) < (known.scale, abs(known.offset)):
                found[symbol.name] = symbol
    return tuple(found.values())


def postfix(expression: str, names: Iterable[str]) -> str:
    """`ceil(O/128)` -> `O 128 ceil`: postfix over integers, `names`, + - * / ceil max. Raises ValueError."""
    known = set(names)
    tokens = _tokens(expression)
    out = _sum(tokens, known, expression)
    if tokens:
        raise ValueError(f"dimension {expression!r}: '{tokens[0]}' is left over")
    return " ".join(out)


def _tokens(expression: str) -> list[str]:
    tokens, at = [], 0
    while at < len(expression):
        match = _TOKEN.match(expression, at)
        if not match:
            raise ValueError(f"dimension {expression!r}: cannot read {expression[at:]!r}")
        tokens.append(match[1])
        at = match.end()
    return tokens


def _sum(tokens: list[str], known: set[str], whole: str) -> list[str]:
    out = _product(tokens, known, whole)
    while tokens and tokens[0] in "+-":
        operator = tokens.pop(0)
        out += [*_product(tokens, known, whole), operator]
    return out


def _product(tokens: list[str], known: set[str], whole: str) -> list[str]:
    out = _atom(tokens, known, whole)
    while tokens and (tokens[0] in "*/" or tokens[0].isidentifier() or tokens[0] == "("):
        operator = tokens.pop(0) if tokens[0] in "*/" else "*"  # 2I is 2*I
        out += [*_atom(tokens, known, whole), operator]
    return out


def _atom(tokens: list[str], known: set[str], whole: str) -> list[str]:
    if not tokens:
        raise ValueError(f"dimension {whole!r} ends too early")
    token = tokens.pop(0)
    if token.isdigit():
        return [token]
    if token in ("ceil", "max") or token == "(":
        if token != "(":
            _expect(tokens, "(", whole)
        out = _sum(tokens, known, whole)
        if token == "max":
            _expect(tokens, ",", whole)
            out += [*_sum(tokens, known, whole), "max"]
        elif token == "ceil":
            if out[-1] != "/":
                raise ValueError(f"dimension {whole!r}: ceil() takes a quotient")
            out[-1] = "ceil"
        _expect(tokens, ")", whole)
        return out
    if token not in known:
        raise ValueError(f"dimension {whole!r}: '{token}' is neither an int attribute nor a dimension of an input")
    return [token]


def _expect(tokens: list[str], token: str, whole: str) -> None:
    if not tokens or tokens.pop(0) != token:
        raise ValueError(f"dimension {whole!r}: expected '{token}'")


def _braces(items: Iterable[str]) -> str:
    return "{" + ", ".join(items) + "}"


def _ports(record: OpRecord, names: set[str], outputs: bool) -> Iterable[str]:
    inputs = [port.name for port in record.inputs]
    for port in record.outputs if outputs else record.inputs:
        dims = _braces(f'"{postfix(str(dim), names)}"' for dim in port.shape)
        source = record.aliases.get(port.name) if outputs else None
        alias = inputs.index(source) if source else -1
        yield f'{{"{port.name}", {_TYPES[port.type]}, {dims}, {alias}}}'


def _entry(record: OpRecord) -> str:
    bound = symbols(record)
    names = {s.name for s in bound} | {a.name for a in record.attributes if a.kind == "int"}
    try:
        inputs, outputs = list(_ports(record, names, False)), list(_ports(record, names, True))
    except (ValueError, KeyError) as error:
        raise ValueError(f"op {record.name}: {error}") from error
    lines = [f'    {{"{record.name}",']
    lines += ["        {" + ",\n            ".join(inputs) + "},"]
    lines += ["        {" + ",\n            ".join(outputs) + "},"]
    lines += ["        " + _braces(f'{{"{a.name}", {_KINDS[a.kind]}}}' for a in record.attributes) + ","]
    lines += ["        " + _braces(f'{{"{s.name}", {s.slot}, {s.axis}, {s.scale}, {s.offset}}}' for s in bound) + "},"]
    return "\n".join(lines)


def _table(records: Iterable[OpRecord]) -> str:
    head = [
        _NOTICE,
        "// name, {inputs: name, type, dimensions, -1}, {outputs: name, type, dimensions, aliased input},",
        "// {attributes}, {symbols: name, input, axis, scale, offset}",
        "// clang-format off",
    ]
    return "\n".join([*head, *(_entry(record) for record in records)]) + "\n"


def _slots(records: Iterable[OpRecord]) -> str:
    lines = [_NOTICE, "// clang-format off"]
    for record in records:
        inputs, outputs = (", ".join(port.name for port in ports) for ports in (record.inputs, record.outputs))
        lines += [f"struct {record.name}", "{", f"    struct In {{ enum : int {{ {inputs} }}; }};"]
        lines += [f"    struct Out {{ enum : int {{ {outputs} }}; }};", "};"]
    return "\n".join(lines) + "\n"


def generated(table: Mapping[str, OpRecord] = OP_TABLE) -> dict[str, str]:
    """File name -> text of the generated files. Raises ValueError naming the op whose record cannot be expressed."""
    records = sorted(table.values(), key=lambda record: record.name)  # imports decide the order of the table
    return {"op_table.inc": _table(records), "op_slots.inc": _slots(records)}


def main() -> None:
    """Write the generated files, or check them."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--check", action="store_true")
    check = cli.parse_args().check
    for name, text in generated().items():
        path = SKIN / name
        if not check:
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            raise SystemExit(f"{path} is out of date: run python -m glm_mtp_export.engine.plugin_table")


if __name__ == "__main__":
    main()
