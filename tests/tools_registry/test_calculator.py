"""The calculator of the shelf: exact, bounded, and helpful about nonsense."""

from __future__ import annotations

import sys
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl import ToolError, registry


@pytest.fixture(scope="module")
def calculator():
    with registry.tools.isolated():
        module = registry.load_file("shelf:calculator")
        yield module.calculator
    # Otherwise `load_file` would not register the calculator again for other test files.
    sys.modules.pop(module.__name__, None)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("3*4", "12"),
        (" 3 * (4 + 5) ", "27"),
        ("2 + 3 * 4 - 1", "13"),
        ("-3 - -2", "-1"),
        ("+5", "5"),
        ("7/2", "3.5"),
        ("6/2", "3"),
        ("10/3", "3.3333333333333335"),
        ("7//2", "3"),
        ("-7//2", "-4"),
        ("7%4", "3"),
        ("7.5%2", "1.5"),
        ("2**10", "1024"),
        ("2^10", "1024"),
        ("2**-1", "0.5"),
        ("2**0.5", "1.4142135623730951"),
        ("0.1+0.2", "0.30000000000000004"),
        ("0.5*4", "2"),
        ("1e3", "1000"),
        ("1e22", "1e+22"),
        ("10**30/10**10", "1" + "0" * 20),
        ("10**18+1", "1000000000000000001"),
        ("1,234 * 2", "2468"),
        ("1,234,567 + 1", "1234568"),
        ("3×4÷2−1", "5"),
        ("1_000", "1000"),
        ("2**3**2", "512"),
        ("0**0", "1"),
        ("1**(10**900)", "1"),
        ("(" * 50 + "1" + ")" * 50, "1"),
        ("1" + "+1" * 150, "151"),
    ],
)
def test_values(calculator, expression, value):
    assert calculator(expression) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("1/0", "division by zero"),
        ("1%0", "division by zero"),
        ("1//0.0", "division by zero"),
        ("0**-1", "division by zero"),
        ("", "'' is not an arithmetic expression. Allowed: numbers, + - * / // % **"),
        ("3 +", "'3 +' is not an arithmetic expression"),
        ("three", "cannot evaluate 'three'"),
        ("x = 3", "is not an arithmetic expression"),
        ("1 + True", "cannot evaluate 'True'"),
        ("'a' * 3", "cannot evaluate \"'a'\""),
        ("1j", "cannot evaluate '1j'"),
        ("[1]", "cannot evaluate '[1]'"),
        ("~1", "cannot evaluate '~1'"),
        ("1 << 9", "cannot evaluate '1 << 9'"),
        ("1, 2", "cannot evaluate '1, 2'"),
        ("1 if 1 else 2", "cannot evaluate"),
        ("(lambda: 1)()", "cannot evaluate"),
        ("__import__('os').system('ls')", "cannot evaluate"),
        ("007", "is not an arithmetic expression"),
        ("1\0", "is not an arithmetic expression"),
        ("(-8)**0.5", "-8 ** 0.5 is not a real number"),
        ("9**9**9", "the result is too large"),
        ("10**1001", "the result is too large"),
        ("(10**999)*(10**999)", "the result is too large"),
        ("1e308*10", "the result is too large"),
        ("1e999", "the result is too large"),
        ("1.5**(10**900)", "the result is too large"),
        ("10**900/3", "the result is too large"),
        ("1" * 1001, "the expression has 1001 characters, maximum 1000"),
        ("(" * 400 + ")" * 400, "is not an arithmetic expression"),
        ("-" * 900 + "1", "nested more than 200 levels deep"),
        ("1" + "+1" * 400, "nested more than 200 levels deep"),
        ("f" + "(-" * 90 + "1" + ")" * 90, "cannot evaluate"),
    ],
)
@pytest.mark.timing
def test_invalid_expressions_are_tool_errors(calculator, expression, message):
    began = time.process_time()
    with pytest.raises(ToolError) as e:
        calculator(expression)
    assert message in str(e.value)
    assert time.process_time() - began < 0.5


INTEGERS = st.recursive(
    st.integers(0, 10**6).map(str),
    lambda e: st.builds("({} {} {})".format, e, st.sampled_from("+-*"), e),
    max_leaves=12,
)


@given(INTEGERS)
def test_integers_are_exact(calculator, expression):
    assert int(calculator(expression)) == eval(expression)


@given(st.integers(-(10**20), 10**20), st.integers(1, 10**20))
def test_quotients(calculator, a, b):
    """Exact where they can be, else the nearest float."""
    answer = calculator(f"{a}/{b}")
    if a % b == 0:
        assert answer == str(a // b)
    else:
        assert Fraction(answer) == Fraction(a / b) or float(answer) == a / b


@given(st.text("0123456789+-*/%(). ^e,", max_size=40) | st.text(max_size=20))
def test_any_expression_is_a_number_or_a_tool_error(calculator, expression):
    try:
        answer = calculator(expression)
    except ToolError as e:
        assert str(e)
    else:
        float(answer)
