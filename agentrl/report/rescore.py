"""Score recorded episodes again, by another reward or with other weights.

The reward function replaces the outcome. The rewards of turns and tools stay as they were recorded,
and so does everything that was played.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from agentrl import sandbox
from agentrl.config import FIELDS, Config, load_config
from agentrl.config.sources import Setting, assignment, read_overrides
from agentrl.errors import ConfigError, DataError, RunStopped
from agentrl.evaluate import score_stored
from agentrl.plural import plural
from agentrl.preflight import announce_files, load_files
from agentrl.registry import is_shipped, rewards, tools
from agentrl.report.run import Run
from agentrl.rewards import Scorer
from agentrl.rewards.graders import find_reward
from agentrl.rewards.scorer import BY_SOURCE, combine
from agentrl.store import TRAINING
from agentrl.trajectory import Group, Sample, Scored, Scores
from agentrl.workers import run_all

log = logging.getLogger("agentrl")

OUTCOME_KEYS = ("reward.function", "reward.functions", "reward.kwargs")
"""The keys that change the outcome: the episodes are scored again."""
REWARD_KEYS = (
    *OUTCOME_KEYS, "reward.outcome_weight", "reward.turn_weight", "reward.tool_weight",
    "reward.overlong_buffer", "reward.overlong_penalty", "reward.timeout_s", "reward.workers",
    "rollout.budget_policy", "sandbox.backend", "sandbox.slots", "sandbox.timeout_s",
    "sandbox.memory_mb", "sandbox.python",
)  # fmt: skip
"""The keys that a recorded episode can be scored with, and what a reward runs in."""
_LISTED = 3


# --- the config ----------------------------------------------------------------------------------


def change_config(
    config: Config,
    overrides: Sequence[str],
    reward: str,
    allowed: Collection[str],
    by_name: Collection[str] = (),
    reasons: Mapping[str, str] | None = None,
) -> Config:
    """Return a recorded config with other values.

    Args:
        config: the config that held.
        overrides: texts such as `algorithm.adv_estimator=rloo`.
        reward: a reward function, which replaces the recorded ones and their arguments; "": none.
        allowed: the keys that may change.
        by_name: further keys that `algorithm.name` may set, because they have no effect.
        reasons: why some of the other keys may not change, for messages.

    Raises:
        ConfigError: a value is wrong, or a key is not one of `allowed`. The message has all
            mistakes.
    """
    mistakes: list[str] = []
    for setting in read_overrides(overrides, []):
        key = next((k for k in FIELDS if f"{setting.path}.".startswith(f"{k}.")), "")
        if key and key not in allowed:
            why = (reasons or {}).get(key) or "the record cannot be repeated with another value"
            mistakes.append(f"{assignment(setting.path, setting.value)}: {why}")
    if mistakes:
        mistakes[-1] += f". Keys that can change: {', '.join(allowed)}"
    tree = config.model_dump(mode="json")
    recorded = []
    for key in FIELDS:
        section, _, leaf = key.rpartition(".")
        if not (reward and key in OUTCOME_KEYS):
            recorded.append(Setting(key, (tree[section] if section else tree)[leaf], "the run"))
    flags = {"reward.function": reward} if reward else {}
    changed = load_config(None, overrides, flags, translated=recorded, mistakes=mistakes)
    implied = [
        key
        for key in FIELDS
        if key not in (*allowed, *by_name) and changed.value(key) != config.value(key)
    ]
    if implied:
        values = ", ".join(assignment(key, changed.stored_value(key)) for key in implied)
        raise ConfigError(
            f"algorithm.name={changed.algorithm.name} sets {values}, and the record cannot be"
            " repeated with another value. Set its other keys one by one (docs/algorithms.md lists"
            " them)"
        )
    return changed


def changes_outcome(config: Config, changed: Config) -> bool:
    """Return whether the episodes must be scored again, because the outcome has other rewards."""
    return any(config.value(key) != changed.value(key) for key in OUTCOME_KEYS)


def open_scorer(run: Run, config: Config) -> Scorer:
    """Return the rewards of a config, for the recorded episodes of a run.

    Raises:
        UserError: there is no such reward, or it cannot score recorded episodes.
    """
    names = list(config.reward.functions) or [config.reward.function]
    # The run's own files are read only if they are needed: its folder may have been copied.
    unknown = [n for n in names if n not in ("", BY_SOURCE) and ".py" not in n and n not in rewards]
    files = [f for f in config.reward.files if f in run.config_at().reward.files]
    announce_files(run.folder / "config.yaml", [*(config.files if unknown else []), *files])
    if unknown and (problems := load_files(config)):
        raise ConfigError("\n".join(problems))
    for name in names:
        if name in ("", BY_SOURCE):
            continue
        function = find_reward(name)
        if inspect.isclass(function) and not is_shipped(function):
            raise ConfigError(
                f"the reward {name!r} is a class: its scores may depend on the episodes that it has"
                " scored before, so recorded episodes cannot be scored again by it. Use a function"
            )
    rollout = config.rollout
    return Scorer(config.reward, rollout.budget_policy, rollout.max_trajectory_tokens)


# --- scoring -------------------------------------------------------------------------------------


def rescore(run: Run, config: Config) -> Iterator[dict[str, Any]]:
    """Score all stored episodes of a run again, step by step.

    Yields a row for each episode, with its recorded outcome (the score that the reward function
    returned) and reward (the weighted sum under the budget policy), and the new ones.

    Args:
        run: the run.
        config: the config to score with; see `change_config`.

    Raises:
        UserError: the reward cannot score recorded episodes, or the record does not suffice; see
            `open_scorer` and `check_rows`.
        UserCodeError: the reward raised.
        RunStopped: a server or a process of the reward failed three times.
    """
    with open_rescoring(run, config, run.store.all_steps()) as score:
        for step in run.store.all_steps():
            training = run.read_step(step)
            parts = {"train": training.groups, "evicted": training.evicted}
            parts |= {split: run.read_groups(step, split) for split in ("val", "greedy")}
            for split, groups in parts.items():
                again = score(groups, split in TRAINING)
                for before, after in zip(groups, again, strict=True):
                    yield from _pair(step, split, before.scored, after.scored)
                    if before.greedy and after.greedy:
                        yield from _pair(step, "baseline", [before.greedy], [after.greedy])


Rescoring = Callable[[Sequence[Group], bool], list[Group]]
"""Scores groups again. The second argument is False for the groups of a validation."""


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


@contextmanager
def open_rescoring(run: Run, config: Config, steps: Collection[int]) -> Iterator[Rescoring]:
    """Open the rewards of a config for recorded episodes; raises as `rescore`."""
    scorer = open_scorer(run, config)
    check_rows(run, steps, scorer)
    sandbox.configure(config.sandbox)
    with asyncio.Runner() as runner:
        try:
            yield lambda groups, trains: runner.run(_score_groups(groups, scorer, trains))
        finally:
            runner.run(_close(scorer))
            scorer.stop()


def check_rows(run: Run, steps: Collection[int], scorer: Scorer) -> None:
    """Raise `DataError` if the record does not contain what a reward got when it was played."""
    table = run.store.read_episodes(lambda step: step in steps)
    rows = table.select(["sample_id", "step", "as_text", "dropped"]).to_pylist()
    lossy = {row["sample_id"]: row["as_text"] for row in rows if row["as_text"]}
    if lossy:
        named = [f"{row} ({', '.join(paths)})" for row, paths in lossy.items()]
        raise DataError(
            f"{plural(len(lossy), 'row')} of {run.folder} have values that JSON cannot hold, so the"
            f" record has others in their place, which a reward would get: {_list(named)}"
        )
    lost = dict.fromkeys((row["sample_id"], row["step"]) for row in rows if row["dropped"])
    if lost and scorer.has_group_reward:
        named = [f"{sample} in step {step}" for sample, step in lost]
        raise DataError(
            "a reward of groups compares all rollouts of a row, and"
            f" {plural(len(lost), 'group')} lost rollouts: {_list(named)}"
        )


async def _score_groups(groups: Sequence[Group], scorer: Scorer, trains: bool) -> list[Group]:
    return await run_all([_score_group(group, scorer, trains) for group in groups])


async def _score_group(group: Group, scorer: Scorer, trains: bool) -> Group:
    """Score a group with its greedy rollout, as in training."""
    every = [*group.scored, *([group.greedy] if group.greedy else [])]
    trajectories = [s.trajectory for s in every]
    if _environment_scored(group.sample) and scorer.uses_data_source:
        # The environment is gone, and no reward function is named in its place.
        trajectories = [replace(s.trajectory, scores=_recorded_scores(s)) for s in every]
    again = await score_stored(trajectories, scorer, trains=trains)
    count = len(group.scored)
    return replace(group, scored=again[:count], greedy=again[-1] if group.greedy else None)


def _environment_scored(sample: Sample) -> bool:
    """Return whether a row's environment gave the outcome, as far as its class is known."""
    name = sample.environment
    return bool(name) and (name not in tools or "reward" in tools.get(name).hooks)


