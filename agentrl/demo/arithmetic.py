"""Word problems in the manner of GSM8K, for all three agent loops, from a seed.

`tool_agent` and `react` rows ask for two operations, which the calculator does; `single_turn` rows
ask to find one number in the text. Operands are 1 to 9, so that a model of half a million weights
can learn them in a minute or two.

Every row carries two conversations to imitate: `gold`, which is right, and `trace`, which has bad
habits in four of five rows (it guesses at once, stops after one call, takes a wrong operator). A
model that imitates `trace` answers some problems and not others: what reinforcement learning needs.
"""

from __future__ import annotations

import json
import operator
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.answers import gsm8k_answer
from agentrl.interactions.gsm8k import WRONG
from agentrl.trajectory import Message, Sample

DATA_SOURCE = "agentrl/arithmetic"
LOOPS = ("single_turn", "tool_agent", "react")
TOOL = "calculator"
SPLITS = {"train": 3072, "val": 240}
"""Rows of each file in datasets/. 140 steps of 16 prompts see no row twice."""
GOLD_SHARE = 0.2
TALK_SHARE = 0.25
"""Share of the tool_agent rows that have an interaction."""
MAX_ATTEMPTS = 3
"""How many answers the gsm8k interaction hears."""

SYSTEM = {
    "single_turn": "Find the number. Answer with ####.",
    "tool_agent": "Use the tools. Answer with ####.",
    "react": "Use the tools. Answer with ####.",
}
NAMES = ("Ann", "Tom", "Max", "Eva", "Ben", "Mia", "Leo", "Zoe", "Kim", "Sam", "Lea", "Jan")
ITEMS = ("apples", "pears", "nuts", "pens", "coins", "cards", "eggs", "plums", "stamps", "books")
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@dataclass(frozen=True, slots=True)
class Story:
    """A text about the numbers a, b, c; what (a first b) second c counts; what a, b and c count."""

    text: str
    operators: tuple[str, str]
    parts: tuple[str, str, str]


STORIES = (
    Story(
        "{name} has {a} bags of {b} {items} and finds {c} more.",
        ("*", "+"),
        ("How many bags?", "How many {items} in a bag?", "How many more?"),
    ),
    Story(
        "{name} has {a} boxes of {b} {items} and {c} break.",
        ("*", "-"),
        ("How many boxes?", "How many {items} in a box?", "How many break?"),
    ),
    Story(
        "{name} buys {a} red and {b} green {items} on each of {c} days.",
        ("+", "*"),
        ("How many red a day?", "How many green a day?", "How many days?"),
    ),
    Story(
        "{name} has {a} {items}, {b} get lost and {c} more turn up.",
        ("-", "+"),
        ("How many {items} at first?", "How many get lost?", "How many more turn up?"),
    ),
)


@dataclass(frozen=True, slots=True)
class Problem:
    """A question, the operations that answer it, and numbers that a careless reader would give.

    Example: `Problem("Tom has 3 bags of 4 nuts and finds 5 more. How many nuts?", ("*", "+"),
    (3, 4, 5), 17)`. A problem without operators asks for one number of its text.
    """

    question: str
    operators: tuple[str, ...]
    operands: tuple[int, ...]
    answer: int


def two_hops(rng: random.Random) -> Problem:
    """A problem of two operations whose results are positive."""
    story = rng.choice(STORIES)
    first, second = (OPERATORS[o] for o in story.operators)
    while True:
        a, b, c = (rng.randint(1, 9) for _ in range(3))
        if first(a, b) > 0 and second(first(a, b), c) > 0:
            break
    items = rng.choice(ITEMS)
    text = story.text.format(name=rng.choice(NAMES), items=items, a=a, b=b, c=c)
    answer = second(first(a, b), c)
    return Problem(f"{text} How many {items} in all?", story.operators, (a, b, c), answer)


def look_up(rng: random.Random) -> Problem:
    """A problem whose answer stands in the text, beside two other numbers."""
    story = rng.choice(STORIES)
    numbers = tuple(rng.sample(range(1, 10), 3))
    a, b, c = numbers
    items, asked = rng.choice(ITEMS), rng.randrange(3)
    text = story.text.format(name=rng.choice(NAMES), items=items, a=a, b=b, c=c)
    question = f"{text} {story.parts[asked].format(items=items)}"
    return Problem(question, (), numbers, numbers[asked])


