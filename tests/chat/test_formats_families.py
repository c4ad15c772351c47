"""Formats of single families: hostile turns (`fixtures/hostile_*.json`), and what always holds."""

from __future__ import annotations

import json
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.calls_in_jinja import template_with
from support.examples import examples
from support.family_calls import (
    CALLS_IN_JINJA,
    DSML,
    OPENAI,
    jinja,
)
from support.hostile_turns import hostile_turns
from support.storable_calls import assert_storable

from agentrl.chat.formats import FORMATS, cast_arguments
from agentrl.chat.formats.detect import detect_format, open_reader
from agentrl.chat.formats.scan import MAX_CALLS
from agentrl.chat.formats.strict_json import MAX_RAW
from agentrl.trajectory import ToolCall

# -- turns as the models write them ----------------------------------------------------------------


def as_json(value):
    return json.dumps(value, ensure_ascii=False)


def as_text(value):
    return value if isinstance(value, str) else as_json(value)


def json_list(opening, closing, call):
    return lambda calls: opening + as_json([call(n, a) for n, a in calls]) + closing


def json_objects(opening, closing, call, all_in_one=False):
    if all_in_one:
        return lambda calls: (
            opening + "".join(as_json(call(n, a)) + "\n" for n, a in calls) + closing
        )
    return lambda calls: "".join(opening + as_json(call(n, a)) + closing for n, a in calls)


def openai(name, arguments):
    return {"name": name, "arguments": arguments}


def cohere(name, arguments):
    return {"tool_call_id": "0", "tool_name": name, "parameters": arguments}


def kimi(calls):
    return (
        "<|tool_calls_section_begin|>"
        + "".join(
            f"<|tool_call_begin|>functions.{n}:{i}<|tool_call_argument_begin|>{as_json(a)}"
            "<|tool_call_end|>"
            for i, (n, a) in enumerate(calls)
        )
        + "<|tool_calls_section_end|>"
    )


def between_tags(section, call, value, call_end):
    def render(calls):
        body = "\n".join(
            call.format(n)
            + "\n"
            + "".join(value.format(k, as_text(v)) + "\n" for k, v in a.items())
            + call_end
            for n, a in calls
        )
        return f"<{section}>\n{body}\n</{section}>"

    return render


def dsml(section):
    def value(key, v):
        is_string = "true" if isinstance(v, str) else "false"
        opening = f'<{DSML}parameter name="{key}" string="{is_string}">'
        return f"{opening}{as_text(v)}</{DSML}parameter>\n"

    def render(calls):
        body = "\n".join(
            f'<{DSML}invoke name="{n}">\n'
            + "".join(value(k, v) for k, v in a.items())
            + f"</{DSML}invoke>"
            for n, a in calls
        )
        return f"<{DSML}{section}>\n{body}\n</{DSML}{section}>"

    return render


def muse(calls):
    one = between_tags(
        "atem:function_calls",
        '<atem:invoke name="{}">',
        '<atem:parameter name="{}">{}</atem:parameter>',
        "</atem:invoke>",
    )
    messages = (f" to={n}<|message|>{one([(n, a)])}" for n, a in calls)
    return "<|eom|><|start|>assistant".join(messages)


def braced(calls):
    def written(value):
        if isinstance(value, str):
            return f"<escape>{value}<escape>"
        if isinstance(value, list):
            return f"[{','.join(map(written, value))}]"
        if isinstance(value, dict):
            return "{" + ",".join(f"{written(k)}:{written(v)}" for k, v in value.items()) + "}"
        return as_json(value)

    return "".join(
        f"<start_function_call>call:{n}{{"
        + ",".join(f"{k}:{written(v)}" for k, v in a.items())
        + "}<end_function_call>"
        for n, a in calls
    )


def pythonic(calls):
    written = (f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in calls)
    return f"<|tool_call_start|>[{', '.join(written)}]<|tool_call_end|>"


