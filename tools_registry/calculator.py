"""A calculator with exact integers and bounded work, without `eval`.

    $ agentrl tools call calculator '{"expression": "3 * (4 + 5)"}' --file shelf:calculator
    27

The constants below bound every intermediate value.
"""

from __future__ import annotations

import ast
import math
import operator
import re

from agentrl import ToolError, tool

MAX_LENGTH = 1000
MAX_DEPTH = 200
MAX_DIGITS = 1000

_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_ALLOWED = "Allowed: numbers, + - * / // % ** and parentheses"
_SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


@tool(timeout=5, idempotent=True)
def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: numbers, + - * / // % ** and parentheses, for example "3 * (4 + 5)"
    """
    if len(expression) > MAX_LENGTH:
        raise ToolError(f"the expression has {len(expression)} characters, maximum {MAX_LENGTH}")
    plain = _THOUSANDS.sub("", expression.translate(_SPELLINGS).replace("^", "**")).strip()
    try:
        tree = ast.parse(plain, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ToolError(f"{expression!r} is not an arithmetic expression. {_ALLOWED}") from None
    try:
        return _text(_value(tree, plain, 0))
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except OverflowError:
        raise ToolError("the result is too large") from None


def _value(node: ast.expr, source: str, depth: int) -> int | float:
    """Return the value of a syntax tree. Every intermediate value is bounded."""
    if depth > MAX_DEPTH:
        raise ToolError(f"the expression is nested more than {MAX_DEPTH} levels deep")
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.UnaryOp(op=ast.UAdd() | ast.USub() as op, operand=operand):
            return _OPERATORS[type(op)](_value(operand, source, depth + 1))
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _value(left, source, depth + 1), _value(right, source, depth + 1)
            match op:
                case ast.Pow():
                    return _bounded(_power(a, b))
                case ast.Div():
                    return _bounded(_quotient(a, b))
                case _ if type(op) in _OPERATORS:
                    return _bounded(_OPERATORS[type(op)](a, b))
    raise ToolError(f"cannot evaluate {ast.get_source_segment(source, node)!r}. {_ALLOWED}")


def _quotient(a: int | float, b: int | float) -> int | float:
    """Return the quotient, exact if there is no remainder: floats hold 15 digits only."""
    if isinstance(a, int) and isinstance(b, int) and b and a % b == 0:
        return a // b
    return a / b


def _power(a: int | float, b: int | float) -> int | float:
    """Return the power. A huge result is refused before it is computed."""
    if isinstance(a, int) and isinstance(b, int) and b > 0 and abs(a) > 1:
        if b * math.log10(abs(a)) > MAX_DIGITS:
            raise OverflowError
        return a**b
    power = a**b
    if isinstance(power, complex):
        raise ToolError(f"{_text(a)} ** {_text(b)} is not a real number")
    return power


def _bounded(value: int | float) -> int | float:
    if isinstance(value, float):
        if not math.isfinite(value):
            raise OverflowError
    elif abs(value) >= 10**MAX_DIGITS:
        raise OverflowError
    return value


def _text(value: int | float) -> str:
    """Return `12` instead of `12.0`. Beyond 2**53 the digits of a float would be inexact."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    return str(value)
