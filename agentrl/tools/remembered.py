"""Answers that are given again: of tools to which equal arguments always mean the same."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import replace

from agentrl.trajectory import ToolResult

MAX_KEPT = 2**26
"""Characters of one tool's arguments and answers; then the longest unused are forgotten."""
_OVERHEAD = 500
"""About what an entry takes beside its texts."""


class Remembered:
    """One tool's answers by its arguments. Belongs to one event loop."""

    def __init__(self, max_kept: int = MAX_KEPT):
        self._max_kept = max_kept
        self._kept = 0
        self._answers: OrderedDict[bytes, ToolResult] = OrderedDict()
        self._running: dict[bytes, asyncio.Task[ToolResult]] = {}

    async def answer(self, key: bytes, run: Callable[[], Awaitable[ToolResult]]) -> ToolResult:
        """The answer that is known, is being found out, or is found out now; failures are not kept.

        Whoever waits may be cancelled: the others get their answer all the same.

        Args:
            key: the arguments.
            run: makes the call.
        """
        began = time.monotonic()
        known = self._answers.get(key)
        if known is not None:
            self._answers.move_to_end(key)
            return replace(known, seconds=0.0)
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = asyncio.ensure_future(self._find_out(key, run))
        result = await asyncio.shield(task)
        return replace(result, seconds=time.monotonic() - began)

    async def _find_out(self, key: bytes, run: Callable[[], Awaitable[ToolResult]]) -> ToolResult:
        try:
            result = await run()
        finally:
            del self._running[key]
        if result.ok:
            self._answers[key] = result
            self._kept += self._size(key, result)
            while self._kept > self._max_kept:
                self._kept -= self._size(*self._answers.popitem(last=False))
        return result

    @staticmethod
    def _size(key: bytes, result: ToolResult) -> int:
        return len(key) + len(result.content) + _OVERHEAD
