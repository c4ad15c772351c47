"""Texts get the types that their tools' schemas ask for."""

from __future__ import annotations

import json

import pytest

from agentrl.chat.formats import cast_arguments
from agentrl.trajectory import ToolCall


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "integer"}, "3", 3),
        ({"type": "integer"}, " 3\n", 3),
        ({"type": "integer"}, "3.5", "3.5"),
        ({"type": "integer"}, "true", "true"),
        ({"type": "integer"}, "9" * 30, "9" * 30),
        ({"type": "number"}, "3", 3),
        ({"type": "number"}, "1e-3", 0.001),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "1e30", 1e30),
        ({"type": "number"}, "9" * 30, "9" * 30),  # a float would be another number
        ({"type": "boolean"}, "false", False),
        ({"type": "boolean"}, "False", False),
        ({"type": "boolean"}, "0", "0"),
        ({"type": "null"}, "None", None),
        ({"type": "array"}, "[1, null]", [1, None]),
        ({"type": "array"}, "[1,", "[1,"),
        ({"type": "array"}, "{}", "{}"),
        ({"type": "array"}, "[" * 70 + "]" * 70, "[" * 70 + "]" * 70),
        ({"type": "object"}, '{"a": [1]}', {"a": [1]}),
        ({"type": "object"}, '{"a": 1, "a": 2}', '{"a": 1, "a": 2}'),
        ({"type": "object"}, '{"a": "\\ud800"}', '{"a": "\\ud800"}'),
        ({"type": "string"}, "3", "3"),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"type": ["integer", "null"]}, "null", None),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "4", 4),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "4", "4"),
        ({"anyOf": [{"type": "integer"}, {"enum": ["4"]}]}, "4", "4"),
        ({"type": "array"}, "['it\\'s', None, True, 1.5]", ["it's", None, True, 1.5]),
        ({"type": "object"}, "{'a': {\"b\": [false]}}", {"a": {"b": [False]}}),
        ({"type": "object"}, "{'a': 1, 'a': 2}", "{'a': 1, 'a': 2}"),
        ({"type": "object"}, "{1: 2}", "{1: 2}"),
        ({"type": "object"}, "dict(a=1)", "dict(a=1)"),
        ({"type": "array"}, "[1] + [2]", "[1] + [2]"),
        ({"type": "array"}, "['\\ud800']", "['\\ud800']"),
        ({"type": "array"}, "['a'" + ", ['a'" * 70 + "]" * 71, "['a'" + ", ['a'" * 70 + "]" * 71),
        ({"type": "integer"}, "'3'", "'3'"),
        ({"type": "float"}, "3.5", 3.5),
        ({"type": "int"}, "3", 3),
        ({"type": "int"}, "3.5", "3.5"),
        ({"type": "bool"}, "true", True),
        ({"type": "dict"}, "{}", {}),
        ({"type": ["list", "null"]}, "[1]", [1]),
        ({"type": "str"}, "3", "3"),
        ({"type": "any"}, "3", "3"),
        ({"enum": [1, 2]}, "2", 2),
        ({"type": "object", "anyOf": [{"required": ["a"]}, {}]}, '{"a": 1}', {"a": 1}),
        ({"type": "integer", "oneOf": [{"minimum": 5}, {"maximum": 0}]}, "7", 7),
        ({"type": "integer"}, "3.00000000000000001", "3.00000000000000001"),
        ({"type": "integer"}, "4503599627370497.4", "4503599627370497.4"),
        ({"enum": [1, "2"]}, "2", "2"),
        ({"const": 7}, "7", 7),
        ({"$ref": "#/$defs/Point"}, '{"x": 1}', {"x": 1}),
        ({"allOf": [{"$ref": "#/$defs/Point"}], "title": "P"}, '{"x": 1}', {"x": 1}),
        ({"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]}, "null", None),
        ({"$ref": "#/$defs/a~1b"}, "3", 3),
        ({"$ref": "#/$defs/Self"}, "3", "3"),
        ({"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "integer"}]}, "3", "3"),
        ({"$ref": "#/$defs/none"}, "3", "3"),
        ({"$ref": "https://example.com/schema"}, "3", "3"),
        ({"type": None, "anyOf": None, "enum": None, "const": None, "$ref": None}, "3", "3"),
        ({}, "3", "3"),
        (None, "3", "3"),
    ],
)
def test_texts_get_the_type_their_schema_wants(schema, text, value):
    parameters = {
        "type": "object",
        "properties": {} if schema is None else {"a": schema},
        "$defs": {
            "Point": {"type": "object", "properties": {"x": {"type": "integer"}}},
            "a/b": {"type": "integer"},
            "Self": {"$ref": "#/$defs/Self"},
            "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"$ref": "#/$defs/Loop"}]},
        },
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    for shape in (tool, tool["function"]):
        (call,) = cast_arguments([ToolCall("f", {"a": text})], [shape])
        assert json.dumps([call.name, call.arguments, call.error]) == json.dumps(
            ["f", {"a": value}, ""]
        )


def test_values_without_a_schema_and_values_that_are_no_text_are_unchanged():
    calls = [
        ToolCall("g", {"a": "1"}),
        ToolCall("f", "raw", error="bad"),
        ToolCall("f", {"a": 1.5}),
    ]
    tool = {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}
    assert cast_arguments(calls, [tool]) == calls
    assert cast_arguments(calls, [{}, {"function": {"name": "f", "parameters": None}}]) == calls


@pytest.mark.parametrize("word", ["allOf", "anyOf", "oneOf"])
def test_parameters_may_be_a_combination_of_objects(word):
    parameters = {word: [{"properties": {"a": {"type": "integer"}}}, {"properties": {}}]}
    tool = {"name": "f", "parameters": parameters}
    assert cast_arguments([ToolCall("f", {"a": "7", "b": "7"})], [tool]) == [
        ToolCall("f", {"a": 7, "b": "7"})
    ]


@pytest.mark.parametrize(
    ("type_", "text", "value"),
    [
        ("integer", "3.0", 3),
        ("integer", "-2e1", -20),
        (["integer", "null"], "3.0", 3),
        ("integer", "3.5", "3.5"),
        ("integer", "1e300", "1e300"),
        ("number", "3.0", 3.0),
        (["integer", "number"], "3.0", 3.0),
        (["integer", "string"], "3.0", "3.0"),
    ],
)
def test_a_whole_number_is_an_integer_if_the_schema_wants_one(type_, text, value):
    tool = {"name": "f", "parameters": {"properties": {"a": {"type": type_}}}}
    (call,) = cast_arguments([ToolCall("f", {"a": text})], [tool])
    assert json.dumps(call.arguments) == json.dumps({"a": value})
