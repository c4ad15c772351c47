"""Episodes in the form that trackers of LLM applications show: messages and operations.

A trace has the messages of an episode in the form of OpenAI's API, and one `Operation` for each
generated turn and each tool call.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Literal

from agentrl.trajectory import Message, Span, Trajectory, show_images


@dataclass(frozen=True, slots=True)
class Operation:
    """A part of an episode.

    Attributes:
        kind: "generation" of a turn, or "tool" for a tool call.
        name: "generate", or the name of the tool.
        input: the arguments of a tool; None for a turn, because the messages show its input.
        output: the text of the turn, or the result of the tool.
        start: in seconds since 1970.
        end: in seconds since 1970.
        error: the kind of a tool's error, as in `ToolResult`; "" without one.
    """

    kind: Literal["generation", "tool"]
    name: str
    input: Any
    output: str
    start: float
    end: float
    error: str = ""


def as_message(message: Message) -> dict[str, Any]:
    """Return a message in the form of OpenAI's API."""
    fields: dict[str, Any] = {"role": message.role, "content": message.shown}
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        fields["tool_call_id"] = message.tool_call_id
    return fields


def operations(trajectory: Trajectory) -> list[Operation]:
    """Return the operations of an episode, in the order of its turns.

    Tool calls of a turn run at the same time, so each starts when the first one does.
    """
    begin = trajectory.started
    spans: defaultdict[tuple[str, int], list[Span]] = defaultdict(list)
    for span in trajectory.spans:
        spans[span.name, span.thread].append(span)
    last = begin
    parts = []
    for turn in trajectory.turns:
        start, end = _take(spans["generate", turn.thread], begin, last, turn.generate_seconds)
        text = trajectory.messages[turn.message_index].content
        parts.append(Operation("generation", "generate", None, text, start, end))
        last = max(last, end)
        if not turn.tool_results:
            continue
        start, end = _take(spans["tools", turn.thread], begin, end, turn.tool_seconds)
        for call, result in zip(turn.tool_calls, turn.tool_results, strict=False):
            ended = start + result.seconds
            content = show_images(str(result.content), result.images)
            parts.append(
                Operation("tool", call.name, call.arguments, content, start, ended, result.error)
            )
        last = max(last, end)
    return parts


def _take(spans: list[Span], begin: float, start: float, seconds: float) -> tuple[float, float]:
    """Return start and end of the next span; without one, those of its `seconds` at `start`."""
    if not spans:
        return start, start + seconds
    span = spans.pop(0)
    return begin + span.start, begin + span.end
