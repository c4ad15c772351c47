"""Mistral, DeepSeek, gpt-oss and Gemma 4: hostile turns, valid ones, and what is cut off."""

import json
import math
import time
from functools import cache
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.hostile_turns import hostile_turns
from support.storable_calls import assert_storable

from agentrl.chat.formats.gemma import parse_gemma
from agentrl.chat.formats.gpt_oss import parse_gpt_oss
from agentrl.chat.formats.mistral import parse_mistral
from agentrl.chat.formats.sections import parse_deepseek
from agentrl.testing import byte_tokenizer
from agentrl.trajectory import ToolCall

PARSERS = {
    "mistral": parse_mistral,
    "deepseek": parse_deepseek,
    "gpt_oss": parse_gpt_oss,
    "gemma": parse_gemma,
}
FRAGMENTS = {
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "add", "[{", "]", ",",
                '[TOOL_CALLS]add[ARGS]{"a":1}', '"name": "x"', "a1B2c3D4e"],
    "deepseek": ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
                 "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "function", "add", "\n```json\n", "\n```",
                 "add<｜tool▁sep｜>{}<｜tool▁call▁end｜>"],
    "gpt_oss": ["<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|start|>assistant",
                " to=functions.add", " to=", "commentary", "analysis", " <|constrain|>json",
                " json"],
    "gemma": ["<|tool_call>", "<tool_call|>", "<|channel>thought\n", "<channel|>", '<|"|>', "call:",
              "add{", "a:", ",", "[", "]", "null"],
}  # fmt: skip
COMMON = ["{", "}", '{"a":', "1", '"', "\\", " ", "\n", "<think>", "</think>", "é", "\ud800"]


def seconds(parse, text):
    best = math.inf
    for _ in range(3):
        start = time.process_time()
        parse(text)
        best = min(best, time.process_time() - start)
    return best


