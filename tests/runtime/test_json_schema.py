"""Demands of a schema that the grammar makes, and those that it would pass over: the latter are refused by name.

The oracle is xgrammar itself: each case has an answer that breaks its schema. Where we find nothing, xgrammar must refuse that
answer; where we find something, it takes the answer, or the finding would have no cause.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from harness import TOKENIZER

from glm_mtp_export.errors import RequestError
from glm_mtp_export.runtime.json_schema import unenforced
from glm_mtp_export.runtime.sampling import StructuredOutput
from glm_mtp_export.runtime.structured import GrammarCompiler
from glm_mtp_export.runtime.thinking import ThinkingIds

xgrammar = pytest.importorskip("xgrammar")

WHOLE = {"type": "integer"}
NAMED = {"type": "object", "properties": {"a": WHOLE}}

# schema, an answer that breaks it, what is found in it
PASSED_OVER: list[tuple[dict[str, Any], str, str]] = [
    ({"type": "array", "items": WHOLE, "uniqueItems": True}, "[1,1]", "schema: uniqueItems"),
    ({"type": "array", "items": WHOLE, "contains": {"const": 5}}, "[1]", "schema: contains"),
    ({"type": "string", "not": {"const": "a"}}, '"a"', "schema: not"),
    ({**NAMED, "if": {"required": ["a"]}, "then": {"required": ["b"]}}, '{"a":1}', "schema: if"),
    ({**NAMED, "dependentRequired": {"a": ["b"]}}, '{"a":1}', "schema: dependentRequired"),
    ({**NAMED, "dependentSchemas": {"a": {"required": ["b"]}}}, '{"a":1}', "schema: dependentSchemas"),
    (
        {"allOf": [{**NAMED, "required": ["a"]}, {"type": "object", "required": ["b"], "properties": {"b": WHOLE}}]},
        '{"a":1}',
        "schema: allOf of several schemas",
    ),
    ({**NAMED, "required": ["a"], "anyOf": [{"required": ["b"]}]}, '{"a":1}', "properties, required beside anyOf"),
    ({"$defs": {"x": {"type": "string"}}, "$ref": "#/$defs/x", "maxLength": 1}, '"abc"', "maxLength beside $ref"),
    ({"type": "string", "pattern": "^a+$", "maxLength": 2}, '"aaa"', "maxLength beside pattern"),
    ({"minimum": 5}, "3", "minimum without type"),
    ({"minLength": 5}, '"a"', "minLength without type"),
]
MADE: list[tuple[dict[str, Any], str]] = [
    ({"type": "integer", "multipleOf": 5}, "3"),
    ({"type": "integer", "minimum": 5}, "3"),
    ({"type": "number", "exclusiveMaximum": 5}, "5"),
    ({"type": ["integer", "null"], "minimum": 5}, "3"),
    ({"type": "string", "minLength": 3}, '"a"'),
    ({"type": "string", "pattern": "^a+$"}, '"b"'),
    ({"type": "string", "format": "date"}, '"x"'),
    ({"type": "array", "items": WHOLE, "minItems": 2}, "[1]"),
    ({"type": "array", "prefixItems": [WHOLE]}, '["a"]'),
    ({"type": "object", "propertyNames": {"pattern": "^x"}}, '{"a":1}'),
    ({"type": "object", "patternProperties": {"^x": WHOLE}, "additionalProperties": False}, '{"xa":"s"}'),
    ({"type": "object", "maxProperties": 1}, '{"a":1,"b":2}'),
    ({"properties": {"a": WHOLE}, "required": ["a"]}, "{}"),
    ({"allOf": [WHOLE]}, '"s"'),
    ({"anyOf": [WHOLE, {"type": "null"}], "title": "n", "default": None}, '"s"'),
    ({"const": "a", "type": "string"}, '"b"'),
    ({"enum": ["a", "b"], "type": "string"}, '"c"'),
    ({"$defs": {"x": WHOLE}, "$ref": "#/$defs/x", "description": "d"}, '"s"'),
    ({**NAMED, "unevaluatedProperties": False}, '{"b":1}'),
]


def takes(schema: dict[str, Any], answer: str) -> bool:
    vocabulary = [TOKENIZER.token_bytes(i) for i in range(len(TOKENIZER))]
    info = xgrammar.TokenizerInfo(vocabulary, xgrammar.VocabType.RAW, stop_token_ids=list(TOKENIZER.eos_ids))
    matcher = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(schema)))
    return bool(matcher.accept_string(answer) and matcher.is_completed())


@pytest.mark.parametrize(("schema", "answer", "found"), PASSED_OVER, ids=[found for *_, found in PASSED_OVER])
def test_demands_that_a_grammar_does_not_make(schema: dict[str, Any], answer: str, found: str) -> None:
    assert len(unenforced(schema)) == 1 and found in unenforced(schema)[0]
    assert takes(schema, answer)


@pytest.mark.parametrize(("schema", "answer"), MADE, ids=[json.dumps(schema)[:60] for schema, _ in MADE])
def test_demands_that_a_grammar_makes(schema: dict[str, Any], answer: str) -> None:
    assert unenforced(schema) == []
    assert not takes(schema, answer)


def test_findings_name_their_place() -> None:
    unique = {"type": "array", "uniqueItems": True}
    schema = {
        "type": "object",
        "properties": {"tags": unique, "not": WHOLE},  # a property's name is no keyword
        "$defs": {"x": {"anyOf": [WHOLE, {"items": unique}]}},
    }
    assert unenforced(schema) == ["schema.properties.tags: uniqueItems", "schema.$defs.x.anyOf[1].items: uniqueItems"]
    assert unenforced(True) == [] and unenforced({"items": False, "uniqueItems": False}) == []


def test_a_schema_that_cannot_be_enforced_whole_is_refused() -> None:
    compiler = GrammarCompiler(TOKENIZER, len(TOKENIZER))
    structure = StructuredOutput(json_schema='{"type": "array", "uniqueItems": true}')
    with pytest.raises(RequestError, match=r"cannot be enforced: schema: uniqueItems\. Leave it out"):
        compiler.compile(structure)


def test_what_cannot_be_enforced_is_left_to_the_model_where_the_caller_is_not_strict() -> None:
    """The rest of the schema holds."""
    schema = '{"type": "array", "items": {"type": "integer"}, "uniqueItems": true, "maxItems": 2}'
    compiler = GrammarCompiler(TOKENIZER, len(TOKENIZER))
    structure = StructuredOutput(json_schema=schema, strict=False)
    for text, allowed in (("[1,1]", True), ("[1,1,1]", False), ('["a"]', False)):
        state = compiler.state(compiler.compile(structure), frozenset(TOKENIZER.eos_ids), ThinkingIds(), False)
        assert all(state.advance(token) for token in TOKENIZER.encode(text)) == allowed, text