HUNYUAN = ("<tool_call>{}<tool_sep>", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>")
RENDER = {
    "apertus": json_list("<|tools_prefix|>", "<|tools_suffix|>", lambda n, a: {n: a}),
    "cohere_command": json_list("<|START_ACTION|>", "<|END_ACTION|>", cohere),
    "deepseek_v32": dsml("function_calls"),
    "deepseek_v4": dsml("tool_calls"),
    "functiongemma": braced,
    "gigachat3": json_objects("<|function_call|>", "", openai),
    "granite": json_list("<|tool_call|>", "", openai),
    "hunyuan": between_tags("tool_calls", *HUNYUAN, "</tool_call>"),
    "hunyuan_a13b": json_list("<tool_calls>", "</tool_calls>", openai),
    "internlm": json_objects("<|action_start|><|plugin|>\n", "<|action_end|>", openai),
    "kimi_k2": kimi,
    "lfm2": pythonic,
    "minimax_m1": json_objects("<tool_calls>\n", "</tool_calls>", openai, all_in_one=True),
    "minimax_m2": between_tags(
        "minimax:tool_call",
        '<invoke name="{}">',
        '<parameter name="{}">{}</parameter>',
        "</invoke>",
    ),
    "muse": muse,
    "phi4_mini": json_list("<|tool_call|>", "<|/tool_call|>", openai),
    "seed_oss": between_tags(
        "seed:tool_call", "<function={}>", "<parameter={}>{}</parameter>", "</function>"
    ),
}
THINK = dict.fromkeys(RENDER, ("<think>", "</think>")) | {
    "cohere_command": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
}
OPENING = {
    "apertus": "<|tools_prefix|>",
    "cohere_command": "<|START_ACTION|>",
    "deepseek_v32": f"<{DSML}function_calls>",
    "deepseek_v4": f"<{DSML}tool_calls>",
    "functiongemma": "<start_function_call>",
    "gigachat3": "<|function_call|>",
    "granite": "<|tool_call|>",
    "hunyuan": "<tool_calls>",
    "hunyuan_a13b": "<tool_calls>",
    "internlm": "<|action_start|>",
    "kimi_k2": "<|tool_calls_section_begin|>",
    "lfm2": "<|tool_call_start|>",
    "minimax_m1": "<tool_calls>",
    "minimax_m2": "<minimax:tool_call>",
    "muse": "<atem:function_calls>",
    "phi4_mini": "<|tool_call|>",
    "seed_oss": "<seed:tool_call>",
}
UNTYPED = ("functiongemma", "hunyuan", "minimax_m2", "muse", "seed_oss")
TAGGED = ("hunyuan", "minimax_m2", "muse", "seed_oss", "deepseek_v32", "deepseek_v4")
# What no value between tags can hold, for nothing escapes it.
TAGS = ("<parameter", "</parameter>", "<invoke ", "<function=", "<tool_call>", "<arg_key>",
        "<arg_value>", "</arg_value>", "<atem:invoke ", "<atem:parameter ", "</atem:parameter>",
        f"<{DSML}invoke ", f"<{DSML}parameter ", f"</{DSML}parameter>")  # fmt: skip


def text_of(case):
    text, length = case["text"], case.get("repeat_to", 0)
    return (
        (text + case["repeat"] * (length // len(case["repeat"]) + 1))[:length] if length else text
    )


@pytest.mark.parametrize(("name", "case"), list(hostile_turns(RENDER)))
@pytest.mark.timing
def test_hostile_turns_are_parsed_as_in_the_table(name, case):
    text = text_of(case)
    calls = FORMATS[name](text)
    expected = [call for call in case["calls"] for _ in range(call.get("times", 1))]
    assert len(calls) == len(expected), calls[:3]
    for call, wanted in zip(calls, expected, strict=True):
        if "error" in wanted:
            assert call.error and wanted["error"] in call.error, call
            assert wanted["name"] in ("", call.name), call
            assert isinstance(call.arguments, str) and len(call.arguments) < MAX_RAW + 40
        else:
            assert call == ToolCall(wanted["name"], wanted["arguments"], id=wanted.get("id", ""))
    assert seconds(FORMATS[name], text) < 0.1 * max(1, len(text) / 100_000)


def seconds(parse, text):
    best = 9.0
    for _ in range(3):
        began = time.process_time()
        parse(text)
        best = min(best, time.process_time() - began)
    return best


def test_every_format_has_a_long_table_with_every_kind_of_outcome():
    for name in RENDER:
        cases = [p.values[1] for p in hostile_turns(RENDER) if p.values[0] == name]
        assert len(cases) == len({case["name"] for case in cases}) >= 40
        kinds = [{"error" in call for call in case["calls"]} for case in cases]
        assert {True} in kinds and {False} in kinds and {True, False} in kinds and set() in kinds


# -- what always holds -----------------------------------------------------------------------------

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,8}[A-Za-z0-9]", fullmatch=True).filter(
    lambda name: name[: len(name) // 2] * 2 != name.replace(".", "", 1) and name != "self"
)
keys = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
FRAGMENTS = (
    "<think>", "</think>", "<|START_THINKING|>", "<|END_THINKING|>", "<seed:think>",
    "</seed:think>", "<|tool_call|>", "<|/tool_call|>", "functools[", "<tool_call>", "</tool_call>",
    "<tool_calls>", "</tool_calls>", "<tool_sep>", "<arg_key>a</arg_key>", "<arg_value>",
    "</arg_value>", "<|START_ACTION|>", "<|END_ACTION|>", "<|tools_prefix|>", "<|tools_suffix|>",
    "<|action_start|>", "<|plugin|>", "<|action_end|>", "<|function_call|>",
    "function call<|role_sep|>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
    "<|tool_call_begin|>", "functions.f:0", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="f">', "</invoke>",
    '<parameter name="a">', "</parameter>", "<seed:tool_call>", "</seed:tool_call>", "<function=f>",
    "<parameter=a>", "</function>", f"<{DSML}function_calls>", f"<{DSML}tool_calls>",
    f'<{DSML}invoke name="f">', f'<{DSML}parameter name="a" string="false">',
    f"</{DSML}parameter>", f"</{DSML}invoke>", f"</{DSML}tool_calls>", "<|tool_call_start|>",
    " to=f", "<|message|>", "<|start|>", "<|eom|>", "<atem:function_calls>",
    '<atem:invoke name="f">', "</atem:invoke>", "</atem:function_calls>",
    "<start_function_call>", "<end_function_call>", "call:f{a:1", "call:f{}",
    '{"name": "f", "arguments": {}}', '{"f": {}}', "[f(a=1)]", "[", "]", "{", "}", '{"a":', "1",
    '"', "'", "\\", ",", " ", "\n", "é",
)  # fmt: skip
texts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.lists(st.sampled_from(FRAGMENTS), max_size=4).map("".join),
)
values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**64 - 1),
        st.floats(allow_nan=False, allow_infinity=False),
        texts,
    ),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(texts, v, max_size=3),
    max_leaves=6,
)


