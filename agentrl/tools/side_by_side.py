"""The calls of one turn at once, answered in their order, none left out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from agentrl.tools.arguments import encode_arguments
from agentrl.tools.results import unknown_tool
from agentrl.trajectory import ToolCall, ToolResult


async def side_by_side(
    calls: Sequence[ToolCall],
    call: Callable[[int, bytes], Awaitable[ToolResult]],
    lanes: Mapping[str, str] | None,
) -> list[ToolResult]:
    """Run calls at once, those of one lane one after another; the results in order.

    The first exception ends them all.

    Args:
        calls: malformed ones are answered here.
        call: runs the call at an index with its encoded arguments.
        lanes: see `lanes_of`; None where there are no tools to call.
    """

    async def answer(index: int) -> ToolResult:
        arguments = encode_arguments(calls[index])
        if isinstance(arguments, ToolResult):
            return arguments
        if lanes is None:
            return unknown_tool(calls[index].name, ())
        return await call(index, arguments)

    if len(calls) == 1:
        return [await answer(0)]
    by_lane: dict[str | int, list[int]] = {}
    for i, c in enumerate(calls):
        by_lane.setdefault((lanes or {}).get(c.name, i), []).append(i)
    results: dict[int, ToolResult] = {}

    async def follow(indices: list[int]) -> None:
        for i in indices:
            results[i] = await answer(i)

    tasks = [asyncio.create_task(follow(indices)) for indices in by_lane.values()]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    return [results[i] for i in range(len(calls))]
