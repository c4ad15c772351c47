"""Formats with values between XML-like tags: GLM, Qwen3-Coder, Muse and others."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import orjson

from agentrl.chat.formats.scan import MAX_CALLS, any_tag, invalid_call_at, limit_calls, read_calls
from agentrl.chat.formats.sections import ReadCall, Sections
from agentrl.chat.formats.strict_json import (
    end_of_object,
    find_loss,
    invalid_call,
    is_valid_unicode,
    read_arguments,
    skip_space,
    with_span,
)
from agentrl.trajectory import ToolCall

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def _read_values(
    text: str,
    position: int,
    key: re.Pattern[str],
    end: re.Pattern[str],
    closing: str,
    follows: re.Pattern[str] | None,
) -> tuple[dict[str, str], str, int]:
    """Return the values of one call by key, the error or "", and the index at which parsing ended.

    Args:
        text: the turn.
        position: the end of the call's name.
        key: a pattern of an argument's key (group 1) up to the start of its value.
        end: a pattern of `closing`, and of the tags that show that it is missing.
        closing: the tag after a value.
        follows: a pattern of text that only follows a complete value, so that a value without
            `closing` ends there; None if the format has no such text.
    """
    values: dict[str, str] = {}
    while pair := key.match(text, position):
        name, begin = pair[1].strip(), pair.end()
        match = end.search(text, begin)
        if match and match[0] == closing:
            stop, after = match.span()
        else:
            following = follows.search(text, begin) if follows else None
            stop = after = following.start() if following else 0
            # Otherwise a misspelled closing tag would become part of the value.
            is_certain = following and text.find(closing[:-1], begin, stop) < 0
            if not is_certain or (match and match.start() < stop):
                return values, f"missing {closing} for argument {name[:80]}", position
        position, value = after, text[begin:stop]
        if name in values:
            return values, f"duplicate argument {name[:80]}", position
        if not is_valid_unicode(value + name):
            return values, "invalid Unicode: lone surrogate", position
        values[name] = value
    return values, "", position


def tagged_call(
    form: str,
    head: str,
    key: str,
    openings: tuple[str, ...],
    value_end: str,
    call_end: str,
    values: Callable[[dict[str, str]], dict[str, Any]] = dict,
    takes_json: bool = False,
    tail: str = "",
    follows: str = "",
) -> ReadCall:
    """Return a reader of calls with values between tags.

    Values have no escapes, so a value ends at the first closing tag. A value that contains the
    opening tag of a value or of a call is an error: probably a closing tag is missing, and then the
    next value would become part of this value. Other tags and all white space belong to the value.

    Args:
        form: an example of a call, for error messages.
        head: a pattern of the call's opening tag and name; group 1 is the name.
        key: a pattern of the opening tag of a value; group 1 is its key.
        openings: the opening tags of values and of calls.
        value_end: the closing tag of a value.
        call_end: the closing tag of the call.
        values: converts the texts by key to arguments; it raises `ValueError` for invalid texts.
        takes_json: whether the arguments may be one JSON object, and a call without arguments may
            be a single tag.
        tail: a pattern of the end of the call; "" for the tag `call_end`.
        follows: a pattern of the text after a value without closing tag; "" for none.
    """
    head_pattern, key_pattern = re.compile(head), re.compile(r"\s*" + key)
    end_pattern = any_tag((value_end, *openings))
    tail_pattern = re.compile(r"\s*" + (tail or re.escape(call_end)))
    follows_pattern = re.compile(follows) if follows else None

    def read(text: str, start: int) -> tuple[ToolCall, int, bool]:
        match = head_pattern.match(text, start)
        if not match:
            return (invalid_call("", f"missing tool name; expected {form}"), start, False)
        name = match[1] if is_valid_unicode(match[1]) else ""
        if takes_json and match[0].endswith("/>"):
            return ToolCall(name, {}), match.end(), True
        body = skip_space(text, match.end())
        if takes_json and text.startswith("{", body):
            end = end_of_object(text, body)
            closed = tail_pattern.match(text, end) if end else None
            if closed:
                return read_arguments(name, text[body:end]), closed.end(), True
            return (
                invalid_call("", "the arguments must be one JSON object", name),
                end or body,
                False,
            )
        texts, why, position = _read_values(
            text, match.end(), key_pattern, end_pattern, value_end, follows_pattern
        )
        closed = None if why else tail_pattern.match(text, position)
        if not closed:
            why = why or f"expected {form}"
            return invalid_call("", why, name), position, False
        if not name:
            return (
                invalid_call(text[start : closed.end()], "invalid Unicode: lone surrogate"),
                closed.end(),
                True,
            )
        try:
            return ToolCall(name, values(texts)), closed.end(), True
        except ValueError as e:
            return invalid_call(text[match.end() : position], str(e), name), closed.end(), True

    return read


def named_tags(call: str, value: str) -> ReadCall:
    """Return a reader of calls whose opening tags contain the name of the tool, or the key.

    Args:
        call: the opening tag of a call, with NAME.
        value: the opening tag of a value, with KEY.
    """
    ends = [f"</{re.split('[ =]', tag[1:])[0]}>" for tag in (call, value)]
    return tagged_call(
        f"{call} {value}VALUE{ends[1]} {ends[0]}",
        call.replace("NAME", r'([^"<>\s]+)'),
        value.replace("KEY", r'([^"<>\n]+)'),
        (call.partition("NAME")[0], value.partition("KEY")[0]),
        ends[1],
        ends[0],
    )


parse_minimax_m2 = Sections(
    ("<minimax:tool_call>", "</minimax:tool_call>"),
    ("<invoke ", "</invoke>"),
    named_tags('<invoke name="NAME">', '<parameter name="KEY">'),
)
"""The format of MiniMax-M2. All values are strings (see `cast_arguments`).

    <minimax:tool_call>
    <invoke name="calculator">
    <parameter name="expression">3*4</parameter>
    </invoke>
    </minimax:tool_call>
