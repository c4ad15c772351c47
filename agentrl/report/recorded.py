"""A step of a recorded run: the config that held, and the groups that were played."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentrl.config import Config, load_config
from agentrl.errors import DataError
from agentrl.rewards.scorer import combine
from agentrl.store import StoredRollout, TrajectoryStore
from agentrl.trajectory import Group, Scored


@dataclass(frozen=True, slots=True)
class StepGroups:
    """The stored groups of a training step, in the order of their rows."""

    groups: Sequence[Group]
    """The groups that trained."""
    evicted: Sequence[Group]
    """The groups that were played and did not train (`algorithm.filter_groups`)."""


class RecordedRun:
    """Reads the folder of a run, step by step. It writes nothing."""

    def __init__(self, folder: Path):
        """Read the config and its changes.

        Args:
            folder: the run's folder.

        Raises:
            UserError: the folder is not that of a training run, or its config has mistakes.
        """
        self.folder = folder
        self.store = TrajectoryStore(folder / "trajectories")
        path = folder / "config.yaml"
        if not path.is_file():
            raise DataError(f"{folder} is not the folder of a training run: it has no config.yaml")
        self.config = load_config(str(path))
        """The config of the last step."""
        changes = folder / "changes.jsonl"
        lines = changes.read_text().splitlines() if changes.exists() else []
        self.changes: list[dict[str, Any]] = [json.loads(line) for line in lines]
        """The changes of keys, oldest first: `step` (the last one with the old value), `key`,
        `old` and `new`."""

    def config_at(self, step: int) -> Config:
        """Return the config that held in a step: the present one without later changes."""
        tree = self.config.model_dump(mode="json")
        for change in reversed(self.changes):
            if change["step"] >= step and change["key"] != "rows":
                _set(tree, change["key"], change["old"])
        return Config.model_validate(tree)

    def read_step(self, step: int) -> StepGroups:
        """Return the stored groups of a training step, with their greedy rollouts.

        Raises:
            DataError: a file is damaged, or the greedy rollouts are not those of the groups.
        """
        groups, evicted = (self.read_groups(step, split) for split in ("train", "evicted"))
        greedy = [scored for group in self.read_groups(step, "baseline") for scored in group.scored]
        if not greedy:
            return StepGroups(groups, evicted)
        every = [*groups, *evicted]
        if [g.sample.id for g in every] != [s.trajectory.sample.id for s in greedy]:
            raise DataError(
                f"{self.store.folder}: the greedy rollouts of step {step} (baseline) are not those"
                " of its groups"
            )
        every = [replace(g, greedy=s) for g, s in zip(every, greedy, strict=True)]
        return StepGroups(every[: len(groups)], every[len(groups) :])

    def read_groups(self, step: int, split: str) -> list[Group]:
        """Return the stored groups of a step and split, without greedy rollouts.

        Raises:
            DataError: a file is damaged.
        """
        parts: list[list[StoredRollout]] = []
        for rollout in self.store.read(step, split):
            if parts and _is_same_group(parts[-1][-1], rollout):
                parts[-1].append(rollout)
            else:
                parts.append([rollout])
        return [
            Group(p[0].scored.trajectory.sample, tuple(r.scored for r in p), p[0].dropped)
            for p in parts
        ]


def recompute(scored: Scored, config: Config, *, trains: bool = True) -> Scored:
    """Return a stored rollout with the reward that follows from its stored parts.

    Args:
        scored: the rollout.
        config: the config, of which weights of rewards and the budget policy are used.
        trains: False for a validation, which has no penalty for overlong rollouts.

    Raises:
        UserCodeError: see `agentrl.rewards.scorer.combine`.
    """
    rollout = config.rollout
    return combine(
        scored.trajectory,
        scored.rewards["outcome"],
        scored.metrics,
        config.reward,
        rollout.budget_policy,
        rollout.max_trajectory_tokens if trains else None,
    )


def format_steps(steps: Sequence[int]) -> str:
    """Return ascending steps as text, such as `1-4, 7`; "none" for no steps."""
    return ", ".join(_ranges(steps)) or "none"


def _ranges(steps: Sequence[int]) -> Iterator[str]:
    first = 0
    for i, step in enumerate(steps):
        if i + 1 == len(steps) or steps[i + 1] != step + 1:
            yield f"{steps[first]}-{step}" if step > steps[first] else f"{step}"
            first = i + 1


def _is_same_group(last: StoredRollout, rollout: StoredRollout) -> bool:
    """Return whether a rollout belongs to the group of the one before it.

    Files of older versions have no index of the group. In them a group ends with its row, or when
    the index of the rollout starts again.
    """
    if rollout.group is not None or last.group is not None:
        return rollout.group == last.group
    before, now = last.scored.trajectory, rollout.scored.trajectory
    return before.sample.id == now.sample.id and before.rollout < now.rollout


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in a tree of mappings; None removes it."""
    *sections, leaf = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    if value is None:
        tree.pop(leaf, None)
    else:
        tree[leaf] = value
