"""Types of tool arguments: bare text of an `<arg_value>` to a JSON value, by the tool's schema.

The markup carries no types: strings are bare, everything else is JSON. The schema decides:
- string: the text, verbatim (`{"k": 1}`, `020`, `null` stay text);
- integer, number, boolean, array, object, null: the JSON the text holds, or the text when it is no JSON;
- a union (`["integer", "null"]`, anyOf, oneOf) with string in it: JSON of one of the other types, else the text;
- no schema: JSON if the text is JSON, else the text.

JSON is passed on as written, so `1.10` and integers of any length keep their digits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["argument_json", "argument_schema"]

_MAX_DEPTH = 16  # of $ref chains and nested unions: schemas come from clients and may refer to themselves


def argument_schema(parameters: Mapping[str, Any] | None, name: str) -> Any:
    """The schema of one argument in a tool's `parameters`; None when nothing is said about it."""
    if not isinstance(parameters, Mapping):
        return None
    properties = parameters.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    return parameters.get("additionalProperties")


def argument_json(text: str, schema: Any, root: Mapping[str, Any] | None = None) -> str:
    """JSON text of one argument. `root` is the schema that local `$ref`s in `schema` point into."""
    types = _types(schema, root or {}, _MAX_DEPTH)
    if types == {"string"}:
        return _quoted(text)
    kinds = _json_types(text)
    if kinds is None:
        return _quoted(text)
    if types is not None and "string" in types and not kinds & (types - {"string"}):
        return _quoted(text)
    return text.strip()


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _small_integer(digits: str) -> int:
    """Only the type counts here; int() refuses more than 4300 digits."""
    return 0


def _json_types(text: str) -> frozenset[str] | None:
    """The schema types a JSON text satisfies; None when it is not JSON."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_int=_small_integer)
    except (ValueError, RecursionError):
        return None
    if value is None:
        return frozenset({"null"})
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int):
        return frozenset({"number", "integer"})
    if isinstance(value, float):
        return frozenset({"number", "integer"} if value.is_integer() else {"number"})
    if isinstance(value, str):
        return frozenset({"string"})
    return frozenset({"array" if isinstance(value, list) else "object"})


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> set[str] | None:
    """Types a schema allows; None = any."""
    if not isinstance(schema, Mapping) or depth == 0:
        return None
    if isinstance(schema.get("$ref"), str):
        return _types(_resolved(schema["$ref"], root), root, depth - 1)
    declared = schema.get("type")
    allowed: set[str] | None = None
    if isinstance(declared, str):
        allowed = {declared}
    elif isinstance(declared, list):
        allowed = {t for t in declared if isinstance(t, str)}
    elif isinstance(schema.get("enum"), list) and schema["enum"]:
        allowed = {_type_of(v) for v in schema["enum"]}
    elif "const" in schema:
        allowed = {_type_of(schema["const"])}
    for keyword in ("anyOf", "oneOf"):
        if allowed is None and isinstance(schema.get(keyword), list):
            allowed = _union([_types(s, root, depth - 1) for s in schema[keyword]])
    if allowed is None and isinstance(schema.get("allOf"), list):
        parts = [t for t in (_types(s, root, depth - 1) for s in schema["allOf"]) if t is not None]
        allowed = set.intersection(*parts) if parts else None
    if allowed is not None and schema.get("nullable") is True:
        allowed = allowed | {"null"}
    return allowed or None


def _union(parts: list[set[str] | None]) -> set[str] | None:
    known = [part for part in parts if part is not None]
    return set().union(*known) if known and len(known) == len(parts) else None


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    kinds = {str: "string", int: "integer", float: "number", list: "array", dict: "object"}
    return kinds.get(type(value), "object")


def _resolved(reference: str, root: Mapping[str, Any]) -> Any:
    if not reference.startswith("#"):
        return None
    node: Any = root
    for step in reference[1:].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        node = node.get(step) if isinstance(node, Mapping) else None
    return node
