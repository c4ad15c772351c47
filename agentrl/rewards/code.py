"""The grader of programming problems: the last program in the answer, against a row's test cases.

The program runs in the sandbox, all tests of a run in one (`code_harness`); what came out is
compared here. What should come out never enters the sandbox, so that there is nothing in it to read
or to forge: a program that owned all of it would still have to name the right answers.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from agentrl import sandbox
from agentrl.errors import ConfigError, DataError, SandboxError
from agentrl.rewards.base import reward
from agentrl.rewards.code_tests import Tests, read_tests, same_output, same_value

FIRST = 10
"""Tests that are run first; for a share, only these count. Some problems have hundreds."""
MOST_LATE = 2
"""Tests that may run out of time before the rest is given up."""
LEAST_OUTPUT = 65_536
READY = '"ready"'
"""What the harness says before it runs anything."""

_FENCED = re.compile(r"^ {0,3}```([^\n`]*)\n(.*?)(?:^ {0,3}```|\Z)", re.DOTALL | re.MULTILINE)
_PYTHON = frozenset(("", "python", "py", "python3"))


@reward("code", bounded=True, sandbox=True)
class Code:
    """Judges a run's programs."""

    def __init__(self, continuous: bool = True, seconds: float = 5.0, total_seconds: float = 30.0):
        """How to judge.

        Args:
            continuous: where not all tests pass, score the share of the first ten that do; else 0.
            seconds: for each test.
            total_seconds: for all of them.

        Raises:
            ConfigError: impossible times.
        """
        if not 0 < seconds <= total_seconds:
            raise ConfigError(
                f"reward.kwargs: seconds={seconds} for a test must be above 0 and at most"
                f" total_seconds={total_seconds}, for all of them"
            )
        self._continuous = continuous
        self._seconds = seconds
        self._total_seconds = total_seconds
        self._turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            WeakKeyDictionary()
        )

    async def __call__(self, solution_str: str, ground_truth: Any) -> dict[str, float]:
        """Run the last program of the text against the test cases.

        Args:
            solution_str: what the assistant wrote.
            ground_truth: the test cases, see `code_tests.read_tests`.

        Returns:
            `score`; `acc`: 1.0 where all tests pass, else 0.0; `timeout` and `crash`: 1.0 where a
            test ended so.

        Raises:
            DataError: test cases that cannot be read.
            SandboxError: nothing can be run.
        """
        tests, program = read_tests(ground_truth), last_program(solution_str)
        # As many as there are cores: with more at once, a test's seconds are too short for some.
        turn = self._turns.setdefault(
            asyncio.get_running_loop(), asyncio.Semaphore(len(os.sched_getaffinity(0)))
        )
        async with turn:
            end = time.monotonic() + self._total_seconds
            ended = first = await self._run(program, tests.some(0, FIRST), end, self._continuous)
            if not any(first):
                ended = [*first, *await self._run(program, tests.some(FIRST, None), end, False)]
        passed = not any(ended)
        share = first.count("") / len(first) if self._continuous else 0.0
        return {
            "score": 1.0 if passed else share,
            "acc": float(passed),
            "timeout": float("time" in ended),
            "crash": float("crash" in ended),
        }

    async def _run(self, program: str, tests: Tests, end: float, go_on: bool) -> list[str]:
        """How each test ended: "" where it passed, or "wrong", "time", "crash", "output", "none".

        Args:
            program: the solution.
            tests: those to run.
            end: when all must be done.
            go_on: past one that failed.
        """
        count, left = len(tests.inputs), end - time.monotonic()
        if not count or left <= 0:
            return ["time"] * count
        most = _most(tests.outputs)
        job = {
            "solution": program,
            "inputs": tests.inputs,
            "fn_name": tests.fn_name,
            "seconds": self._seconds,
            "most": most,
            "crash": count if go_on else 1,
            "time": MOST_LATE if go_on else 1,
        }
        limits = replace(
            sandbox.limits(),
            seconds=left,
            cpu_seconds=int(left) + 1,
            output_bytes=count * (most * 4 // 3 + 100) + 100,
        )
        place = sandbox.current()
        done = await place.run(_harness(), stdin=json.dumps(job), limits=limits)
        lines = done.stdout.split("\n")
        if lines[0] != READY:
            raise SandboxError(
                f"programs cannot be judged in {place.name}: exit code {done.exit_code}"
                f" {done.ended_by}: {done.stderr[-500:]}"
            )
        same = same_value if tests.fn_name else same_output
        ended = ["time" if done.ended_by == "time" else "none"] * count
        for line in lines[1:]:
            at, how, out = _reported(line, count)
            if at >= 0:
                ended[at] = how or ("" if same(out, tests.outputs[at]) else "wrong")
        return ended


def last_program(text: str) -> str:
    """The last fenced block of Python, or of nothing in particular; without one, all of the text.

    A block that never closes reaches to the end of the text.
    """
    blocks = [code for kind, code in _FENCED.findall(text) if kind.strip().lower() in _PYTHON]
    return blocks[-1] if blocks else text


def _reported(line: str, count: int) -> tuple[int, str, str]:
    """Of a line of the harness: which test, how it ended, what came out; -1 where it is not one."""
    try:
        at, how, out = json.loads(line)
        known = isinstance(at, int) and 0 <= at < count and how in ("", "time", "crash", "output")
        return (at if known else -1), how, base64.b64decode(out).decode("utf-8", "replace")
    except (ValueError, TypeError, RecursionError):
        return -1, "", ""


def _most(outputs: Sequence[Any]) -> int:
    """Bytes that a test may put out: a round number, which says little of what is expected."""
    longest = max(len(str(output).encode("utf-8", "replace")) for output in outputs)
    return max(LEAST_OUTPUT, 2 << longest.bit_length())


def problem_of(ground_truth: Any) -> str:
    """Why nothing could be judged by this ground truth; "" where all is well."""
    try:
        read_tests(ground_truth)
    except DataError as e:
        return str(e)
    return ""


@cache
def _harness() -> str:
    return Path(__file__).with_name("code_harness.py").read_text("utf-8")
