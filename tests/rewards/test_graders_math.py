from __future__ import annotations

import asyncio
import logging
import resource
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.answers import boxed_answer, named_answer, tagged_answer
from agentrl.config import RewardConfig
from agentrl.errors import ConfigError, DataError, GraderCrash
from agentrl.rewards import Scorer, check_graders, math, math_algebra
from agentrl.rewards.executor import RewardExecutor
from agentrl.rewards.graders import grader_of
from agentrl.rewards.math import is_other_kind, is_too_hard
from agentrl.rewards.math_dapo import compute_score as dapo
from agentrl.rewards.math_dapo import minerva
from agentrl.rewards.math_text import normal_form, same_text
from agentrl.trajectory import Message, Sample

# -- reading an answer ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so $\boxed{4}$.", "4"),
        (r"\boxed{3} no: \boxed{4}", "4"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed {4}", "4"),
        (r"is $\boxed 4$ then", "4"),
        ("\\boxed 4\nthen", "4"),
        (r"\boxed{\boxed{4}}", "4"),
        (r"\boxed{}", ""),
        (r"\fbox{4}", "4"),
        (r"\fbox{3} \boxed{4} \fbox{5}", "4"),
        (r"\boxed{4", None),
        (r"\boxed{4} and \boxed{5", None),
        (r"\boxed{a}}", "a"),
        (r"\boxed4", None),
        (r"\boxed", None),
        ("4", None),
        ("", None),
        (r"\boxed{" * 2000 + "4" + "}" * 2000, "4"),
    ],
)
def test_the_last_box(text, answer):
    assert boxed_answer(text) == answer


def test_other_marks_of_an_answer():
    assert named_answer("Answer: 3\nanswer : 4 \n") == "4 "
    assert named_answer("answer 4") is None
    assert named_answer("Answer: 4" + " " * 300) is None
    assert tagged_answer("<answer>a</answer><answer> b\n</answer>") == "b"
    assert tagged_answer("<answer>a <answer>b</answer>") == "a <answer>b"
    assert tagged_answer("<answer>a") is tagged_answer("a</answer>") is None


# -- one spelling --------------------------------------------------------------------------------