def has(value, tags):
    text = as_text(value)
    return any(tag in text for tag in tags)


def lists_of_calls(name):
    plain = values.filter(lambda v: not has(v, TAGS)) if name in TAGGED else values
    call = st.tuples(names, st.dictionaries(keys, plain, max_size=3))
    return st.lists(call, min_size=1, max_size=3, unique_by=lambda c: c[0])


def read(name, text, calls):
    parsed = FORMATS[name](text)
    return cast_arguments(parsed, schemas_of(calls)) if name in UNTYPED else parsed


def schemas_of(calls):
    types = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array",
             dict: "object", type(None): "null"}  # fmt: skip
    return [
        {
            "type": "function",
            "function": {
                "name": n,
                "parameters": {"properties": {k: {"type": types[type(v)]} for k, v in a.items()}},
            },
        }
        for n, a in calls
    ]


def exact(calls):
    """With types told apart: 1, 1.0 and true are equal in Python."""
    return [json.dumps([n, a], sort_keys=True) for n, a in calls]


EVERY_FORMAT = pytest.mark.parametrize("name", RENDER)


@EVERY_FORMAT
@examples(40)
@given(data=st.data())
def test_rendered_calls_are_parsed_exactly(name, data):
    calls = data.draw(lists_of_calls(name))
    think, end = THINK[name]
    before = data.draw(st.sampled_from(["", f"{think}I {OPENING[name]} so{end}\n"]))
    if name == "muse":
        before = before and f" to=self<|message|>I {OPENING[name]} so<|eom|><|start|>assistant"
    text = before + RENDER[name](calls)
    parsed = read(name, text, calls)
    assert [call.error for call in parsed] == [""] * len(calls)
    assert exact((c.name, c.arguments) for c in parsed) == exact(calls)
    spans = [call.span for call in parsed]
    assert all(n in text[a:b] for (a, b), (n, _) in zip(spans, calls, strict=True))
    assert all(left[1] <= right[0] for left, right in pairwise(spans))


