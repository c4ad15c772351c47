"""The tasks of reasoning-gym, in the Python that has the package."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import SYSTEM_PROMPTS, extract_answer
from serve import Unavailable, check_options, unknown


def rows(task: str, n: int, seed: int, options: dict[str, Any]) -> dict[str, Any]:
    """Return the system prompt, and the questions and answers of a task."""
    if task not in DATASETS:
        raise unknown("task", task, DATASETS)
    defaults = {f.name: f.default for f in dataclasses.fields(DATASETS[task][1])}
    check_options(options, {k: v for k, v in defaults.items() if k not in ("seed", "size")})
    entries = [dict(_tasks(task, n, seed, json.dumps(options))[i]) for i in range(n)]
    texts = [{"question": e["question"], "answer": e["answer"]} for e in entries]
    return {"system": SYSTEM_PROMPTS["default"], "entries": texts}


def score(
    task: str, n: int, seed: int, options: dict[str, Any], index: int, text: str, prompt: str
) -> float:
    """Return the package's score of a text, whose answer is in <answer> and </answer>."""
    tasks = _tasks(task, n, seed, json.dumps(options))
    if tasks[index]["question"].strip() not in prompt:
        raise Unavailable(
            f"question {index} of {task} is not that of the row: another version of the package"
            " made the row. Start the run again"
        )
    return float(tasks.score_answer(extract_answer(text), tasks[index]))


@functools.lru_cache(maxsize=256)
def _tasks(task: str, size: int, seed: int, options: str) -> Any:
    return reasoning_gym.create_dataset(task, size=size, seed=seed, **json.loads(options))
