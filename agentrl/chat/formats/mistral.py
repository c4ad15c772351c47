"""Mistral: a list of JSON calls after `[TOOL_CALLS]`, or a name and its arguments."""

from __future__ import annotations

import re

from agentrl.chat.formats.marked_json import read_list
from agentrl.chat.formats.scan import THINK_END, THINK_START, read_calls
from agentrl.chat.formats.strict_json import (
    end_of_broken_json,
    end_of_object,
    find_start,
    invalid_call,
    read_arguments,
    read_call,
    read_object,
    skip_space,
    with_span,
)
from agentrl.trajectory import ToolCall

OPEN = "[TOOL_CALLS]"
MISTRALS_THOUGHT = ("[THINK]", "[/THINK]")

_NAME = re.compile(r"\s*([\w.\-]+)(?:\[CALL_ID\](\w*))?(?:\[ARGS\]\s*|\s*(?=\{))")
_TAG = re.compile(r"\[TOOL_CALLS\]|\[/?THINK\]|</?think>")
_THOUGHT = re.compile(r"\[/THINK\]|</think>")
_THINKING = re.compile(r"\[/?THINK\]|</?think>")
_ID = re.compile(r"[A-Za-z0-9]{9}")
_BAD_ID = "a call's id must be nine letters or digits"


def parse_mistral(text: str) -> list[ToolCall]:
    """Return the calls of one assistant turn in Mistral's formats.

        [TOOL_CALLS] [{"name": "calculator", "arguments": {"expression": "3*4"}, "id": "a1B2c3D4e"}]
        [TOOL_CALLS]calculator[ARGS]{"expression": "3*4"}
        [TOOL_CALLS]calculator[CALL_ID]a1B2c3D4e[ARGS]{"expression": "3*4"}
        [TOOL_CALLS]calculator{"expression": "3*4"}

    A list of one call may lack its brackets. Calls inside `[THINK]...[/THINK]` (or `<think>`) do
    not count. Within a list, an element that is not a call becomes an error, and the others are
    kept. If a list stops being JSON, the text up to the next `[TOOL_CALLS]` is one error.
    """
    if OPEN not in text:  # most turns; this takes a tenth of the time
        return []
    first = _THINKING.search(text)
    thought = (THINK_START, THINK_END) if first and first[0][0] == "<" else MISTRALS_THOUGHT
    return read_calls(text, (OPEN,), "", _read, thought)


def _read(text: str, start: int) -> tuple[list[ToolCall], int]:
    body = start + len(OPEN)
    first = skip_space(text, body)
    if text.startswith("[", first) and not text.startswith(OPEN, first):
        return _read_list_of_calls(text, first)
    if text.startswith("{", first):
        return _read_single_call(text, first)
    return _read_named_call(text, body)


def _read_list_of_calls(text: str, start: int) -> tuple[list[ToolCall], int]:
    """Return the calls of a JSON list, and where it ends."""
    calls, end, is_complete = read_list(text, start, _read_json_call)
    if is_complete:
        return calls, end
    stop = end_of_broken_json(text, end, _TAG, _THOUGHT)
    error = invalid_call(text[end:stop], "the JSON list of calls is not closed")
    return [*calls, with_span(error, end, stop)], stop


def _read_json_call(body: str) -> ToolCall:
    call = read_call(body, other_keys=("id",))
    value = {} if call.error else read_object(body)[0]
    if "id" not in value:
        return call
    if not isinstance(value["id"], str) or not _ID.fullmatch(value["id"]):
        return invalid_call(body, _BAD_ID, call.name)
    return ToolCall(call.name, call.arguments, id=value["id"])


def _read_named_call(text: str, start: int) -> tuple[list[ToolCall], int]:
    """Return the call whose name is at `start`."""
    stop = find_start(_TAG, text, start)
    head = _NAME.match(text, start)
    if not head:
        why = f"expected {OPEN}NAME[ARGS]{{...}} or {OPEN} and a JSON list"
        return [invalid_call(text[start:stop], why)], stop
    return _read_single_call(text, head.end(), head[1], head[2])


def _read_single_call(
    text: str, start: int, name: str | None = None, call_id: str | None = None
) -> tuple[list[ToolCall], int]:
    """Return the call with the JSON object at `start`. Only another call may follow it.

    Args:
        text: one assistant turn.
        start: the start of the arguments or, without `name`, of an object with name and arguments.
        name: the name of the function, if it is before the object.
        call_id: the call's id, if it is before the object.
    """
    end = end_of_object(text, start)
    if not end:
        stop = end_of_broken_json(text, start, _TAG, _THOUGHT)
        before = "[TOOL_CALLS]" if name is None else "the name"
        why = f"the text after {before} must be a complete JSON object"
        return [invalid_call(text[start:stop], why, name or "")], stop
    after = skip_space(text, end)
    if after < len(text) and not text.startswith(OPEN, after):
        stop = find_start(_TAG, text, after)
        return [
            invalid_call(text[start:stop], "unexpected text after the call's arguments", name or "")
        ], stop
    body = text[start:end]
    if name is None:
        return [_read_json_call(body)], after
    if call_id is not None and not _ID.fullmatch(call_id):
        return [invalid_call(body, _BAD_ID, name)], after
    return [read_arguments(name, body, call_id or "")], after
