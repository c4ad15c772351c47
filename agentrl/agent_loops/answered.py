"""What a turn's calls came to: their results and rewards, and what those that failed cost.

A call that failed may cost the tokens that wrote it (`tools.penalties`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from agentrl.agent_loops.row import Row
from agentrl.chat import ChatTemplate
from agentrl.trajectory import ToolCall, ToolResult, Turn

Penalties = tuple[tuple[int, int, float], ...]
"""Of failed calls: response tokens [start, end), and the price."""


def answered(
    turn: Turn, results: Sequence[ToolResult], penalties: Penalties, seconds: float
) -> Turn:
    """The turn with the results of its calls, which took these seconds."""
    reward = sum(r.reward for r in results if r.reward is not None)
    return replace(
        turn,
        tool_results=tuple(results),
        tool_seconds=seconds,
        penalties=penalties,
        rewards={**turn.rewards, **({"tool": reward} if reward else {})},
    )


def penalties_of(
    turn: Turn,
    results: Sequence[ToolResult],
    prices: Mapping[str, float],
    row: Row,
    template: ChatTemplate,
) -> Penalties:
    """What a turn's failed calls cost: response tokens [start, end) of its row, and the price.

    Args:
        turn: with its calls.
        results: theirs, in order.
        prices: by class of failure; a class that is not there costs nothing.
        row: in which the turn was sampled.
        template: the policy's.
    """
    failed = [
        (call.span, prices[result.error])
        for call, result in zip(turn.tool_calls, results, strict=True)
        if result.error in prices
    ]
    if not failed:
        return ()
    ids = row.ids[len(row.prompt) + turn.start : len(row.prompt) + turn.end]
    tokens = [(*_tokens(ids, span, template), price) for span, price in failed]
    return tuple((turn.start + a, turn.start + b, price) for a, b, price in tokens)


def moved(calls: Iterable[ToolCall], by: int) -> list[ToolCall]:
    """The calls of a text, their spans as of one that begins so many characters later."""
    return [
        replace(c, span=(max(c.span[0] - by, 0), c.span[1] - by)) if c.span else c for c in calls
    ]


def _tokens(
    ids: Sequence[int], span: tuple[int, int] | None, template: ChatTemplate
) -> tuple[int, int]:
    """The tokens that wrote some characters of a turn, those that wrote but a part included.

    All of the turn where its parser did not tell the characters.
    """
    if span is None:
        return 0, len(ids)
    lengths = range(1, len(ids))
    start, end = span
    text = template.decode(ids)[:end]
    # A character whose bytes are not all there counts as one, and differs from what it will be.
    first = bisect_left(lengths, True, key=lambda n: len(template.decode(ids[:n])) > start)
    last = bisect_left(lengths, True, key=lambda n: template.decode(ids[:n])[:end] == text)
    return first, last + 1
