"""The grader of programming problems: run the last program in the answer on a row's test cases.

The program runs in the sandbox, once per test (`code_harness`). Its output is compared here. The
expected output never enters the sandbox, so a program cannot read it or forge a comparison.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any

from agentrl import sandbox
from agentrl.errors import ConfigError, DataError, SandboxError
from agentrl.rewards.base import reward
from agentrl.sandbox import Completed
from agentrl.sandbox.box import TERMINATED_NOTE
from agentrl.workers import PerLoop

FIRST = 10
"""The number of tests that are run first. A partial score counts only these tests."""
MAX_LATE = 2
"""The number of tests that may time out before the rest is skipped."""
MIN_OUTPUT_LIMIT = 65_536
START_SECONDS = 10.0
"""The time in which the harness starts if the sandbox works. If a harness had less time and did not
start, the sandbox is not the cause."""
READY = '"ready"'
"""The first line that the harness prints, before it runs the solution."""

_FENCED = re.compile(r"^ {0,3}```([^\n`]*)\n(.*?)(?:^ {0,3}```|\Z)", re.DOTALL | re.MULTILINE)
_PYTHON = frozenset(("", "python", "py", "python3"))

_HARNESS = Path(__file__).with_name("code_harness.py").read_text("utf-8")


@reward("code", bounded=True, sandbox=True)
class Code:
    """Grades the programs of a run."""

    def __init__(self, continuous: bool = True, seconds: float = 5.0, total_seconds: float = 30.0):
        """Check the settings.

        Args:
            continuous: the score if not all tests pass. True: the share of the first ten tests that
                pass. False: 0.
            seconds: the time limit of a test.
            total_seconds: the time limit of all tests together.

        Raises:
            ConfigError: the time limits contradict each other.
        """
        if not 0 < seconds <= total_seconds:
            raise ConfigError(
                f"reward.kwargs: seconds={seconds} (of a test) must be above 0 and at most"
                f" total_seconds={total_seconds} (of all tests)"
            )
        self._continuous = continuous
        self._seconds = seconds
        self._total_seconds = total_seconds
        # One program per core: with more at once, some would exceed the time limit of a test.
        self._turns = PerLoop(lambda: asyncio.Semaphore(len(os.sched_getaffinity(0))))

    async def __call__(self, solution_str: str, ground_truth: Any) -> dict[str, float]:
        """Run the last program of the text against the test cases.

        Args:
            solution_str: the assistant's text.
            ground_truth: the test cases, see `read_tests`.

        Returns:
            `score`; `acc`: 1.0 if all tests pass, else 0.0; `timeout` and `crash`: 1.0 if a test
            timed out or crashed, else 0.0.

        Raises:
            DataError: the test cases cannot be read.
            SandboxError: the sandbox cannot run programs.
        """
        tests, program = read_tests(ground_truth), last_program(solution_str)
        async with self._turns.get():
            end = time.monotonic() + self._total_seconds
            ended = first = await self._run(program, tests.select(0, FIRST), end, self._continuous)
            if not any(first):
                ended = [*first, *await self._run(program, tests.select(FIRST, None), end, False)]
        passed = not any(ended)
        share = first.count("") / len(first) if self._continuous else 0.0
        return {
            "score": 1.0 if passed else share,
            "acc": float(passed),
            "timeout": float("time" in ended),
            "crash": float("crash" in ended),
        }

    async def _run(self, program: str, tests: Tests, end: float, run_all: bool) -> list[str]:
        """Return the ending of each test: "" (passed), "wrong", "time", "crash", "output", "none".

        "none" stands for a test that was not run. If the harness dies, the test that was running
        fails, and another harness runs the rest.

        Args:
            program: the solution.
            tests: the tests to run.
            end: the `time.monotonic()` seconds at which to stop.
            run_all: whether to continue after a test that failed.

        Raises:
            SandboxError: the sandbox cannot run programs.
        """
        count = at_once = len(tests.inputs)
        ended: list[str] = []
        while len(ended) < count:
            max_crashes = (count if run_all else 1) - ended.count("crash") - ended.count("output")
            max_late = (MAX_LATE if run_all else 1) - ended.count("time")
            if max_crashes <= 0 or max_late <= 0:
                break
            remaining = end - time.monotonic()
            if remaining <= 0:
                return ended + ["time"] * (count - len(ended))
            next_tests = tests.select(len(ended), len(ended) + at_once)
            completed = await self._run_harness(
                program, next_tests, remaining, max_crashes, max_late
            )
            if completed.stdout.startswith(READY):
                ended += _endings(completed, next_tests)
            elif completed.stderr == TERMINATED_NOTE and at_once > 1:
                # The program ended the sandbox, so the harness's reports are lost. From here on,
                # each test has its own sandbox and cannot destroy the report of another test.
                at_once = 1
            elif completed.stderr == TERMINATED_NOTE:
                ended.append("time" if completed.ended_by == "time" else "crash")
            elif completed.ended_by == "time" and remaining < START_SECONDS:
                return ended + ["time"] * (count - len(ended))
            else:
                raise SandboxError(
                    f"the code grader cannot run programs in the sandbox {sandbox.current().name}:"
                    f" exit code {completed.exit_code}, ended by {completed.ended_by or 'exit'},"
                    f" stderr: {completed.stderr[-500:]}"
                )
        return ended + ["none"] * (count - len(ended))

    async def _run_harness(
        self, program: str, tests: Tests, seconds: float, max_crashes: int, max_late: int
    ) -> Completed:
        """Run the harness on these tests, until too many of them have crashed or timed out."""
        count, max_output = len(tests.inputs), _output_limit(tests.outputs)
        job = {
            "solution": program,
            "fn_name": tests.fn_name,
            "count": count,
            "seconds": self._seconds,
            "most": max_output,
            "crash": max_crashes,
            "time": max_late,
        }
        output_bytes = count * (max_output * 4 // 3 + 200) + 100
        limits = replace(
            sandbox.limits(),
            seconds=seconds,
            cpu_seconds=int(seconds) + 1,
            output_bytes=output_bytes,
        )
        stdin = "".join(map(_frame, [job, *tests.inputs]))
        return await sandbox.current().run(_HARNESS, stdin=stdin, limits=limits, init=True)


def last_program(text: str) -> str:
    """Return the last code block in Python or without a language; if there is none, all the text.

    A block that is not closed extends to the end of the text.
    """
    blocks = [code for kind, code in _FENCED.findall(text) if kind.strip().lower() in _PYTHON]
    return blocks[-1] if blocks else text


def _frame(value: Any) -> str:
    """Encode a value for the harness: its length in 10 characters, then JSON."""
    text = json.dumps(value)
    return f"{len(text):10}{text}"


def _endings(completed: Completed, tests: Tests) -> list[str]:
    """Return the ending of each test whose beginning the harness reported.

    Lines of any other form are skipped: without isolation, a program can write such lines.
    """
    count = len(tests.inputs)
    missing = "time" if completed.ended_by == "time" else "crash"
    same = same_value if tests.fn_name else same_output
    ended: list[str] = []
    for line in completed.stdout.split("\n")[1:]:
        try:
            report = json.loads(line)
            if report == len(ended) < count:
                ended.append(missing)
                continue
            at, ending, out = report
            text = base64.b64decode(out).decode("utf-8", "replace")
            if ending in ("", "time", "crash", "output"):
                ended[at] = ending or ("" if same(text, tests.outputs[at]) else "wrong")
        except (ValueError, TypeError, IndexError, RecursionError):
            continue  # The line is of another form, or was cut off when the harness ended.
    # Before the first test the harness only compiles the program. A program that ends the harness
    # there does so every time.
    return ended or [missing] * count


def _output_limit(outputs: Sequence[Any]) -> int:
    """Return the output limit in bytes: rounded, so that it reveals little of the right output."""
    longest = max(len(str(output).encode("utf-8", "replace")) for output in outputs)
    return max(MIN_OUTPUT_LIMIT, 2 << longest.bit_length())


def problem_of(ground_truth: Any) -> str:
    """Return why a ground truth is unusable; "" if it can be read."""
    try:
        read_tests(ground_truth)
    except DataError as e:
        return str(e)
    return ""


CLOSE = Decimal("1e-5")
"""The relative tolerance for numbers with a fraction."""

# Numbers are compared as decimals: as floats, `1e999` and all other huge numbers would be infinite.
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,4})?")
_WIDE = Context(prec=28, Emin=MIN_EMIN, Emax=MAX_EMAX)
_INTEGER = re.compile(r"[+-]?\d+")


@dataclass(frozen=True, slots=True)
class Tests:
    """The tests of one problem: inputs and expected outputs."""

    inputs: tuple[Any, ...]
    """Per test: the stdin of the program, or the list of the function's arguments."""
    outputs: tuple[Any, ...]
    """Per test: the expected stdout of the program, or value of the function."""
    fn_name: str = ""
    """The function to call; "" for a program that reads stdin and prints."""

    def select(self, start: int, stop: int | None) -> Tests:
        """Return the tests [start, stop)."""
        return replace(self, inputs=self.inputs[start:stop], outputs=self.outputs[start:stop])


