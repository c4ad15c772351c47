"""Each format as a table of hostile turns (`fixtures/hostile_*.json`), and what always holds."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.calls_in_jinja import PYTHONIC, with_calls
from support.examples import examples
from support.families import family_tokenizer
from support.hostile_turns import hostile_turns
from support.storable_calls import assert_storable

from agentrl.chat import ChatTemplate
from agentrl.chat.formats import FORMATS, cast_arguments, parse_hermes
from agentrl.chat.formats.detect import detect_format, explain_unknown_format, open_reader
from agentrl.chat.formats.scan import MAX_CALLS
from agentrl.chat.formats.strict_json import MAX_RAW
from agentrl.config.sections import TOOL_FORMATS
from agentrl.errors import TemplateError
from agentrl.trajectory import ToolCall

NAMES = ("glm", "hermes", "llama_json", "llama_pythonic", "qwen3_coder")
TAGGED = ("glm", "hermes", "qwen3_coder")


def text_of(case):
    """Cases that repeat a text do so up to this length."""
    text = case["text"]
    while len(text) < (length := case.get("repeat_to", 0)):
        text = (text + case["repeat"] * length)[:length]
    return text


@pytest.mark.parametrize(("name", "case"), list(hostile_turns(NAMES)))
@pytest.mark.timing
def test_hostile_turns_are_parsed_as_in_the_table(name, case):
    text = text_of(case)
    began = time.process_time()
    calls = FORMATS[name](text)
    assert time.process_time() - began < 0.5  # a tenth of that on a quiet machine
    expected = [call for call in case["calls"] for _ in range(call.get("times", 1))]
    assert len(calls) == len(expected), calls[:3]
    for call, wanted in zip(calls, expected, strict=True):
        assert call.name == wanted["name"], call
        if "error" in wanted:
            assert wanted["error"] in call.error and isinstance(call.arguments, str), call
            assert len(call.arguments) < MAX_RAW + 40
        else:
            assert (call.arguments, call.error) == (wanted["arguments"], ""), call


def test_every_table_is_long_and_has_every_kind_of_outcome():
    for name in NAMES:
        cases = [p.values[1] for p in hostile_turns(NAMES) if p.values[0] == name]
        assert len(cases) == len({case["name"] for case in cases}) >= 19
        assert any(not case["calls"] for case in cases)
        mixed = [{"error" in call for call in case["calls"]} for case in cases]
        assert {True} in mixed and {False} in mixed and {True, False} in mixed


# -- rendering ----------------------------------------------------------------------------------


def render(name: str, calls: list[dict[str, Any]]) -> str:
    """Calls as a model writes them that has learned the format."""
    return _SEPARATOR[name].join(map(_RENDER[name], calls)).join(_AROUND.get(name, ("", "")))


def hermes(call):
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def llama_json(call):
    return json.dumps({"name": call["name"], "parameters": call["arguments"]}, ensure_ascii=False)


def llama_pythonic(call):
    return f"{call['name']}({', '.join(f'{k}={v!r}' for k, v in call['arguments'].items())})"


def qwen3_coder(call):
    values = (
        f"<parameter={k}>\n{as_text(v)}\n</parameter>\n" for k, v in call["arguments"].items()
    )
    return f"<tool_call>\n<function={call['name']}>\n{''.join(values)}</function>\n</tool_call>"


def glm(call):
    values = (
        f"<arg_key>{k}</arg_key>\n<arg_value>{as_text(v)}</arg_value>\n"
        for k, v in call["arguments"].items()
    )
    return f"<tool_call>{call['name']}\n{''.join(values)}</tool_call>"


def as_text(value):
    return value if isinstance(value, str) else json.dumps(value)


_RENDER = {"hermes": hermes, "llama_json": llama_json, "llama_pythonic": llama_pythonic,
           "qwen3_coder": qwen3_coder, "glm": glm}  # fmt: skip
_SEPARATOR = dict.fromkeys(NAMES, "\n") | {"llama_json": "; ", "llama_pythonic": ", "}
_AROUND = {"llama_pythonic": ("[", "]")}

# Where nothing escapes a value, it cannot hold the format's own tags; `</tool_call>` it can.
UNTYPED_TAGS = ("<tool_call>", "<function=", "<parameter=", "</parameter>", "<arg_key>",
                "<arg_value>", "</arg_value>")  # fmt: skip
FRAGMENTS = (
    "<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "c"', '"parameters": {', "}",
    "{", '"', "'", "\\", "[", "]", "(", ")", ",", ";", "\n", " ", "=", ":", "c", "1", "é", "f(a=",
    "<function=f>", "</function>", "<parameter=a>", "</parameter>", "<arg_key>", "</arg_key>",
    "<arg_value>", "</arg_value>", "<|python_tag|>", "<|python_start|>", "<|python_end|>", "\ud800",
)  # fmt: skip

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
texts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.lists(st.sampled_from(FRAGMENTS[:-1]), max_size=5).map("".join),
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
)
values = st.recursive(
    st.one_of(scalars, texts),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(texts, v, max_size=3),
    max_leaves=6,
)


def lists_of_calls(name, least=1):
    def plain(value):
        return not has(as_text(value), UNTYPED_TAGS)

    value = values.filter(plain) if name in ("glm", "qwen3_coder") else values
    arguments = st.dictionaries(names, value, max_size=3)
    call = st.fixed_dictionaries({"name": names, "arguments": arguments})
    # What a schema types by name, it types the same in all calls: give each call its own name.
    return st.lists(call, min_size=least, max_size=3, unique_by=lambda c: str(c["name"]))


def schemas_of(calls):
    """The tools that were called, with the types of the arguments they got."""
    types = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array",
             dict: "object", type(None): "null"}  # fmt: skip
    for call in calls:
        properties = {k: {"type": types[type(v)]} for k, v in call["arguments"].items()}
        parameters = {"type": "object", "properties": properties}
        function = {"name": call["name"], "description": "", "parameters": parameters}
        yield {"type": "function", "function": function}


def read(name, text, calls=()):
    return cast_arguments(FORMATS[name](text), list(schemas_of(calls)))


def exactly(calls):
    return [ToolCall(call["name"], call["arguments"]) for call in calls]


# -- what always holds --------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@examples(100)
@given(data=st.data())
def test_rendered_calls_are_parsed_exactly(name, data):
    calls = data.draw(lists_of_calls(name))
    before = data.draw(st.sampled_from(["", "<think>I <tool_call> [f(</think>\n"]))
    assert read(name, before + render(name, calls), calls) == exactly(calls)


@pytest.mark.parametrize("name", NAMES)
@examples(30)
@given(data=st.data())
def test_a_cut_turn_yields_no_call_that_was_not_complete(name, data):
    calls = data.draw(lists_of_calls(name))
    text = render(name, calls)
    around = len(_AROUND.get(name, ("", ""))[0])
    ends = [around + len(_SEPARATOR[name].join(map(_RENDER[name], calls[: i + 1])))
            for i in range(len(calls))]  # fmt: skip
    for cut in range(len(text)):
        # The thought is over: a `</think>` in a call that was cut off cannot mean anything before.
        parsed = read(name, "<think></think>" + text[:cut], calls)
        complete = sum(end <= cut for end in ends)
        assert [c for c in parsed if not c.error] == exactly(calls[:complete])
        begun = text[ends[complete - 1] if complete else 0 : cut].strip(" \n;,")
        tries = begun.count("<tool_call>") if name in TAGGED else bool(begun)
        assert bool(tries) <= sum(bool(c.error) for c in parsed) <= max(tries, 1)


@pytest.mark.parametrize("name", NAMES)
@examples(200)
@given(text=st.one_of(st.text(max_size=50), st.lists(st.sampled_from(FRAGMENTS), max_size=40)
                      .map("".join)))  # fmt: skip
def test_no_text_raises_or_returns_calls_that_cannot_be_stored(name, text):
    calls = FORMATS[name](text)
    assert len(calls) <= MAX_CALLS + 1
    assert_storable(cast_arguments(calls, []))


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("llama_json", '{"name": "add", "parameters": {"a": 1}}'),
        ("llama_pythonic", "[add(a=1)]"),
    ],
)
def test_a_call_after_many_thoughts_is_read(name, call):
    [read] = FORMATS[name]("<think>so</think>" * 10_000 + call)
    assert (read.name, read.arguments, read.error) == ("add", {"a": 1}, "")


@pytest.mark.parametrize("name", NAMES)
@examples(100)
@given(data=st.data())
def test_no_thought_is_a_call(name, data):
    marks = ("</think>", "<|python_")  # which could end the thought, or begin a call in prose
    calls = data.draw(lists_of_calls(name).filter(lambda c: not has(render(name, c), marks)))
    thought = render(name, calls)
    assert FORMATS[name](f"<think>{thought}</think>Done.") == []
    assert all(call.error for call in FORMATS[name](f"<think>{thought}"))
    assert FORMATS[name](f"I may {thought} so</think>Done.") == []
    again = FORMATS[name](f"<think>{thought}</think>{thought}")
    assert cast_arguments(again, list(schemas_of(calls))) == exactly(calls)


BAD = (
    "<tool_call>",
    "<tool_call>{]</tool_call>",
    "<tool_call>\n<function=f>\n<parameter=a>\n</tool_call>",
)


@pytest.mark.parametrize("name", TAGGED)
@examples(100)
@given(data=st.data())
def test_good_calls_next_to_bad_ones_are_kept(name, data):
    calls = data.draw(lists_of_calls(name))
    bad = data.draw(st.sampled_from(BAD))
    rendered = render(name, calls)
    for text in (bad + rendered, rendered + bad, bad + rendered + bad):
        parsed = read(name, text, calls)
        assert [c for c in parsed if not c.error] == exactly(calls)
        assert any(c.error for c in parsed)


def has(text, marks):
    return any(mark in text for mark in marks)


def units():
    """Parts of very long inputs: each fragment, and pairs after which a parser reads on."""
    yield from FRAGMENTS
    for opening in ("<tool_call>", "<tool_call>{", '{"name":', "[f(a=", "<function=f>", "\n{"):
        yield from (opening + fragment for fragment in FRAGMENTS)


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("glm", "hermes") else pytest.param(name, marks=pytest.mark.slow)
        for name in NAMES
    ],
)
def test_parsing_takes_linear_time(name):
    """100 kB of anything; the bound is several times what a quiet machine needs."""
    starts = ("", "<tool_call>", "<tool_call>\n<function=f>\n<parameter=a>", "[f(a=", '{"name":1')
    nested = ("", "<tool_call>{" * 33, '\n{"name":1' * 33, "<tool_call>f<arg_key>a</arg_key>" * 33)
    for unit in units():
        for start in (*starts, *nested[1:]):
            text = start + unit * (100_000 // len(unit))
            best = 9.0
            for _ in range(3):
                began = time.process_time()
                FORMATS[name](text)
                best = min(best, time.process_time() - began)
                if best < 0.05:
                    break
            assert best < 0.15, (start[:20], unit)


# -- the templates ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "name"),
    [("qwen2_5", "hermes"), ("qwen3", "hermes"), ("qwen3_5_think", "qwen3_coder"),
     ("glm4moe", "glm"), ("deepseekv3", "deepseek"), ("gptoss", "gpt_oss"), ("gemma4", "gemma"),
     ("llama3_1", "llama_json"), ("llama3_2", "llama_json"), ("mistral_v3", "mistral"),
     ("nemotron_3_nano", "qwen3_coder"), ("chatml", "hermes")],
)  # fmt: skip
def test_the_template_names_its_format(family, name):
    """By a call that it writes and that the format's parser reads; ChatML's by a mark."""
    assert detect_format(ChatTemplate(family_tokenizer(family))) == name


ARGUMENTS = "{{ call.function.arguments | tojson }}"
SOLAR = "<|tool_call:begin|>{{ call.function.name }}<|tool_call:args|>" + ARGUMENTS
SCREAM = "CALL {{ call.function.name }} WITH " + ARGUMENTS
HERMES = (
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": ' + ARGUMENTS + "}</tool_call>"
)


def test_a_format_that_no_parser_reads_has_no_name():
    assert detect_format(with_calls(HERMES)) == "hermes"
    for written, shown in ((SOLAR, "the format of Solar"), (SCREAM, "'CALL probe WITH")):
        template = with_calls(written)
        assert detect_format(template) == ""
        why = explain_unknown_format(template)
        assert shown in why and "agent_name=react" in why and "hermes, hunyuan" in why


def test_a_format_without_a_parser_is_refused_if_tools_are_shown():
    """A run would otherwise train on calls that never ran."""
    read = open_reader("auto", with_calls(SOLAR))
    assert read("What is it?", []) == []
    with pytest.raises(TemplateError, match="the format of Solar"):
        read("What is it?", [{"type": "function", "function": {"name": "f"}}])
    hermes = open_reader("hermes", with_calls(SOLAR))
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert hermes(text, []) == parse_hermes(text)


def test_values_between_quotes_get_the_types_of_the_schema():
    """Some templates of Llama's Python format put every value between quotes."""
    template = with_calls(PYTHONIC)
    assert detect_format(template) == "llama_pythonic"
    arguments = {"text": "3", "count": 3, "ratio": 0.5, "on": True, "none": None,
                 "items": [1, "one"], "point": {"x": None}, "lines": "a\nb"}  # fmt: skip
    calls = [{"name": "f", "arguments": arguments}]
    turn = {"role": "assistant", "content": "", "tool_calls": [{"function": calls[0]}]}
    schemas = list(schemas_of(calls))
    shown = template.render([{"role": "user", "content": "Q"}, turn], schemas, as_prompt=False)
    text = shown.rpartition("<|im_start|>assistant\n")[2].partition("<|im_end|>")[0]
    assert text.startswith('[f(text="3", count="3", ratio="0.5", on="True"')
    assert open_reader("auto", template)(text, schemas) == exactly(calls)


def test_the_config_takes_the_formats_that_can_be_read():
    assert sorted(TOOL_FORMATS) == sorted(["auto", "hf", *FORMATS])


def test_every_format_has_marks_of_its_own():
    marks = [mark for format in FORMATS.values() for mark in format.marks]
    assert all(format.marks for format in FORMATS.values())
    assert len(set(marks)) == len(marks)