SAME = [
    (r"\frac{1}{2}", r"\dfrac12"),
    (r"\frac{1}{2}", r"\tfrac 1 2"),
    (r"\frac{1}{2}", "1/2"),
    (r"\frac{1}{2}", "0.5"),
    (r"\frac{1}{2}", ".5"),
    (r"\frac{1}{72}", r"\frac1{72}"),
    (r"\frac{72}{1}", r"\frac{72}1"),
    (r"-\frac{1}{2}", "-1/2"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"),
    (r"\frac{\sqrt{3}}{2}", r"\frac{\sqrt3}2"),
    (r"2\sqrt{3}", r"2\sqrt3"),
    (r"\sqrt[3]{2}", r"\sqrt[3]{ 2 }"),
    ("5", "x = 5"),
    ("5", "5."),
    ("5", r"5 \text{ cm}"),
    ("5", r"5\text{ cm}^2"),
    ("5", r"5 \text{ m} / \text{ s}^{-2}"),
    ("50", r"50\%"),
    ("50", "50%"),
    ("18", r"\$18"),
    ("90", r"90^\circ"),
    ("90", r"90^{\circ}"),
    ("(1,2)", r"\left( 1, 2 \right)"),
    ("10000", r"10\!000"),
    (r"\frac{3}{4}", r"\\frac{3}{4}"),
    (r"\text{east}", r"\text{ east }"),
    (
        r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
        r"\begin{pmatrix}1\\2\end{pmatrix}",
    ),
]
DIFFERENT = [
    ("5", "6"),
    ("5", "55"),
    ("3", r"3 \text{ or } 4"),
    ("3", r"3 \text{ or }\text{ 4}"),
    ("3", r"3 \text{ or } x"),
    ("12", "21"),
    ("(1,2)", "(2,1)"),
    (r"\leftarrow", "arrow"),
    (r"\frac{1}{23}", r"\frac{12}{3}"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 12 \end{pmatrix}"),
    (r"\text{ east}", r"\text{ west}"),
    ("", ""),
    ("$", r"\%"),
    ("x=5", "y=5"),
    ("AB = 5", "CD = 5"),
    (r"\alpha=5", r"\beta=5"),
    ("5", "3=5"),
    ("5", "-=5"),
]


@pytest.mark.parametrize(("a", "b"), SAME)
def test_equivalent_spellings_of_an_answer(a, b):
    assert same_text(a, b) and same_text(b, a)


@pytest.mark.parametrize(("a", "b"), DIFFERENT)
def test_different_answers(a, b):
    assert not same_text(a, b)


PIECES = (
    r"\frac", r"\dfrac", r"\sqrt", r"\text{ ", r"\text", r"\left", r"\right", "\\", "\\\\", "{",
    "}", "[", "]", "^", r"\circ", r"\begin", r"\begin{", "=", ".", "0.5", "1/2", "-", "1", "2", "x",
    "a", "$", "%", "/", "\\ ", r"\boxed{", "~", r"\degree", "é", " ", "\n",
)  # fmt: skip


@given(st.lists(st.sampled_from(PIECES)).map("".join) | st.text())
def test_a_normal_form_is_its_own(text):
    normal = normal_form(text)
    assert normal_form(normal) == normal
    assert same_text(text, normal) == bool(normal)


@pytest.mark.parametrize("unit", [*PIECES, r"\frac1", r"\text{ a}", "<answer>", "Answer:"])
@pytest.mark.timing
def test_fifty_thousand_characters_take_no_time(unit):
    text = unit * (50_000 // max(1, len(unit)))
    started = time.thread_time()
    for function in (boxed_answer, named_answer, tagged_answer, normal_form, minerva):
        function(text)
    assert time.thread_time() - started < 0.25


# -- math: fixtures of verl's math_reward, worked out by reading it -------------------------------


def judge(text: str, truth: Any, **kwargs: Any) -> dict[str, float]:
    async def judged():
        executor = RewardExecutor(RewardConfig())
        try:
            return await grader_of("lighteval/MATH", kwargs, executor).grade_text(text, truth)
        finally:
            executor.close()

    return asyncio.run(judged())


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        (r"It is $\boxed{\dfrac{3}{4}}$.", r"\frac{3}{4}", 1.0),
        (r"\boxed{3/4}", r"\frac{3}{4}", 1.0),
        (r"\boxed{k = 7}", "7", 1.0),
        (r"\boxed{7} or \boxed{8}", "8", 1.0),
        (r"\boxed{8} or \boxed{7}", "8", 0.0),
        (r"$\boxed 8$", "8", 1.0),
        (r"\fbox{8}", "8", 1.0),
        ("8", "8", 0.0),
        (r"\boxed{8", "8", 0.0),
        (r"\boxed{}", "8", 0.0),
        (r"\boxed{8}", 8, 1.0),
        (r"\boxed{8}", 8.0, 1.0),
        (r"\boxed{\sqrt{12}}", r"2\sqrt{3}", 0.0),
    ],
)
def test_math_by_spelling_alone_as_verl(text, truth, score):
    assert judge(text, truth, verify=False) == {"score": score, "acc": score, "grader_timeout": 0.0}


def with_one_worker(work) -> Any:
    """Return `work(grader)` of a grader with its own process."""

    async def working():
        executor = RewardExecutor(RewardConfig(workers=1))
        try:
            return await work(grader_of("HuggingFaceH4/MATH-500", {}, executor))
        finally:
            executor.close()

    return asyncio.run(working())


def test_math_by_algebra_in_a_worker():
    cases = {
        (r"\boxed{\sqrt{12}}", r"2\sqrt{3}"): 1.0,
        (r"\boxed{2.25}", r"\frac{9}{4}"): 1.0,
        (r"\boxed{10,000}", "10000"): 1.0,
        (r"\boxed{3,1,2}", "1,2,3"): 1.0,
        (r"\boxed{\text{East}}", "east"): 1.0,
        (r"\boxed{silent}", r"\text{listen}"): 0.0,
        (r"\boxed{(2,1)}", "(1,2)"): 0.0,
        (r"\boxed{0.333}", r"\frac{1}{3}"): 0.0,
        (r"\boxed{3 \text{ or } 4}", "3"): 0.0,
        (r"\boxed{)(}", "3"): 0.0,
    }

    async def judged(grader):
        return {case: (await grader.grade_text(*case))["score"] for case in cases}

    assert with_one_worker(judged) == cases


RIGHT = [
    ("5=5", "5"),
    ("2+3=5", "5"),
    (r"\binom{5}{2}=10", "10"),
    ("f(2)=8", "8"),
    ("5", "x=5"),
    ("2,1", "1,2"),
    (r"\{2,1\}", "1,2"),
    (r"\{(3,4),(1,2)\}", "(1,2),(3,4)"),
    (r"x \in [1,2]", "[1,2]"),
    ("(x,y)=(1,2)", "(1,2)"),
    (r"(\sqrt{4}, 1.0)", "(2,1)"),
    ("(1,2)", "1 < x < 2"),
    (r"(2,3)\cup(0,1)", r"(0,1)\cup(2,3)"),
    (r"\left[0,\frac{2}{4}\right)", "[0,0.5)"),
    ("2.50", r"\frac52"),
    ("x=2.50", r"\frac52"),
    (r"1.5\pi", r"\frac{3\pi}{2}"),
    ("x<2.5", r"x<\frac52"),
    ("4", r"4\%"),
    ("2516", "2516_8"),
    ("2516_{8}", "2516_8"),
    ("A", r"\text{(A)}"),
    (r"\text{Mid-point}", "mid-point"),
]
WRONG = [
    ("6=5", "5"),
    ("2+3=6=5", "5"),
    ("x=5", "y=5"),
    ("(1,2)", r"\{1,2\}"),
    (r"\{1,2\}", "(1,2)"),
    ("1,2", "(1,2)"),
    ("(1,2)", "1,2"),
    ("(1,2]", "(1,2)"),
    ("[1,2,3]", "(1,2,3)"),
    (r"\{1,2\},\{3,4\}", "(1,2),(3,4)"),
    ("3.1415926", r"\pi"),
    ("3.14159265358979323846", r"\pi"),
    (r"\pi", "3.141593"),
    ("0.333333", r"\frac13"),
    ("(0.333333,1)", r"(\frac13,1)"),
    (r"0.333333333333333333333\pi", r"\frac{\pi}{3}"),
    ("x<0.333333", r"x<\frac13"),
    (r"4\%", "0.04"),
    ("0.04", r"4\%"),
    ("2516_9", "2516_8"),
    ("2^{3}4", "2^{34}"),
    (r"\frac{1}{23}", r"\frac{12}{3}"),
    ("(2+3)4", "2+34"),
]


def test_what_math_verify_and_brackets_would_get_wrong():
    cases = {**dict.fromkeys(RIGHT, 1.0), **dict.fromkeys(WRONG, 0.0)}

    async def judged(grader):
        return {
            (text, right): (await grader.grade_text(rf"\boxed{{{text}}}", right))["score"]
            for text, right in cases
        }

    assert with_one_worker(judged) == cases


PARTS = st.sampled_from(
    ["1", "2", "x", "(", ")", "[", "]", "{", "}", r"\{", r"\}", ",", "=", r"\in"]
)


@given(st.lists(PARTS).map("".join) | st.text(), st.lists(PARTS).map("".join))
def test_kinds_of_answers(a, b):
    assert not is_other_kind(a, a)
    assert is_other_kind(a, b) == is_other_kind(b, a)


def test_algebra_that_does_not_end_is_killed_and_scores_0(monkeypatch):
    hangs, after = r"\boxed{\binom{100000000}{50000000}}", (r"\boxed{\sqrt{8}}", r"2\sqrt{2}")

    async def judged(grader):
        monkeypatch.setattr(math, "SECONDS", 0.3)
        late = await grader.grade_text(hangs, "3")
        monkeypatch.setattr(math, "SECONDS", 30.0)
        return late, await grader.grade_text(*after)

    late, right = with_one_worker(judged)
    assert late == {"score": 0.0, "acc": 0.0, "grader_timeout": 1.0}
    assert right == {"score": 1.0, "acc": 1.0, "grader_timeout": 0.0}


def test_the_death_of_a_grader_is_no_score():
    from support import hostile_functions

    grader = math.Math()
    grader._equivalent = hostile_functions.exit_on_any_arguments

    async def judged():
        executor = RewardExecutor(RewardConfig(workers=1))
        try:
            await grader(r"\boxed{2}", "3", executor.pool)
        finally:
            executor.close()

    with pytest.raises(GraderCrash, match=r"Math-Verify failed on '2' and '3': the worker"):
        asyncio.run(judged())


def test_a_missing_math_verify_is_reported_before_the_run(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "agentrl.rewards.math_algebra", None)
    with pytest.raises(ConfigError, match=r"pip install .*\[math\].*verify=false"):
        Scorer(RewardConfig(function="math"))
    Scorer(RewardConfig(function="math", kwargs={"verify": False}))


def test_math_verify_logs_nothing_about_its_deadlines(caplog):
    with caplog.at_level(logging.WARNING):
        assert math_algebra.equivalent("1/2", "0.5")
    assert not caplog.records


# -- H8: what would take for ever ----------------------------------------------------------------

HOSTILE = {
    "tower": "9^{9^{9^{9}}}",
    "factorial": "10^{9}!",
    "bare factorial": "10^9!",
    "sum": r"\sum_{i=1}^{10^8} i",
    "set": r"\{" + ",".join(map(str, range(3000))) + r"\}",
    "fractions": r"\frac{1}{" * 150 + "2" + "}" * 150,
    "brackets": "(" * 300 + "1" + ")" * 300,
    "digits": "7" * 50_000,
    "boxes": r"\boxed{" * 2000 + "1" + "}" * 2000,
    "spaces": " " * 60_000 + "1",
    "exponent": "2^{100000}",
    "code": "__import__('os').system('true')",
}


@pytest.mark.parametrize("text", [HOSTILE[k] for k in HOSTILE if k not in ("spaces", "code")])
@pytest.mark.timing
def test_the_hardest_expressions_are_refused_at_once(text):
    started = time.thread_time()
    assert is_too_hard(text)
    assert time.thread_time() - started < 0.1


@pytest.mark.parametrize(
    "text",
    [
        "e^{x^2}",
        "2^{10}+3^{2}",
        "x^2y^3",
        "(x^2)^3",
        "1234!",
        "n!",
        r"\frac{10^{5}}{2^{3}}",
        "12345",
    ],
)
def test_ordinary_expressions_are_not_refused(text):
    assert not is_too_hard(text)


@pytest.mark.slow
@pytest.mark.load
@pytest.mark.timing
def test_hostile_answers_and_truths(capsys):
    slow = [r"\binom{100000000}{50000000}", "(x+1)^{9999}", "(((9^9)^{99})^{999})^{9999}"]

    async def judged():
        executor = RewardExecutor(RewardConfig(workers=1))
        grader = grader_of("lighteval/MATH", {}, executor)
        try:
            assert (await grader.grade_text(r"\boxed{\sqrt{8}}", r"2\sqrt{2}"))["acc"] == 1.0
            for text in [*HOSTILE.values(), *slow]:
                for answer, truth in ((text, "3"), ("3", text)):
                    started = time.monotonic()
                    marks = await grader.grade_text(rf"\boxed{{{answer}}}", truth)
                    seconds = time.monotonic() - started
                    assert marks["acc"] == 0.0
                    assert seconds < (10 if marks["grader_timeout"] else 6), text[:50]
            assert (await grader.grade_text(r"\boxed{\sqrt{8}}", r"2\sqrt{2}"))["acc"] == 1.0
        finally:
            executor.close()

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    asyncio.run(judged())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB


# -- math_dapo: fixtures of verl's math_dapo ------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "truth", "score", "pred"),
    [
        ("so\nAnswer: 34", "34", 1.0, "34"),
        ("Answer: $34$", "34", 1.0, "34"),
        (r"Answer: \boxed{34}", "34", 1.0, "34"),
        ("answer:34", 34, 1.0, "34"),
        ("Answer: 35", "34", -1.0, "35"),
        ("Answer: 34\nAnswer: 35", "34", -1.0, "35"),
        ("Answer: 1,000", "1000", 1.0, "1000"),
        ("Answer: x = 34 dollars", "34", 1.0, "34"),
        (r"Answer: 90^\circ", "90", 1.0, "90"),
        (r"Answer: \frac12", r"\frac{1}{2}", 1.0, r"\frac{1}{2}"),
        (r"Answer: \sqrt3", r"\sqrt{3}", 1.0, r"\sqrt{3}"),
        (r"Answer: \text{\textbf{B}}", "B", 1.0, "B"),
        ("Answer: 0.5", r"\frac{1}{2}", -1.0, "0.5"),
        ("**Answer:** 34", "34", -1.0, "**34"),
        (r"It is \boxed{34}.", "34", 1.0, "34"),
        (r"\boxed{34} Answer: 35", "34", -1.0, "35"),
        ("34", "34", -1.0, ""),
        ("", "34", -1.0, ""),
        ("Answer: 34" + " " * 300, "34", -1.0, ""),
    ],
)
def test_math_dapo(text, truth, score, pred):
    assert dapo(text, truth) == {"score": score, "acc": max(0.0, score), "pred": pred}


