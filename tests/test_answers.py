from __future__ import annotations

import time

import pytest

from agentrl.answers import gsm8k_answer, plain_number, same_number
from agentrl.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("#### 12", "12", "12"),
        ("3*4 = 12", None, "12"),
        ("#### 1,012", "1012", "1012"),
        ("#### $12", "12", "12"),
        ("#### -$12", "-12", "-12"),
        ("#### -12.50", "-12.50", "-12.50"),
        ("#### 12.", "12.", "12"),
        ("#### 3, no: #### 12", "12", "12"),
        ("#### 12 apples in 3 bags", "12", "3"),
        ("####12", None, "12"),
        ("#### twelve", None, None),
        ("...", None, None),
        ("", None, None),
        ("#### 5" + " " * 300, None, None),
        ("#### 5" + " " * 294, "5", "5"),
    ],
)
def test_reading_an_answer(text, strict, flexible):
    assert gsm8k_answer(text) == strict
    assert gsm8k_answer(text, "flexible") == flexible


def test_an_unknown_method_names_the_choices():
    with pytest.raises(
        ConfigError, match=r"'stict' is unknown. Did you mean 'strict'\? Choices: strict, flex"
    ):
        gsm8k_answer("#### 1", "stict")


@pytest.mark.parametrize(
    ("truth", "plain"),
    [("12", "12"), (" 1,012 ", "1012"), ("$5", "5"), (12, "12"), (12.0, "12"), (0.5, "0.5")],
)
def test_ground_truths_as_text(truth, plain):
    assert plain_number(truth) == plain
    assert same_number(plain, truth)


def test_numbers_are_compared_as_strings():
    assert not same_number("17.0", "17")
    assert not same_number("17", "17.0")


@pytest.mark.parametrize("hostile", ["1,.-$", "#### ", "-", "####", "#### -$"])
def test_a_megabyte_takes_no_time(hostile):
    text = hostile * (1_000_000 // len(hostile))
    started = time.thread_time()
    for method in ("strict", "flexible"):
        gsm8k_answer(text, method)
    assert time.thread_time() - started < 0.05
