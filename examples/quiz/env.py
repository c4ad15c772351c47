"""A quiz of several questions, one a turn: does it pay to know which answer was right?

The policy reads a story and is asked for one of its numbers, again and again, each time of another
story. Every answer is marked at once, as a reward of its turn; the outcome is 1 where all were
right. Whoever learns from the outcome alone must be right everywhere by chance before there is
anything to learn.

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

from agentrl import Interaction, Message, Reply, Trajectory, interaction, reward
from agentrl.answers import gsm8k_answer, same_number
from agentrl.demo.arithmetic import Problem, look_up

QUESTIONS = 3


@interaction("quiz")
class Quiz(Interaction):
    """Marks an answer, and asks the next question."""

    def __init__(self, questions: Sequence[str], answers: Sequence[str]):
        if len(questions) != len(answers):
            raise ValueError(f"{len(questions)} questions, but {len(answers)} answers")
        self.questions, self.answers = questions, answers
        self.asked = 0

    async def respond(self, messages: Sequence[Message]) -> Reply:
        answer = gsm8k_answer(messages[-1].content)
        right = answer is not None and same_number(answer, self.answers[self.asked])
        score = right / len(self.answers)
        self.asked += 1
        if self.asked == len(self.questions):
            return Reply("", score=score, done=True)
        return Reply(self.questions[self.asked], score=score)


@reward("all_right")
def all_right(trajectory: Trajectory) -> dict[str, float]:
    """1 where every question was answered right; `right` is the share that was."""
    asked = len(trajectory.sample.interaction_kwargs["questions"])
    right = sum(turn.rewards.get("turn", 0.0) > 0 for turn in trajectory.turns)
    done = float(right == asked)
    return {"score": done, "acc": done, "right": right / asked}


def rows(seed: int, questions: int = QUESTIONS) -> Iterator[dict[str, Any]]:
    """Endless rows; a larger number of questions is harder."""
    rng = random.Random(seed)
    while True:
        asked: list[Problem] = [look_up(rng) for _ in range(questions)]
        yield {
            "prompt": [
                {"role": "system", "content": "Find the number. Answer with ####."},
                {"role": "user", "content": asked[0].question},
            ],
            "agent_name": "tool_agent",
            "data_source": "examples/quiz",
            "interaction": "quiz",
            "interaction_kwargs": {
                "questions": [p.question for p in asked],
                "answers": [str(p.answer) for p in asked],
            },
        }


def main() -> None:
    parser = argparse.ArgumentParser(description="Write rows of the quiz.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--questions", type=int, default=QUESTIONS)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    made = rows(given.seed, given.questions)
    with given.file.open("w") as file:
        for _ in range(given.rows):
            file.write(json.dumps(next(made)) + "\n")


if __name__ == "__main__":
    main()