@pytest.mark.parametrize(("name", "case"), list(hostile_turns(PARSERS)))
@pytest.mark.timing
def test_hostile_turns(name, case):
    text = case["text"]
    if length := case.get("repeat_to"):
        more = case.get("repeat", text)
        text = (text + more * (length // len(more) + 1))[:length]
    calls = PARSERS[name](text)
    assert len(calls) == len(case["calls"]), calls
    for call, expected in zip(calls, case["calls"], strict=True):
        if "error" in expected:
            assert expected["error"] in call.error
            assert isinstance(call.arguments, str) and len(call.arguments) < 2100
        else:
            assert call == ToolCall(
                expected["name"], expected["arguments"], id=expected.get("id", "")
            )
    assert seconds(PARSERS[name], text) < 0.05 * max(1, len(text) / 100_000)


@pytest.mark.parametrize("name", PARSERS)
@examples(300)
@given(data=st.data())
def test_no_text_raises_or_loses_its_errors(name, data):
    pieces = st.sampled_from(FRAGMENTS[name] + COMMON) | st.text(max_size=4)
    text = "".join(data.draw(st.lists(pieces, max_size=30)))
    calls = PARSERS[name](text)
    assert len(calls) <= 33
    assert_storable(calls)


@pytest.mark.parametrize("name", PARSERS)
@examples(60)
@given(data=st.data())
@pytest.mark.timing
def test_hundred_kilobytes_of_fragments_take_no_time(name, data):
    pieces = st.sampled_from(FRAGMENTS[name] + COMMON[:-1])
    unit = "".join(data.draw(st.lists(pieces, min_size=1, max_size=6)))
    lead = "".join(data.draw(st.lists(pieces, max_size=6)))
    assert seconds(PARSERS[name], lead + unit * (100_000 // len(unit))) < 0.05


# What valid turns look like: by the family's own template where there is one.

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,20}", fullmatch=True)
PLAIN = st.characters(exclude_categories=["Cs"])
TEXT = st.text(PLAIN, max_size=12) | st.sampled_from(
    ["<think>", "</think>", "}", '"}', "\\", "[/THINK]", "<channel|>", "```"]
    + [f for fragments in FRAGMENTS.values() for f in fragments if '<|"|>' not in f]
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT.filter(lambda text: '<|"|>' not in text)
)
KEYS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,8}", fullmatch=True)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(KEYS, VALUES, max_size=3)
CALLS = st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=3)
THOUGHTS = st.sampled_from(["", "add() to=me?", "3*4 is {12}"])


@cache
def template(name):
    return (files("trl") / "chat_templates" / name).read_text()


def rendered(jinja, *, arguments_as_text, calls, **message):
    tool_calls = [
        {
            "type": "function",
            "function": {"name": n, "arguments": json.dumps(a) if arguments_as_text else a},
        }
        for n, a in calls
    ]
    return byte_tokenizer().apply_chat_template(
        [
            {"role": "user", "content": "Q"},
            {"role": "assistant", "tool_calls": tool_calls} | message,
        ],
        chat_template=template(jinja),
        tokenize=False,
    )


def mistral_list(calls, thought):
    body = [{"name": n, "arguments": a, "id": f"{i:09}"} for i, (n, a) in enumerate(calls)]
    return (f"[THINK]{thought}[/THINK]" if thought else "") + "[TOOL_CALLS] " + json.dumps(body)


def mistral_named(calls, thought):
    return (f"[THINK]{thought}[/THINK]" if thought else "") + "".join(
        f"[TOOL_CALLS]{n}[ARGS]{json.dumps(a, ensure_ascii=False)}" for n, a in calls
    )


def mistral_named_with_ids(calls, thought):
    return f"{thought}" + "".join(
        f"[TOOL_CALLS]{n}[CALL_ID]{i:09}[ARGS]{json.dumps(a)}" for i, (n, a) in enumerate(calls)
    )


def deepseek_v3(calls, thought):
    turn = rendered("deepseekv3.jinja", arguments_as_text=True, calls=calls, content=thought)
    turn = turn.partition("<｜Assistant｜>")[2].removesuffix("<｜end▁of▁sentence｜>")
    return f"<think>{thought}</think>{turn}" if thought else turn


def deepseek_v31(calls, thought):
    body = "".join(
        f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{json.dumps(a)}<｜tool▁call▁end｜>"
        for n, a in calls
    )
    return f"{thought}</think><｜tool▁calls▁begin｜>{body}<｜tool▁calls▁end｜>"


def gpt_oss(calls, thought):  # its template renders one call for each message
    turns = [
        rendered(
            "gptoss.jinja",
            arguments_as_text=False,
            calls=[call],
            content="",
            **({"thinking": thought} if thought else {}),
        ).partition("<|start|>assistant")[2]
        for call in calls
    ]
    return "<|start|>assistant".join(turns).removesuffix("<|call|>")


def gpt_oss_late(calls, thought):
    turns = [
        f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{json.dumps(a)}"
        for n, a in calls
    ]
    analysis = [f"<|channel|>analysis<|message|>{thought}<|end|>"] * bool(thought)
    return "<|start|>assistant".join([*analysis, "<|call|><|start|>assistant".join(turns)])


def gemma(calls, thought):
    turn = rendered(
        "gemma4_v5.jinja",
        arguments_as_text=False,
        calls=calls,
        content="",
        **({"reasoning": thought} if thought else {}),
    )
    return turn.partition("<|turn>model\n")[2].removesuffix("<|tool_response>")


def test_a_closing_tag_before_a_thought_is_an_error_with_its_place():
    text = "a:1}<tool_call|><|channel>thought\nso<channel|>3"
    [call] = parse_gemma(text)
    assert call.error == "missing <|tool_call> before <tool_call|>"
    assert call.span == (0, len("a:1}<tool_call|>")) and call.arguments == "a:1}<tool_call|>"


RENDERERS = [
    (mistral_list, parse_mistral, None),
    (mistral_named, parse_mistral, "[TOOL_CALLS]"),
    (mistral_named_with_ids, parse_mistral, "[TOOL_CALLS]"),
    (deepseek_v3, parse_deepseek, "<｜tool▁call▁begin｜>"),
    (deepseek_v31, parse_deepseek, "<｜tool▁call▁begin｜>"),
    (gpt_oss, parse_gpt_oss, " to=functions."),
    (gpt_oss_late, parse_gpt_oss, " to=functions."),
    (gemma, parse_gemma, "<|tool_call>"),
]
EVERY_RENDERER = pytest.mark.parametrize(
    ("render", "parse", "opening"), RENDERERS, ids=[r.__name__ for r, _, _ in RENDERERS]
)


def exact(calls):
    """With types told apart: 1, 1.0 and true are equal in Python."""
    return json.dumps([[name, arguments] for name, arguments in calls], sort_keys=True)


@EVERY_RENDERER
@examples(80)
@given(calls=CALLS, thought=THOUGHTS)
def test_valid_calls_come_back_exactly(render, parse, opening, calls, thought):
    parsed = parse(render(calls, thought))
    assert [call.error for call in parsed] == [""] * len(calls)
    assert exact([(call.name, call.arguments) for call in parsed]) == exact(calls)
    if render in (mistral_list, mistral_named_with_ids):
        assert [call.id for call in parsed] == [f"{i:09}" for i in range(len(calls))]


@EVERY_RENDERER
@examples(25)
@given(calls=CALLS, thought=THOUGHTS)
def test_a_turn_cut_anywhere_has_whole_calls_or_errors(render, parse, opening, calls, thought):
    text = render(calls, thought)
    whole = exact(calls)
    for end in range(len(text)):
        parsed = parse(text[:end])
        good = [(call.name, call.arguments) for call in parsed if not call.error]
        assert exact(good) == exact(calls[: len(good)]), f"not of {whole}"
        assert all(not call.error for call in parsed[:-1]), "only the last one can be cut"


@EVERY_RENDERER
@given(calls=st.lists(st.tuples(NAMES, st.just({"a": "x"})), min_size=1, max_size=3))
def test_a_call_that_was_begun_is_never_dropped(render, parse, opening, calls):
    text = render(calls, "")
    opening = opening or "[TOOL_CALLS]"
    for end in range(text.index(opening) + len(opening), len(text)):
        assert len(parse(text[:end])) >= text[:end].count(opening)
