"""The warnings about leaked answers at the start of a run."""

from __future__ import annotations

import json
import logging
from itertools import islice

import pytest
from support.trajectories import row

from agentrl.config import load_config
from agentrl.demo.arithmetic import rows as demo_rows
from agentrl.preflight import make_plan
from agentrl.rewards.leaks import find_leaks
from agentrl.trajectory import Message


def of(*pairs, shown=""):
    """Warnings of rows with these prompts and ground truths."""
    samples = [
        row(prompt=(Message("user", prompt),), ground_truth=truth, row=i)
        for i, (prompt, truth) in enumerate(pairs)
    ]
    return list(find_leaks(samples, lambda sample: shown, "train.jsonl"))


@pytest.mark.parametrize(
    ("prompt", "truth"),
    [
        ("What is 3*4? #### 12", "12"),
        (r"What is 3*4? Answer in a box: \boxed{12}", 12),
        ("3*4? <answer>12</answer>", "12"),
        ("Which city? Answer: Paris", "Paris"),
        ("1000 + 12? #### 1,012", "1012"),
        ("#### 12.", "12"),
    ],
)
def test_the_answer_in_the_form_that_graders_read(prompt, truth):
    [warning] = of((prompt, truth))
    assert warning.startswith(
        "train.jsonl: the prompt of the row (first: row 0) contains the right answer"
    )


def test_the_ground_truth_as_it_is():
    leaky = [(f"Hint: the capital is City{i}. Which?", f"City{i}") for i in range(4)]
    [warning] = of(*leaky, ("And what else?", "Nothing at all"))
    assert warning == (
        "train.jsonl: the prompt of 4 of 5 rows (first: row 0) contains the row's ground truth,"
        " 'City0'. Check whether this is intended"
    )


@pytest.mark.parametrize(
    ("prompt", "truth"),
    [
        ("3 times 4 is 12?", "12"),  # short: it stands there by chance
        ("Answer with #### and the number.", "12"),
        ("Such as: #### 7", "12"),
        ("#### 120", "12"),
        ("#### 12.5", "12"),
        (r"\boxed{12}", "2"),
        ("Parisian streets?", "Paris"),
        ("12000 of them", "2000"),
        ("anything", None),
        ("anything", ["any", "thing"]),
        ("anything", {"inputs": ["any"], "outputs": ["thing"]}),
        ("True or not?", True),
        ("What?", ""),
    ],
)
def test_rows_without_a_leak(prompt, truth):
    assert of((prompt, truth)) == []


def test_a_few_chances_are_no_leak():
    """Few-shot examples have an answer that is some row's own; questions name some answers."""
    shot = [("Example: 5+7. #### 12\nNow you.", str(i)) for i in range(100)]
    assert of(*shot) == []
    named = [("Is Paris larger than Rome?", "Paris" if i < 2 else f"City{i}") for i in range(20)]
    assert of(*named) == []


def test_tools_that_leak_the_answer():
    [warning] = of(
        ("3*4?", "12"), shown='{"description": "Returns \\\\boxed{12}."}'.replace("\\\\", "\\")
    )
    assert "the descriptions of the tools of the row" in warning


def test_the_demo_and_gsm8k_like_rows_are_quiet():
    prompts = [
        ("Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in"
         " May. How many clips did Natalia sell altogether in April and May?", "72"),
        ("Weng earns $12 an hour for babysitting. Yesterday, she just did 50 minutes of"
         ' babysitting. How much did she earn? Let\'s think step by step and output the final'
         ' answer after "####".', "10"),
        ("A robe takes 2 bolts of blue fiber and half that much white fiber. How many?", "3"),
        ("A company made $2,000 in 2001 and 2,000 more in 2002. How much in all?", "6000"),
    ]  # fmt: skip
    assert of(*prompts) == []
    samples = [made.sample for made in islice(demo_rows(0), 300)]
    assert list(find_leaks(samples, lambda s: "")) == []


def test_a_plan_warns_about_leaks_once(tmp_path, caplog):
    file = tmp_path / "env.py"
    file.write_text(
        "from agentrl import tool\n"
        "@tool\n"
        "def peek(x: int) -> str:\n"
        '    """Return the answer, which is \\\\boxed{12}."""\n'
        "    return ''\n"
    )
    rows = [
        {"prompt": [{"role": "user", "content": "3*4? #### 12"}], "ground_truth": "12",
         "data_source": "openai/gsm8k", "agent_name": "tool_agent", "tools": ["peek"]}
        for _ in range(3)
    ]  # fmt: skip
    data = tmp_path / "train.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    caplog.set_level(logging.WARNING, "agentrl")
    plan = make_plan(load_config(overrides=[f"files=[{file}]", f"data.train={data}"]))
    warnings = [r.getMessage() for r in caplog.records]
    assert len(plan.train) == 3 and len(warnings) == 2
    assert "the prompt of 3 of 3 rows (first: row 0)" in warnings[0] and "'#### 12'" in warnings[0]
    assert "the descriptions of the tools of 3 of 3 rows" in warnings[1]
