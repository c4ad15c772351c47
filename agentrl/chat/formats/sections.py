"""Formats with tags around each call within a section of the turn: DeepSeek and Kimi-K2."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from agentrl.chat.formats.scan import MAX_CALLS, THINK_END, THINK_START, any_tag, read_calls
from agentrl.chat.formats.strict_json import (
    end_of_broken_json,
    end_of_object,
    find_start,
    invalid_call,
    read_arguments,
    with_span,
)
from agentrl.trajectory import ToolCall

ReadCall = Callable[[str, int], tuple[ToolCall, int, bool]]
"""Takes a text and the index of a call's opening tag. Returns the call, the index at which parsing
ended, and whether the closing tag ends there. If not, the call is invalid and
its rest is skipped."""


@dataclass(frozen=True, slots=True)
class Sections:
    """A parser of calls with their own tags within a section of the turn.

    A call counts if it has its closing tag, even if the end of the section is missing. Text between
    calls, a section without calls and (by default) a call outside of a section are errors.

    Args:
        section: the tags around all calls.
        call: the tags around one call. The first may be the beginning of a tag.
        read: reads one call.
        thought: the tags around a thought. Calls between them are thoughts.
        takes_bare: whether a call outside of a section counts.
    """

    section: tuple[str, str]
    call: tuple[str, str]
    read: ReadCall
    thought: tuple[str, str] = (THINK_START, THINK_END)
    takes_bare: bool = False

    def __call__(self, text: str) -> list[ToolCall]:
        """Return the calls of one assistant turn."""
        opening, closing = self.section
        return read_calls(text, (opening, self.call[0]), closing, self.read_section, self.thought)

    def read_section(self, text: str, start: int) -> tuple[list[ToolCall], int]:
        """Return the calls of the section at `start`, and where the text continues."""
        opening = self.section[0]
        if text.startswith(opening, start):
            return self._section(text, start + len(opening))
        call, end = self._call(text, start)
        if self.takes_bare:
            return [call], end
        return [invalid_call(text[start:end], f"a call outside of {opening}", call.name)], end

    def _section(self, text: str, start: int) -> tuple[list[ToolCall], int]:
        """Return the calls of a section, and where the section ends.

        Args:
            text: one assistant turn.
            start: the index after the tag that begins the section.
        """
        opening, closing = self.call
        calls: list[ToolCall] = []
        position = start
        while len(calls) <= MAX_CALLS:
            stop = self._next(text, position)
            if gap := text[position:stop].strip():
                calls.append(
                    with_span(invalid_call(gap, "unexpected text between calls"), position, stop)
                )
            position = stop
            if text.startswith(opening, stop):
                call, position = self._call(text, stop)
                calls.append(call)
            elif text.startswith(closing, stop):
                position += len(closing)
                error = invalid_call(closing, f"missing {opening.strip()} before {closing}")
                calls.append(with_span(error, stop, position))
            else:
                if text.startswith(self.section[1], stop):
                    position += len(self.section[1])
                break
        if not calls:
            calls.append(invalid_call(text[start:position], f"no call after {self.section[0]}"))
        return calls, position

    def _call(self, text: str, start: int) -> tuple[ToolCall, int]:
        """Return the call whose opening tag is at `start`, and where it ends."""
        opening, closing = self.call
        call, position, is_closed = self.read(text, start)
        if is_closed:
            return with_span(call, start, position), position
        stop = self._next(text, max(position, start + len(opening)))
        is_closed = text.startswith(closing, stop)
        end = stop + len(closing) * is_closed
        why = call.error if is_closed else f"missing closing {closing}"
        return with_span(
            invalid_call(text[start + len(opening) : stop], why, call.name), start, end
        ), end

    def _next(self, text: str, position: int) -> int:
        return find_start(any_tag((*self.section, *self.call, *self.thought)), text, position)


_FENCE = "```"


def named_json(head: str, section: tuple[str, str], call: tuple[str, str], why: str) -> ReadCall:
    """Return a reader of calls with JSON arguments after the tool's name.

    Args:
        head: a pattern from the call's opening tag to the JSON. Its group `name` is the name of the
            tool, `id` the id of the call, and `fence` the beginning of a code fence; the last two
            are optional.
        section: the tags around all calls.
        call: the tags around one call.
        why: the error of a call that the pattern does not match.
    """
    tags, end_tag = any_tag((*section, *call, THINK_START, THINK_END)), re.escape(call[1])
    tails = re.compile(rf"\s*{end_tag}"), re.compile(rf"\s*{_FENCE}\s*{end_tag}")
    pattern = re.compile(head)

    def read(text: str, start: int) -> tuple[ToolCall, int, bool]:
        match = pattern.match(text, start)
        if not match:
            return invalid_call("", why), start, False
        groups = match.groupdict()
        name, begin = groups["name"], match.end()
        end = end_of_object(text, begin)
        tail = tails[bool(groups.get("fence"))].match(text, end) if end else None
        if not tail:
            stop = end or end_of_broken_json(text, begin, tags, any_tag((THINK_END,)))
            return invalid_call("", "the arguments must be one JSON object", name), stop, False
        return read_arguments(name, text[begin:end], groups.get("id") or ""), tail.end(), True

    return read


_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_SEPARATOR = "<｜tool▁sep｜>"

# V3 and R1 write the type of the tool, then the name, and the arguments in a code fence. V3.1
# writes only name and arguments.
_DEEPSEEK_HEAD = (
    rf"{_DEEPSEEK_CALL[0]}\s*(?P<fence>function{_SEPARATOR}\s*)?(?P<name>[\w.\-]+)"
    rf"(?(fence)\s*```json|\s*{_SEPARATOR})\s*(?={{)"
)

parse_deepseek = Sections(
    _DEEPSEEK,
    _DEEPSEEK_CALL,
    named_json(_DEEPSEEK_HEAD, _DEEPSEEK, _DEEPSEEK_CALL, f"expected NAME{_SEPARATOR}{{...}}"),
)
"""The format of DeepSeek V3 and R1 (first example) and V3.1 (second example).

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>calculator
    ```json
    {"expression": "3*4"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>calculator<｜tool▁sep｜>{"expression": "3*4"}
    <｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""


_KIMI = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_KIMI_CALL = ("<|tool_call_begin|>", "<|tool_call_end|>")
_ARGUMENTS = "<|tool_call_argument_begin|>"

_KIMI_HEAD = (
    rf"{re.escape(_KIMI_CALL[0])}\s*(?P<id>(?:functions\.)?(?P<name>[\w.\-]+):\d+)\s*"
    rf"{re.escape(_ARGUMENTS)}\s*"
)
_KIMI_WHY = f"expected functions.NAME:NUMBER, then {_ARGUMENTS} and a JSON object"

parse_kimi_k2 = Sections(_KIMI, _KIMI_CALL, named_json(_KIMI_HEAD, _KIMI, _KIMI_CALL, _KIMI_WHY))
"""The format of Kimi-K2 and K2.5.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.calculator:0
    <|tool_call_argument_begin|>{"expression": "3*4"}<|tool_call_end|><|tool_calls_section_end|>

The text before the arguments is the call's id; it must contain the tool's name.
"""
