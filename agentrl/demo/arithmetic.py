"""Word problems in the manner of GSM8K, for all three agent loops, from a seed.

`tool_agent` and `react` rows ask for two operations, which the calculator does; `single_turn` rows
ask to find one number in the text. Operands are 1 to 9, so that a model of half a million weights
learns them in a minute.

Every row carries two conversations to imitate: `gold`, which is right, and `trace`, which has bad
habits in four of five rows: it guesses at once, stops after one call or takes a wrong operator. A
model that imitates `trace` answers some problems and not others, which is what reinforcement
learning needs.
"""

from __future__ import annotations

import json
import operator
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from agentrl.answers import gsm8k_answer
from agentrl.interactions.gsm8k import WRONG
from agentrl.trajectory import Message, Sample

DATA_SOURCE = "agentrl/arithmetic"
LOOPS = ("single_turn", "tool_agent", "react")
TOOL = "calculator"
GOLD_SHARE = 0.2
"""Share of the `trace` conversations that are right on purpose."""
TALK_SHARE = 0.25
"""Share of the tool_agent rows that have the gsm8k interaction."""
MAX_ATTEMPTS = 3
"""How many answers that interaction hears."""

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
    """A question, its numbers, and the operators that lead from them to the answer.

    Example: `Problem("Tom has 3 bags of 4 nuts and finds 5 more. How many nuts in all?", (3, 4, 5),
    ("*", "+"), 17)`. Without operators the question asks for one of the numbers.
    """

    question: str
    operands: tuple[int, ...]
    operators: tuple[str, ...]
    answer: int

    @property
    def solution(self) -> str:
        """The answer as GSM8K writes it: `3*4=<<3*4=12>>12`, one line a step, then `#### 17`."""
        steps = _steps(self.operands, self.operators)
        return "\n".join([*(f"{e}=<<{e}={v}>>{v}" for e, v in steps), f"#### {self.answer}"])


def two_hops(rng: random.Random) -> Problem:
    """A problem of two operations whose results are positive."""
    story = rng.choice(STORIES)
    while True:
        a, b, c = operands = tuple(rng.randint(1, 9) for _ in range(3))
        results = [value for _, value in _steps(operands, story.operators)]
        if min(results) > 0:
            break
    items = rng.choice(ITEMS)
    text = story.text.format(name=rng.choice(NAMES), items=items, a=a, b=b, c=c)
    return Problem(f"{text} How many {items} in all?", operands, story.operators, results[-1])


def look_up(rng: random.Random) -> Problem:
    """A problem whose answer stands in the text, beside two other numbers."""
    story = rng.choice(STORIES)
    a, b, c = operands = tuple(rng.sample(range(1, 10), 3))
    items, asked = rng.choice(ITEMS), rng.randrange(3)
    text = story.text.format(name=rng.choice(NAMES), items=items, a=a, b=b, c=c)
    return Problem(
        f"{text} {story.parts[asked].format(items=items)}", operands, (), operands[asked]
    )


def _steps(operands: Sequence[int], operators: Sequence[str]) -> list[tuple[str, int]]:
    """Expressions and their values, each going on from the value before."""
    steps = []
    value = operands[0]
    for symbol, operand in zip(operators, operands[1:], strict=False):
        expression = f"{value}{symbol}{operand}"
        value = OPERATORS[symbol](value, operand)
        steps.append((expression, value))
    return steps


# -- what an assistant says -----------------------------------------------------------------------


def gold(problem: Problem, loop: str) -> list[Message]:
    """The right conversation after the prompt."""
    return _solve(problem, loop, problem.operators, problem.answer)


def trace(problem: Problem, loop: str, rng: random.Random, talk: bool = False) -> list[Message]:
    """A conversation after the prompt that is right in about one of five rows.

    Where there is an interaction (`talk`), a wrong answer is called so, and tried again.
    """
    messages = _attempt(problem, loop, rng)
    for _ in range(MAX_ATTEMPTS - 1 if talk else 0):
        answer = gsm8k_answer(messages[-1].content)
        if answer == str(problem.answer):
            break
        messages.append(Message("user", WRONG.format(answer=answer)))
        messages += _attempt(problem, loop, rng)
    return messages