"""

parse_seed_oss = Sections(
    ("<seed:tool_call>", "</seed:tool_call>"),
    ("<function=", "</function>"),
    named_tags("<function=NAME>", "<parameter=KEY>"),
    thought=("<seed:think>", "</seed:think>"),
)
"""The format of Seed-OSS. All values are strings (see `cast_arguments`).

    <seed:tool_call>
    <function=calculator>
    <parameter=expression>3*4</parameter>
    </function>
    </seed:tool_call>
"""


def _dsml(section: str) -> Sections:
    mark = "<｜DSML｜"
    return Sections(
        (f"{mark}{section}>", f"</｜DSML｜{section}>"),
        (f"{mark}invoke ", "</｜DSML｜invoke>"),
        tagged_call(
            f'{mark}invoke name="NAME"> {mark}parameter name="KEY" string="true">VALUE'
            "</｜DSML｜parameter> </｜DSML｜invoke>",
            mark + r'invoke name="([^"<>\s]+)"\s*/?>',
            mark + r'parameter name="([^"<>\n]+" string="(?:true|false))">',
            (f"{mark}invoke ", f"{mark}parameter "),
            "</｜DSML｜parameter>",
            "</｜DSML｜invoke>",
            _by_attribute,
            takes_json=True,
        ),
        takes_bare=True,
    )


def _by_attribute(texts: dict[str, str]) -> dict[str, Any]:
    """Convert DSML's values, whose keys end with the attribute `string`.

    Raises:
        ValueError: if a value is invalid JSON, or if a key is a duplicate.
    """
    arguments: dict[str, Any] = {}
    for key, text in texts.items():
        name, _, is_string = key.partition('" string="')
        if name in arguments:
            raise ValueError(f"duplicate argument {name[:80]}")
        if is_string == "true":
            arguments[name] = text
            continue
        try:
            arguments[name] = orjson.loads(text)
        except orjson.JSONDecodeError as e:
            why = f'argument {name[:80]} has string="false" and is invalid JSON: {str(e)[:120]}'
            raise ValueError(why) from None
        if why := find_loss(text, arguments[name]):
            raise ValueError(f"argument {name[:80]}: {why}")
    return arguments


parse_deepseek_v32 = _dsml("function_calls")
"""The format of DeepSeek V3.2. The attribute `string` says whether a value is text or JSON.

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="calculator">
    <｜DSML｜parameter name="expression" string="true">3*4</｜DSML｜parameter>
    <｜DSML｜parameter name="digits" string="false">2</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

