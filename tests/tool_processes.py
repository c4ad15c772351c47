"""Tools that need a process of their own, loaded by path here and in the workers."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

from agentrl import ToolError, ToolResult, tool


@tool(process=True, timeout=5)
def divide(a: int, b: int, seconds: float = 0.0) -> ToolResult:
    """Divide.

    Args:
        a: what
        b: by what
        seconds: a name that the pool has, too
    """
    if b == 1:
        raise ToolError("that is no division")
    return ToolResult(f"{a // b} in {os.getpid()}", reward=0.5 + seconds)


@tool(process=True, timeout=1)
def end(how: str) -> str:
    """End the process."""
    if how == "exit":
        os._exit(3)
    if how == "crash":
        ctypes.string_at(0)
    if how == "system exit":
        raise SystemExit(3)
    if how == "hang":
        time.sleep(60)
    return how


@tool(process=True)
async def whose(sample) -> str:
    """Tell the row."""
    return f"{sample.id} {sample.ground_truth}"


@tool(process=True, idempotent=True, retries=1, timeout=10)
def dies_once(marker: str) -> str:
    """Die the first time."""
    path = Path(marker)
    if not path.exists():
        path.touch()
        os._exit(1)
    return "alive"
