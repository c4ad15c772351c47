"""A recorded run as Arrow tables, and the diagnoses: functions that look for a problem in a run.

    from agentrl import load_run

    run = load_run("runs/demo")
    run.metrics.to_pandas().plot(x="step", y="critic/score/mean")

A table contains null where a run has not recorded a value, never a number in its place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml
from pydantic import ValidationError

from agentrl.chat import load_tokenizer
from agentrl.config import Config, load_config
from agentrl.config.sources import load_yaml
from agentrl.errors import DataError
from agentrl.record import METRICS, is_run, read_metrics
from agentrl.registry import Registry
from agentrl.regular_files import read_regular
from agentrl.report.behaviour import read_behaviour
from agentrl.report.finding import SEVERITIES, Finding, findings_table
from agentrl.store import StoredRollout, TrajectoryStore
from agentrl.trajectory import Group

CHANGES_SCHEMA = pa.schema(
    [("step", pa.int64()), ("key", pa.string()), ("old", pa.string()), ("new", pa.string())]
)


@dataclass(frozen=True, slots=True)
class StepGroups:
    """The stored groups of a training step, in the order of their rows."""

    groups: Sequence[Group]
    """The groups that trained."""
    evicted: Sequence[Group]
    """The groups that were played and did not train (`algorithm.filter_groups`)."""


@dataclass(frozen=True)
class Run:
    """A recorded run. Tables are read when they are first used.

    Attributes:
        folder: the run's folder.
        steps: the steps that the tables contain; None: all.
    """

    folder: Path
    steps: Collection[int] | None = None

    @cached_property
    def config(self) -> dict[str, Any]:
        """The present config, by section: the content of `config.yaml`."""
        path = self.folder / "config.yaml"
        if not path.exists():
            return {}
        try:
            config = load_yaml(path)
        except (yaml.YAMLError, OSError) as e:
            raise DataError(f"{path} is not a YAML file: {e}") from e
        if not isinstance(config, dict):
            raise DataError(f"{path} is not the config of a run: it must be a mapping of sections")
        return config

    @cached_property
    def metrics(self) -> pa.Table:
        """One row per step: `step`, int64, and a float64 column for each metric."""
        path = self.folder / METRICS
        record = [(step, data) for step, data in read_metrics(path) if self.has_step(step)]
        try:
            return metrics_table(record)
        except pa.ArrowException as e:
            raise DataError(f"{path} has a metric that is not a number: {e}") from e

    @cached_property
    def episodes(self) -> pa.Table:
        """One row per stored episode, without its tokens; the columns of `store.SCHEMA`.

        Structured data (messages, turns, rewards) is JSON text.
        """
        return self.store.read_episodes(self.has_step)

    @cached_property
    def behaviour(self) -> pa.Table:
        """One row per stored episode: numbers of its turns, such as `repeated_calls`.

        `agentrl.report.behaviour.BEHAVIOUR_SCHEMA` describes the columns.
        """
        return read_behaviour(self.store, self.has_step)

    @cached_property
    def tokens(self) -> pa.Table:
        """One row per response token of the stored episodes; the columns of `store.TOKENS_SCHEMA`.

        `logprob` and `version` are null for tokens that the policy did not sample. What a step
        learned from (`advantage`, `old_logprob`, ...) is null where it is not recorded. A token of
        the table takes about 60 bytes: choose steps in a long run.
        """
        return self.store.read_tokens(self.has_step)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the run, a fast tokenizer of transformers.

        Raises:
            DataError: the folder has none. `agentrl eval` writes none.
        """
        folder = self.folder / "tokenizer"
        if not folder.is_dir():
            model = self.config.get("model", {}).get("path", "the model")
            raise DataError(
                f"{folder} does not exist. Load the tokenizer of {model} instead"
                " (transformers.AutoTokenizer)"
            )
        return load_tokenizer(folder)

    @cached_property
    def changes(self) -> pa.Table:
        """One row per config key that was changed during the run: step, key, and old, new as JSON.

        The values of keys have different types, which a column cannot have.
        """
        path = self.folder / "changes.jsonl"
        try:
            lines = read_regular(path).splitlines() if path.exists() else []
            rows = [json.loads(line) for line in lines]
            rows = [row | {name: json.dumps(row[name]) for name in ("old", "new")} for row in rows]
            return pa.Table.from_pylist(rows, CHANGES_SCHEMA)
        except (OSError, ValueError, TypeError, KeyError, RecursionError, pa.ArrowException) as e:
            raise DataError(f"{path} is not a record of changed config keys: {e}") from e

    @cached_property
    def findings(self) -> pa.Table:
        """One row per finding of the diagnoses; see `Finding`."""
        return findings_table(diagnose(self))

    def rollouts(self, split: str | None = None) -> Iterator[StoredRollout]:
        """Return an iterator over the stored rollouts, with tokens, messages and turns.

        Args:
            split: "train", "evicted", "baseline", "val" or "greedy"; None: all.

        Raises:
            DataError: a file is damaged.
        """
        return self.store.read(split=split, is_wanted=self.has_step)

    def config_at(self, step: int | None = None) -> Config:
        """Return the config that held in a step: the present one without later changes.

        Args:
            step: the step; None: the present config.

        Raises:
            UserError: the folder has no config, or its config has mistakes.
        """
        path = self.folder / "config.yaml"
        if not path.is_file():
            raise DataError(
                f"{self.folder} is not the folder of a training run: it has no {path.name}"
            )
        config = load_config(str(path))
        if step is None:
            return config
        tree = config.model_dump(mode="json")
        for change in reversed(self.changes.to_pylist()):
            if change["step"] >= step and change["key"] != "rows":
                _set(tree, change["key"], json.loads(change["old"]))
        try:
            return Config.model_validate(tree)
        except ValidationError as e:
            wrong = ", ".join(".".join(map(str, error["loc"])) for error in e.errors())
            raise DataError(
                f"{self.folder}: this version of agentrl does not read the config of step {step}:"
                f" {wrong}"
            ) from e

    def read_step(self, step: int) -> StepGroups:
        """Return the stored groups of a training step, with their greedy rollouts.

        Args:
            step: the step, from 1.

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

        Args:
            step: the step, from 0.
            split: "train", "evicted", "baseline", "val" or "greedy".

        Raises:
            DataError: a file is damaged.
        """
        groups = []
        for _, part in groupby(self.store.read(step, split), key=lambda rollout: rollout.group):
            rollouts = list(part)
            scored, causes = tuple(r.scored for r in rollouts), tuple(rollouts[0].drop_causes)
            sample = scored[0].trajectory.sample
            groups.append(Group(sample, scored, rollouts[0].dropped, drop_causes=causes))
        return groups

    @cached_property
    def store(self) -> TrajectoryStore:
        """The files with the run's trajectories."""
        return TrajectoryStore(self.folder / "trajectories")

    def has_step(self, step: int) -> bool:
        """Return whether the tables contain a step.

        Args:
            step: the step, from 0.
        """
        return self.steps is None or step in self.steps


