"""The quick look at arguments never says yes where the JSON schema says no."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from agentrl.tools.quick import quick_check

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=6,
)
NAMES = st.sampled_from(["a", "b", "c"])
SIMPLE = st.sampled_from(["string", "integer", "number", "boolean", "null", "array", "object"])
# Keywords that forbid something, beside the ones that @tool writes for plain annotations.
MORE = st.sampled_from(
    [
        {},
        {"description": "a text"},
        {"default": 3},
        {"minimum": 1},
        {"maxLength": 1},
        {"minItems": 1},
        {"enum": ["a", 1]},
        {"const": None},
        {"not": {"type": "string"}},
    ]
)
PROPERTIES = st.recursive(
    st.booleans() | st.builds(lambda t, m: {"type": t, **m}, SIMPLE, MORE) | MORE,
    lambda inner: (
        st.builds(lambda i, m: {"type": "array", "items": i, **m}, inner, MORE)
        | st.builds(lambda c, m: {"anyOf": c, **m}, st.lists(inner, min_size=1, max_size=2), MORE)
        | st.builds(lambda i: {"type": "object", "properties": {"a": i}}, inner)
        | st.lists(SIMPLE, min_size=1, unique=True).map(lambda t: {"type": t})
    ),
    max_leaves=3,
)
SCHEMAS = st.fixed_dictionaries(
    {"type": st.just("object"), "properties": st.dictionaries(NAMES, PROPERTIES)},
    optional={
        "required": st.lists(NAMES, unique=True),
        "additionalProperties": st.booleans() | st.just({"type": "string"}),
        "description": st.just("text"),
        "minProperties": st.integers(0, 3),
        "patternProperties": st.just({"a": {"type": "string"}}),
        "dependentRequired": st.just({"a": ["b"]}),
        "propertyNames": st.just({"const": "a"}),
    },
)


@given(SCHEMAS, st.lists(st.dictionaries(NAMES | st.text(max_size=1), VALUES), max_size=4))
def test_what_passes_is_valid(schema, candidates):
    check, validator = quick_check(schema), Draft202012Validator(schema)
    for arguments in ({}, *candidates):
        assert not check(arguments) or validator.is_valid(arguments)


def test_plain_arguments_pass():
    """The cases that the quick look is there for; without them, saying no would always do."""
    check = quick_check(
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
