"""Test cases of programming problems: read them from a row, and compare outputs.

Both happen outside the sandbox. The expected output never enters it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal
from functools import lru_cache
from typing import Any

from agentrl.errors import DataError

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
