"""The format of ReAct turns (Yao et al., 2022, arXiv 2210.03629)."""

from __future__ import annotations

import re

from agentrl.chat.formats.strict_json import end_of_object, read_object, with_span
from agentrl.trajectory import ToolCall

REACT_STOP = "Observation:"
"""The stop string of a turn. The model samples it; the tool writes the text after it."""

_ACTION = re.compile("^Action:", re.MULTILINE)
_FINAL = re.compile("^Final Answer:", re.MULTILINE)


def parse_react(text: str) -> list[ToolCall]:
    """Return the call of one ReAct turn: the last `Action:` with the `Action Input:` after it.

        Thought: I need the product.
        Action: calculator
        Action Input: {"expression": "3*4"}
        Observation:

    There is no call if the turn has no `Action:`, or has a `Final Answer:` after it.
    """
    actions = [m.span() for m in _ACTION.finditer(text)]
    final = max((m.end() for m in _FINAL.finditer(text)), default=-1)
    if not actions or actions[-1][1] <= final:
        return []
    start, action = actions[-1]
    return [with_span(_call(text[action:]), start, len(text))]


def _call(text: str) -> ToolCall:
    """Return the call in the text after `Action:`."""
    name, _, rest = text.partition("\n")
    name = name.strip()
    label, _, tail = rest.lstrip().partition("Action Input:")
    if label.strip() or not rest.lstrip().startswith("Action Input:"):
        return ToolCall(name, rest, error="`Action:` needs an `Action Input:` line after it")
    body = tail.strip().removesuffix(REACT_STOP).strip()
    end = end_of_object(body, 0)
    if not end or body[end:].strip():
        return ToolCall(name, body, error="`Action Input:` must be one JSON object")
    arguments, error = read_object(body)
    return ToolCall(name, body if error else arguments, error=error)
