"""Calls as TRL's chat templates write them are read back exactly."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import trl
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import TemplateError
from support.examples import examples
from transformers.utils.chat_template_utils import render_jinja_template

from agentrl.chat.formats import FORMATS, cast_arguments
from agentrl.chat.render import strings
from agentrl.trajectory import ToolCall

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
NAMES = ("hermes", "qwen3_coder", "glm", "llama_json", "llama_pythonic", "mistral", "deepseek",
         "gpt_oss", "gemma")  # fmt: skip
ASKED = [{"role": "user", "content": "Q"}]
ARGUMENT = "zqargumentqz"
ENDS = ("<|im_end|>", "<|eot_id|>", "<|call|>", "<｜end▁of▁sentence｜>", "<|tool_response>",
        "<turn|>", "<|endoftext|>")  # fmt: skip
"""Tokens that close a turn with calls."""

Call = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """The message with which a template accepts a call, and the text that it writes."""

    format: str
    arguments_as_text: bool
    content: str | None
    end: str
    """Return the text that the template writes after the calls."""


@cache
def source(template: str) -> str:
    return (TEMPLATES / f"{template}.jinja").read_text()


def rendered(template: str, calls: list[Call], as_text: bool, content: str | None) -> str:
    """Return the turn that a template makes of calls, and what it writes behind the turn."""
    functions = [c | {"arguments": json.dumps(c["arguments"])} if as_text else c for c in calls]
    tool_calls = [
        {"type": "function", "id": f"{i:09}", "function": f} for i, f in enumerate(functions)
    ]
    turn = {"role": "assistant", "content": content, "tool_calls": tool_calls}
    kwargs: dict[str, Any] = {"chat_template": source(template), "tools": schemas_of(calls)}
    (prompt,), _ = render_jinja_template(
        [ASKED], add_generation_prompt=True, bos_token="", **kwargs
    )
    (shown,), _ = render_jinja_template([[*ASKED, turn]], bos_token="", **kwargs)
    pairs = zip(prompt, shown, strict=False)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return shown[shared:]


@cache
def ways(template: str) -> tuple[Way, ...]:
    """Return every way in which a template takes a call that one of the formats reads."""
    ways_of_template = []
    for as_text in (False, True):
        for content in ("", "Well.", None):
            try:
                text = rendered(template, [probe("probe")], as_text, content)
            except (TemplateError, TypeError):
                continue
            if ARGUMENT not in text:
                continue
            behind = text[text.rindex(ARGUMENT) + len(ARGUMENT) :]
            end = max((behind[behind.index(e) :] for e in ENDS if e in behind), key=len, default="")
            for name in NAMES:
                calls = FORMATS[name](text.removesuffix(end))
                if calls == [ToolCall("probe", {"x": ARGUMENT})]:
                    ways_of_template.append(Way(name, as_text, content, end))
                    break
    return tuple(
        w for w in ways_of_template if w.arguments_as_text == ways_of_template[0].arguments_as_text
    )


def probe(name: str) -> Call:
    return {"name": name, "arguments": {"x": ARGUMENT}}


@cache
def takes_several(template: str) -> bool:
    way = ways(template)[0]
    calls = [probe("probe"), probe("again")]
    try:
        text = rendered(template, calls, way.arguments_as_text, way.content)
    except TemplateError:
        return False
    return "again" in text


OTHERS = ("deepseek_r1_distill", "lfm2", "muse_glimmer")
"""Templates that mention calls, but in no format of `NAMES`."""


def with_calls() -> list[str]:
    """Return the templates with calls, by their text: rendering all would slow the collection."""
    files = [p.stem for p in sorted(TEMPLATES.glob("*.jinja"))]
    return [n for n in files if "tool_calls" in source(n) and not n.startswith(OTHERS)]


def test_templates_of_most_formats_are_there():
    names = [p.stem for p in TEMPLATES.glob("*.jinja")]
    assert sorted(n for n in names if ways(n)) == with_calls()
    counts = Counter(ways(template)[0].format for template in with_calls())
    assert set(NAMES) - set(counts) == {"llama_pythonic", "mistral"}  # TRL has none
    assert sum(counts.values()) > 30, counts


# -- random calls ---------------------------------------------------------------------------------

PIECES = (
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<function=f>", "</function>",
    "<parameter=a>", "</parameter>", "<arg_key>", "<arg_value>", "</arg_value>", "<b>x</b>", "&lt;",
    '{"name": "f"}', "{", "}", "[", "]", "(", ")", '"', "'", "\\", "\\n", "```", ",", ";", ":", "=",
    "\n", "\r\n", "\t", " ", "é", "漢", "😀", "\u2028", "3", "1.5", "true", "None", "null",
    "f(a=1)", " to=functions.f", "call:f{}", "<|tool_call>", "<tool_call|>", "[TOOL_CALLS]",
)  # fmt: skip
CUT = {
    # Nothing escapes a value here, so that some tags cannot be part of one.
    "qwen3_coder": ("<function=", "<parameter=", "</parameter>"),
    "glm": ("<tool_call>", "<arg_key>", "<arg_value>", "</arg_value>"),
    "gemma": ('<|"|>',),
}
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.lists(
    st.sampled_from(PIECES), max_size=5
).map("".join)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
)


@st.composite
def lists_of_calls(draw: st.DrawFn, template: str) -> list[Call]:
    format = ways(template)[0].format
    keys = names if format == "gemma" else texts  # it writes keys without quotes
    value = st.recursive(
        scalars | texts,
        lambda v: st.lists(v, max_size=3) | st.dictionaries(keys, v, max_size=3),
        max_leaves=6,
    ).filter(lambda v: not any(tag in s for s in strings(v) for tag in CUT.get(format, ())))
    call = st.fixed_dictionaries(
        {"name": names, "arguments": st.dictionaries(names, value, max_size=3)}
    )
    most = 3 if takes_several(template) else 1
    # Each call has a name of its own, and so its own schema.
    return draw(st.lists(call, min_size=1, max_size=most, unique_by=lambda c: str(c["name"])))


def schemas_of(calls: list[Call]) -> list[dict[str, Any]]:
    types = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array",
             dict: "object", type(None): "null"}  # fmt: skip
    return [
        {
            "type": "function",
            "function": {
                "name": call["name"],
                "description": "Does it.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        k: {"type": types[type(v)], "description": "A value."}
                        for k, v in call["arguments"].items()
                    },
                },
            },
        }
        for call in calls
    ]


@pytest.mark.parametrize("template", with_calls())
@examples(25)
@given(data=st.data())
def test_calls_of_a_template_are_parsed_exactly(template: str, data: st.DataObject):
    calls = data.draw(lists_of_calls(template))
    way = data.draw(st.sampled_from(ways(template)))
    text = rendered(template, calls, way.arguments_as_text, way.content)
    assert text.endswith(way.end)
    parsed = cast_arguments(FORMATS[way.format](text.removesuffix(way.end)), schemas_of(calls))
    assert [(c.name, c.error) for c in parsed] == [(c["name"], "") for c in calls]
    # As JSON: 1, 1.0 and true are equal in Python.
    read, written = ([json.dumps(a, sort_keys=True) for a in some] for some in (
        [c.arguments for c in parsed], [c["arguments"] for c in calls]
    ))  # fmt: skip
    assert read == written