def _recorded_scores(scored: Scored) -> Scores:
    """Return the scores that a rollout was recorded with."""
    turns = enumerate(scored.trajectory.turns)
    by_turn = {index: turn.rewards["scores"] for index, turn in turns if "scores" in turn.rewards}
    return Scores(scored.rewards["outcome"], by_turn, scored.metrics)


async def _close(scorer: Scorer) -> None:
    await scorer.close()
    await sandbox.release()


def _pair(
    step: int, split: str, before: Sequence[Scored], after: Sequence[Scored]
) -> Iterator[dict[str, Any]]:
    for old, new in zip(before, after, strict=True):
        yield {
            "step": step,
            "split": split,
            "sample_id": old.trajectory.sample.id,
            "episode_id": old.trajectory.episode_id,
            "rollout": old.trajectory.rollout,
            "outcome": old.rewards["outcome"],
            "new_outcome": new.rewards["outcome"],
            "reward": old.reward,
            "new_reward": new.reward,
        }


def write_rescored(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Write the rows of `rescore` to a .parquet file.

    Raises:
        RunStopped: the file cannot be written.
    """
    try:
        pq.write_table(pa.Table.from_pylist([*rows]), file)
    except OSError as e:
        raise RunStopped(f"cannot write {file}: {e.strerror or e}") from e


def _list(names: Sequence[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f", and {more} more" if more > 0 else "")
