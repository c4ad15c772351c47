"""Timing on a shared machine: CPU time of the process, and stalls of its event loop."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of a benchmark, whose help is its docstring."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


@dataclass(frozen=True, slots=True)
class Round:
    """The cost of playing some conversations at once."""

    cpu_s: float
    wall_s: float
    stall_p99_ms: float
    results: list[Any]


async def timed(plays: Iterable[Coroutine[Any, Any, Any]]) -> Round:
    """Play conversations at once, and measure the cost."""
    stalls: list[float] = []

    async def tick() -> None:
        """Sleep 1 ms again and again; a late wake-up is a stall of the event loop."""
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            stalls.append(time.perf_counter() - began - 0.001)

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0)
    cpu, wall = cpu_seconds(), time.perf_counter()
    results = await asyncio.gather(*map(asyncio.create_task, plays))
    wall, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
    ticking.cancel()
    stalls.sort()
    p99 = stalls[min(len(stalls) - 1, int(0.99 * len(stalls)))] if stalls else wall
    return Round(cpu, wall, 1e3 * p99, results)


def cpu_seconds() -> float:
    """Return the CPU time of this process, with all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def cpu_us(function: Callable[[T], object], arguments: Sequence[T]) -> float:
    """Return the CPU microseconds per call, as the mean over the arguments."""
    began = time.process_time()
    for argument in arguments:
        function(argument)
    return 1e6 * (time.process_time() - began) / len(arguments)


def machine() -> dict[str, object]:
    """Return the versions and the device that each figure is measured with."""
    versions: dict[str, object] = {"python": platform.python_version(), "cpus": os.cpu_count()}
    if torch := sys.modules.get("torch"):
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        versions |= {"torch": torch.__version__, "device": gpu}
    return versions


def short(value: float) -> float:
    """Round a number to four significant digits."""
    return float(f"{value:.4g}")


def print_figure(name: str, value: float | None, unit: str, **context: object) -> None:
    """Print one figure as one line of JSON."""
    value = short(value) if isinstance(value, float) else value
    line = {"name": name, "value": value, "unit": unit, "context": context | machine()}
    print(json.dumps(line), flush=True)