def read_tests(ground_truth: Any) -> Tests:
    r"""Return the tests in a ground truth, which is a mapping or its JSON.

        {"inputs": ["1 2\n", ...], "outputs": ["3\n", ...]}
        {"inputs": [[1, 2], ...], "outputs": [3, ...], "fn_name": "add"}

    Arguments may also be text with one JSON value per line, as in LiveCodeBench.

    Raises:
        DataError: the ground truth has another form. The message says what is wrong.
    """
    return _read(ground_truth) if isinstance(ground_truth, str) else _tests(ground_truth)


@lru_cache(maxsize=64)
def _read(text: str) -> Tests:
    """Parse JSON as `read_tests` does. It is cached: the rollouts of a row have the same text."""
    try:
        return _tests(json.loads(text))
    except (ValueError, RecursionError) as e:
        if isinstance(e, DataError):
            raise
        raise DataError(f"test cases are not valid JSON: {e}") from e


def _tests(cases: Any) -> Tests:
    if not isinstance(cases, Mapping):
        raise DataError(f"test cases must be a mapping, not {type(cases).__name__}")
    inputs, outputs = cases.get("inputs"), cases.get("outputs")
    for name, values in (("inputs", inputs), ("outputs", outputs)):
        if not isinstance(values, list | tuple) or not values:
            raise DataError(f'test cases need a list under "{name}" with at least one element')
    assert inputs is not None and outputs is not None
    if len(inputs) != len(outputs):
        raise DataError(f"{len(inputs)} inputs, but {len(outputs)} outputs")
    fn_name = cases.get("fn_name") or ""
    if not isinstance(fn_name, str) or (fn_name and not fn_name.isidentifier()):
        raise DataError(f"fn_name={fn_name!r} is not a valid function name")
    if not fn_name:
        return Tests(tuple(map(_lines, inputs)), tuple(map(_lines, outputs)))
    pairs = [_arguments(*pair) for pair in zip(inputs, outputs, strict=True)]
    return Tests(tuple(i for i, _ in pairs), tuple(o for _, o in pairs), fn_name)


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _arguments(arguments: Any, returned: Any) -> tuple[list[Any], Any]:
    if isinstance(arguments, str):
        try:
            return [json.loads(line) for line in arguments.split("\n")], json.loads(returned)
        except (ValueError, TypeError) as e:
            raise DataError(f"arguments as text must have one JSON value per line: {e}") from e
    if not isinstance(arguments, list | tuple):
        raise DataError(f"a function's input must be a list of arguments, not {arguments!r:.40}")
    return list(arguments), returned