Diagnosis = Callable[[Run], Iterable[Finding]]
diagnoses: Registry[Diagnosis] = Registry("diagnosis", home="agentrl.report.diagnoses")


def diagnosis(name: str) -> Callable[[Diagnosis], Diagnosis]:
    """Register a function that looks for a problem in a run and yields a `Finding` for each."""

    def register(function: Diagnosis) -> Diagnosis:
        return diagnoses.add(name, function)

    return register


def diagnose(run: Run) -> list[Finding]:
    """Return the findings of all registered diagnoses, the most severe first.

    Findings of equal severity are in the order in which the diagnoses were registered: the shipped
    ones first, in the order of causes (a problem is before those that it may cause). A diagnosis
    that raises gives a warning with its name, and the others go on.

    Raises:
        DataError: a file of the run is damaged.
    """
    findings: list[Finding] = []
    for name, function in diagnoses.items():
        try:
            new = [replace(finding, name=name) for finding in function(run)]
        except DataError:  # all diagnoses that read this file would repeat it
            raise
        except Exception as e:
            text = f"the diagnosis {name!r} failed: {type(e).__name__}: {e}"
            new = [Finding(step=0, text=text, name=name, subject="failed")]
        findings += new
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def metrics_table(record: Sequence[tuple[int, Mapping[str, Any]]]) -> pa.Table:
    """Return the table `Run.metrics` of steps and their metrics."""
    names = dict.fromkeys(name for _, data in record for name in data)
    columns = {"step": pa.array([step for step, _ in record], pa.int64())}
    for name in names:
        columns[name] = pa.array([data.get(name) for _, data in record], pa.float64())
    return pa.table(columns)


def load_run(path: str | Path, steps: Collection[int] | None = None) -> Run:
    """Open the folder of a run, which may still be training.

    Args:
        path: the run's folder (`runs/NAME`).
        steps: the steps that the tables contain, such as `range(100, 120)`; None: all.

    Raises:
        DataError: the folder does not exist, or is not that of a run.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder} (looked at {folder.absolute()})")
    if not is_run(folder):
        raise DataError(
            f"{folder} is not the folder of a run: it has neither {METRICS} nor trajectories, or it"
            " is the folder of a model"
        )
    return Run(folder, steps)


def config_value(run: Run, key: str) -> object:
    """Return the value of a config key; None if the run's config lacks it."""
    section, _, name = key.partition(".")
    return (run.config.get(section) or {}).get(name)


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in a tree of mappings; None removes it."""
    *sections, leaf = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    if value is None:
        tree.pop(leaf, None)
    else:
        tree[leaf] = value
