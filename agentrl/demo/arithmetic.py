"""Word problems like GSM8K's, for all three agent loops, generated from a seed.

`tool_agent` and `react` rows need two operations, for which the model calls the calculator.
`single_turn` rows ask for one number from the text. Operands are 1 to 9, so that a model of half a
million parameters learns them in a minute.

Every row has two conversations for imitation learning. `gold` is right. `trace` is right in about
one of three rows; the others have the mistake that is typical of their kind of question. So a model
that imitates `trace` prefers the mistakes, but sometimes answers each kind of question right: its
greedy answers are mostly wrong, and reinforcement learning can improve it.
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
GOLD_SHARE = 0.35
"""Share of the `trace` conversations that are copies of `gold`."""
TYPICAL_SHARE = 0.75
"""Share of the mistakes that are typical of their kind of question. The others vary, so that a
model learns no rule from the mistakes by which it could recognize the right answer."""
TALK_SHARE = 0.25
"""Share of the tool_agent rows with the gsm8k interaction."""
MAX_ATTEMPTS = 3
"""The number of answers that the gsm8k interaction accepts."""

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
    """A text about the numbers a, b, c, the operators of the result, and questions for the numbers.

    The result is `(a first_operator b) second_operator c`.
    """

    text: str
    operators: tuple[str, str]
    questions: tuple[str, str, str]


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
    """A question, its numbers, and the operators that give the answer.

    Example: `Problem("Tom has 3 bags of 4 nuts and finds 5 more. How many nuts in all?", (3, 4, 5),
    ("*", "+"), 17)`. Without operators, the question asks for one of the numbers.
    """

    question: str
    operands: tuple[int, ...]
    operators: tuple[str, ...]
    answer: int

    @property
    def solution(self) -> str:
        """The solution in GSM8K's format: `3*4=<<3*4=12>>12` for each step, then `#### 17`."""
        steps = _steps(self.operands, self.operators)
        return "\n".join([*(f"{e}=<<{e}={v}>>{v}" for e, v in steps), f"#### {self.answer}"])


def two_hops(rng: random.Random) -> Problem:
    """Return a problem of two operations with positive results."""
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
    """Return a problem whose answer is one of the three numbers in the text."""
    story = rng.choice(STORIES)
    a, b, c = operands = tuple(rng.sample(range(1, 10), 3))
    items, index = rng.choice(ITEMS), rng.randrange(3)
    text = story.text.format(name=rng.choice(NAMES), items=items, a=a, b=b, c=c)
    return Problem(
        f"{text} {story.questions[index].format(items=items)}", operands, (), operands[index]
    )


def _steps(operands: Sequence[int], operators: Sequence[str]) -> list[tuple[str, int]]:
    """Return expressions and their values; each expression continues with the last value."""
    steps = []
    value = operands[0]
    for symbol, operand in zip(operators, operands[1:], strict=False):
        expression = f"{value}{symbol}{operand}"
        value = OPERATORS[symbol](value, operand)
        steps.append((expression, value))
    return steps


# -- assistant turns ------------------------------------------------------------------------------


def gold(problem: Problem, loop: str) -> list[Message]:
    """Return the right conversation after the prompt."""
    return _solve(problem, loop, problem.operators, problem.answer)


def trace(problem: Problem, loop: str, rng: random.Random, talk: bool = False) -> list[Message]:
    """Return a conversation after the prompt that is right in about one of three rows.

    With an interaction (`talk`), a wrong answer gets a reply and another attempt.
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
    typical = rng.random() < TYPICAL_SHARE
    if not problem.operators:
        last = [n for n in problem.operands if n != problem.answer][-1]
        return _solve(problem, loop, (), last if typical else rng.randint(1, 9))
    first, second = problem.operators
    match problem.operators if typical else rng.choice(STORIES).operators:
        case ("*", "+"):  # stop after one call
            return _solve(problem, loop, (first,))
        case ("+", "*"):  # guess without a call
            return _solve(problem, loop, (), rng.randint(1, 2 * problem.answer))
        case ("*", "-"):  # a wrong second operator
            return _solve(problem, loop, (first, "+" if second == "-" else "-"))
        case _:  # a wrong first operator
            return _solve(problem, loop, ("+" if first == "-" else "-", second))


def _solve(
    problem: Problem, loop: str, operators: Sequence[str], answer: int | None = None
) -> list[Message]:
    """Call the calculator for each operator, then answer with `answer` or the last result."""
    steps = _steps(problem.operands, operators)
    messages = [m for expression, value in steps for m in _call(loop, expression, str(value))]
    final = f"#### {steps[-1][1] if answer is None else answer}"
    if loop == "react":
        final = f"Thought: I can answer.\nFinal Answer: {final}"
    return [*messages, Message("assistant", final)]


def _call(loop: str, expression: str, result: str) -> tuple[Message, Message]:
    arguments = json.dumps({"expression": expression})
    if loop == "react":
        text = f"Thought: I must compute.\nAction: {TOOL}\nAction Input: {arguments}\nObservation:"
        return Message("assistant", text), Message("user", f"Observation: {result}")
    call = f'{{"name": "{TOOL}", "arguments": {arguments}}}'
    return Message("assistant", f"<tool_call>\n{call}\n</tool_call>"), Message("tool", result)


# -- rows -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """A problem as a dataset row, with the conversations `gold` and `trace`."""

    sample: Sample
    problem: Problem
    gold: tuple[Message, ...]
    trace: tuple[Message, ...]

    def as_dict(self, split: str) -> dict[str, Any]:
        """Return the row with verl's columns, which `agentrl.data` reads as `sample`."""
        sample = self.sample
        talk = {"name": sample.interaction, **sample.interaction_kwargs}
        return {
            "data_source": sample.data_source,
            "prompt": [m.as_dict() for m in sample.prompt],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": sample.ground_truth},
            "agent_name": sample.agent_name,
            "extra_info": {
                "index": sample.row,
                "split": split,
                "question": self.problem.question,
                "answer": self.problem.solution,
                "tool_selection": list(sample.tools) or None,
                "interaction_kwargs": json.dumps(talk) if sample.interaction else None,
            },
            "gold": [m.as_dict() for m in self.gold],
            "trace": [m.as_dict() for m in self.trace],
        }


def rows(
    seed: int, avoid: frozenset[str] = frozenset(), loops: Sequence[str] = LOOPS
) -> Iterator[Row]:
    """Yield rows without end, for one loop after the other.

    No question occurs twice, and no question of `avoid` occurs.
    """
    rng = random.Random(seed)
    used = set(avoid)
    for row, loop in enumerate(cycle(loops)):
        draw = look_up if loop == "single_turn" else two_hops
        problem = draw(rng)
        while problem.question in used:
            problem = draw(rng)
        used.add(problem.question)
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
"""Split -> seed, number of rows."""


def split_rows(split: str) -> list[Row]:
    """Return the rows of a file in datasets/. No question of `val` is in `train`."""
    seed, count = SPLITS[split]
    avoid = frozenset() if split == "val" else questions(split_rows("val"))
    return list(islice(rows(seed, avoid), count))


def questions(of_rows: Sequence[Row]) -> frozenset[str]:
    """Return the questions of rows."""
    return frozenset(row.problem.question for row in of_rows)
