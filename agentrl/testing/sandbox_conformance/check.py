"""What a check is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from agentrl.sandbox import Sandbox

Run = Callable[[Sandbox], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that a backend must do."""

    name: str
    run: Run
    """Raises `AssertionError` with what the backend did instead."""
    isolating: bool = False
    """Whether it is about being kept away from this machine."""
    boxes: bool = False
    """Whether it needs `Sandbox.open`."""
    limits: bool = False
    """Whether it is about limits that a remote server need not keep: output, files, memory."""


CHECKS: list[Check] = []


def check(
    isolating: bool = False, boxes: bool = False, limits: bool = False
) -> Callable[[Run], Run]:
    """Add a check, named as its function."""

    def add(run: Run) -> Run:
        name = getattr(run, "__name__", "").removeprefix("_")
        CHECKS.append(Check(name, run, isolating, boxes, limits))
        return run

    return add


async def said(sandbox: Sandbox, code: str, **kwargs: Any) -> str:
    """What a program prints, which must end well."""
    done = await sandbox.run(code, **kwargs)
    assert done.ok, done
    return done.stdout