def _attempt(problem: Problem, loop: str, rng: random.Random) -> list[Message]:
    if rng.random() < GOLD_SHARE:
        return gold(problem, loop)
    if not problem.operators:
        guess = rng.choice((rng.choice(problem.operands), rng.randint(1, 9)))
        return _solve(problem, loop, (), guess)
    match rng.randrange(3):
        case 0:  # guess at once
            return _solve(problem, loop, (), rng.randint(1, 2 * problem.answer))
        case 1:  # stop after one call
            return _solve(problem, loop, problem.operators[:1])
        case _:  # a wrong operator
            operators = list(problem.operators)
            hop = rng.randrange(2)
            operators[hop] = rng.choice([o for o in OPERATORS if o != operators[hop]])
            return _solve(problem, loop, operators)


def _solve(
    problem: Problem, loop: str, operators: Sequence[str], answer: int | None = None
) -> list[Message]:
    """Call the calculator once for each operator, then give `answer`, or the last result."""
    steps = _steps(problem.operands, operators)
    messages = [m for expression, value in steps for m in _call(loop, expression, str(value))]
    final = f"#### {steps[-1][1] if answer is None else answer}"
    if loop == "react":
        final = f"Thought: I can answer.\nFinal Answer: {final}"
    return [*messages, Message("assistant", final)]


def _call(loop: str, expression: str, result: str) -> tuple[Message, Message]:
    arguments = json.dumps({"expression": expression})
    if loop == "react":
        said = f"Thought: I must compute.\nAction: {TOOL}\nAction Input: {arguments}\nObservation:"
        return Message("assistant", said), Message("user", f"Observation: {result}")
    call = f'{{"name": "{TOOL}", "arguments": {arguments}}}'
    return Message("assistant", f"<tool_call>\n{call}\n</tool_call>"), Message("tool", result)


# -- rows -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """A problem as a dataset row, and what an assistant may say to it."""

    sample: Sample
    problem: Problem
    gold: tuple[Message, ...]
    trace: tuple[Message, ...]

    def as_dict(self, split: str) -> dict[str, Any]:
        """The row in verl's columns, which `agentrl.data` reads as `sample`."""
        asked = self.sample
        talk = {"name": asked.interaction, **asked.interaction_kwargs}
        return {
            "data_source": asked.data_source,
            "prompt": [m.as_dict() for m in asked.prompt],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": asked.ground_truth},
            "agent_name": asked.agent_name,
            "extra_info": {
                "index": asked.row,
                "split": split,
                "question": self.problem.question,
                "answer": self.problem.solution,
                "tool_selection": list(asked.tools) or None,
                "interaction_kwargs": json.dumps(talk) if asked.interaction else None,
            },
            "gold": [m.as_dict() for m in self.gold],
            "trace": [m.as_dict() for m in self.trace],
        }


def rows(
    seed: int, avoid: frozenset[str] = frozenset(), loops: Sequence[str] = LOOPS
) -> Iterator[Row]:
    """Endless rows, the loops by turns; no question comes twice, and none of `avoid` at all."""
    rng = random.Random(seed)
    seen = set(avoid)
    for row, loop in enumerate(cycle(loops)):
        draw = look_up if loop == "single_turn" else two_hops
        problem = draw(rng)
        while problem.question in seen:
            problem = draw(rng)
        seen.add(problem.question)
        talk = loop == "tool_agent" and rng.random() < TALK_SHARE
        answer = str(problem.answer)
        sample = Sample(
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
        right = tuple(gold(problem, loop))
        yield Row(sample, problem, right, tuple(trace(problem, loop, rng, talk)))


SPLITS = {"val": (1, 240), "train": (2, 3072)}
"""Split -> seed and number of rows."""


def split_rows(split: str) -> list[Row]:
    """The rows of a file in datasets/. No question of `val` is in `train`."""
    seed, count = SPLITS[split]
    avoid = frozenset() if split == "val" else questions(split_rows("val"))
    return list(islice(rows(seed, avoid), count))


def questions(of: Sequence[Row]) -> frozenset[str]:
    """The questions of some rows."""
    return frozenset(row.problem.question for row in of)
