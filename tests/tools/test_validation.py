"""Arguments that cost too much to check, and schemas that could not be checked in bounded time."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import time
from decimal import Decimal
from typing import Annotated, Any, Literal

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from support.examples import examples

from agentrl.errors import Infrastructure, ToolError, ToolServerError, UserError
from agentrl.tools import HttpToolbox, LocalToolbox, tool
from agentrl.tools.payloads import MAX_DEPTH, InvalidArguments
from agentrl.tools.schema import describe_function, parameters_from_schema
from agentrl.tools.serving.background import serve_in_background
from agentrl.tools.validation import (
    LOOP_BYTES,
    LOOP_SECONDS,
    SlowCheck,
    Validator,
    thread_seconds,
)
from agentrl.trajectory import Sample, ToolCall

pytestmark = pytest.mark.usefixtures("no_tools")


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def is_valid(schema: dict[str, Any], value: Any) -> bool:
    return not Validator(schema).errors(value, 5.0)


# -- as every validator has it --------------------------------------------------------------------

# From JSON Schema's own test suite (draft 2020-12: pattern, patternProperties, propertyNames,
# additionalProperties, uniqueItems, ecmascript-regex): schema, data, whether it is valid.
SUITE = [
    ({"pattern": "^a*$"}, "aaa", True),
    ({"pattern": "^a*$"}, "abc", False),
    ({"pattern": "^a*$"}, 123, True),
    ({"pattern": "a+"}, "xxaayy", True),
    ({"pattern": r"^\p{Letter}+$"}, "π", True),
    ({"pattern": r"^\p{Letter}+$"}, "123", False),
    ({"pattern": "^🐲*$"}, "🐲🐲", True),
    ({"pattern": "^\\S(|(.|\\n)*\\S)\\Z"}, "\nabc", False),
    ({"pattern": r"^\W$"}, "0", False),
    ({"patternProperties": {"f.*o": {"type": "integer"}}}, {"foo": 1, "foooooo": 2}, True),
    ({"patternProperties": {"f.*o": {"type": "integer"}}}, {"foo": "bar"}, False),
    ({"patternProperties": {"a*": {"type": "integer"}, "aaa*": {"maximum": 20}}}, {"aaa": 31}, 0),
    ({"patternProperties": {"f.*": True, "b.*": False}}, {"foo": 1, "bar": 2}, False),
    ({"propertyNames": {"pattern": "^a+$"}}, {"a": {}, "aa": {}}, True),
    ({"propertyNames": {"pattern": "^a+$"}}, {"aaA": {}}, False),
    (
        {"patternProperties": {"^á": {}}, "additionalProperties": False},
        {"ármányos": 2},
        True,
    ),
    ({"patternProperties": {"^á": {}}, "additionalProperties": False}, {"élmény": 2}, False),
    (
        {**of(foo={}), "patternProperties": {"^v": {}}, "additionalProperties": {"type": "null"}},
        {"foo": 1, "vroom": 2, "quux": True},
        False,
    ),
    ({"uniqueItems": True}, [1, 2], True),
    ({"uniqueItems": True}, [1.0, 1.00, 1], False),
    ({"uniqueItems": True}, [1, True], True),
    ({"uniqueItems": True}, [0, False], True),
    ({"uniqueItems": True}, [[1], [True]], True),
    ({"uniqueItems": True}, [{"a": 1, "b": 2}, {"b": 2, "a": 1}], False),
    ({"uniqueItems": True}, [{"foo": {"bar": {"baz": True}}}] * 2, False),
    ({"uniqueItems": True}, [{}, [1], True, None, 1, "{}"], True),
    ({"uniqueItems": True}, ["1", 1, '"1"'], True),
    ({"uniqueItems": False}, [1, 1], True),
]


@pytest.mark.parametrize(("schema", "data", "valid"), SUITE)
def test_cases_of_the_json_schema_test_suite(schema, data, valid):
    assert is_valid(schema, data) == valid


PARTS = r"""
a b . \d \w \s [a-c] [^a] [[a] [a&&b] [a--b] {e} {e<=1} {i} {1,2} {,2} {2} {} {,} { } ( (?: (?= (?!
(?<=a) ) | * + ? *? +? ^ $ \b \A \Z - ] \n \. \/ [{e}] []{e}] [^]{] \{ {{ é
"""
TEXTS = ("", "a", "b", "ab", "a\n", "{", "}", "{e}", "a{e}", "[]", "a&b", "a-b", "é", "1 2")


@examples(300)
@given(st.lists(st.sampled_from(PARTS.split()), min_size=1, max_size=4).map("".join))
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_patterns_match_as_in_re(pattern):
    """`regex` knows more than `re`: nothing of that changes a pattern that `re` understands."""
    try:
        known = re.compile(pattern)
    except re.error:
        return
    validator = Validator({"pattern": pattern})
    for text in TEXTS:
        assert (not validator.errors(text, 5.0)) == bool(known.search(text)), text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.0, 1.0, 0.5, -0.0, 1e300])
    | st.sampled_from(["", "a", "ab", "1", "true"]),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.sampled_from("abk"), inner, max_size=3),
    max_leaves=12,
)  # fmt: skip
VARIANTS = [of(k={"const": i}, a={"$ref": "#"}) | {"required": ["k"]} for i in range(2)]
SAME = [
    {"uniqueItems": True},
    {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#"}}]},
    {"oneOf": [*VARIANTS, {"type": "integer", "minimum": 0}]},
    {"anyOf": [{"minimum": 1}, {"type": "object", "maxProperties": 1}], "uniqueItems": True},
    {"patternProperties": {"a": {"type": "integer"}}, "additionalProperties": False},
    {"items": {"uniqueItems": True}, "additionalProperties": {"uniqueItems": True}},
]


@given(st.sampled_from(SAME), JSON)
def test_verdicts_are_those_of_jsonschema(schema, value):
    assert is_valid(schema, value) == Draft202012Validator(schema).is_valid(value)


# -- what costs too much --------------------------------------------------------------------------


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


SLOW = r"(a|a)*$"
REFERS = [of(a={"$ref": "#/$defs/t"}, k={"const": i}) | {"required": ["k"]} for i in range(3)]
TREE = {"$defs": {"t": {"oneOf": REFERS}}, **of(t={"$ref": "#/$defs/t"})}
HOSTILE = {
    "pattern": (of(x={"pattern": SLOW}), {"x": "a" * 40 + "!"}),
    "classic": (of(x={"pattern": "^([a-z]+)+$"}), {"x": "a" * 40 + "!"}),
    "search": (of(x={"pattern": r"\s+$"}), {"x": " " * 200_000 + "x"}),
    "pattern of names": ({**of(), "propertyNames": {"pattern": SLOW}}, {"a" * 40 + "!": 1}),
    "names by pattern": ({**of(), "patternProperties": {SLOW: False}}, {"a" * 40 + "!": 1}),
    "names of no pattern": (
        {**of(), "additionalProperties": False, "patternProperties": {SLOW: {}}},
        {"a" * 40 + "!": 1},
    ),
    "many patterns": (
        of(x={"items": {"pattern": SLOW}}),
        {"x": ["a" * 40 + "!"] * 1000},
    ),
    "choices in choices": (TREE, {"t": nested(60)}),
}


def cpu_of(schema: dict[str, Any], arguments: dict[str, Any]) -> tuple[str, float]:
    """Return the result of a check in a thread, and the CPU time of this thread that it took."""
    parameters = parameters_from_schema(schema, "f", "here")
    began = time.thread_time()
    try:
        parameters.check_in_thread(arguments)
        error = ""
    except InvalidArguments as e:
        error = str(e)
    return error, time.thread_time() - began


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.timing
def test_a_check_ends_in_time(what):
    """Python's `re`, or jsonschema alone, would take seconds to centuries here."""
    schema, arguments = HOSTILE[what]
    error, seconds = cpu_of(schema, arguments)
    size = len(str(arguments))
    assert seconds < thread_seconds(size) + 0.5
    if what == "classic":
        assert "does not match" in error
    else:
        assert error.startswith("validating them took too long. Use shorter and simpler")
        assert "Expected: f(" in error


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.timing
def test_the_event_loop_is_not_held_up(what):
    schema, arguments = HOSTILE[what]
    parameters = parameters_from_schema(schema, "f", "here")
    began = time.thread_time()
    with pytest.raises((SlowCheck, InvalidArguments)):
        parameters.check(arguments)
    assert time.thread_time() - began < LOOP_SECONDS + 0.03


@pytest.mark.timing
def test_unique_items_are_linear():
    """Of unions as well, which cannot be sorted."""

    def f(items: set[int | str]) -> str:
        """F."""
        return ""

    _, parameters = describe_function(f, "f", bound=False)

    def seconds(count: int) -> float:
        items = [x for i in range(count // 2) for x in (i, str(i))]
        times = []
        for _ in range(3):
            began = time.thread_time()
            parameters.check_in_thread({"items": items})
            times.append(time.thread_time() - began)
        return min(times)

    seconds(100)
    assert seconds(16_000) < 16 * seconds(2_000)  # 8 times the items; 64 times is quadratic
    assert seconds(4_000) < 0.5


def test_unique_items_are_linear_for_colliding_hashes():
    """hash(-1) == hash(-2): lists of these have one hash, and a set of them would be quadratic."""
    items = [[-1 - (i >> bit & 1) for bit in range(12)] for i in range(4096)]
    began = time.thread_time()
    assert is_valid({"uniqueItems": True}, items)
    assert not is_valid({"uniqueItems": True}, [*items, items[7]])
    assert time.thread_time() - began < 1.0


class Point(BaseModel):
    x: int = Field(ge=0)
    y: int = Field(0, ge=0)
    kind: Literal["a", "b"] = "a"


def test_long_arguments_that_are_valid_pass():
    def f(points: list[Point], shares: dict[str, Annotated[int, Field(ge=0)]]) -> str:
        """F."""
        return ""

    _, parameters = describe_function(f, "f", bound=False)
    arguments = {
        "points": [{"x": i, "y": 2, "kind": "b"} for i in range(5000)],
        "shares": {str(i): i for i in range(5000)},
    }
    with pytest.raises(SlowCheck):
        parameters.check(arguments)
    checked = parameters.check_in_thread(arguments)
    assert checked["points"][4999] == Point(x=4999, y=2, kind="b")
    gc.collect()  # A collection while `check` runs would use up its time.
    small = {"points": arguments["points"][:3], "shares": {}}
    assert len(parameters.check(small)["points"]) == 3
    wrong = {**arguments, "shares": {str(i): -i for i in range(1000, 6000)}}
    message = "'shares.1000' must be at least 0, got -1000; 'shares.1001' "
    with pytest.raises(InvalidArguments, match=re.escape(message)):
        parameters.check_in_thread(wrong)


def test_only_long_arguments_are_validated_off_the_event_loop():
    parameters = parameters_from_schema(of(text={"type": "string", "pattern": "^a*$"}), "f", "f")
    longest = {"text": "a" * (LOOP_BYTES - len('{"text":""}'))}
    assert parameters.check(longest) == longest
    with pytest.raises(SlowCheck):
        parameters.check({"text": longest["text"] + "a"})


def test_arguments_nested_beyond_the_recursion_limit():
    wrapped: dict[str, Any] = {"$ref": "#/$defs/t"}
    for _ in range(20):
        wrapped = {"allOf": [wrapped]}
    schema = {"$defs": {"t": of(a=wrapped)}, **of(a={"$ref": "#/$defs/t"})}
    error, _ = cpu_of(schema, nested(MAX_DEPTH - 1))
    assert error == "they are nested too deeply. Expected: f(a: any = ...)"


# -- on a server ----------------------------------------------------------------------------------

TOOLS = '''
from decimal import Decimal
from typing import Annotated
from pydantic import Field
from agentrl import tool

@tool
async def good(text: str) -> str:
    """Good."""
    return text

@tool(timeout=2)
async def word(text: Annotated[str, Field(json_schema_extra={"pattern": r"(a|a)*$"})]) -> str:
    """Take a word."""
    return text

@tool
def unique(items: set[int | str]) -> str:
    """Count."""
    return str(len(items))
'''


@pytest.mark.load
async def test_a_slow_validation_does_not_delay_other_episodes(tmp_path):
    """A real server: hostile calls fail with a text for the model, good ones are answered."""
    file = tmp_path / "tools.py"
    file.write_text(TOOLS)
    url, token, server = serve_in_background([str(file)])
    box = HttpToolbox(url, token)
    sample = Sample("s", (), tools=("good", "word", "unique"))
    episodes = [f"e{i}" for i in range(9)]
    mixed = [x for i in range(2000) for x in (i, str(i))]
    hostile = [ToolCall("word", {"text": "a" * 40 + "!"}), ToolCall("unique", {"items": mixed})]
    try:
        for episode in episodes:
            await box.open(episode, sample)
        began = time.monotonic()
        working = asyncio.gather(*(box.run(hostile, e, 0) for e in episodes[1:]))
        waits = []
        while not working.done():
            start = time.monotonic()
            call = ToolCall("good", {"text": "x"})
            async with asyncio.timeout(15):
                [result] = await box.run([call], episodes[0], len(waits))
            waits.append(time.monotonic() - start)
            assert result.content == "x"
        assert time.monotonic() - began < 15
        for refused, counted in working.result():
            assert (refused.error, counted.content) == ("schema", "4000")
            assert "took too long" in refused.content
        assert len(waits) > 10 and sorted(waits)[len(waits) // 2] < 0.2
        page = httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {token}"}).text
        assert 'agentrl_tool_calls_total{outcome="schema",tool="word"} 8.0' in page
    finally:
        await box.aclose()
        server.stop()


# -- what its own code raises ---------------------------------------------------------------------


def raising(kind: type[BaseException]) -> Any:
    def check(value: str) -> str:
        raise kind("postgres://root:hunter2@db")

    return Annotated[str, AfterValidator(check)]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (OSError, "Error: the tool failed: OSError"),
        (ToolError, "Error: postgres://root:hunter2@db"),
    ],
)
@pytest.mark.parametrize("length", [1, 100_000])
async def test_a_type_that_raises_is_a_tool_that_failed(caplog, kind, message, length):
    def f(text, n=1):
        """F."""

    f.__annotations__ = {"text": raising(kind), "n": Annotated[int, Field(ge=0)]}
    tool(f)
    box = LocalToolbox()
    await box.open("e", Sample("s", (), tools=("f",)))
    with caplog.at_level(logging.ERROR):
        [result] = await box.run([ToolCall("f", {"text": "x" * length, "n": 3})], "e", 0)
    assert result.content == message
    assert ("hunter2" in caplog.text) == (kind is OSError)
    await box.aclose()


async def test_a_type_whose_service_is_down(monkeypatch):
    def f(text):
        """F."""

    f.__annotations__ = {"text": raising(Infrastructure)}
    tool(f)
    box = LocalToolbox()
    await box.open("e", Sample("s", (), tools=("f",)))
    with pytest.raises(ToolServerError):
        await box.run([ToolCall("f", {"text": "x"})], "e", 0)
    await box.aclose()


# -- what is refused at once ----------------------------------------------------------------------

REFUSED = [
    ({**of(), "unevaluatedProperties": False}, "unevaluatedProperties is not supported"),
    (of(x={"unevaluatedItems": False}), "unevaluatedItems is not supported"),
    (
        of(x={"$ref": "http://127.0.0.1:9/s.json"}),
        "points outside the schema, and agentrl downloads nothing",
    ),
    (of(x={"$ref": "#/$defs/none"}), "'#/$defs/none' does not exist"),
    (of(x={"$schema": "http://json-schema.org/draft-07/schema#"}), "are allowed at the root only"),
    (of(x={"$id": "http://x/y"}), "are allowed at the root only"),
    ({**of(), "$ref": "#"}, r"a \$ref points to itself"),
    (of(x={"pattern": "("}), "'\\('.* is not a 'regex'"),
]


@pytest.mark.parametrize(("schema", "why"), REFUSED)
def test_schemas_that_are_refused(schema, why):
    with pytest.raises(UserError, match=re.sub(r"([$#])", r"\\\1", why.replace("\\$", "$"))):
        parameters_from_schema(schema, "f", "here")


def test_the_schema_key_at_the_root_is_ignored():
    """Exporters write it. It would bring back that draft's own validator, without a time limit."""
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **of(a={"$ref": "#"}, x={"pattern": SLOW}),
    }
    parameters = parameters_from_schema(schema, "f", "here")
    assert parameters.schema == schema
    with pytest.raises(InvalidArguments, match="took too long"):
        parameters.check_in_thread({"a": {"a": {"x": "a" * 40 + "!"}}})


def test_properties_named_like_keywords():
    schema = of(
        pattern={"type": "string"},
        unevaluatedItems={"const": {"$ref": "http://x", "pattern": "("}},
        **{"$schema": {"enum": [{"$id": 1}]}},
    )
    assert parameters_from_schema(schema, "f", "here").check(
        {"pattern": "(", "$schema": {"$id": 1}}
    )


class ByPython(BaseModel):
    model_config = ConfigDict(regex_engine="python-re")
    text: str = Field(pattern="^(a+)+$")


@pytest.mark.parametrize(
    "annotation",
    [
        Annotated[str, Field(pattern=re.compile("^(a+)+$"))],
        list[ByPython],
        dict[str, ByPython | None],
    ],
)
def test_patterns_that_pydantic_would_search_by_re_are_refused(annotation):
    def f(x):
        """F."""

    f.__annotations__ = {"x": annotation}
    with pytest.raises(UserError, match=r"'\^\(a\+\)\+\$' would be matched by Python's `re`"):
        describe_function(f, "f", bound=False)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (r"^(?=.*\d)", "look-around, including look-ahead and look-behind, is not supported"),
        (r"(a)\1", "backreferences are not supported"),
        ("[", "unclosed character class"),
    ],
)
def test_patterns_that_pydantic_does_not_support_are_refused(pattern, reason):
    def f(x):
        """F."""

    f.__annotations__ = {"x": list[Annotated[str, Field(pattern=pattern)]]}
    with pytest.raises(UserError, match="the tool function 'f' ") as e:
        describe_function(f, "f", bound=False)
    assert reason in str(e.value) and "Field(json_schema_extra={'pattern':" in str(e.value)


def test_a_look_around_pattern_in_json_schema_extra_is_searched():
    def f(x):
        """F."""

    f.__annotations__ = {"x": Annotated[str, Field(json_schema_extra={"pattern": r"^(?=.*\d)"})]}
    _, parameters = describe_function(f, "f", bound=False)
    assert parameters.check({"x": "a1"}) == {"x": "a1"}
    with pytest.raises(InvalidArguments, match="does not match"):
        parameters.check({"x": "a"})


def test_a_pydantic_type():
    def f(amount: Decimal) -> str:
        """F."""
        return ""

    _, parameters = describe_function(f, "f", bound=False)
    assert parameters.check({"amount": "1.50"}) == {"amount": Decimal("1.50")}
    began = time.thread_time()
    with pytest.raises(InvalidArguments):
        parameters.check_in_thread({"amount": "0" * 200_000 + "x"})
    assert time.thread_time() - began < 5
