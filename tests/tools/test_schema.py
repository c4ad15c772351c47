"""From signatures to schemas: what a model is shown, and what a tool is given."""

from __future__ import annotations

import enum
import functools
import inspect
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Optional, Union

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import AfterValidator, BaseModel, Field
from typing_extensions import TypedDict

from agentrl import registry
from agentrl.errors import DataError, RegistryError, UserError
from agentrl.tools import tool
from agentrl.tools.payloads import InvalidArguments, encode_arguments
from agentrl.tools.schema import describe_function, parameters_from_schema
from agentrl.trajectory import Sample, ToolCall


@pytest.fixture(autouse=True)
def tools(no_tools):
    return registry.tools


class Unit(enum.Enum):
    """A unit."""

    C = "celsius"
    F = "fahrenheit"


class ShardInfo(BaseModel):
    """A place."""

    title: str
    height: int = Field(0, ge=0, description="in metres")
    unit: Unit = Unit.C


class Trip(BaseModel):
    stops: list[ShardInfo]


class Options(TypedDict):
    deep: bool


@dataclass
class Box:
    width: int
    depth: int = 1


class Cat(BaseModel):
    kind: Literal["cat"]


class Dog(BaseModel):
    kind: Literal["dog"]


class Tree(BaseModel):
    children: list[Tree]


UNIT = {"type": "string", "enum": ["celsius", "fahrenheit"], "description": "A unit."}
PLACE = {
    "description": "A place.",
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "height": {"type": "integer", "default": 0, "minimum": 0, "description": "in metres"},
        "unit": {**UNIT, "default": "celsius"},
    },
    "required": ["title"],
    "additionalProperties": False,
}


def f_plain(a: int, b: float, c: str, d: bool): ...
def f_containers(a: list[int], b: dict[str, float], c: tuple[int, str], d: set[str]): ...
def f_optional(a: Optional[int] = None, b: int | str = 3): ...  # noqa: UP045
def f_literal(mode: Literal["fast", "exact"] = "fast", n: Literal[1, 2] = 1): ...
def f_enum(unit: Unit, other: Unit = Unit.F): ...
def f_annotated(k: Annotated[int, Field(ge=1, le=5, description="how many")] = 3): ...
def f_nested(place: ShardInfo, trip: Trip | None = None): ...
def f_typed(options: Options, box: Box): ...
def f_union(pet: Annotated[Union[Cat, Dog], Field(discriminator="kind")]): ...  # noqa: UP007
def f_untyped(a, b=2, *, c: int = 1): ...
def f_names(schema: int, model_config: int, json: int, copy: int, _x: int, title: int): ...
def f_odd_default(a: int = 1, b: Any = object()): ...
def f_none(): ...


def the(schema: dict[str, Any], required: list[str]) -> dict[str, Any]:
    extra = {"required": required} if required else {}
    return {"type": "object", "properties": schema, **extra, "additionalProperties": False}


INT, TEXT = {"type": "integer"}, {"type": "string"}

SCHEMAS = [
    (
        f_plain,
        the({"a": INT, "b": {"type": "number"}, "c": TEXT, "d": {"type": "boolean"}}, [*"abcd"]),
    ),
    (
        f_containers,
        the(
            {
                "a": {"type": "array", "items": INT},
                "b": {"type": "object", "additionalProperties": {"type": "number"}},
                "c": {"type": "array", "minItems": 2, "maxItems": 2, "prefixItems": [INT, TEXT]},
                "d": {"type": "array", "items": TEXT, "uniqueItems": True},
            },
            [*"abcd"],
        ),
    ),
    (
        f_optional,
        the(
            {
                "a": {"anyOf": [INT, {"type": "null"}], "default": None},
                "b": {"anyOf": [INT, TEXT], "default": 3},
            },
            [],
        ),
    ),
    (
        f_literal,
        the(
            {
                "mode": {"type": "string", "enum": ["fast", "exact"], "default": "fast"},
                "n": {"type": "integer", "enum": [1, 2], "default": 1},
            },
            [],
        ),
    ),
    (
        f_enum,
        the({"unit": UNIT, "other": {**UNIT, "default": "fahrenheit"}}, ["unit"]),
    ),
    (
        f_annotated,
        the(
            {"k": {**INT, "minimum": 1, "maximum": 5, "description": "how many", "default": 3}}, []
        ),
    ),
    (
        f_typed,
        the(
            {
                "options": the({"deep": {"type": "boolean"}}, ["deep"]),
                "box": the({"width": INT, "depth": {**INT, "default": 1}}, ["width"]),
            },
            ["options", "box"],
        ),
    ),
    (
        f_union,
        the(
            {
                "pet": {
                    "oneOf": [
                        the({"kind": {"type": "string", "const": kind}}, ["kind"])
                        for kind in ("cat", "dog")
                    ]
                }
            },
            ["pet"],
        ),
    ),
    (f_untyped, the({"a": {}, "b": {"default": 2}, "c": {**INT, "default": 1}}, ["a"])),
    (
        f_names,
        the(
            dict.fromkeys(["schema", "model_config", "json", "copy", "_x", "title"], INT),
            ["schema", "model_config", "json", "copy", "_x", "title"],
        ),
    ),
    (f_odd_default, the({"a": {**INT, "default": 1}, "b": {}}, [])),
    (f_none, the({}, [])),
]


