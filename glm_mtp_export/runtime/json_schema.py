"""What of a JSON Schema a grammar can hold an answer to.

xgrammar reads some keywords and passes over others without a word, so an answer would match its grammar and break the schema.
`unenforced` finds those, from how xgrammar 0.2.9 was seen to treat each; `tests/runtime/test_json_schema.py` asks it again.
`format` names that it does not know are left alone: by the standard they say something and demand nothing. `oneOf` is taken as
`anyOf`, since schemas of tagged unions are written with it and their branches exclude each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["unenforced"]

_PASSED_OVER = (
    "not",
    "if",
    "contains",
    "minContains",
    "maxContains",
    "uniqueItems",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "$dynamicRef",
    "$recursiveRef",
)
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_LENGTHS = ("minLength", "maxLength")
_OBJECTS = ("properties", "required", "additionalProperties", "patternProperties", "propertyNames")
_SIZES = ("minProperties", "maxProperties", "minItems", "maxItems")
_ARRAYS = ("items", "prefixItems", "unevaluatedItems", "unevaluatedProperties")
# One of these decides alone: what stands beside it is not read. `type` may, as every generator of schemas writes it.
_DECIDING = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_DEMANDS = (*_NUMBERS, *_LENGTHS, "pattern", *_OBJECTS, *_SIZES, *_ARRAYS, *_DECIDING)
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "unevaluatedItems", "unevaluatedProperties")


def unenforced(schema: Any) -> list[str]:
    """Demands of a schema (parsed JSON) that the grammar would not make, each as `place: what`; empty when it makes them all."""
    return [f"{place}: {what}" for place, part in _parts(schema, "schema") for what in _own(part)]


def _own(part: Mapping[str, Any]) -> Iterator[str]:
    """Of one subschema, without those inside it."""
    for name in _PASSED_OVER:
        if part.get(name, False) is not False:
            yield name
    deciding = [name for name in _DECIDING if name in part]
    if deciding:
        others = [name for name in _DEMANDS if name in part and name != deciding[0]]
        if others:
            yield f"{', '.join(others)} beside {deciding[0]}"
        if len(part.get("allOf", ())) > 1:
            yield "allOf of several schemas"
        return
    lengths = [name for name in _LENGTHS if name in part]
    if lengths and ("pattern" in part or "format" in part):
        yield f"{', '.join(lengths)} beside {'pattern' if 'pattern' in part else 'format'}"
    if "type" not in part:
        untyped = [name for name in (*_NUMBERS, *_LENGTHS, "pattern") if name in part]
        if untyped:
            yield f"{', '.join(untyped)} without type"


def _parts(schema: Any, place: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A schema and all schemas inside it, with where they stand."""
    if not isinstance(schema, Mapping):
        return
    yield place, schema
    for name in _MAPS:
        inside = schema.get(name)
        for key, part in inside.items() if isinstance(inside, Mapping) else ():
            yield from _parts(part, f"{place}.{name}.{key}")
    for name in _LISTS:
        several = schema.get(name)
        for index, part in enumerate(several) if isinstance(several, list) else ():
            yield from _parts(part, f"{place}.{name}[{index}]")
    for name in _SINGLE:
        yield from _parts(schema.get(name), f"{place}.{name}")
