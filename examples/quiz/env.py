"""A quiz with one question per turn, to compare turn rewards with outcome rewards.

In each turn the policy reads a story and must answer with one of its numbers. Every answer is
graded immediately, as a reward of its turn; the outcome is 1 if all answers are right. With the
outcome alone, the policy must answer all questions right by chance before it can learn anything.

    python examples/quiz/env.py quiz_train.jsonl --rows 2048 --seed 1
    python examples/quiz/env.py quiz_val.jsonl --rows 128 --seed 2
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from agentrl import Environment, Message, Reply, Sample, Scores, environment
from agentrl.answers import gsm8k_answer, same_number
from agentrl.demo.arithmetic import Problem, look_up

QUESTIONS = 3


@environment("quiz")
class Quiz(Environment):
    """Grades an answer, asks the next question, and counts the right answers."""

    def __init__(self, questions: Sequence[str], answers: Sequence[str]):
        if len(questions) != len(answers):
            raise ValueError(f"{len(questions)} questions, but {len(answers)} answers")
        self.questions, self.answers = questions, answers
        self.right: list[bool] = []

    async def respond(self, messages: Sequence[Message]) -> Reply:
        index, answer = len(self.right), gsm8k_answer(messages[-1].content)
        self.right.append(answer is not None and same_number(answer, self.answers[index]))
        score = self.right[-1] / len(self.answers)
        if index + 1 == len(self.questions):
            return Reply("", score=score, done=True)
        return Reply(self.questions[index + 1], score=score)

    async def reward(self) -> Scores:
        """Return 1 if all answers are right; `right` is the share of right answers."""
        right = sum(self.right) / len(self.answers)
        return Scores(float(right == 1), metrics={"acc": right == 1, "right": right})

    @classmethod
    def gold(cls, sample: Sample) -> list[str]:
        return [f"#### {answer}" for answer in sample.environment_kwargs["answers"]]


def rows(seed: int, questions: int = QUESTIONS) -> Iterator[dict[str, Any]]:
    """Yield rows without end. More questions are harder."""
    rng = random.Random(seed)
    while True:
        problems: list[Problem] = [look_up(rng) for _ in range(questions)]
        yield {
            "prompt": [
                {"role": "system", "content": "Find the number. Answer with ####."},
                {"role": "user", "content": problems[0].question},
            ],
            "data_source": "examples/quiz",
            "environment": "quiz",
            "environment_kwargs": {
                "questions": [p.question for p in problems],
                "answers": [str(p.answer) for p in problems],
            },
        }


def main() -> None:
    parser = argparse.ArgumentParser(description="Write rows of the quiz.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--questions", type=int, default=QUESTIONS)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    lines = rows(args.seed, args.questions)
    with args.file.open("w") as file:
        for _ in range(args.rows):
            file.write(json.dumps(next(lines)) + "\n")


if __name__ == "__main__":
    main()