def parameters(function) -> dict[str, Any]:
    tool(function)
    [schema] = registry.tools.get(function.__name__).spec.schemas
    assert schema["type"] == "function"
    assert schema["function"]["name"] == function.__name__
    json.dumps(schema)
    return schema["function"]["parameters"]


@pytest.mark.parametrize(
    ("function", "expected"), SCHEMAS, ids=lambda v: getattr(v, "__name__", "")
)
def test_schemas(function, expected):
    schema = parameters(function)
    Draft202012Validator.check_schema(schema)
    assert schema == expected


def test_the_prompt_shows_the_keys_of_a_schema_in_one_order():
    options, box = parameters(f_typed)["properties"].values()
    assert [*options] == [*box] == ["properties", "required", "type", "additionalProperties"]


def test_nested_models_are_inlined_and_closed():
    schema = parameters(f_nested)
    assert schema["properties"]["place"] == PLACE
    trip = schema["properties"]["trip"]
    assert trip["anyOf"][0]["properties"]["stops"] == {"type": "array", "items": PLACE}
    assert trip["default"] is None


def google(a: int, b: str = "x"):
    """Do it.

    In more words.

    Args:
        a: the first,
            continued
        b: the second
    """


def numpy(a: int, b: str = "x"):
    """Do it.

    In more words.

    Parameters
    ----------
    a : int
        the first,
        continued
    b : str
        the second
    """


def rest(a: int, b: str = "x"):
    """Do it.

    In more words.

    :param a: the first,
        continued
    :param b: the second
    """


@pytest.mark.parametrize("function", [google, numpy, rest])
def test_docstrings(function):
    tool(function)
    shown = registry.tools.get(function.__name__).spec.schemas[0]["function"]
    assert shown["description"] == "Do it.\n\nIn more words."
    properties = shown["parameters"]["properties"]
    assert properties["a"] == {"type": "integer", "description": "the first, continued"}
    assert properties["b"] == {"type": "string", "description": "the second", "default": "x"}


def other_sections(x: str, y: str, state: dict):
    """Search.

    Args:
        `x`, **y**: words
        state: of the episode
        z: nothing

    Returns:
        JSON with the keys title and url.

    Note:
        At most ten calls.
    """


def numpy_sections(x: str, y: str):
    """Search.

    Parameters
    ----------
    x, y : str
        words

    Notes
    -----
    At most ten calls.
    """


def test_all_of_a_docstring_is_shown_or_reported(caplog):
    tool(other_sections)
    tool(numpy_sections)
    google, numpy = [
        registry.tools.get(f.__name__).spec.schemas[0]["function"]
        for f in (other_sections, numpy_sections)
    ]
    more = "Returns:\n    JSON with the keys title and url.\n\nNote:\n    At most ten calls."
    assert google["description"] == f"Search.\n\n{more}"
    assert numpy["description"] == "Search.\n\nNotes\n-----\nAt most ten calls."
    for shown in (google, numpy):
        properties = shown["parameters"]["properties"]
        assert {k: p["description"] for k, p in properties.items()} == {"x": "words", "y": "words"}
    [message] = caplog.messages
    assert "'other_sections'" in message and "about 'z', because no parameter has" in message


def test_the_annotations_description_wins():
    @tool
    def f(k: Annotated[int, Field(description="from the annotation")]):
        """F.

        Args:
            k: from the docstring
        """

    [schema] = registry.tools.get("f").spec.schemas
    described = schema["function"]["parameters"]["properties"]["k"]["description"]
    assert described == "from the annotation"


def test_no_docstring_is_one_warning(caplog):
    @tool
    def bare(a: int): ...

    assert caplog.messages == [
        "tool function 'bare' has no docstring: the model only sees its name"
    ]