@pytest.mark.parametrize("unit", [r"\text{", r"\boxed{", r"\boxed{}", "Answer: ", "$", "="])
@pytest.mark.timing
def test_math_dapo_takes_milliseconds_for_a_megabyte(unit):
    long = unit * (10**6 // len(unit))
    start = time.thread_time()
    dapo(long, "1")
    dapo("Answer: 1", long)
    for length in (1000, 10**6):
        minerva(long[:length])
    assert time.thread_time() - start < 0.5


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (r"\boxed{34}", 1.0),
        (r"\boxed{34 }", -1.0),
        ("Answer: 34", -1.0),
        (r"\boxed{34}" + " " * 91, -1.0),
    ],
)
def test_math_dapo_reads_the_box_only(text, score):
    assert dapo(text, "34", strict_box_verify=True)["score"] == score


# -- rows ----------------------------------------------------------------------------------------


def row(source: str, truth: Any, number: int = 0) -> Sample:
    prompt = (Message("user", "?"),)
    return Sample(id="r", prompt=prompt, data_source=source, ground_truth=truth, row=number)


def check(*rows: Sample, **kwargs: Any) -> None:
    check_graders(rows, Scorer(RewardConfig(kwargs=kwargs)))


@pytest.mark.parametrize(
    "truth", [r"\frac{3}{4}", "x=5", r"\text{east}", "(1,2)", 12, 12.0, "9^{9^9}"]
)
@pytest.mark.parametrize("source", ["lighteval/MATH", "HuggingFaceH4/MATH-500"])
def test_ground_truths_of_math_that_an_answer_can_match(source, truth):
    check(row(source, truth), verify=False)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("truth", ["34", 34, 34.0, r"\frac{1}{2}"])
def test_ground_truths_of_aime_that_an_answer_can_match(strict, truth):
    check(row("aime2024", truth), row("math", truth), strict_box_verify=strict)


@pytest.mark.parametrize("source", ["lighteval/MATH", "math_dapo", "aime25"])
@pytest.mark.parametrize("truth", [None, "", "$", ["3"], {"a": 1}, True, "}3{", r"so \boxed{3}"])
def test_ground_truths_that_no_answer_could_match_are_refused(source, truth):
    if source != "lighteval/MATH" and truth in ("}3{", r"so \boxed{3}"):
        return  # text like any other
    with pytest.raises(DataError, match=r"rows? 4.*cannot read ground_truth="):
        check(row(source, "3"), row(source, truth, 4))