@EVERY_FORMAT
@examples(8)
@given(data=st.data())
def test_a_turn_cut_anywhere_has_whole_calls_or_errors(name, data):
    calls = data.draw(lists_of_calls(name))
    text = RENDER[name](calls)
    # The thought is over: what ends one in a call that was cut off cannot mean anything before.
    begun = "" if name == "muse" else "".join(THINK[name])
    for cut in range(len(text)):
        parsed = read(name, begun + text[:cut], calls)
        good = [(c.name, c.arguments) for c in parsed if not c.error]
        assert exact(good) == exact(calls[: len(good)])
        assert all(call.error for call in parsed[len(good) :]), "only what follows can be cut"
        if text[:cut].endswith(OPENING[name]):
            assert parsed[-1].error, "a call that was begun is not silent"


@EVERY_FORMAT
@examples(80)
@given(text=st.text(max_size=50) | st.lists(st.sampled_from((*FRAGMENTS, "\ud800")), max_size=30)
       .map("".join))  # fmt: skip
def test_no_text_raises_or_returns_calls_that_cannot_be_stored(name, text):
    calls = FORMATS[name](text)
    assert len(calls) <= MAX_CALLS + 1
    assert_storable(cast_arguments(calls, []))
    spans = [call.span for call in calls if call.span]
    assert all(0 <= a <= b <= len(text) for a, b in spans)
    assert all(left[1] <= right[0] for left, right in pairwise(spans))


@EVERY_FORMAT
@examples(20)
@given(data=st.data())
def test_no_thought_is_a_call(name, data):
    think, end = THINK[name]
    calls = data.draw(
        lists_of_calls(name).filter(lambda c: not has(RENDER[name](c), (think, end, "<|eom|>")))
    )
    thought = RENDER[name](calls)
    if name == "muse":
        thought = thought.replace("<|eom|>", "")
        assert FORMATS[name](f" to=self<|message|>{thought}<|eom|>") == []
        return
    assert FORMATS[name](f"{think}{thought}{end}Done.") == []
    assert FORMATS[name](f"I may {thought} so{end}Done.") == []
    assert all(call.error for call in FORMATS[name](f"{think}{thought}"))
    again = read(name, f"{think}{thought}{end}{thought}", calls)
    assert exact((c.name, c.arguments) for c in again) == exact(calls)


@EVERY_FORMAT
@examples(12)
@given(data=st.data())
@pytest.mark.timing
def test_hundred_kilobytes_of_fragments_take_no_time(name, data):
    pieces = st.sampled_from(FRAGMENTS)
    lead = OPENING[name] + "".join(data.draw(st.lists(pieces, max_size=5)))
    unit = "".join(data.draw(st.lists(pieces, min_size=1, max_size=5)))
    assert seconds(FORMATS[name], lead + unit * (100_000 // len(unit))) < 0.1


# -- the templates ---------------------------------------------------------------------------------


CALLS = (("f", {"a": '1 < 2 & "x"', "b": 3}), ("g.h-1", {}))


@pytest.mark.parametrize("name", CALLS_IN_JINJA)
def test_the_template_names_its_format(name):
    template = template_with(jinja(*CALLS_IN_JINJA[name]))
    assert detect_format(template) == name
    calls = [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in CALLS]
    question = [{"role": "user", "content": "Q"}]
    messages = [*question, {"role": "assistant", "content": "So: ", "tool_calls": calls}]
    prompt = template.render(question)
    turn = template.render(messages, as_prompt=False)[len(prompt) :].partition("<|im_end|>")[0]
    parsed = open_reader("auto", template)(turn, schemas_of(CALLS))
    assert [(c.name, c.arguments, c.error) for c in parsed] == [(n, a, "") for n, a in CALLS]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("granite", "respond only with <|tool_call|> followed by a JSON list"),
        ("phi4_mini", "write functools[...]"),
        ("phi4_mini", "<|tool|>{{ tools }}<|/tool|>"),
        ("lfm2", "List of tools: [{{ tools }}]"),
        ("lfm2", "<|tool_list_start|>{{ tools }}<|tool_list_end|>"),
        ("hunyuan_a13b", "write <tool_calls>[...]</tool_calls>; results: <tool_response>"),
        ("cohere_command", "write <|START_ACTION|>"),
    ],
)
def test_a_template_that_writes_no_calls_is_known_by_its_marks(name, shown):
    """The format that it asks for also where it shows earlier calls in another way."""
    template = template_with("{# " + shown.replace("{{ tools }}", "tools") + " #}")
    assert detect_format(template) == name


def test_the_format_in_a_templates_instructions_wins():
    written = jinja("", OPENAI, ",\n", "")
    assert detect_format(template_with(written)) == "llama_json"
    assert detect_format(template_with("{# write functools[...] #}" + written)) == "phi4_mini"
