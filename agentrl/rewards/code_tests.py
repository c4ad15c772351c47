"""Test cases of programming problems: reading them from a row, and comparing what came out.

Both happen outside of the sandbox. What a program should print never enters it.
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
"""How far a number with a fraction may be off, as a share of the right one."""

# As decimals, since as a float `1e999` is infinite, the same as any other number that is too large.
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,4})?")
_WIDE = Context(prec=28, Emin=MIN_EMIN, Emax=MAX_EMAX)
_INTEGER = re.compile(r"[+-]?\d+")


@dataclass(frozen=True, slots=True)
class Tests:
    """The tests of one problem: what goes in, and what should come out."""

    inputs: tuple[Any, ...]
    """What the program reads, or the list of the function's arguments."""
    outputs: tuple[Any, ...]
    """What the program should print, or the function return."""
    fn_name: str = ""
    """The function to call; "" for a program that reads and prints."""

    def some(self, start: int, stop: int | None) -> Tests:
        """Those from `start` to before `stop`."""
        return replace(self, inputs=self.inputs[start:stop], outputs=self.outputs[start:stop])


def read_tests(ground_truth: Any) -> Tests:
    r"""The tests in a ground truth: a mapping, or its JSON.

        {"inputs": ["1 2\n", ...], "outputs": ["3\n", ...]}
        {"inputs": [[1, 2], ...], "outputs": [3, ...], "fn_name": "add"}

    Arguments may also be text with one JSON value per line (LiveCodeBench's way).

    Raises:
        DataError: it holds something else; the message says what.
    """
    return _read(ground_truth) if isinstance(ground_truth, str) else _tests(ground_truth)


@lru_cache(maxsize=64)
def _read(text: str) -> Tests:
    """As `read_tests`; all rollouts of a row read the same."""
    try:
        return _tests(json.loads(text))
    except (ValueError, RecursionError) as e:
        if isinstance(e, DataError):
            raise
        raise DataError(f"test cases that are no JSON: {e}") from e


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
        raise DataError(f"fn_name={fn_name!r} is no name of a function")
    if not fn_name:
        return Tests(tuple(map(_lines, inputs)), tuple(map(_lines, outputs)))
    pairs = [_arguments(*pair) for pair in zip(inputs, outputs, strict=True)]
    return Tests(tuple(i for i, _ in pairs), tuple(o for _, o in pairs), fn_name)


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _arguments(given: Any, returned: Any) -> tuple[list[Any], Any]:
    if isinstance(given, str):
        try:
            return [json.loads(line) for line in given.split("\n")], json.loads(returned)
        except (ValueError, TypeError) as e:
            raise DataError(f"arguments that are text must be a JSON value per line: {e}") from e
    if not isinstance(given, list | tuple):
        raise DataError(f"a function's inputs must be lists of its arguments, not {given!r:.40}")
    return list(given), returned


def same_output(printed: str, expected: str) -> bool:
    """Whether a program printed what it should: lines without the blanks around and between words.

    Where a line should be a number with a fraction, one that is nearly it will do.
    """
    said, right = _words(printed), _words(expected)
    return len(said) == len(right) and all(
        a == b or _close(a, b) for a, b in zip(said, right, strict=True)
    )


def _words(text: str) -> list[str]:
    return [words for line in text.splitlines() if (words := " ".join(line.split()))]


def _close(said: str, right: str) -> bool:
    if not (_NUMBER.fullmatch(said) and _NUMBER.fullmatch(right)):
        return False
    if _INTEGER.fullmatch(right):
        return not _INTEGER.fullmatch(said) and Decimal(said) == Decimal(right)
    off = _WIDE.subtract(Decimal(said), Decimal(right)).copy_abs()
    return off <= max(_WIDE.multiply(CLOSE, Decimal(right)).copy_abs(), CLOSE * CLOSE)


def same_value(returned: str, expected: Any) -> bool:
    """Whether a function returned what it should: `returned` is the JSON of its value.

    As in APPS, the expected value may stand in a list of its own; it is alone there, or every list
    would be the same as its first element.
    """
    try:
        value = json.loads(returned)
    except (ValueError, RecursionError):
        return False
    right = json.loads(json.dumps(expected))  # keys are text, as they are in the value
    return value == right or (isinstance(right, list) and len(right) == 1 and value == right[0])