The arguments may also be one JSON object between the tags of the call, and a call without
arguments may be one tag, `<｜DSML｜invoke name="clock"/>`. A call outside of a section counts,
because the models often leave out the section's tags, and `｜DSML｜` is one token.
"""

parse_deepseek_v4 = _dsml("tool_calls")
"""The format of DeepSeek V4: as V3.2, but between tags named `｜DSML｜tool_calls`."""

_SUFFIX = ":opensource"


def parse_hunyuan(text: str) -> list[ToolCall]:
    """Return the calls of one assistant turn in the format of Hunyuan 3.

        <tool_calls>
        <tool_call>calculator<tool_sep>
        <arg_key>expression</arg_key>
        <arg_value>3*4</arg_value>
        </tool_call>
        </tool_calls>

    All values are strings (see `cast_arguments`). In the published vocabulary every tag ends with
    `:opensource>`. Later models leave out `<tool_sep>`.
    """
    return _hunyuan(_SUFFIX if f"{_SUFFIX}>" in text else "")(text)


@cache
def _hunyuan(suffix: str) -> Sections:
    def tag(name: str) -> str:
        return f"<{name}{suffix}>"

    def end(name: str) -> str:
        return f"</{name}{suffix}>"

    return Sections(
        (tag("tool_calls"), end("tool_calls")),
        (tag("tool_call"), end("tool_call")),
        tagged_call(
            f"{tag('tool_call')}NAME{tag('tool_sep')} {tag('arg_key')}KEY{end('arg_key')}"
            f" {tag('arg_value')}VALUE{end('arg_value')} {end('tool_call')}",
            rf"{tag('tool_call')}\s*([^\s<>]+)\s*"
            rf"(?:{tag('tool_sep')}|(?={tag('arg_key')}|{end('tool_call')}))",
            rf"{tag('arg_key')}([^<>]+){end('arg_key')}\s*{tag('arg_value')}",
            tuple(map(tag, ("tool_call", "arg_key", "arg_value"))),
            end("arg_value"),
            end("tool_call"),
        ),
        thought=(tag("think"), end("think")),
    )


_GLM = tagged_call(
    "<tool_call>NAME <arg_key>KEY</arg_key> <arg_value>VALUE</arg_value> </tool_call>",
    r"<tool_call>\s*([^\s<>{}\"]+)\s*(?=<arg_key>|</tool_call>)",
    r"<arg_key>([^<>]+)</arg_key>\s*<arg_value>",
    ("<arg_key>", "<arg_value>", _OPEN),
    "</arg_value>",
    _CLOSE,
)


def parse_glm(text: str) -> list[ToolCall]:
    """Return the calls of one assistant turn in GLM's format. All values are strings.

        <tool_call>calculator
        <arg_key>expression</arg_key>
        <arg_value>3*4</arg_value>
        </tool_call>

    Values have no escapes, so a value ends at the first `</arg_value>`. A value that contains one
    of the format's opening tags is an error: probably a closing tag is missing. Other tags and all
    white space are text of the value.
    """
    return read_calls(text, (_OPEN,), _CLOSE, _glm_call)


def _glm_call(text: str, start: int) -> tuple[list[ToolCall], int]:
    call, position, is_closed = _GLM(text, start)
    return (
        ([call], position) if is_closed else _invalid_call_between_tags(text, start, call, position)
    )


def _invalid_call_between_tags(
    text: str, start: int, call: ToolCall, read: int
) -> tuple[list[ToolCall], int]:
    """Return the error of the call whose `<tool_call>` is at `start`."""
    body = start + len(_OPEN)
    return invalid_call_at(text, body, (_OPEN,), _CLOSE, call.error, call.name, read)


_FUNCTION, _FUNCTION_END = "<function=", "</function>"


def _qwen(head: str, tail: str) -> ReadCall:
    return tagged_call(
        f"{_OPEN} <function=NAME> <parameter=KEY>VALUE</parameter> {_FUNCTION_END} {_CLOSE}",
        head + r"<function=([^<>\s]+)>",
        r"<parameter=([^<>\n]+)>",
        ("<parameter=", _FUNCTION),
        "</parameter>",
        _FUNCTION_END,
        lambda texts: {k: v.removeprefix("\n").removesuffix("\n") for k, v in texts.items()},
        tail=tail,
        # Templates write these tags on separate lines, so a value ends before such a line.
        follows=r"(?<=\n)(?:<parameter=[^<>\n]+>|</function>\s*</tool_call>)",
    )


# If the next call follows, the closing tag is missing.
_QWEN = _qwen(r"<tool_call>\s*", r"</function>\s*(?:</tool_call>|(?=<tool_call>))")
_QWEN_BARE = _qwen("", r"</function>(?:\s*</tool_call>)?")


def parse_qwen3_coder(text: str) -> list[ToolCall]:
    """Return the calls of one assistant turn in Qwen3-Coder's format. All values are strings.

        <tool_call>
        <function=calculator>
        <parameter=expression>
        3*4
        </parameter>
        </function>
        </tool_call>

    Models of this family leave out tags. A call without `<tool_call>` counts; it is between
    `<function=NAME>` and `</function>`. A value without `</parameter>` counts, too, if the next
    parameter or the end of the call is on a separate line. Values have no escapes, so a value ends
    at the first `</parameter>`. A value with `<parameter=` or `<function=` within a line is an
    error, because a closing tag may be missing. Other tags are text of the value. One line break at
    each end belongs to the format, further ones to the value.
    """
    return read_calls(text, (_OPEN, _FUNCTION), _CLOSE, _qwen_call)


def _qwen_call(text: str, start: int) -> tuple[list[ToolCall], int]:
    is_bare = text.startswith(_FUNCTION, start)
    call, position, is_closed = (_QWEN_BARE if is_bare else _QWEN)(text, start)
    if is_closed:
        return [call], position
    if not is_bare:
        return _invalid_call_between_tags(text, start, call, position)
    why = f"missing {_OPEN} before {_FUNCTION}NAME>"
    return invalid_call_at(
        text, start + len(_FUNCTION), (_OPEN, _FUNCTION), _FUNCTION_END, why, read=start
    )


_MESSAGE, _START, _END, _TURN_END = "<|message|>", "<|start|>", "<|eom|>", "<|eot|>"
_SECTION = ("<atem:function_calls>", "</atem:function_calls>")
_CALL = ("<atem:invoke ", "</atem:invoke>")

_MUSE_TAG = re.compile(
    "|".join(map(re.escape, (_MESSAGE, _START, _END, _TURN_END, _SECTION[0], _CALL[0])))
)
_RECIPIENT = re.compile(r"(?:assistant)?\s*to=(\S+)\s*")
_PROSE, _NOBODY = ("self", "user", "commentary"), "?"
_MUSE_CALLS = Sections(
    _SECTION,
    _CALL,
    named_tags('<atem:invoke name="NAME">', '<atem:parameter name="KEY">'),
    thought=(_END, _TURN_END),  # an invalid call ends with its message
)


def parse_muse(text: str) -> list[ToolCall]:
    """Return the calls of one assistant turn of Muse, which continues `<|start|>assistant`.

         to=self<|message|>A product.<|eom|><|start|>assistant to=calculator<|message|>
        <atem:function_calls>
        <atem:invoke name="calculator">
        <atem:parameter name="expression">3*4</atem:parameter>
        </atem:invoke>
        </atem:function_calls>

    All values are strings (see `cast_arguments`). A message to `self` is a thought, and a message
    to `user` or `commentary` is text; calls in them do not count. A message to any other recipient
    must contain a call. The template lists recipients as `calculator.*`, so models also write
    `calculator.calculator`, which is the same tool.
    """
    calls: list[ToolCall] = []
    recipient, header, position = "", 0, 0  # recipient "": the header begins at `header`
    has_called = True
    while len(calls) <= MAX_CALLS and (tag := _MUSE_TAG.search(text, position)):
        position = tag.end()
        if tag[0] == _MESSAGE and not recipient:
            match = _RECIPIENT.fullmatch(text[header : tag.start()])
            recipient, header = match[1] if match else _NOBODY, position
            has_called = recipient in (*_PROSE, _NOBODY)
        elif tag[0] in (_END, _TURN_END) or (tag[0] == _START and not recipient):
            if not has_called:
                calls.append(_no_call(text, header, tag.start(), recipient))
            recipient, header, has_called = "", position, True
        elif tag[0] in (_SECTION[0], _CALL[0]) and recipient not in _PROSE:
            more, position = _MUSE_CALLS.read_section(text, tag.start())
            if recipient in ("", _NOBODY):
                raw, why = (
                    text[tag.start() : position],
                    f"missing to=NAME{_MESSAGE} before {tag[0]}",
                )
                more = [invalid_call(raw, why, more[0].name)]
            calls += [
                with_span(_remove_repeated_name(call), tag.start(), position) for call in more
            ]
            has_called = True
    if not has_called:
        calls.append(_no_call(text, header, len(text), recipient))
    return limit_calls(calls)


def _remove_repeated_name(call: ToolCall) -> ToolCall:
    """Return a call with the name `x` in place of the repeated name `x.x`."""
    half = len(call.name) // 2
    name = call.name[:half]
    return replace(call, name=name) if name and call.name == f"{name}.{name}" else call


def _no_call(text: str, start: int, end: int, recipient: str) -> ToolCall:
    why = f"missing {_SECTION[0]} in the message to {recipient[:80]}"
    return with_span(invalid_call(text[start:end], why), start, end)
