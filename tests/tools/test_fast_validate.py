"""The fast check of arguments accepts nothing that the JSON schema refuses."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from agentrl.tools.payloads import make_fast_validator

SCALARS: list[Any] = [None, True, False, 0, 1, 2**70, 0.0, 1.5, float("nan"), "", "a", "ab"]
VALUES = [*SCALARS, [], *([s] for s in SCALARS), ["a", 1], [[1]], ["a", "a"], {}, {"a": 1}]
TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
PLAIN: list[dict[str, Any]] = [{"type": t} for t in TYPES]
PROPERTIES: list[dict[str, Any]] = [
    {},
    *PLAIN,
    *({"type": "array", "items": p} for p in (*PLAIN, {}, True, False)),
    *({"anyOf": [p, {"type": "null"}]} for p in (*PLAIN, False)),
    {"anyOf": [{"type": "string", "maxLength": 1}, {"type": "integer"}]},
    {"oneOf": [{"type": "number"}, {"type": "integer"}]},
    {"type": ["string", "null"]},
]
# What may stand in a property's schema beside these: the first few forbid nothing.
BESIDE: list[dict[str, Any]] = [
    {},
    {"description": "a text"},
    {"default": 3},
    {"minimum": 1},
    {"maxLength": 1},
    {"minItems": 1},
    {"uniqueItems": True},
    {"prefixItems": [{"type": "string"}]},
    {"enum": ["a", 1]},
    {"const": None},
    {"not": {"type": "string"}},
]
# And beside the properties of the whole.
WHOLE: list[dict[str, Any]] = [
    {},
    {"description": "a text"},
    {"required": ["b"]},
    {"required": ["c"]},
    {"additionalProperties": False},
    {"additionalProperties": {"type": "string"}},
    {"minProperties": 2},
    {"maxProperties": 1},
    {"patternProperties": {"a": {"type": "string"}}},
    {"dependentRequired": {"a": ["b"]}},
    {"propertyNames": {"const": "b"}},
    {"not": {"required": ["a"]}},
]


def agrees(schema: dict[str, Any], candidates: list[dict[str, Any]]) -> int:
    """Return how many of the arguments pass. Each of those must be valid."""
    check, validator = make_fast_validator(schema), Draft202012Validator(schema)
    passed = [a for a in candidates if check(a)]
    for arguments in passed:
        assert validator.is_valid(arguments), (schema, arguments)
    return len(passed)


def test_every_kind_of_property():
    candidates: list[dict[str, Any]] = [{"a": value} for value in VALUES]
    passed = 0
    for described, beside in itertools.product(PROPERTIES, BESIDE):
        schema = {"type": "object", "properties": {"a": {**described, **beside}}}
        passed += agrees(schema, candidates)
    assert passed > 100


def test_every_kind_of_object():
    properties = {"a": {"type": "integer"}, "b": {"type": "string"}}
    values = {"a": (1, "x"), "b": ("x", 1), "c": ("x", 1)}
    candidates = [
        dict(zip(names, chosen, strict=True))
        for n in range(4)
        for names in itertools.combinations(values, n)
        for chosen in itertools.product(*(values[name] for name in names))
    ]
    passed = sum(
        agrees({"type": "object", "properties": properties, **beside}, candidates)
        for beside in WHOLE
    )
    assert passed > 10


@given(
    st.dictionaries(st.sampled_from("abc"), st.sampled_from(PROPERTIES)),
    st.sampled_from(WHOLE),
    st.lists(st.dictionaries(st.sampled_from("abc"), st.sampled_from(VALUES)), max_size=8),
)
def test_what_passes_is_valid(properties, beside, candidates):
    agrees({"type": "object", "properties": properties, **beside}, [{}, *candidates])


def test_plain_arguments_pass():
    """The cases that the fast check is there for; without them, saying no would always do."""
    check = make_fast_validator(
        {
            "type": "object",
            "properties": {
                "text": {"type": "string", "description": "a text"},
                "k": {"type": "integer", "default": 3},
                "x": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                "deep": {"type": "boolean"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "level": {"type": "integer", "minimum": 0},
            },
            "required": ["text"],
            "additionalProperties": False,
        }
    )
    assert check({"text": "a"})
    assert check({"text": "", "k": 1, "x": None, "deep": True, "tags": ["a", "b"]})
    assert check({"text": "a", "x": 1, "tags": []})
    for arguments in (
        {},
        {"text": 1},
        {"text": "a", "k": True},
        {"text": "a", "k": 1.0},  # valid, and for the validator to say
        {"text": "a", "tags": ["a", 1]},
        {"text": "a", "other": 1},
        {"text": "a", "level": 1},
    ):
        assert not check(arguments)


def test_a_choice_of_texts_passes():
    check = make_fast_validator(
        {"type": "object", "properties": {"a": {"type": "string", "enum": ["x", 1]}}}
    )
    assert check({"a": "x"})
    assert not (check({"a": "y"}) or check({"a": 1}) or check({"a": ["x"]}))
