"""Formats with calls as JSON after a mark: Hermes, Granite, Cohere and others."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from agentrl.chat.formats.scan import (
    MAX_CALLS,
    THINK_END,
    THINK_START,
    any_tag,
    invalid_call_at,
    read_calls,
)
from agentrl.chat.formats.strict_json import (
    end_of_brackets,
    end_of_broken_json,
    end_of_object,
    find_start,
    invalid_call,
    read_call,
    read_object,
    skip_space,
    with_span,
)
from agentrl.trajectory import ToolCall

_SCALAR = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[0-9.eE+\-a-z]+', re.DOTALL)


def read_list(
    text: str, start: int, read: Callable[[str], ToolCall]
) -> tuple[list[ToolCall], int, bool]:
    """Read the calls of a JSON list.

    An element that is not a call becomes an error, and the other elements are kept. An empty list
    is an error, too.

    Args:
        text: one assistant turn.
        start: the index of the list's opening bracket.
        read: reads the text of one JSON object.

    Returns:
        The calls, each with its span; the end of the list, or where the text stops being JSON; and
        whether the list is complete. Reading stops after more than `MAX_CALLS` calls.
    """
    calls: list[ToolCall] = []
    position = start + 1
    if text.startswith("]", after := skip_space(text, position)):
        return (
            [with_span(invalid_call("[]", "an empty list of calls"), start, after + 1)],
            after + 1,
            True,
        )
    while len(calls) <= MAX_CALLS:
        begin = skip_space(text, position)
        end = end_of_brackets(text, begin) if text[begin : begin + 1] in ("{", "[") else 0
        if not end and (scalar := _SCALAR.match(text, begin)):
            end = scalar.end()
        after = skip_space(text, end) if end else len(text)
        if text[after : after + 1] not in (",", "]"):
            return calls, begin, False
        body = text[begin:end]
        is_object = body.startswith("{")
        call = read(body) if is_object else invalid_call(body, "a call must be a JSON object")
        calls.append(with_span(call, begin, end))
        position = after + 1
        if text[after] == "]":
            break
    return calls, position, True


@dataclass(frozen=True, slots=True)
class MarkedJson:
    """A parser of calls that are JSON objects, or lists of them, after a mark.

    A call counts if its object is closed (within a list: if a comma or the list's bracket follows).
    A missing closing mark is a separate error, and so is text before the closing mark. Within a
    list, an element that is not a call becomes an error, and the other elements are kept. If a list
    stops being JSON, the text up to the next mark is one error. A mark in a JSON string is text.

    Args:
        marks: pairs of the text before the JSON and the text after it (or ""). A bracket at the end
            of the first text is the opening bracket of the list.
        read: reads the text of one JSON object.
        begins: the brackets that the JSON may begin with: "[" for lists, "{" for single calls, or
            both.
        head: a pattern of the text between the mark and the JSON.
        is_stop: whether the closing mark also ends the turn, so that the text of a turn lacks it.
        thought: the tags around a thought. Calls between them do not count.
    """

    marks: tuple[tuple[str, str], ...]
    read: Callable[[str], ToolCall] = read_call
    begins: str = "["
    head: str = r"\s*"
    is_stop: bool = False
    thought: tuple[str, str] = (THINK_START, THINK_END)

    def __call__(self, text: str) -> list[ToolCall]:
        """Return the calls of one assistant turn."""
        openings = tuple(opening for opening, _ in self.marks)
        return read_calls(text, openings, self.marks[0][1], self.read_marked, self.thought)

    def read_marked(self, text: str, start: int) -> tuple[list[ToolCall], int]:
        """Return the calls after the mark at `start`, and where the text continues."""
        opening, closing = next(m for m in self.marks if text.startswith(m[0], start))
        body = start + len(opening) - opening.endswith("[")
        head = re.compile(self.head).match(text, body)
        position = head.end() if head else body
        calls: list[ToolCall] = []
        while head and len(calls) <= MAX_CALLS and text.startswith((*self.begins,), position):
            more, end, is_complete = self._value(text, position)
            calls += more
            if not is_complete:
                closed = bool(closing) and text.startswith(closing, end)
                return calls, end + len(closing) * closed
            position = skip_space(text, end)
        if not calls:
            return self._no_json(text, start, body, closing, f"no JSON call after {opening}")
        if closing and text.startswith(closing, position):
            return calls, position + len(closing)
        if self._is_over(text, position, closing) or len(calls) > MAX_CALLS:
            return calls, position
        why = (
            f"missing {closing} directly after the calls"
            if closing
            else "unexpected text after the calls"
        )
        more, position = self._no_json(text, position, position, closing, why)
        return [*calls, *more], position

    def _is_over(self, text: str, position: int, closing: str) -> bool:
        """Return whether the calls may end here without a closing mark."""
        if closing:
            return self.is_stop and position == len(text)
        return text[position : position + 1] not in (",", "[", "{")

    def _value(self, text: str, start: int) -> tuple[list[ToolCall], int, bool]:
        """Return the calls of a JSON value, where it ends, and whether it is complete."""
        if text[start] == "[":
            calls, end, is_complete = read_list(text, start, self.read)
            if is_complete:
                return calls, end, True
            error, end, _ = self._incomplete(text, end, "the JSON list of calls is not closed")
            return [*calls, *error], end, False
        end = end_of_object(text, start)
        if end:
            return [with_span(self.read(text[start:end]), start, end)], end, True
        return self._incomplete(text, start, "must be one complete JSON object")

    def _incomplete(self, text: str, start: int, why: str) -> tuple[list[ToolCall], int, bool]:
        """Return an error for incomplete JSON, and the end of this JSON: the next mark."""
        end = end_of_broken_json(text, start, any_tag(self._tags()), any_tag(self.thought[1:]))
        return [with_span(invalid_call(text[start:end], why), start, end)], end, False

    def _no_json(
        self, text: str, start: int, body: int, closing: str, why: str
    ) -> tuple[list[ToolCall], int]:
        """Return one error for text that is not JSON, up to and including the closing mark."""
        stop = find_start(any_tag(self._tags()), text, body)
        is_closed = bool(closing) and text.startswith(closing, stop)
        end = stop + len(closing) * is_closed
        return [with_span(invalid_call(text[body:stop].strip(), why), start, end)], end

    def _tags(self) -> tuple[str, ...]:
        return (*(mark for pair in self.marks for mark in pair), *self.thought)


def _read_cohere_call(body: str) -> ToolCall:
    """Read a call in Cohere's format: an object with `tool_name` and `tool_call_id`."""
    value, error = read_object(body)
    if error:
        return invalid_call(body, error)
    number = value.pop("tool_call_id", "")
    if not isinstance(number, str):
        return invalid_call(body, '"tool_call_id" must be a string')
    call = read_call(body, ("parameters",), ("tool_call_id",), True, name_key="tool_name")
    return call if call.error else ToolCall(call.name, call.arguments, id=number)


def _read_apertus_call(body: str) -> ToolCall:
    """Read a call in Apertus' format: an object whose only key is the tool's name."""
    value, error = read_object(body)
    if error:
        return invalid_call(body, error)
    if len(value) != 1:
        return invalid_call(body, "a call must be an object with one key, the name of the tool")
    [(name, arguments)] = value.items()
    if not name or not isinstance(arguments, dict):
        return invalid_call(body, "the arguments must be a JSON object", name)
    return ToolCall(name, arguments)


def _read_with_arguments(body: str) -> ToolCall:
    """Read a call that must have arguments."""
    return read_call(body, ("arguments", "parameters"), ("type", "id"), True)


parse_granite = MarkedJson(
    (("<|tool_call|>", ""), ("<tool_call>", ""), ("<function_call>", "")), begins="[{"
)
"""Granite 3: `<|tool_call|>[{"name": "calculator", "arguments": {"expression": "3*4"}}]`.

Granite 20B writes `<function_call>` instead, and some templates write objects without the list.
"""

parse_phi4_mini = MarkedJson(
    (("<|tool_call|>", "<|/tool_call|>"), ("functools[", "")), read=_read_with_arguments
)
"""Phi-4 mini: `<|tool_call|>[{"name": "calculator", "arguments": {...}}]<|/tool_call|>`.

Or `functools[{"name": "calculator", "arguments": {...}}]`, as other prompts ask for.
"""

parse_cohere_command = MarkedJson(
    (("<|START_ACTION|>", "<|END_ACTION|>"),),
    read=_read_cohere_call,
    begins="[{",
    thought=("<|START_THINKING|>", "<|END_THINKING|>"),
)
"""Cohere Command R7B, A and later: a list between `<|START_ACTION|>` and `<|END_ACTION|>`.

    <|START_ACTION|>[
        {"tool_call_id": "0", "tool_name": "calculator", "parameters": {"expression": "3*4"}}
    ]<|END_ACTION|>

One object without the brackets of the list also counts.
"""

parse_apertus = MarkedJson(
    (("<|tools_prefix|>", "<|tools_suffix|>"),), read=_read_apertus_call, is_stop=True
)
"""Apertus: `<|tools_prefix|>[{"calculator": {"expression": "3*4"}}]<|tools_suffix|>`.

The closing mark ends the turn, because the results follow in the same message. The model also calls
tools between `<|inner_prefix|>` and `<|inner_suffix|>`, so these calls count.
"""

parse_hunyuan_a13b = MarkedJson((("<tool_calls>", "</tool_calls>"),))
"""Hunyuan A13B: `<tool_calls>[{"name": "calculator", "arguments": {...}}]</tool_calls>`."""

parse_minimax_m1 = MarkedJson((("<tool_calls>", "</tool_calls>"),), begins="{")
"""MiniMax M1: one object on each line between `<tool_calls>` and `</tool_calls>`."""

parse_internlm = MarkedJson(
    (("<|action_start|>", "<|action_end|>"),),
    read=lambda body: read_call(body, ("parameters", "arguments")),
    begins="{",
    head=r"\s*<\|plugin\|>\s*",
)
"""InternLM 2 and Intern-S1: one object between `<|action_start|><|plugin|>` and `<|action_end|>`.

    <|action_start|><|plugin|>
    {"name": "calculator", "parameters": {"expression": "3*4"}}<|action_end|>
"""

parse_gigachat3 = MarkedJson(
    (("<|function_call|>", ""), ("function call<|role_sep|>", "")),
    read=lambda body: read_call(body, required=True),
    begins="{",
)
"""GigaChat 3.1: `<|function_call|>{"name": "calculator", "arguments": {...}}`.

GigaChat 3 writes the call as a separate message after the header `function call<|role_sep|>`.
"""


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def parse_hermes(text: str) -> list[ToolCall]:
    """Return the calls of one assistant turn in the Hermes / Qwen format.

        <tool_call>
        {"name": "calculator", "arguments": {"expression": "3*4"}}
        </tool_call>

    Calls inside `<think>...</think>` do not count. A tag within a JSON string of a call is text. A
    call that is cut off at the end of the turn is an error, and is never executed.
    """
    return read_calls(text, (_OPEN,), _CLOSE, _hermes_call)


def _hermes_call(text: str, start: int) -> tuple[list[ToolCall], int]:
    body = skip_space(text, start + len(_OPEN))
    end = end_of_object(text, body)
    after = skip_space(text, end) if end else 0
    if end and text.startswith(_CLOSE, after):
        return [read_call(text[body:end], other_keys=("id",))], after + len(_CLOSE)
    return invalid_call_at(text, body, (_OPEN,), _CLOSE, "must be one JSON object")
