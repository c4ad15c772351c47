"""Text to tool calls: strict and linear.

A policy under training writes every kind of broken call. None of them may crash the parser, take
quadratic time, or vanish: what is not a call becomes a `ToolCall` with its error, so that the model
is told and the metrics count it.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from agentrl.trajectory import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK, THOUGHT = "<think>", "</think>"
MAX_CALLS = 32
"""More calls than this in one turn are answered with one error: a runaway loop, not a plan."""

MAX_DEPTH = 64

# One token of a JSON value: a string, a bracket, or a run of what may stand outside of strings. A
# tag's `<` is none of these, so that a scan can pass a tag only within a string; that keeps the sum
# of all scans linear.
_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]]|[\s:,0-9.eE+\-a-z]+', re.DOTALL)
_ACTION = re.compile("^Action:", re.MULTILINE)
_FINAL = re.compile("^Final Answer:", re.MULTILINE)
_TAG = re.compile("|".join((OPEN, THINK, THOUGHT)))
_SPACE = re.compile(r"\s*")


def parse_tool_calls(text: str) -> list[ToolCall]:
    """The calls of one assistant turn in the Hermes / Qwen format.

        <tool_call>
        {"name": "calculator", "arguments": {"expression": "3*4"}}
        </tool_call>

    Calls inside `<think>...</think>` are thoughts, not calls. A tag within a call's JSON string is
    text. A call cut off at the end of the turn is an error, never executed.
    """
    calls: list[ToolCall] = []
    position = 0
    while tag := _TAG.search(text, position):
        position = tag.end()
        if tag[0] == THOUGHT:  # begun in the prompt: what came before was thought
            calls.clear()
        elif tag[0] == THINK:
            position = text.find(THOUGHT, position) + len(THOUGHT)
            if position < len(THOUGHT):
                if text.find(OPEN, tag.end()) >= 0:
                    why = "the call stands in a <think> that is never closed"
                    calls.append(ToolCall("", text[tag.end() :], error=why))
                break
        else:
            call, position = _call_at(text, position)
            calls.append(call)
        if len(calls) > MAX_CALLS:
            calls[-1] = ToolCall("", "", error=f"more than {MAX_CALLS} calls in one turn")
            break
    return calls


def _call_at(text: str, position: int) -> tuple[ToolCall, int]:
    """The call behind an opening tag, and where to go on."""
    body = _SPACE.match(text, position).end()  # type: ignore[union-attr]
    end = _end_of_object(text, body)
    after = _SPACE.match(text, end).end() if end else 0  # type: ignore[union-attr]
    if end and text.startswith(CLOSE, after):
        return _read_call(text[body:end]), after + len(CLOSE)
    close, following = text.find(CLOSE, body), text.find(OPEN, body)
    stop = min(p for p in (close, following, len(text)) if p >= 0)
    why = "no closing </tool_call>" if close < 0 else "not one JSON object"
    return ToolCall("", text[body:stop], error=why), stop


def parse_react(text: str) -> list[ToolCall]:
    """The call of one ReAct turn: the last `Action:` and the `Action Input:` that follows it.

        Thought: I need the product.
        Action: calculator
        Action Input: {"expression": "3*4"}
        Observation:

    Returns no call where the turn has no `Action:`, or a `Final Answer:` after it.
    """
    action = max((m.end() for m in _ACTION.finditer(text)), default=-1)
    final = max((m.end() for m in _FINAL.finditer(text)), default=-1)
    if action <= final:
        return []
    name, _, rest = text[action:].partition("\n")
    name = name.strip()
    label, _, tail = rest.lstrip().partition("Action Input:")
    if label.strip() or not rest.lstrip().startswith("Action Input:"):
        return [ToolCall(name, rest, error="`Action:` needs an `Action Input:` line after it")]
    body = tail.strip().removesuffix("Observation:").strip()
    end = _end_of_object(body, 0)
    if not end or body[end:].strip():
        return [ToolCall(name, body, error="`Action Input:` must be one JSON object")]
    arguments, error = _read_object(body)
    return [ToolCall(name, body if error else arguments, error=error)]


def _end_of_object(text: str, start: int) -> int:
    """Where the JSON object at `start` ends (exclusive), or 0 where there is none."""
    if not text.startswith("{", start):
        return 0
    depth, position = 0, start
    while token := _JSON_TOKEN.match(text, position):
        position = token.end()
        first = text[token.start()]
        if first in "{[":
            depth += 1
            if depth > MAX_DEPTH:
                return 0
        elif first in "}]":
            depth -= 1
            if depth == 0:
                return position
    return 0


def _read_object(body: str) -> tuple[dict[str, Any], str]:
    """A JSON object and no error, or an empty one and why."""
    try:
        # orjson refuses what later breaks HTTP, parquet and tokenizers: NaN, lone surrogates.
        value = orjson.loads(body)
    except orjson.JSONDecodeError as e:
        return {}, f"not JSON: {str(e)[:120]}"
    except UnicodeEncodeError:
        return {}, "not JSON: lone surrogate"
    if not isinstance(value, dict):
        return {}, "not a JSON object"
    return value, ""


def _read_call(body: str) -> ToolCall:
    value, error = _read_object(body)
    if error:
        return ToolCall("", body, error=error)
    name, arguments = value.get("name"), value.get("arguments", {})
    if not isinstance(name, str) or not name:
        return ToolCall("", body, error='"name" must be a string')
    if not isinstance(arguments, dict):
        return ToolCall(name, body, error='"arguments" must be a JSON object')
    if unknown := sorted(value.keys() - {"name", "arguments", "id"}):
        return ToolCall(name, body, error=f"unknown keys {unknown}")
    return ToolCall(name, arguments)