def test_the_function_stays_what_it_was():
    def f(a: int) -> int:
        """F."""
        return a + 1

    assert tool(f) is f
    assert tool(timeout=3, idempotent=True, max_concurrency=8)(f) is f
    record = registry.tools.get("f")
    assert (record.timeout, record.idempotent, record.max_concurrency) == (3, True, 8)
    assert (record.stateful, record.target) == (False, f)


def test_arguments_arrive_typed():
    tool(f_nested)
    check = registry.tools.get("f_nested").functions[0].parameters.check
    arguments = check({"place": {"title": "x", "unit": "fahrenheit"}})
    assert arguments == {"place": ShardInfo(title="x", unit=Unit.F)}
    tool(f_typed)
    check = registry.tools.get("f_typed").functions[0].parameters.check
    assert check({"options": {"deep": True}, "box": {"width": 2}})["box"] == Box(2)
    tool(f_names)
    check = registry.tools.get("f_names").functions[0].parameters.check
    names = dict.fromkeys(("schema", "model_config", "json", "copy", "_x", "title"), 1)
    assert check(names) == names


def test_missing_arguments_get_the_functions_defaults():
    marker = object()

    @tool
    def f(a: int = 1, b: Any = marker):
        """F."""

    assert registry.tools.get("f").functions[0].parameters.check({"a": 2}) == {"a": 2}


def test_null_is_valid_if_it_is_the_default():
    @tool
    def find(
        city: str = None,  # noqa: RUF013
        k: Annotated[int, Field(ge=1, description="how many")] = None,  # noqa: RUF013
        kind: Literal["a", "b"] | None = None,
        more=None,
    ):
        """Find."""

    function = registry.tools.get("find").functions[0]
    properties = function.schema["function"]["parameters"]["properties"]
    string, integer = {"type": "string"}, {"minimum": 1, "type": "integer"}
    assert properties["city"] == {"anyOf": [string, {"type": "null"}], "default": None}
    assert properties["k"]["anyOf"] == [integer, {"type": "null"}]
    assert properties["k"]["description"] == "how many" and properties["more"] == {"default": None}
    check = function.parameters.check
    # The default is used if an argument is left out, and its type needs no None.
    assert check({"city": None, "k": None, "kind": None}) == {"kind": None}
    assert check({"city": "Rome", "k": 3}) == {"city": "Rome", "k": 3}
    with pytest.raises(InvalidArguments, match="'k': 0 does not match"):
        check({"k": 0})


def test_values_that_the_schema_allows_are_accepted():
    @tool
    def f(
        unit: Literal[Unit.C],
        units: list[Literal[Unit.F, "other"]],
        numbers: Iterable[int],
        words: Annotated[Iterable[str] | None, Field(description="words")] = None,
    ):
        """F."""

    check = registry.tools.get("f").functions[0].parameters.check
    json_values = {"unit": "celsius", "units": ["fahrenheit", "other"], "numbers": [1, 2]}
    values = {"unit": Unit.C, "units": [Unit.F, "other"], "numbers": [1, 2]}
    assert check(json_values) == values
    assert check({**json_values, "words": ["a"]}) == {**values, "words": ["a"]}
    with pytest.raises(InvalidArguments, match="'unit'"):
        check({**json_values, "unit": "fahrenheit"})


@pytest.mark.parametrize("number", [math.inf, math.nan, 2**70])
def test_a_default_that_json_cannot_hold_is_not_shown(number):
    def f(limit: float = number):
        """F."""

    parameters = describe_function(f, "f", bound=False)[1]  # type: ignore[arg-type]
    assert parameters.schema["properties"] == {"limit": {"type": "number"}}
    assert parameters.usage == "f(limit: number = ...)"
    with pytest.raises(UserError, match="a value that JSON cannot hold, such as an infinity"):
        parameters_from_schema({"type": "object", "examples": [number]}, "f", "here")


def test_errors_are_short_and_say_what_was_expected():
    def f(color: Literal["red", "blue"], n: int, deep: dict[str, list[int]] | None = None):
        """F."""

    tool(f)
    check = registry.tools.get("f").functions[0].parameters.check
    with pytest.raises(InvalidArguments) as e:
        check({"color": "x" * 1000, "n": "1", "deep": {"k": [1, "2"]}})
    usage = 'Expected: f(color: "red"|"blue", n: integer, deep: object|null = null)'
    assert str(e.value).endswith(usage)
    assert "'n' must be an integer, got \"1\"" in str(e.value)
    assert len(str(e.value)) < 400


