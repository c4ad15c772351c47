"""The stored episodes of a run as arrays, and how diagnoses choose, group and compare them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from agentrl.metrics import is_close
from agentrl.report.run import Run

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

EXAMPLES = 5
"""The number of episodes that a finding names."""
LEVELS = 5
"""The fewest different rewards of a correlation. With a reward of two values, calling the tool may
be the task."""


class Episodes:
    """Rows of `Run.behaviour` whose columns are arrays: `episodes["reward"]`.

    A null of a number is NaN.
    """

    def __init__(self, table: pa.Table):
        self.table = table

    def __len__(self) -> int:
        return self.table.num_rows

    def __getitem__(self, column: str) -> np.ndarray:
        return self.table.column(column).to_numpy()

    def where(self, mask: np.ndarray) -> Episodes:
        """Return the episodes that a mask selects."""
        return Episodes(self.table.filter(pa.array(mask)))

    def answered(self, right: bool) -> np.ndarray:
        """Return the mask of the answers that end with their ground truth, or of the others.

        Episodes without a ground truth are in neither.
        """
        return self.table.column("right").fill_null(not right).to_numpy() == right

    @cached_property
    def groups(self) -> np.ndarray:
        """The key of each episode's group: its step, split and number."""
        columns = (self.table.column(name).to_pylist() for name in ("step", "split", "group"))
        return np.array(["/".join(map(str, key)) for key in zip(*columns, strict=True)], object)

    def examples(self, mask: np.ndarray, turn: str = "") -> dict[str, Any]:
        """Return `episodes` and `turns` of a finding: the last episodes that a mask selects.

        Args:
            mask: which of the episodes show the problem.
            turn: the turn that shows it: "last", a column with its index, or "" for the whole
                episode.
        """
        chosen = self.table.take(np.flatnonzero(mask)[-EXAMPLES:])
        cited: dict[str, Any] = {"episodes": chosen.column("episode_id").to_pylist()}
        if turn == "last":
            cited["turns"] = [n - 1 if n else None for n in chosen.column("turns").to_pylist()]
        elif turn:
            cited["turns"] = chosen.column(turn).to_pylist()
        return cited


def training_episodes(run: Run, steps: int = 0) -> Episodes:
    """Return the training rollouts; of the last `steps` steps, 0 for all."""
    episodes = Episodes(run.behaviour)
    episodes = episodes.where(np.isin(episodes["split"], ("train", "evicted")))
    if not steps or not len(episodes):
        return episodes
    return episodes.where(episodes["step"] >= np.unique(episodes["step"])[-steps:][0])


def group_by(keys: Iterable[K], values: Iterable[V]) -> dict[K, list[V]]:
    """Return the values of each key. Keys are in the order in which they occur."""
    groups: dict[K, list[V]] = defaultdict(list)
    for key, value in zip(keys, values, strict=True):
        groups[key].append(value)
    return groups


def most_common(values: np.ndarray) -> tuple[Any, int]:
    """Return the most frequent of one or more values, and how often it occurs."""
    return Counter(values.tolist()).most_common(1)[0]


def shorten(text: str) -> str:
    """Return the last 60 characters of a text."""
    return text if len(text) <= 60 else f"...{text[-57:]}"


def without_group_means(episodes: Episodes, column: str) -> np.ndarray:
    """Return a column minus its mean over the episode's group."""
    values = episodes[column].astype(float)
    _, group = np.unique(episodes.groups, return_inverse=True)
    means = (np.bincount(group, values) / np.bincount(group))[group]
    return np.where(is_close(values, means), 0.0, values - means)


def correlation_within_rows(episodes: Episodes, column: str) -> float:
    """Return the correlation of a column and the reward, both without the mean of their group.

    0 if one of them does not vary, or the reward has fewer than `LEVELS` values.
    """
    if len(np.unique(episodes["reward"])) < LEVELS:
        return 0.0
    x, y = (without_group_means(episodes, name) for name in (column, "reward"))
    scale = math.sqrt(float((x**2).sum() * (y**2).sum()))
    return float((x * y).sum()) / scale if scale else 0.0
