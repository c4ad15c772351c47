"""Tools that run in processes of their own, and tools that raise secrets. Loaded by path."""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from pathlib import Path

from agentrl import ToolError, ToolResult, tool
from agentrl.errors import DataError, UserCodeError

SECRET = "cannot reach postgres://root:hunter2@db, see /etc/db.conf"


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
def by_name(*, seconds: int, function: str) -> str:
    """Take names that the pool has, too, and that cannot go in order."""
    return f"{function} {seconds}"


@tool(process=True)
def leak_in_a_process(how: str) -> str:
    """Raise what is not for the model."""
    raise DataError(SECRET) if how == "ours" else OSError(SECRET)


@tool
def leak_in_a_thread(how: str) -> str:
    """Raise what is not for the model."""
    raise UserCodeError(SECRET) if how == "ours" else KeyError(SECRET)


@tool(idempotent=True, retries=1)
async def leak_on_the_loop(how: str) -> ToolResult:
    """Raise what is not for the model."""
    if how == "result":
        return ToolResult("x", reward=SECRET)  # type: ignore[arg-type]
    raise ConnectionError(SECRET)


@tool(scope="call")
class LeakByCall:
    """Raise what is not for the model."""

    def __init__(self, at: str = "call"):
        self.at = at
        if at == "constructor":
            raise RuntimeError(SECRET)

    def leak_by_call(self) -> str:
        """Raise what is not for the model."""
        if self.at == "call":
            raise RuntimeError(SECRET)
        return "said nothing"

    def close(self) -> None:
        """Raise what is not for the model."""
        raise RuntimeError(SECRET)


@tool
class LeakByEpisode:
    """Raise what is not for the model."""

    async def leak_by_episode(self) -> str:
        """Raise what is not for the model."""
        raise RuntimeError(SECRET)


BY_HAND = {
    "type": "function",
    "function": {
        "name": "offers_too_much",
        "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}},
    },
}


@tool(process=True, schema=BY_HAND)
def offers_too_much() -> str:
    """Take nothing of what the schema offers."""
    return "nothing"


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


def _note(log: str, mark: str) -> None:
    with Path(log).open("a") as file:
        file.write(mark)


def _stay(log: str) -> None:
    _note(log, "+")
    time.sleep(0.6)
    _note(log, "-")


@tool(max_concurrency=1)
def stay_in_a_thread(log: str) -> None:
    """Stay for a while, and note it."""
    _stay(log)


@tool(max_concurrency=1, process=True)
def stay_in_a_process(log: str) -> None:
    """Stay for a while, and note it."""
    _stay(log)


@tool(max_concurrency=1)
async def stay_on_the_loop(log: str) -> None:
    """Stay for a while, and note it; cancelled, go slowly."""
    _note(log, "+")
    try:
        await asyncio.sleep(60)
    finally:
        await asyncio.sleep(0.3)
        _note(log, "-")