class Point(BaseModel):
    x: int


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({"n": "1"}, "'n' must be an integer, got \"1\"."),
        ({"n": 1, "text": 2}, "'text' must be a string or null, got 2."),
        ({"n": 1, "color": "red"}, '\'color\' must be one of "green", "blue", got "red".'),
        ({"n": 1, "point": {"x": "a"}}, "'point': {'x': 'a'} does not match any of the allowed"),
        ({"n": 1, "point": 3}, "'point' must be an object or null, got 3."),
        ({"n": -1}, "'n' must be at least 0, got -1."),
        ({"n": 1, "m": 2}, "unexpected argument 'm'."),
        ({}, "'n' is required."),
    ],
)
def test_errors_use_the_words_of_tool_calling_data(arguments, fault):
    def f(
        n: Annotated[int, Field(ge=0)],
        text: str | None = None,
        color: Literal["green", "blue"] = "green",
        point: Point | None = None,
    ) -> str:
        """F."""
        return ""

    _, parameters = describe_function(f, "f", bound=False)
    with pytest.raises(InvalidArguments) as e:
        parameters.check(arguments)
    assert str(e.value).startswith(fault)


def test_validators_of_users_are_applied():
    def even(n: int) -> int:
        if n % 2:
            raise ValueError("must be even")
        return n

    Even = Annotated[int, AfterValidator(even)]

    def f(n):
        """F."""

    f.__annotations__["n"] = Even
    tool(f)
    check = registry.tools.get("f").functions[0].parameters.check
    assert check({"n": 4}) == {"n": 4}
    with pytest.raises(InvalidArguments, match=r"'n': must be even. Expected: f\(n: integer\)"):
        check({"n": 3})


TYPES = st.sampled_from([int, str, bool, float, list[int], dict[str, int], int | None])


def passes_the_gate(value: Any) -> bool:
    return isinstance(encode_arguments(ToolCall("f", {"value": value})), bytes)


@given(st.dictionaries(st.text("abcxyz_", min_size=1, max_size=5), TYPES, max_size=4), st.data())
def test_any_signature_accepts_what_its_types_hold(types, data):
    def f(**kwargs): ...

    names = [n for n in types if n.isidentifier()]
    f.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, annotation=types[n]) for n in names]
    )
    f.__annotations__ = {n: types[n] for n in names}
    f.__doc__ = "F."
    tool(f)
    parameters = registry.tools.get("f").functions[0].parameters
    values = {n: data.draw(st.from_type(types[n]).filter(passes_the_gate)) for n in names}
    assert parameters.check(values) == values
    for missing in names:
        with pytest.raises(InvalidArguments, match=f"'{missing}' is required"):
            parameters.check({n: v for n, v in values.items() if n != missing})
    with pytest.raises(InvalidArguments, match="unexpected"):
        parameters.check({**values, "another": 1})


def g_positional(a, /): ...
def g_recursive(tree: Tree): ...
def g_unknown(x: Nowhere): ...  # noqa: F821
def g_args(a, *args: int): ...
def g_kwargs(a, **kwargs): ...
def g_generator():
    yield 1


def g_field(k: int = Field(3, ge=1)): ...


async def g_async_generator():
    yield 1


class Callable:
    def __call__(self): ...


class Open:
    def __init__(self, **kwargs): ...
    def fill(self, **rest): ...


BROKEN = [
    (lambda: tool(g_positional), "'a' is positional-only.*Remove the '/'"),
    (lambda: tool(g_recursive), "the type 'Tree' contains itself"),
    (lambda: tool(g_unknown), "an annotation cannot be evaluated.*'Nowhere'.*top of the file"),
    (lambda: tool(g_args), r"a model cannot fill '\*args'.*Name each parameter.*functools.wraps"),
    (lambda: tool(g_kwargs), r"g_kwargs.*a model cannot fill '\*\*kwargs'"),
    (lambda: tool(Open), r"'fill'.*a model cannot fill '\*\*rest'"),
    (lambda: tool(g_generator), "is a generator: return the whole result"),
    (lambda: tool(g_async_generator), "is a generator"),
    (lambda: tool(g_field), r"Write `k: Annotated\[TYPE, Field\(...\)\] = VALUE`"),
    (lambda: tool(Callable()), "@tool is for functions and classes, not for"),  # type: ignore[type-var]
    (lambda: tool(len), "@tool is for functions and classes"),
    (lambda: tool(lambda: 1), "'<lambda>' .* is not a valid tool name"),
    (lambda: tool(name="no spaces")(f_none), "'no spaces' .* is not a valid tool name"),
    (lambda: tool(name="x" * 65)(f_none), "at most 64 characters"),
    (lambda: tool(timeout=0)(f_none), "timeout=0 must be greater than 0 seconds"),
    (lambda: tool(max_concurrency=-1)(f_none), "max_concurrency=-1 must be at least 0"),
    (lambda: tool(schema={"name": "f"})(f_none), 'expected {"type": "function"'),
    (
        lambda: tool(schema={"function": {"parameters": {"type": 3}}})(f_none),
        "not a valid JSON schema",
    ),
    (lambda: tool(schema={"function": {"parameters": {}}})(f_none), 'must have "type": "object"'),
]


