"""Write the rows and the conversations to imitate: word problems of one or two steps.

    python recipes/calculator/rows.py

The column `prompt` is for a policy with the calculator, `alone` for one without it. No two rows or
conversations have the same numbers.
"""

import random
from pathlib import Path

from agentrl.data import write_rows
from agentrl.testing import call

TRAINING, VALIDATION, CHATS = 512, 200, 72
WITH_TOOL = "Call the calculator for each step. Then write the answer."
ALONE = "Solve the problem. Then write the answer."
NAMES = ["Ann", "Ben", "Carl", "Dora", "Emil", "Fay", "Gus", "Hana", "Ivan", "Kim", "Lena", "Max"]
THINGS = ["apples", "books", "cards", "coins", "eggs", "marbles", "nuts", "pens", "shells"]
KINDS = [
    ("{n} has {a} {t} and buys {b} more. How many {t} does {n} have now?", "a+b"),
    ("{n} had {a} {t} and gave {b} to {m}. How many {t} does {n} have left?", "a-b"),
    ("{n} fills {b} boxes with {c} {t} each. How many {t} is that?", "b*c"),
    ("{n} reads {c} pages every day. How many pages does {n} read in {b} days?", "c*b"),
    (
        "{n} has {c} bags with {a} {t} in each. {m} gives {n} {b} more. How many {t} is that?",
        "c*a+b",
    ),
    ("{n} buys {c} packs of {a} {t} and loses {b} of them. How many {t} are left?", "c*a-b"),
    (
        "{n} has {a} {t} and {m} has {b}. They sell each for {c} dollars. How much do they get?",
        "a+b*c",
    ),
    ("{n} had {a} {t}, sold {b} of them and then found {c}. How many {t} is that?", "a-b+c"),
]
"""Texts of problems and their steps, from left to right."""


def make_problem(rng):
    """Return the question, its steps as pairs of expression and value, and its numbers."""
    text, steps = rng.choice(KINDS)
    numbers = {"a": rng.randint(500, 999), "b": rng.randint(101, 499), "c": rng.randint(12, 99)}
    n, m = rng.sample(NAMES, 2)
    question = text.format(n=n, m=m, t=rng.choice(THINGS), **numbers)
    value, solution = numbers[steps[0]], []
    for sign, name in zip(steps[1::2], steps[2::2], strict=True):
        expression = f"{value}{sign}{numbers[name]}"
        value = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[sign](value, numbers[name])
        solution.append((expression, value))
    return question, solution, tuple(numbers[name] for name in sorted(steps[::2]))


def make_row(question, solution):
    """Return the row of a problem, with a prompt for each kind of policy."""
    prompts = {
        key: [{"role": "system", "content": text}, {"role": "user", "content": question}]
        for key, text in (("prompt", WITH_TOOL), ("alone", ALONE))
    }
    return {**prompts, "ground_truth": str(solution[-1][1])}


def make_chat(question, solution):
    """Return the row of a problem with the tool's name and the messages to imitate."""
    messages = []
    for expression, value in solution:
        messages += [
            {"role": "assistant", "content": call("calculator", expression=expression)},
            {"role": "tool", "content": str(value)},
        ]
    messages.append({"role": "assistant", "content": f"The answer is {solution[-1][1]}."})
    return {**make_row(question, solution), "tools": ["calculator"], "messages": messages}


def write(folder):
    """Write the files into a folder."""
    rng, problems = random.Random(0), {}
    while len(problems) < TRAINING + VALIDATION + CHATS:
        question, solution, numbers = make_problem(rng)
        problems[numbers] = question, solution
    found = [*problems.values()]
    rows = [make_row(*problem) for problem in found[CHATS:]]
    chats = [make_chat(*problem) for problem in found[:CHATS]]
    answers = [{"alone": c["alone"], "answer": c["messages"][-1]["content"]} for c in chats]
    write_rows(folder / "train.jsonl", rows[VALIDATION:])
    write_rows(folder / "val.jsonl", rows[:VALIDATION])
    write_rows(folder / "chats.jsonl", chats)
    write_rows(folder / "answers.jsonl", answers)


if __name__ == "__main__":
    write(Path(__file__).parent)
