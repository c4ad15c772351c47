"""What a turn says, as against what it thinks: the part that all call formats share.

A thought lies between `<think>` and `</think>`; a call in it is not a call. Many templates open the
thought in the prompt, so that the sampled text holds `</think>` alone: all before it was thought.
Who knows that the prompt ends in an open `<think>` passes `"<think>" + text`, which leaves nothing
to guess: in a turn cut off before its `</think>`, no call is then taken for one.

A tag inside a call (in a JSON string, say) is the call's text: no thought begins or ends there.
Inside means between the call's opening tag and the closing tag that belongs to it. A call that is
never closed shields nothing: a half call before `</think>` was thought.
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
"""More calls than this in one turn are answered with one error: a runaway loop, not a plan."""

Reader = Callable[[str, int], tuple[list[ToolCall], int]]
"""Text and the start of an opening tag, to the calls there and where to go on (further right)."""


def read_calls(
    text: str,
    openings: tuple[str, ...],
    closing: str,
    read: Reader,
    thought: tuple[str, str] = (THINK_START, THINK_END),
) -> list[ToolCall]:
    """The calls of a turn whose format puts them within tags, less those in thoughts.

    The cost is linear as long as one `read` is: no more than `2 * MAX_CALLS + 2` of them happen.

    Args:
        text: one assistant turn.
        openings: the tags a call may begin with.
        closing: the tag it ends with; one that closes nothing, in a turn without calls, is an
            error. "" where the format has none.
        read: reads the call at an opening tag; it must not fail.
        thought: the tags around a thought.

    Returns:
        The calls in order, each with its span, broken ones with their error; what exceeds
        `MAX_CALLS` is one error.
    """
    think, thought_end = thought
    tags = any_tag((*openings, closing, think, thought_end))
    calls: list[ToolCall] = []
    answer, stray, position = 0, 0, 0  # where the answer begins, and behind a closing tag
    unthought = True  # no thought has begun or ended so far
    while tag := tags.search(text, position):
        position = tag.end()
        if tag[0] == closing:
            stray = position
        elif tag[0] == think:
            unthought = False
            end = text.find(thought_end, position)
            if end < 0:
                if any(text.find(opening, position) >= 0 for opening in openings):
                    why = f"the call stands in a {think} that is never closed"
                    calls.append(with_span(invalid_call(text[position:], why), position, len(text)))
                break
            answer = position = end + len(thought_end)
        elif tag[0] != thought_end:
            more, position = read(text, tag.start())
            calls += [with_span(call, tag.start(), position) for call in more]
            if len(calls) > MAX_CALLS:
                end = text.find(thought_end, position) if unthought else -1
                if end < 0 or text.find(think, position, end) >= 0:
                    return limit_calls(calls)
                position = end  # the loop was thought
        elif unthought:  # begun in the prompt: what came before was thought
            unthought = False
            calls.clear()
            answer, stray = position, 0
    if stray and not calls:
        begin = answer if answer < stray else 0
        why = f"no {openings[0]} before {closing}"
        return [with_span(invalid_call(text[begin:stray], why), begin, stray)]
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
    """What a `Reader` returns for a call that it cannot read: all up to `end_of_broken`.

    The error is `why`, or, where the call was never closed, just that. `read` is where the part
    begins that could not be read: no tag before it ends the call.
    """
    stop = end_of_broken(text, max(body, read), openings, closing)
    raw = text[body:stop].removesuffix(closing)
    closed = len(raw) < stop - body
    return [invalid_call(raw, why if closed else f"no closing {closing}", name)], stop


def limit_calls(calls: list[ToolCall]) -> list[ToolCall]:
    """Return the calls of a turn, with one error in place of all calls beyond `MAX_CALLS`."""
    if len(calls) <= MAX_CALLS:
        return calls
    return [*calls[:MAX_CALLS], ToolCall("", "", error=f"more than {MAX_CALLS} calls in one turn")]


def end_of_broken(text: str, start: int, openings: tuple[str, ...], closing: str) -> int:
    """Where a call ends that cannot be read: behind its closing tag, or where it was abandoned.

    Args:
        text: one assistant turn.
        start: where the call's body begins, behind its opening tag.
        openings: the tags a call may begin with: the next one abandons this call.
        closing: the tag that a call ends with.
    """
    close = text.find(closing, start)
    following = min((p for o in openings if (p := text.find(o, start)) >= 0), default=len(text))
    if 0 <= close < following:
        return close + len(closing)
    thoughts = (text.find(t, start, following) for t in (THINK_START, THINK_END))
    return min((p for p in thoughts if p >= 0), default=following)


def remove_thoughts(text: str, end_of_calls: Callable[[str, int], int]) -> str:
    """What a turn says besides its thoughts, for formats in which a whole turn is the call.

    Args:
        text: one assistant turn.
        end_of_calls: where the calls that begin at a place end, or something smaller where none
            does: a tag before that end is their text.

    Returns:
        The calls before a thought, if any, and what follows it; nothing behind a thought that is
        never closed.
    """
    for past in range(MAX_CALLS):  # thoughts so far; only the first can begin in the prompt
        begin, end = text.find(THINK_START), text.find(THINK_END)
        if begin < 0 and (end < 0 or past):
            return text
        lead = len(text) - len(text.lstrip())
        calls_end = lead if begin == lead else max(lead, end_of_calls(text, lead))
        begin = text.find(THINK_START, calls_end)
        end = text.find(THINK_END, max(begin, 0) if past else calls_end)
        if begin < 0 and (end < 0 or past):
            return text
        if end < 0:
            return text[:begin]
        called = calls_end > lead and 0 <= begin < end
        text = (text[:begin] if called else "") + text[end + len(THINK_END) :]
    return ""


def with_spans_of_turn(calls: list[ToolCall], turn: str, answer: str) -> list[ToolCall]:
    """Calls that were read in `remove_thoughts` a turn, their spans as of the turn.

    None where the answer was put together of what stood before a thought and what came after it.
    """
    if turn.endswith(answer):
        return shift_spans(calls, len(turn) - len(answer))
    if turn.startswith(answer):
        return calls
    return [replace(call, span=None) for call in calls]


def shift_spans(calls: list[ToolCall], by: int) -> list[ToolCall]:
    """Return calls whose spans are moved by so many characters."""
    if not by:
        return calls
    return [
        replace(call, span=(call.span[0] + by, call.span[1] + by)) if call.span else call
        for call in calls
    ]


def first_tag(text: str) -> int:
    """Return where the first `<think>` or `</think>` begins, or the end of the text."""
    return find_start(any_tag((THINK_START, THINK_END)), text, 0)


@cache
def any_tag(tags: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern that matches any of these tags. An empty tag matches nothing."""
    return re.compile("|".join(re.escape(tag) for tag in tags if tag))
