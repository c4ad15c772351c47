from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.config import RewardConfig
from agentrl.errors import DataError
from agentrl.registry import rewards
from agentrl.rewards import GRADERS, Scorer, check_graders
from agentrl.rewards.graders import GOLD, PROBLEMS, grader_of
from agentrl.rewards.search_qa import compute_score, normal_answer
from agentrl.trajectory import Message, Sample

# -- search_qa: fixtures of verl's search_r1_like_qa_em, worked out by reading it ------------------

BEATLES = {"target": ["The Beatles", "Fab Four"]}


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        ("<think>?</think><answer>the beatles</answer>", BEATLES, 1.0),
        ("<answer>\n Beatles! \n</answer>", BEATLES, 1.0),
        ("<answer>Fab  Four</answer>", BEATLES, 1.0),
        ("<answer>The Rolling Stones</answer>", BEATLES, 0.1),
        ("<answer>The Beatles and others</answer>", BEATLES, 0.1),
        ("<answer>Stones</answer> no, <answer>Beatles</answer>", BEATLES, 1.0),
        ("<answer>Beatles</answer> no, <answer>Stones</answer>", BEATLES, 0.1),
        ("Beatles", BEATLES, 0.0),
        ("<answer>Beatles", BEATLES, 0.0),
        ("", BEATLES, 0.0),
        ("<answer></answer>", BEATLES, 0.1),
        ("<answer>Paris</answer>", "paris", 1.0),
        ("<answer>Paris</answer>", ["London", "Paris"], 1.0),
        ("<answer>1969</answer>", {"target": 1969}, 1.0),
        ("<answer>1969</answer>", {"target": [1969.0]}, 1.0),
        ("<answer>x</answer>" * 10 + "<answer>Paris</answer>", "Paris", 0.25),
        ("<answer>x</answer>" * 9 + "<answer>Paris</answer>", "Paris", 1.0),
        ("<answer>Paris</answer>" + "</answer>" * 10, "Paris", 0.25),
    ],
)
def test_search_qa(text, truth, score):
    acc = float(score in (0.25, 1.0))
    assert compute_score(text, truth, format_score=0.1) == {"score": score, "acc": acc}


def test_no_answer_matches_an_empty_truth():
    assert compute_score("<answer>!</answer>", "the")["acc"] == 0.0


@given(st.text())
def test_a_normal_answer_is_its_own(text):
    assert normal_answer(normal_answer(text)) == normal_answer(text)


# -- rows ----------------------------------------------------------------------------------------


def row(source: str, truth: Any, number: int = 0) -> Sample:
    prompt = (Message("user", "?"),)
    return Sample(id="r", prompt=prompt, data_source=source, ground_truth=truth, row=number)


def check(*rows: Sample) -> None:
    check_graders(rows, Scorer(RewardConfig()))


@pytest.mark.parametrize("truth", [BEATLES, "Paris", ["Paris"], ("Paris",), {"target": 3}, 3])
@pytest.mark.parametrize("source", ["searchR1_nq", "searchR1_hotpotqa"])
def test_ground_truths_that_an_answer_can_match(source, truth):
    check(row(source, truth))


@pytest.mark.parametrize("truth", [None, "", "The", "?!", [], {"target": []}, {"answer": "Paris"}])
def test_ground_truths_that_no_answer_could_match_are_refused(truth):
    with pytest.raises(DataError, match=r"row 4: the grader 'search_qa' cannot read"):
        check(row("searchR1_nq", "Paris"), row("searchR1_nq", truth, 4))


# -- which grader --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("openai/gsm8k", "gsm8k"),
        ("lighteval/MATH", "math"),
        ("DigitalLearningGmbH/MATH-lighteval", "math"),
        ("HuggingFaceH4/MATH-500", "math"),
        ("math_dapo", "math_dapo"),
        ("math", "math_dapo"),
        ("aime2024", "math_dapo"),
        ("codecontests", "code"),
        ("apps", "code"),
        ("codeforces", "code"),
        ("taco", "code"),
        ("searchR1_nq", "search_qa"),
        ("searchR1_bamboogle", "search_qa"),
    ],
)
def test_graders_go_by_verls_names(source, name):
    assert grader_of(source, {}).name == name


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("numina_olympiads", "verl's prime_math is not part of agentrl; `reward.function=math`"),
        ("hiyouga/geometry3k", "questions about images is not part of agentrl"),
        ("mathdapo", "Did you mean 'math_dapo'?"),
        ("AIME", "Known: openai/gsm8k"),
    ],
)
def test_a_data_source_without_a_grader_is_an_error_with_advice(source, says):
    with pytest.raises(DataError) as caught:
        check(row(source, "3", 7))
    assert str(caught.value).startswith(f"row 7: no grader for data_source {source!r}.")
    assert says in str(caught.value) and "path.py:function" in str(caught.value)


def test_every_grader_exists_and_its_rows_are_checked():
    names = set(GRADERS.values())
    assert names <= set(rewards.names()) and names | {"none"} == {*GOLD, *PROBLEMS}
