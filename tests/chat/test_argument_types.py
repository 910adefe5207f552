from __future__ import annotations

import json
from typing import Any

import pytest

from glm_mtp_export.chat.argument_types import argument_json, argument_schema

STRING, INTEGER = {"type": "string"}, {"type": "integer"}

TABLE: list[tuple[Any, str, str]] = [
    # schema, text, JSON
    (STRING, '{"k": 1}', '"{\\"k\\": 1}"'),
    (STRING, "020", '"020"'),
    (STRING, "null", '"null"'),
    (STRING, "42", '"42"'),
    (STRING, " Köln\n", '" Köln\\n"'),
    (STRING, "", '""'),
    (INTEGER, "42", "42"),
    (INTEGER, "020", '"020"'),
    (INTEGER, "many", '"many"'),
    (INTEGER, "None", '"None"'),
    (INTEGER, "", '""'),
    (INTEGER, "9" * 5000, "9" * 5000),
    ({"type": "number"}, "1.10", "1.10"),
    ({"type": "number"}, "NaN", '"NaN"'),
    ({"type": "number"}, "Infinity", '"Infinity"'),
    ({"type": "boolean"}, "true", "true"),
    ({"type": "boolean"}, "True", '"True"'),
    ({"type": "array"}, "[1, 2]", "[1, 2]"),
    ({"type": "array"}, "[1, 2", '"[1, 2"'),
    ({"type": "object"}, '\n{"a": "ü"}\n', '{"a": "ü"}'),
    ({"type": "null"}, "null", "null"),
    ({"type": ["integer", "null"]}, "null", "null"),
    ({"type": ["integer", "null"]}, "7", "7"),
    ({"type": ["string", "null"]}, "null", "null"),
    ({"type": ["string", "null"]}, "42", '"42"'),
    ({"type": ["string", "integer"]}, "42", "42"),
    ({"type": ["string", "integer"]}, "4.5", '"4.5"'),
    ({"type": "string", "nullable": True}, "null", "null"),
    ({"anyOf": [INTEGER, {"type": "null"}]}, "null", "null"),
    ({"anyOf": [STRING, {"type": "null"}]}, "5", '"5"'),
    ({"oneOf": [STRING, {"type": "array"}]}, '["a"]', '["a"]'),
    ({"anyOf": [STRING, {}]}, "5", "5"),
    ({"allOf": [STRING, {"maxLength": 3}]}, "5", '"5"'),
    ({"enum": ["1", "2"]}, "1", '"1"'),
    ({"enum": ["a", 1]}, "1", "1"),
    ({"const": "1"}, "1", '"1"'),
    ({"$ref": "#/$defs/name"}, "5", '"5"'),
    ({"$ref": "#/$defs/loop"}, "5", "5"),
    ({"$ref": "#/nowhere"}, "5", "5"),
    ({"$ref": "https://example.org/x"}, "5", "5"),
    (None, "42", "42"),
    (None, "plain", '"plain"'),
    (None, '{"k": 1}', '{"k": 1}'),
    (True, "42", "42"),
    ({}, "[" * 100_000, '"' + "[" * 100_000 + '"'),
]
ROOT = {"$defs": {"name": STRING, "loop": {"$ref": "#/$defs/loop"}}}


@pytest.mark.parametrize("row", range(len(TABLE)))
def test_schema_decides_the_type(row: int) -> None:
    schema, text, expected = TABLE[row]
    assert argument_json(text, schema, ROOT) == expected


def test_result_is_always_json() -> None:
    for schema, text, _ in TABLE:
        if len(text) < 1000:
            json.loads(argument_json(text, schema, ROOT))


def test_schema_of_an_argument() -> None:
    parameters = {"properties": {"a": INTEGER}, "additionalProperties": STRING}
    assert argument_schema(parameters, "a") == INTEGER
    assert argument_schema(parameters, "b") == STRING
    assert argument_schema({"properties": []}, "a") is None
    assert argument_schema(None, "a") is None