def same_output(printed: str, expected: str) -> bool:
    """Return whether a program printed the expected lines, apart from extra spaces and empty lines.

    A number with a fraction may differ by the tolerance `CLOSE`.
    """
    answer, truth = _normal_lines(printed), _normal_lines(expected)
    return len(answer) == len(truth) and all(
        a == b or _close(a, b) for a, b in zip(answer, truth, strict=True)
    )


def _normal_lines(text: str) -> list[str]:
    return [normal for line in text.splitlines() if (normal := " ".join(line.split()))]


def _close(printed: str, expected: str) -> bool:
    if not (_NUMBER.fullmatch(printed) and _NUMBER.fullmatch(expected)):
        return False
    if _INTEGER.fullmatch(expected):
        return not _INTEGER.fullmatch(printed) and Decimal(printed) == Decimal(expected)
    difference = _WIDE.subtract(Decimal(printed), Decimal(expected)).copy_abs()
    return difference <= max(_WIDE.multiply(CLOSE, Decimal(expected)).copy_abs(), CLOSE * CLOSE)


def same_value(returned: str, expected: Any) -> bool:
    """Return whether a function returned the expected value; `returned` is JSON.

    As in APPS, the expected value may be wrapped in a list. That list must have one element, or
    every list would equal its first element.
    """
    try:
        value = json.loads(returned)
    except (ValueError, RecursionError):
        return False
    right = json.loads(json.dumps(expected))  # keys are text, as they are in the value
    return value == right or (isinstance(right, list) and len(right) == 1 and value == right[0])
