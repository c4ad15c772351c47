"""The tasks of reasoning-gym as an environment: a question, and the task's own grader.

    pip install reasoning-gym
    python examples/reasoning_tasks/env.py data/tasks.jsonl --rows 128 --seed 1

Some graders give a part of the reward to a text that contains the right answer. So the outcome is 1
for full marks only.
"""

from __future__ import annotations

import argparse

from agentrl import Environment, environment
from agentrl.data import write_rows


@environment("reasoning_task")
class ReasoningTask(Environment):
    """One entry of a task's data set. The answer is the text after ####."""

    def __init__(self, task: str, seed: int):
        import reasoning_gym

        self.tasks = reasoning_gym.create_dataset(task, seed=seed, size=1)
        self.entry = self.tasks[0]

    async def start(self) -> str:
        return f"{self.entry['question']}\nEnd with the answer after ####, for example: #### 12"

    async def reward(self, messages) -> float:
        _, mark, answer = messages[-1].content.rpartition("####")
        score = self.tasks.score_answer(answer.strip() if mark else None, self.entry)
        return float(score == 1)


def make_row(task: str, seed: int) -> dict:
    """Return a row. `agentrl check environment` reads its column `solution`."""
    kwargs = {"task": task, "seed": seed}
    return {
        "prompt": "Answer the question.",
        "environment": "reasoning_task",
        "environment_kwargs": kwargs,
        "solution": [f"#### {ReasoningTask(**kwargs).entry['answer']}"],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("output", help="a .jsonl or .parquet file")
    parser.add_argument("--task", default="letter_counting")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    seeds = range(args.seed * 1_000_000, args.seed * 1_000_000 + args.rows)
    write_rows(args.output, [make_row(args.task, seed) for seed in seeds])
