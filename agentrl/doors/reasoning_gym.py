"""The tasks of reasoning-gym: `data.train='reasoning-gym:letter_counting?n=2000&seed=0'`.

The package makes the questions and scores the answers. Other options are those of the task, such as
`max_words=5`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.doors.door import Door, Named, read_address
from agentrl.doors.episodes import SEEDS, TIMEOUT
from agentrl.doors.program import call_once, program
from agentrl.tools.environment import Environment, environment
from agentrl.trajectory import Message, Sample

NAME = "reasoning-gym"

_named = Named("task")


class ReasoningTask(Environment):
    """A question. The answer is the text in <answer> and </answer>."""

    def __init__(self, task: str, seed: int, options: dict[str, Any], index: int, size: int):
        _named.require(task, settings={"seed": seed, **options})
        # The questions of some tasks (acre) depend on how many there are.
        self._entry = {"task": task, "seed": seed, "options": options, "index": index, "n": size}

    async def reward(self, messages: Sequence[Message]) -> float:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the package's score."""
        last = messages[-1]
        text = last.content if last.role == "assistant" else ""
        prompt = "\n".join(m.content for m in messages if m.role != "assistant")
        return await program(NAME).call("score", text=text, prompt=prompt, **self._entry)

    @classmethod
    def gold(cls, sample: Sample) -> list[str] | None:
        """Return the answer of the package; tasks with many solutions have none."""
        answer = sample.ground_truth
        return None if answer is None else [f"<answer>{answer}</answer>"]


def rows(address: str) -> list[Mapping[str, Any]]:
    """Return the rows of `reasoning-gym:TASK?n=500&seed=0&OPTION=VALUE`."""
    task, seed, options, n = _read(address)
    made = call_once(NAME, "rows", task=task, n=n, seed=seed, options=options)
    kwargs = {"task": task, "seed": seed, "options": options, "size": n}
    return [
        {
            "prompt": [
                {"role": "system", "content": made["system"]},
                {"role": "user", "content": e["question"]},
            ],
            "data_source": f"{NAME}/{task}",
            "environment": NAME,
            "environment_kwargs": {**kwargs, "index": index},
            "ground_truth": e["answer"],
        }
        for index, e in enumerate(made["entries"])
    ]


def _read(address: str) -> tuple[str, int, dict[str, Any], int]:
    """Return the task of an address, the package's first seed, the options and the rows."""
    task, options = read_address(address, {"n": 500, "seed": 0})
    return task, options.pop("seed") * SEEDS, options, options.pop("n")


def load(alias: str, address: str) -> None:
    """Register the environment, and allow rows to name this task."""
    task, seed, options, _ = _read(address)
    _named.add(task, {"seed": seed, **options})
    environment(alias, timeout=TIMEOUT)(ReasoningTask)


DOOR = Door(
    NAME, "questions and graders of 100 tasks", load, rows, requirements=("reasoning-gym>=0.1.23",)
)