def sample(problem: Problem, loop: str, row: int, talk: bool = False) -> Sample:
    """The problem as a dataset row holds it; `talk` adds the gsm8k interaction."""
    answer = str(problem.answer)
    return Sample(
        id=str(row),
        prompt=(Message("system", SYSTEM[loop]), Message("user", problem.question)),
        agent_name=loop,
        data_source=DATA_SOURCE,
        ground_truth=answer,
        tools=(TOOL,) if problem.operators else (),
        interaction="gsm8k" if talk else "",
        interaction_kwargs={"ground_truth": answer} if talk else {},
        row=row,
    )


# -- what an assistant says ---------------------------------------------------------------------


def gold(problem: Problem, loop: str) -> list[Message]:
    """The right conversation after the prompt."""
    return _solve(problem, loop, problem.operators, str(problem.answer))


def trace(problem: Problem, loop: str, rng: random.Random, talk: bool = False) -> list[Message]:
    """A conversation after the prompt that is right in about one of five rows.

    Where there is an interaction (`talk`), a wrong answer is told so, and tried again.
    """
    messages = _attempt(problem, loop, rng)
    for _ in range(MAX_ATTEMPTS - 1 if talk else 0):
        said = gsm8k_answer(messages[-1].content)
        if said == str(problem.answer):
            break
        messages.append(Message("user", WRONG.format(answer=said)))
        messages += _attempt(problem, loop, rng)
    return messages


def _attempt(problem: Problem, loop: str, rng: random.Random) -> list[Message]:
    if rng.random() < GOLD_SHARE:
        return gold(problem, loop)
    if not problem.operators:
        guess = rng.choice((rng.choice(problem.operands), rng.randint(1, 9)))
        return _solve(problem, loop, (), str(guess))
    habit = rng.randrange(3)
    if habit == 0:
        return _solve(problem, loop, (), str(rng.randint(1, 2 * problem.answer)))
    if habit == 1:
        return _solve(problem, loop, problem.operators[:1], "")
    wrong = list(problem.operators)
    hop = rng.randrange(2)
    wrong[hop] = rng.choice([o for o in OPERATORS if o != wrong[hop]])
    return _solve(problem, loop, tuple(wrong), "")


def _solve(problem: Problem, loop: str, operators: tuple[str, ...], answer: str) -> list[Message]:
    """Call the calculator once for each operator, then answer (by default the last result)."""
    messages: list[Message] = []
    value, *rest = problem.operands
    for symbol, operand in zip(operators, rest, strict=False):
        expression = f"{value}{symbol}{operand}"
        value = OPERATORS[symbol](value, operand)
        messages += _call(loop, expression, str(value))
    final = f"#### {answer or value}"
    if loop == "react":
        final = f"Thought: I can answer.\nFinal Answer: {final}"
    return [*messages, Message("assistant", final)]


def _call(loop: str, expression: str, result: str) -> tuple[Message, Message]:
    arguments = json.dumps({"expression": expression})
    if loop == "react":
        said = f"Thought: I must compute.\nAction: {TOOL}\nAction Input: {arguments}\nObservation:"
        return Message("assistant", said), Message("user", f"Observation: {result}")
    call = f'{{"name": "{TOOL}", "arguments": {arguments}}}'
    said = f"<tool_call>\n{call}\n</tool_call>"
    return Message("assistant", said), Message("tool", result)


# -- rows ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """A sample with its conversations to imitate, prompt included."""

    sample: Sample
    problem: Problem
    gold: tuple[Message, ...]
    trace: tuple[Message, ...]


def rows(seed: int, avoid: frozenset[str] = frozenset()) -> Iterator[Row]:
    """Endless rows, the loops by turns, no question twice and none of `avoid`."""
    rng = random.Random(seed)
    seen = set(avoid)
    row = 0
    while True:
        loop = LOOPS[row % len(LOOPS)]
        problem = look_up(rng) if loop == "single_turn" else two_hops(rng)
        if problem.question in seen:
            continue
        seen.add(problem.question)
        talk = loop == "tool_agent" and rng.random() < TALK_SHARE
        asked = sample(problem, loop, row, talk)
        right, habits = gold(problem, loop), trace(problem, loop, rng, talk)
        yield Row(asked, problem, (*asked.prompt, *right), (*asked.prompt, *habits))
        row += 1
