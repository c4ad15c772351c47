"""Scan a turn for calls outside of thoughts: the code that all call formats share.

A thought is the text between `<think>` and `</think>`; a call in it does not count. Many templates
begin the thought in the prompt, so the sampled text has only `</think>`, and all text before this
tag is thought. A caller that knows that the prompt ends with an open `<think>` passes `"<think>" +
text`. Then no call counts in a turn that was cut off before its `</think>`.

A tag within a call (for example in a JSON string) is text of the call: no thought begins or ends
there. A call extends from its opening tag to its closing tag. A call without a closing tag is
incomplete. It does not count, and before `</think>` it is part of the thought.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache

from agentrl.chat.formats.strict_json import find_start, invalid_call, with_span
from agentrl.trajectory import ToolCall

THINK_START, THINK_END = "<think>", "</think>"
MAX_CALLS = 32
"""The maximum number of calls in one turn. All further calls become one error."""

CallsReader = Callable[[str, int], tuple[list[ToolCall], int]]
"""Takes a text and the index of an opening tag. Returns the calls there, and the next index."""


def read_calls(
    text: str,
    openings: tuple[str, ...],
    closing: str,
    read: CallsReader,
    thought: tuple[str, str] = (THINK_START, THINK_END),
) -> list[ToolCall]:
    """Return the calls between tags in a turn, except those in thoughts.

    The cost is linear if the cost of `read` is: it is called at most `2 * MAX_CALLS + 2` times.

    Args:
        text: one assistant turn.
        openings: the tags that a call may begin with.
        closing: the tag that a call ends with; "" if the format has none. In a turn without calls,
            a closing tag alone is an error.
        read: reads the call at an opening tag; it must not raise.
        thought: the tags around a thought.

    Returns:
        The calls in order, each with its span, invalid ones with their error. All calls after
        `MAX_CALLS` are one error.
    """
    think, thought_end = thought
    tags = any_tag((*openings, closing, think, thought_end))
    calls: list[ToolCall] = []
    answer, stray_end, position = 0, 0, 0  # the start of the answer, and the end of a closing tag
    no_thought_yet = True  # whether no thought has begun or ended so far
    while tag := tags.search(text, position):
        position = tag.end()
        if tag[0] == closing:
            stray_end = position
        elif tag[0] == think:
            no_thought_yet = False
            end = text.find(thought_end, position)
            if end < 0:
                if any(text.find(opening, position) >= 0 for opening in openings):
                    why = f"the call is inside a {think} block that is never closed"
                    calls.append(with_span(invalid_call(text[position:], why), position, len(text)))
                break
            answer = position = end + len(thought_end)
        elif tag[0] != thought_end:
            more, position = read(text, tag.start())
            calls += [with_span(call, tag.start(), position) for call in more]
            if len(calls) > MAX_CALLS:
                end = text.find(thought_end, position) if no_thought_yet else -1
                if end < 0 or text.find(think, position, end) >= 0:
                    return limit_calls(calls)
                position = end  # the loop is within a thought
        elif no_thought_yet:  # the prompt began the thought: all text before was thought
            no_thought_yet = False
            calls.clear()
            answer, stray_end = position, 0
    if stray_end and not calls:
        begin = answer if answer < stray_end else 0
        why = f"missing {openings[0]} before {closing}"
        return [with_span(invalid_call(text[begin:stray_end], why), begin, stray_end)]
    return calls


def invalid_call_at(
    text: str,
    body: int,
    openings: tuple[str, ...],
    closing: str,
    why: str,
    name: str = "",
    read: int = 0,
) -> tuple[list[ToolCall], int]:
    """Return the error of an invalid call as a list, and the index of the call's end.

    Args:
        text: one assistant turn.
        body: the index of the call's text, after its opening tag.
        openings: the tags that a call may begin with.
        closing: the tag that a call ends with.
        why: the error. If the closing tag is missing, this is the error instead.
        name: the name of the tool, if it is known.
        read: the end of the text that was parsed. A tag before this index does not end the call.
    """
    stop = end_of_invalid_call(text, max(body, read), openings, closing)
    raw = text[body:stop].removesuffix(closing)
    is_closed = len(raw) < stop - body
    return [invalid_call(raw, why if is_closed else f"missing closing {closing}", name)], stop


def limit_calls(calls: list[ToolCall]) -> list[ToolCall]:
    """Return the calls of a turn, with one error in place of all calls after `MAX_CALLS`."""
    if len(calls) <= MAX_CALLS:
        return calls
    return [*calls[:MAX_CALLS], ToolCall("", "", error=f"more than {MAX_CALLS} calls in one turn")]


def end_of_invalid_call(text: str, start: int, openings: tuple[str, ...], closing: str) -> int:
    """Return the end of an invalid call: its closing tag, or the next tag that begins another call.

    Args:
        text: one assistant turn.
        start: the index of the call's text, after its opening tag.
        openings: the tags that a call may begin with.
        closing: the tag that a call ends with.
    """
    close = text.find(closing, start)
    following = min((p for o in openings if (p := text.find(o, start)) >= 0), default=len(text))
    if 0 <= close < following:
        return close + len(closing)
    thoughts = (text.find(t, start, following) for t in (THINK_START, THINK_END))
    return min((p for p in thoughts if p >= 0), default=following)


_THOUGHTS = re.compile(rf"{THINK_END}(?:\s*{THINK_START}.*?{THINK_END})*", re.DOTALL)


def without_thought(text: str, start_of_calls: Callable[[str], int]) -> tuple[str, int]:
    """Return a turn without its thoughts, and the index of the rest in the turn.

    This is for formats in which the whole turn is the call. Its thoughts are before its calls; a
    tag after the beginning of the calls is text of the calls.

    Args:
        text: one assistant turn.
        start_of_calls: returns the beginning of the calls in a text without thoughts; -1 if there
            are none.
    """
    start = 0
    if not 0 <= start_of_calls(text) < find_start(any_tag((THINK_START, THINK_END)), text, 0):
        thoughts = _THOUGHTS.search(text)
        start = thoughts.end() if thoughts else 0
        text = text[start:]
    begin = text.find(THINK_START)
    is_thought = begin >= 0 and not 0 <= start_of_calls(text) < begin
    return text[:begin] if is_thought else text, start


def shift_spans(calls: list[ToolCall], by: int) -> list[ToolCall]:
    """Return calls with their spans moved by some characters."""
    if not by:
        return calls
    return [
        replace(call, span=(call.span[0] + by, call.span[1] + by)) if call.span else call
        for call in calls
    ]


@cache
def any_tag(tags: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern that matches any of these tags. An empty tag matches nothing."""
    return re.compile("|".join(re.escape(tag) for tag in tags if tag))
