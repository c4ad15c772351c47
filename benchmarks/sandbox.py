"""Measure programs per second in the sandbox. One JSON object a line: name, value, unit, context.

`python benchmarks/sandbox.py [RUNS] [BACKEND]`. First the start of an interpreter, which is the
cost of a short program, with 1, 2, 4, 8 and 16 at once; then opening a box, and a call in a box.
The p99 of the last tenth divided by that of the first tenth shows whether long runs become slower.
"""

from __future__ import annotations

import asyncio
import os
import platform
import statistics
import time

import uvloop
from workload.timing import arguments, print_figure

from agentrl.config import SandboxConfig
from agentrl.rewards.graders import grader_of
from agentrl.sandbox import Sandbox, configure, release
from agentrl.sandbox.settings import open_sandbox


def p99(took: list[float]) -> float:
    return sorted(took)[int(0.99 * len(took))] * 1e3


async def measure(place: Sandbox, runs: int, at_once: int) -> tuple[float, list[float]]:
    """Return the runs per second, and the seconds of each run."""
    took: list[float] = []
    gate = asyncio.Semaphore(at_once)

    async def one() -> None:
        async with gate:
            began = time.monotonic()
            done = await place.run("print(1 + 1)")
            took.append(time.monotonic() - began)
            assert done.stdout == "2\n", done

    began = time.monotonic()
    await asyncio.gather(*(one() for _ in range(runs)))
    return runs / (time.monotonic() - began), took


async def grade(tests: int, backend: str) -> None:
    """Measure the cost of the code grader with a program that does almost nothing.

    A program that writes a file outside of its folder gets a new sandbox for each test.
    """
    sums = "print(sum(map(int, input().split())))"
    programs = {"grade": sums, "grade_with_files": f"open('/tmp/left', 'a').close()\n{sums}"}
    truth = {
        "inputs": [f"{i} 2\n" for i in range(tests)],
        "outputs": [f"{i + 2}\n" for i in range(tests)],
    }
    grader = grader_of("apps", {"total_seconds": 300})
    configure(SandboxConfig(backend=backend))
    for name, program in programs.items():
        took: list[float] = []
        for _ in range(9):
            began = time.monotonic()
            marks = await grader.grade_text(program, truth)
            took.append(time.monotonic() - began)
            assert marks["acc"] == 1.0, marks
        print_figure(
            f"sandbox/{name}", statistics.median(took) * 1e3, "ms", tests=tests, backend=backend
        )
    await release()


async def main(runs: int, backend: str) -> None:
    machine = {"kernel": platform.release(), "backend": backend}
    for at_once in (1, 2, 4, 8, 16):
        place = open_sandbox(SandboxConfig(backend=backend, slots=at_once))
        await measure(place, at_once, at_once)  # the first run reserves user ids
        fds = len(os.listdir("/proc/self/fd"))
        rate, took = await measure(place, runs, at_once)
        print_figure("sandbox/runs", rate, "1/s", at_once=at_once, runs=runs, **machine)
        print_figure("sandbox/p99", p99(took), "ms", at_once=at_once)
        tenth = max(1, runs // 10)
        print_figure("sandbox/p99_last_over_first", p99(took[-tenth:]) / p99(took[:tenth]), "")
        print_figure("sandbox/descriptors_left", len(os.listdir("/proc/self/fd")) - fds, "")
        await place.aclose()
    for tests in (1, 10, 100):
        await grade(tests, backend)
    if "://" in backend:
        return
    place = open_sandbox(SandboxConfig(backend=backend))
    began = time.monotonic()
    boxes = [await place.open() for _ in range(20)]
    print_figure("sandbox/open", (time.monotonic() - began) / 20 * 1e3, "ms", **machine)
    await boxes[0].run("x = 1")
    began = time.monotonic()
    for _ in range(200):
        await boxes[0].run("x + 1")
    print_figure("sandbox/call_in_a_box", (time.monotonic() - began) / 200 * 1e3, "ms", **machine)
    await place.aclose()


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("runs", nargs="?", type=int, default=1000)
    parser.add_argument("backend", nargs="?", default="bubblewrap")
    options = parser.parse_args()
    uvloop.run(main(options.runs, options.backend))