@pytest.mark.parametrize(("define", "message"), BROKEN, ids=range(len(BROKEN)))
def test_definitions_that_no_model_could_call(define, message):
    with pytest.raises(UserError, match=message):
        define()
    assert registry.tools.names() == []


def test_functions_that_take_any_argument():
    """A constructor, a function whose schema is written by hand, and one that a decorator wraps."""
    open_schema = {"type": "object", "properties": {"n": {"type": "integer"}}}

    @tool(schema={"function": {"name": "written", "parameters": open_schema}})
    def written(**kwargs): ...

    @functools.wraps(f_none)
    def wrapper(*args, **kwargs): ...

    tool(wrapper)

    @tool
    class Bag:
        def __init__(self, **kwargs): ...
        def look(self): ...

    assert registry.tools.names() == ["bag", "f_none", "written"]


def test_an_opaque_type_is_named():
    class Opaque: ...

    def f(x): ...

    f.__annotations__["x"] = Opaque
    with pytest.raises(UserError, match=r"has a parameter that no JSON schema describes.*Opaque"):
        tool(f)


def test_a_schema_by_hand():
    written = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    schema = {"type": "function", "function": {"name": "named", "parameters": written}}

    @tool(schema=schema)
    def f(n): ...

    record = registry.tools.get("named")
    assert record.spec.schemas[0]["function"] == {"name": "named", "parameters": written}
    assert record.functions[0].parameters.check({"n": 1, "m": 2}) == {"n": 1, "m": 2}
    with pytest.raises(
        UserError, match="the schema has the name 'named', but the tool has 'other'"
    ):
        tool(name="other", schema=schema)(f)
    with pytest.raises(UserError, match="schema= is for functions, not for classes"):
        tool(schema=schema)(ShardInfo)


def test_two_tools_of_one_name():
    tool(f_none)
    tool(f_none)  # the same definition again
    with pytest.raises(RegistryError, match="two definitions of the tool 'f_none'"):
        tool(name="f_none")(f_plain)


class Base:
    def first(self):
        """First."""

    def hidden(self):
        """Overridden."""


class Whole(Base):
    limit = 3

    def __init__(self, sample, *, size: int = 1): ...

    def __call__(self, text: str):
        """Under the tool's own name."""

    def second(self, a: int):
        """Second."""

    @staticmethod
    def third(b: int):
        """Third."""

    @classmethod
    def fourth(cls, c: int):
        """Fourth."""

    @property
    def shown(self):
        return 1

    def hidden(self, d: int):
        """Hidden."""

    def _private(self): ...

    def reward(self):
        return 0

    def close(self): ...


def test_a_class_offers_its_public_methods():
    assert tool(Whole) is Whole
    record = registry.tools.get("whole")
    assert [f.parameters.usage for f in record.functions] == [
        "first()",
        "hidden(d: integer)",
        "whole(text: string)",
        "second(a: integer)",
        "third(b: integer)",
        "fourth(c: integer)",
    ]
    assert (record.stateful, record.hooks) == (True, ("reward", "close"))
    sample = Sample("x", (), row=3)
    assert record.arguments({"size": 2}, sample) == {"size": 2}
    assert record.constructor_injected == ("sample",)
    with pytest.raises(DataError, match=r"row 3 \(id 'x'\): the arguments of the tool 'whole'"):
        record.arguments({"sample": 1}, sample)


def test_a_class_with_nothing_to_call():
    class Idle:
        def reward(self): ...

    with pytest.raises(UserError, match=r"'idle' \(.*Idle, .*schema.py:\d+\) has no function"):
        tool(Idle)


@pytest.mark.parametrize(
    ("name", "tool_name"),
    [("NoteBook", "note_book"), ("HTTPSearch", "http_search"), ("Sql2", "sql2"), ("A", "a")],
)
def test_class_names_in_snake_case(name, tool_name):
    tool(type(name, (), {"run": f_none}))
    assert registry.tools.names() == [tool_name]
