"""What pydantic's strict mode accepts of a plain signature, the JSON schema accepts, too."""

from __future__ import annotations

import itertools
from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from jsonschema import Draft202012Validator
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, WithJsonSchema
from typing_extensions import TypedDict

from agentrl.tools.payloads import InvalidArguments, Parameters
from agentrl.tools.schema import describe_function


class Options(TypedDict):
    a: int


class Point(BaseModel):
    a: int


class Color(Enum):
    RED = "a"


SCALARS: list[Any] = [None, True, False, 0, 1, 2**62, 0.0, 1.5, "", "a", "ab", "a\n"]
VALUES = [*SCALARS, [], *([s] for s in SCALARS), ["a", 1], [[1]], ["a", "a"], {}, {"a": 1}]
VALUES.append({"a": 1, "b": 2})
PLAIN: list[Any] = [str, int, float, bool, None, Any, list, list[int], list[str | float]]
PLAIN += [int | None, list[int] | None, list[list[int]], Literal["a", "ab"]]
PLAIN += [
    Annotated[str, Field(pattern="^a$")],
    Annotated[str, Field(max_length=1, description="a text")],
    Annotated[int, Field(ge=1)],
    Annotated[float, Field(multiple_of=0.5)],
    Annotated[list[str], Field(min_length=2)],
]
OTHER: list[Any] = [dict, dict[str, int], set[int], tuple[int, str], Options, Point, Color]
OTHER += [
    Literal["a", 1],
    Literal[0, "ab"],
    Literal[Color.RED],
    list[Options],
    Point | int,
    Annotated[list[str], BeforeValidator(lambda x: [x])],
    Annotated[str, AfterValidator(str.upper)],
    Annotated[str, WithJsonSchema({"type": "integer"})],
    Annotated[str, Field(json_schema_extra={"pattern": "b"})],
    Annotated[int | str, Field(union_mode="left_to_right")],
]


def parameters_of(*types: Any) -> Parameters:
    def f(x=None, y=None):
        """F."""

    f.__annotations__ = dict(zip("xy", types, strict=False))
    return describe_function(f, "f", bound=False, excluded="xy"[len(types) :])[1]


@pytest.mark.parametrize("kind", [*PLAIN, *OTHER], ids=range(len(PLAIN + OTHER)))
def test_arguments_are_valid_as_the_schema_says(kind):
    parameters = parameters_of(kind)
    validator = Draft202012Validator(parameters.schema)
    assert parameters.is_plain == (kind in PLAIN)
    for value in VALUES:
        arguments = {"x": value}
        try:
            parameters.check(arguments)
        except InvalidArguments:
            continue  # The schema may allow what the type refuses: it knows no code of the user.
        assert validator.is_valid(arguments), arguments
    with pytest.raises(InvalidArguments, match="unexpected argument 'z'"):
        parameters.check({"z": 1})


def test_a_union_is_tried_from_left_to_right_if_the_tool_says_so():
    parameters = parameters_of(Annotated[int | str, Field(union_mode="left_to_right")])
    assert [parameters.check({"x": x})["x"] for x in ("3", 3, "a")] == [3, 3, "a"]


def test_plain_arguments_keep_their_values_and_types():
    for a, b in itertools.combinations_with_replacement(PLAIN, 2):
        parameters = parameters_of(a, b)
        validator = Draft202012Validator(parameters.schema)
        for value in ("a", 1, True, ["a", 2.5], [1]):
            if validator.is_valid(arguments := {"x": value, "y": value}):
                assert parameters.check(arguments) == arguments
