"""Tools that work, fail or hang. Loaded by path, in test processes and in tool servers."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import threading
import time
from typing import Any

import numpy as np
from pydantic import BaseModel

from agentrl import Infrastructure, Sample, ToolError, ToolResult, tool

CALLED: list[Any] = []
"""The calls of some tools, in order."""
CLOSED: list[str] = []
"""Objects that were closed."""
RELEASE = threading.Event()
"""Ends the calls that hang."""


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Point(BaseModel):
    x: int
    y: int = 0


@tool
def add(a: int, b: int = 2) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


@tool
async def async_add(a: int, b: int = 2) -> int:
    """Add two numbers without a thread."""
    return a + b


@tool
def paint(color: Color, points: list[Point]) -> str:
    """Paint points."""
    types = " ".join(type(p).__name__ for p in points)
    return f"{color.name} {types} {sum(p.x + p.y for p in points)}"


RETURNS = {
    "text": "plain",
    "none": None,
    "bool": True,
    "int": 10**30,
    "float": 0.1,
    "nan": float("nan"),
    "list": [1, "a", None, {"k": 2}],
    "enum": {"color": Color.RED},
    "model": Point(x=1),
    "big": {"n": 10**30},
    "bytes": b"ab\xff",
    "surrogate": "a\ud800b\0c",
    "surrogate_in_json": {"a": "\ud800"},
    "result": ToolResult("own", reward=0.5),
    "failed": ToolResult("own text", ok=False),
    "classed": ToolResult("own text", ok=False, error="mine"),
    "nan_reward": ToolResult("x", reward=float("nan")),
    "numpy_int": np.int64(3),
    "numpy_bool": np.bool_(True),
    "numpy_nan": np.float32("nan"),
    "numpy_array": np.array([[1, 2], [3, 4]]).T,
    "numpy_json": {np.int64(1): [np.float32(0.1), np.float64(0.5), np.array(3)], "a": np.arange(2)},
    "numpy_reward": ToolResult("x", reward=np.float32(0.5)),
    "content_json": ToolResult({"n": [1, None]}),  # type: ignore[arg-type]
}


@tool
def give(what: str) -> Any:
    """Return something."""
    return RETURNS[what]


@tool
def flood() -> str:
    """Return too much."""
    return "a" * 300_000 + "z"


RAISES: dict[str, BaseException] = {
    "value": ValueError("not that one"),
    "exit": SystemExit(3),
    "interrupt": KeyboardInterrupt(),
    "timeout": TimeoutError("mine"),
    "stop": StopIteration(1),
    "cancelled": asyncio.CancelledError(),
    "refused": ToolError("no such file: x\ud800"),
    "long": ToolError("x" * 1000 + "end"),
}


@tool
def fail(what: str) -> str:
    """Raise something."""
    raise RAISES[what]


@tool
async def async_fail(what: str) -> str:
    """Raise something."""
    raise RAISES[what]


@tool
def backend_down() -> str:
    """Depend on what is not there."""
    raise Infrastructure("the search index is down")


@tool(timeout=0.3)
def hang() -> str:
    """Hang in a thread."""
    RELEASE.wait(30)
    return "late"


@tool(timeout=0.3)
async def async_hang() -> str:
    """Hang, and resist being cancelled for a while."""
    for _ in range(2):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.5)
    return "late"


@tool
def nap(seconds: float) -> str:
    """Sleep in a thread."""
    time.sleep(seconds)
    return f"slept {seconds:g}"


@tool(max_concurrency=2)
async def narrow(seconds: float) -> str:
    """Two at a time."""
    CALLED.append("in")
    running = CALLED.count("in") - CALLED.count("out")
    await asyncio.sleep(seconds)
    CALLED.append("out")
    return str(running)


@tool(idempotent=True)
def flaky(key: str) -> str:
    """Work the third time."""
    CALLED.append(key)
    if CALLED.count(key) < 3:
        raise ConnectionError("try again")
    return "done"


@tool
def once(key: str) -> str:
    """Count calls."""
    time.sleep(0.05)
    CALLED.append(key)
    return str(CALLED.count(key))


def plain(function: Any) -> Any:
    """A decorator that hides that a function is async."""

    def wrapper(text: str) -> Any:
        """Wrapped."""
        return function(text)

    wrapper.__name__ = function.__name__
    return wrapper


@tool
@plain
async def wrapped(text: str) -> str:
    return text.upper()


@tool(
    schema={
        "type": "function",
        "function": {
            "name": "handmade",
            "description": "By hand.",
            "parameters": {
                "type": "object",
                "properties": {"n": {"type": "integer", "minimum": 0}},
                "required": ["n"],
            },
        },
    }
)
def handmade(n: int, **others: Any) -> str:
    return f"{n} {others}"


@tool
class Notebook:
    """Lines of one episode."""

    def __init__(self, sample: Sample, capacity: int = 10):
        self.sample = sample
        self.capacity = capacity
        self.lines: list[str] = []
        self.writing = False

    def write(self, line: str, seconds: float = 0.0) -> str:
        """Write a line.

        Args:
            line: what to write
            seconds: how long it takes
        """
        if self.writing:
            raise RuntimeError("two at once")
        self.writing = True
        time.sleep(seconds)
        if len(self.lines) == self.capacity:
            raise ToolError(f"full: {self.capacity} lines")
        self.lines.append(line)
        self.writing = False
        return " ".join(self.lines)

    async def truth(self) -> str:
        """Tell the row's answer, to show that the row is here."""
        return str(self.sample.ground_truth)

    def _private(self) -> str:
        return "never offered"

    def reward(self) -> float:
        return float(len(self.lines))

    async def close(self) -> None:
        CLOSED.append(f"notebook {self.sample.id}")


@tool(timeout=0.3)
class Stuck:
    """Hangs or raises in the method that `at` names."""

    def __init__(self, at: str = "", sample: Sample | None = None):
        self.at = at
        self.id = sample.id if sample else ""
        self._maybe("init")

    def _maybe(self, where: str) -> None:
        if self.at == where:
            RELEASE.wait(30)
        if self.at == f"{where} raises":
            raise ValueError(f"in {where}")

    def __call__(self, text: str = "") -> str:
        """Say it, or hang."""
        self._maybe("call" if text else "")
        return text

    def reward(self) -> float:
        self._maybe("reward")
        return float("nan") if self.at == "reward nan" else 1.0

    def close(self) -> None:
        CLOSED.append(f"stuck {self.id}")
        self._maybe("close")
