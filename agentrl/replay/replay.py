"""Replay a recorded step: repeat its update from the stored rollouts, without an engine.

    checkpoint of step M ─► rollouts of M + 1 ... N ─► the update of each ─► compare with the record

The functions that compute and apply an update are those of the training (`agentrl.trainer.step`).
In one process on a CPU they give the same bits again. A replay writes nothing into the run's
folder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from agentrl.config import Config
from agentrl.engine.local.load import resolve_device
from agentrl.errors import AgentRLError, ConfigError, UserError
from agentrl.learner.algorithms import KLController
from agentrl.learner.batch import Batch, check_logprobs, collate
from agentrl.learner.learner import Learner
from agentrl.learner.sharding import full_tensor
from agentrl.learner.state import dequantize, read_state, shapes_in
from agentrl.metrics import rollout_metrics
from agentrl.plural import format_steps, plural
from agentrl.preflight import announce_files, load_files
from agentrl.record import METRICS, read_metrics
from agentrl.registry import advantage_estimators, policy_losses
from agentrl.report.rescore import recompute
from agentrl.report.run import Run, StepGroups
from agentrl.store import LEARNED, LEARNED_SCHEMA, LEARNED_STEPS
from agentrl.terminal import echo
from agentrl.trainer.checkpoint import INITIAL, META, Checkpoint, find_steps, open_checkpoint
from agentrl.trainer.resume import open_fork, read_fork
from agentrl.trainer.step import compute_targets, learn
from agentrl.trainer.stream import staleness_metrics
from agentrl.trainer.teacher import score_rows, teachers_of
from agentrl.trajectory import Group, Scored

DETERMINED = ("actor/", "critic/", "rollout_corr/", "teacher/", "training/rollout_", "waste/")
"""The prefixes of metrics that the stored rollouts determine."""
ROUNDING = {"cpu": 1e-3, "cuda": 1e-2}
"""The tolerance for runs with several processes or a GPU, by device: sums have another order. Two
processes on a CPU differed by less than 1e-4."""
ROUNDING_ADVICE = (
    "If only last digits differ, and the run was made on another machine, by another version of"
    " torch or agentrl, or with another number of threads (OMP_NUM_THREADS): --tolerance 1e-3"
)
MAX_LISTED = 20
"""The number of differences that a message lists."""
MAX_LOGPROB_GROWTH = 10.0
"""A stored logprob of the engine may differ from the policy's by this multiple of the largest
difference that the step has recorded. That difference does not cover all tokens: those without an
advantage are not run."""
MIN_LOGPROB_DIFFERENCE = 1e-4
"""What is added to this limit for the local engine on a CPU, in nats; a tenth of what is added for
others."""
MAX_LOGPROB_DIFFERENCE = 0.1
"""The limit for the local engine on a CPU if the step has recorded no difference, in nats."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A value of the record that a replay does not give."""

    name: str
    recorded: Any
    replayed: Any


class ReplayDiffers(AgentRLError):
    """A replay does not give the recorded values; the message names them."""


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of a replay."""

    start: str
    """The state that it started from, for people to read."""
    steps: Sequence[int]
    """The steps that were replayed, up to the first one that differs."""
    tolerance: float
    """The relative difference that was accepted; 0: none."""
    compared: Sequence[str]
    """What was compared with the record of the last of these steps."""
    differences: Sequence[Difference]
    """The differences of the last of these steps. The others have none."""

    def raise_differences(self) -> None:
        """Raise `ReplayDiffers` if there are differences."""
        if not self.differences:
            return
        lines = [
            f"{d.name}: recorded {d.recorded}, replayed {d.replayed}" for d in self.differences
        ]
        more = len(lines) - MAX_LISTED
        lines = [*lines[:MAX_LISTED], *([f"and {more} more"] if more > 0 else [])]
        accepted = f"up to {self.tolerance:g}, relative" if self.tolerance else "none"
        raise ReplayDiffers(
            f"step {self.steps[-1]} differs from the record in"
            f" {plural(len(self.differences), 'value')} (accepted difference: {accepted}):"
            + "".join(f"\n  {line}" for line in lines)
            + ("" if self.tolerance else f"\n{ROUNDING_ADVICE}")
        )


class Replayer:
    """A recorded run and a learner that repeats its steps."""

    def __init__(self, run: Run, *, model: str = "", device: str = ""):
        """Read the record; no model is loaded.

        Args:
            run: the run.
            model: the model that training started from, if it is no longer at the run's
                `model.path`.
            device: the device of the replay ("auto", "cpu", "cuda"); "": the run's.
        """
        self.run, self.config = run, run.config_at()
        self._model, self._device = model, device
        self._learner: Learner | None = None
        self.record = dict(read_metrics(run.folder / METRICS))
        """The metrics of each step."""

    @property
    def is_open(self) -> bool:
        """True if `open` has loaded the learner."""
        return self._learner is not None

    @property
    def learner(self) -> Learner:
        """The learner that `open` has loaded."""
        assert self._learner is not None
        return self._learner

    # --- which steps -----------------------------------------------------------------------------

    def replayable_steps(self) -> list[int]:
        """Return the steps whose rollouts, and those of all steps since a checkpoint, are stored.

        The model that the run started from counts as a checkpoint, if it is known.
        """
        starts = {*find_steps(self.run.folder), *self._first_steps()}
        steps: list[int] = []
        for step in self.run.store.steps("train"):
            has_state = step - 1 in starts or (bool(steps) and steps[-1] == step - 1)
            if has_state and step in self.record:
                steps.append(step)
        return steps

    def check_step(self, step: int) -> None:
        """Raise `UserError` if a step cannot be replayed; the message lists those that can be."""
        steps = self.replayable_steps()
        if step in steps:
            return
        stored = self.run.store.steps("train")
        keep = self.config.trainer.keep_trajectories
        if step not in self.record:
            why = f"{METRICS} has no such step"
        elif step not in stored:
            why = f"its rollouts are not stored (trainer.keep_trajectories={keep})"
        else:
            why = (
                "no checkpoint from which the rollouts of all steps up to it are stored"
                f" (checkpoints: {format_steps(find_steps(self.run.folder))}; stored rollouts:"
                f" {format_steps(stored)})"
            )
        raise UserError(
            f"step {step} of {self.run.folder} cannot be replayed: {why}. Steps that can be"
            f" replayed: {format_steps(steps)}"
        )

    def _first_steps(self) -> list[int]:
        """Return the step that the run began after: 0, or the step of a forked checkpoint."""
        fork = read_fork(self.run.folder)
        if fork is None:
            return [0]
        return [fork.step] if (Path(fork.checkpoint) / META).is_file() else []

    # --- the state before a step -----------------------------------------------------------------

    def open(
        self, step: int, tolerance: float | None = None
    ) -> Iterator[tuple[int, list[Difference], list[str]]]:
        """Load the newest state before a step, and replay the steps up to it, one by one.

        Args:
            step: the step.
            tolerance: see `repeat`.

        Yields:
            Each step between, with what differs from the record, and what was compared.

        Raises:
            UserError: the step cannot be replayed, or a checkpoint or the model cannot be loaded.
        """
        self.check_step(step)
        first, checkpoint = self._find_start(step)
        config = self.config_at(first + 1)
        load_names(self.run, config)
        self._learner = Learner(config.model.path, config, total_steps=1)
        self.kl = KLController(config.algorithm)
        self.start = f"the base model {config.model.path}"
        if checkpoint is None and (initial := self.run.folder / INITIAL).is_dir():
            self.start += f" with the adapter in {initial}"
            self.learner.ranks.load(initial)
        if checkpoint is not None:
            self.start = f"the checkpoint of step {first} ({checkpoint.folder})"
            self.learner.ranks.load(checkpoint.folder)
            changed = {c["key"] for c in self.run.changes.to_pylist() if c["step"] == first}
            if "algorithm.kl_reward_coef" not in changed:
                self.kl.load(checkpoint.meta["kl"])
        for between in range(first + 1, step):
            yield between, *self.repeat(between, tolerance)

    def config_at(self, step: int) -> Config:
        """Return the config of a step, with the model and the device of the replay."""
        config = self.run.config_at(step)
        if self._model:
            config = config.with_values("model", path=self._model)
        if self._device:
            config = config.with_values("trainer", device=self._device)
        return config

    def _find_start(self, step: int) -> tuple[int, Checkpoint | None]:
        """Return the newest usable state before a step: its step and checkpoint (None: the model).

        A checkpoint that is damaged is skipped, if an older one will do.
        """
        folder, problems = self.run.folder, []
        stored = self.run.store.steps("train")
        first_steps = self._first_steps()
        saved = find_steps(folder)
        for first in sorted({*saved, *first_steps}, reverse=True):
            if first >= step:
                continue
            if not {*range(first + 1, step)} <= {*stored}:
                break
            try:
                if first in saved:
                    return first, open_checkpoint(folder / f"global_step_{first:08d}")
                fork = read_fork(folder)
                return first, open_fork(folder, fork) if fork else None
            except ConfigError as e:
                problems.append(str(e))
        raise UserError(f"step {step} cannot be replayed: {'; '.join(problems)}")

    # --- one step --------------------------------------------------------------------------------

    def prepare(self, step: int) -> tuple[Config, StepGroups, Batch]:
        """Return the config, the rollouts and the batch of a step. The learner takes the config."""
        config = self.config_at(step)
        groups = self.run.read_step(step)
        self.learner.config = config
        self.learner.total_steps = _find_length(config, step, self.record[step])
        return config, groups, collate(groups.groups, reward=config.reward)

    def repeat(
        self, step: int, tolerance: float | None = None
    ) -> tuple[list[Difference], list[str]]:
        """Repeat the update of the next step, and compare it with the record.

        Args:
            step: the step; the learner has the state before it.
            tolerance: the relative difference to accept; None: see `tolerance_of`.

        Returns:
            The differences, and what was compared.

        Raises:
            DataError: stored rollouts cannot be read.
            RunStopped: see `Learner.update`.
        """
        config, groups, batch = self.prepare(step)
        tolerance = self.tolerance_of(config) if tolerance is None else tolerance
        is_close = _comparison(tolerance)
        recorded = self.record[step]
        every = [*groups.groups, *groups.evicted]
        differences = [*_compare_rewards(every, config)]
        differences += _compare_versions(every, step - 1, config.trainer.max_staleness)
        differences += self._compare_logprobs(batch, recorded, config, tolerance)
        teacher = self.teacher_logprobs(step, config, batch, groups.groups)
        targets, signal = compute_targets(self.learner, batch, self.kl, teacher_logprobs=teacher)
        updated, learned = learn(self.learner, batch, targets, self.kl, step)
        replayed = rollout_metrics(every) | signal | updated
        replayed |= staleness_metrics(groups.groups, step - 1)
        differences += _compare_metrics(recorded, replayed, is_close)
        compared = [f"{len(recorded.keys() & replayed.keys())} metrics"]
        stored = self.run.store.read_learned(step)
        if len(stored):
            differences += _compare_learned(stored, learned.table(batch), tolerance)
            tokens = len(_flatten(stored.column("advantages"))[1])
            compared.append(f"the numbers of {tokens} tokens in learned/")
        folder = self.run.folder / f"global_step_{step:08d}"
        if folder.is_dir():
            try:
                checkpoint = open_checkpoint(folder)
            except ConfigError as e:
                compared.append(f"not the weights ({e})")
            else:
                tensors, wrong = self._compare_weights(checkpoint, tolerance)
                differences += wrong
                compared.append(f"{tensors} tensors of {folder.name}")
        return differences, compared

    def teacher_logprobs(
        self, step: int, config: Config, batch: Batch, groups: Sequence[Group]
    ) -> Tensor | None:
        """Return the teacher's logprobs, (B, T); None without a teacher.

        Those of models of their own are computed again. Those of servers, and of teachers with
        another prompt, are the recorded ones.

        Args:
            step: the step.
            config: its config.
            batch: its batch.
            groups: the groups of the batch.

        Raises:
            UserError: they are not recorded.
        """
        teacher = config.teacher
        if not teacher.model:
            return None
        if teacher.names == teacher.local and not teacher.prompt:
            names = teachers_of(teacher, batch, groups)
            return score_rows(batch, names, self.learner.teacher_logprobs)
        stored = self.run.store.read_learned(step)
        if not len(stored):
            raise UserError(
                f"step {step} cannot be replayed: the logprobs of its teacher are not stored."
                f" learned/ has those of the last {LEARNED_STEPS} steps"
            )
        out = torch.zeros(batch.response_mask.shape)
        if [row[2] for row in _rows(stored)] != batch.response_lengths.tolist():
            raise UserError(f"step {step}: learned/ has other tokens than trajectories/")
        for b, numbers in enumerate(stored["teacher_logprobs"].to_pylist()):
            known = torch.tensor([math.nan if x is None else x for x in numbers])
            out[b, : len(known)] = torch.where(batch.action_mask[b, : len(known)], known, 0.0)
        check_logprobs(batch, out, batch.action_mask, "teacher")
        return out

    def tolerance_of(self, config: Config) -> float:
        """Return the tolerance for a run: 0 for one process on a CPU, else from `ROUNDING`."""
        device = resolve_device(config.trainer.device)
        return 0.0 if device == "cpu" and not config.trainer.spread else ROUNDING[device]

    def _compare_logprobs(
        self, batch: Batch, recorded: Mapping[str, Any], config: Config, tolerance: float
    ) -> list[Difference]:
        """Compare the engine's logprobs with the policy's, at all sampled tokens.

        Return the token where they are farthest apart, if that is farther than arithmetic explains,
        or one with a logprob above 0, which no engine returns.
        """
        is_exact = config.rollout.name == "local" and not tolerance
        margin = MIN_LOGPROB_DIFFERENCE if is_exact else ROUNDING["cpu"]
        largest = recorded.get("rollout_corr/logprob_diff_max")
        if largest is not None:
            limit = MAX_LOGPROB_GROWTH * largest + margin
        else:
            limit = MAX_LOGPROB_DIFFERENCE if is_exact else math.inf
        policy, engine = self.learner.logprobs(batch), batch.rollout_logprobs
        gaps = (policy - engine).abs()
        gaps = torch.where(engine > (0.0 if is_exact else margin), math.inf, gaps)
        gaps = torch.where(batch.response_mask, gaps, 0.0)
        if not (gaps > limit).any() and not gaps.isinf().any():
            return []
        row, column = divmod(int(gaps.argmax()), gaps.shape[1])
        where = f"the logprob of {_name_token(batch, row, column)}"
        return [Difference(where, engine[row, column].item(), policy[row, column].item())]

    def _compare_weights(
        self, checkpoint: Checkpoint, tolerance: float
    ) -> tuple[int, list[Difference]]:
        """Compare weights and optimizer state with a checkpoint of the step.

        With a tolerance, the norm of the difference of a tensor may be that share of its norm.

        Returns:
            The number of tensors, and the differences.
        """
        folder, differences, count = checkpoint.folder, [], 0
        assert self.learner.rank is not None
        for name, optimizer in self.learner.rank.optimizers.items():
            ours = {k: full_tensor(dequantize(t)).cpu() for k, t in optimizer.tensors().items()}
            shapes = shapes_in(folder / name)
            if missing := sorted(shapes.keys() ^ ours.keys()):
                differences.append(
                    Difference(f"{name}: {missing[0]}", missing[0] in shapes, missing[0] in ours)
                )
                continue
            saved = {key: torch.empty_like(tensor) for key, tensor in ours.items()}
            read_state(folder / name, saved)
            count += len(saved)
            for key, tensor in saved.items():
                if difference := _tensor_difference(tensor, ours[key], tolerance):
                    differences.append(Difference(f"{name}: {key}{difference[0]}", *difference[1:]))
        kl = checkpoint.meta["kl"]
        if not _comparison(tolerance)(kl, self.kl.coef):
            differences.append(Difference("the weight of the KL in the reward", kl, self.kl.coef))
        return count, differences


def replay(
    replayer: Replayer, step: int, tolerance: float | None = None, say: Callable[[str], None] = echo
) -> Replay:
    """Replay a step and compare it with the record. The first step that differs ends the replay.

    Args:
        replayer: the run.
        step: the step.
        tolerance: the relative difference to accept; None: see `Replayer.tolerance_of`.
        say: called with a line before the replay begins.

    Raises:
        UserError: the step cannot be replayed; the message lists those that can be.
    """
    accepted = replayer.tolerance_of(replayer.config_at(step)) if tolerance is None else tolerance
    steps: list[int] = []
    for between, differences, compared in replayer.open(step, accepted):
        if not steps:
            say(f"replaying steps {between}-{step} from {replayer.start}")
        steps.append(between)
        if differences:
            return Replay(replayer.start, steps, accepted, compared, differences)
    if not steps:
        say(f"replaying step {step} from {replayer.start}")
    differences, compared = replayer.repeat(step, accepted)
    return Replay(replayer.start, [*steps, step], accepted, compared, differences)


# --- comparing -----------------------------------------------------------------------------------


def _comparison(tolerance: float) -> Callable[[Any, Any], bool]:
    """Return a function that compares two numbers: bit for bit, or within a tolerance."""

    def is_close(recorded: Any, replayed: Any) -> bool:
        a, b = (math.nan if x is None else float(x) for x in (recorded, replayed))
        if not math.isfinite(a) or not math.isfinite(b):
            return math.isfinite(a) == math.isfinite(b)  # the record has null for all of these
        return a == b or math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance / 10)

    return is_close


def _rollouts(groups: Sequence[Group]) -> Iterator[Scored]:
    for group in groups:
        yield from (*group.scored, *([group.greedy] if group.greedy else []))


def _compare_versions(groups: Sequence[Group], policy: int, age: int) -> Iterator[Difference]:
    """Yield the first token of each segment that the policy, or one of that age, did not sample."""
    versions = range(-1, 0), range(max(policy - age, 0), policy + 1)
    for trajectory in (scored.trajectory for scored in _rollouts(groups)):
        for k, segment in enumerate(trajectory.segments):
            pairs = zip(segment.versions, segment.response_mask, strict=True)
            for i, (version, mask) in enumerate(pairs):
                if version not in versions[mask]:
                    name = f"response token {i} of segment {k} of episode {trajectory.episode_id}"
                    yield Difference(f"the version of {name}", version, versions[mask][-1])
                    break


def _compare_rewards(groups: Sequence[Group], config: Config) -> Iterator[Difference]:
    """Yield the stored rewards that do not follow from their stored parts."""
    for scored in _rollouts(groups):
        again = recompute(scored, config)
        name = f"of episode {scored.trajectory.episode_id}"
        for part in again.rewards.keys() & scored.rewards.keys():
            if not _same_sum(scored.rewards[part], again.rewards[part]):
                yield Difference(
                    f"rewards.{part} {name}", scored.rewards[part], again.rewards[part]
                )
        if not _same_sum(scored.reward, again.reward):
            yield Difference(f"the reward {name}", scored.reward, again.reward)
        if scored.masked != again.masked:
            yield Difference(f"masked {name}", scored.masked, again.masked)


def _same_sum(a: float, b: float) -> bool:
    """Return whether two sums of the same numbers are equal; versions may add in other orders."""
    return math.isclose(a, b, rel_tol=1e-12, abs_tol=1e-12)


def _compare_metrics(
    recorded: Mapping[str, Any], replayed: Mapping[str, float], is_close: Callable[..., bool]
) -> Iterator[Difference]:
    for name, value in recorded.items():
        if name in replayed:
            if not is_close(value, replayed[name]):
                yield Difference(name, value, replayed[name])
        elif name.startswith(DETERMINED):
            yield Difference(name, value, None)


def _compare_learned(stored: pa.Table, table: pa.Table, tolerance: float) -> Iterator[Difference]:
    """Yield, for each of `LEARNED`, the first token whose number differs."""
    table = table.cast(LEARNED_SCHEMA)
    rows, ours = (_rows(t) for t in (stored, table))
    if rows != ours:
        pairs = enumerate(zip_longest(rows, ours))
        first, pair = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
        yield Difference(f"episode, segment, tokens of row {first} of learned/", *pair)
        return
    ends, _ = _flatten(table.column("advantages"))
    for name in LEARNED:
        columns = [_flatten(t.column(name))[1] for t in (stored, table)]
        unknown = [column.is_null().to_numpy(zero_copy_only=False) for column in columns]
        numbers = [column.fill_null(0).to_numpy(zero_copy_only=False) for column in columns]
        a, b = (x.astype(np.float64) for x in numbers)
        accepted = np.maximum(tolerance * np.maximum(abs(a), abs(b)), tolerance / 10)
        far = (abs(a - b) > accepted) | (unknown[0] != unknown[1])
        if far.any():
            token = int(far.argmax())
            row = int(np.searchsorted(ends, token, side="right"))
            where = token - int(ends[row - 1] if row else 0)
            episode, segment, _ = rows[row]
            yield Difference(
                f"{name} of response token {where} of segment {segment} of episode {episode}",
                *(column[token].as_py() for column in columns),
            )


def _rows(learned: pa.Table) -> list[tuple[str, int, int]]:
    """Return the episode, segment and number of tokens of each row."""
    lengths = np.diff(_flatten(learned["advantages"])[0], prepend=0).tolist()
    keys = learned["episode_id"].to_pylist(), learned["segment"].to_pylist()
    return list(zip(*keys, lengths, strict=True))


def _flatten(column: pa.ChunkedArray) -> tuple[np.ndarray, pa.Array]:
    """Return where each list of a column ends, and the items of all lists."""
    lists = pa.concat_arrays(column.chunks)
    offsets = lists.offsets.to_numpy()
    return offsets[1:] - offsets[0], lists.flatten()


def _tensor_difference(
    saved: Tensor, ours: Tensor, tolerance: float
) -> tuple[str, float, float] | None:
    """Return the index of the largest difference, and both values there; None if there is none."""
    if saved.equal(ours):
        return None
    gaps = (saved.double() - ours.double()).abs()
    if tolerance and gaps.norm() <= tolerance * saved.double().norm():
        return None
    at = int(gaps.argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(at), gaps.shape)]
    values = saved.flatten()[at].item(), ours.flatten()[at].item()
    return str(index) if index else "", *values


def _name_token(batch: Batch, row: int, column: int) -> str:
    rollout = int(batch.rollout[row])
    segment = row - int((batch.rollout < rollout).sum())
    return f"response token {column} of segment {segment} of episode {batch.episodes[rollout]}"


# --- the learning rate and the user's names ------------------------------------------------------


def _find_length(config: Config, step: int, recorded: Mapping[str, Any]) -> int:
    """Return the length of the run that the learning rate of a step depends on.

    If the config has `trainer.total_epochs`, the length depends on the number of rows, which the
    record does not contain. It follows from the recorded learning rate.
    """
    o, total = config.optim, config.trainer.total_steps
    first = o.lr_warmup_steps + 1
    if total or o.lr_final == 1 or step <= first:
        return total or step
    rates = ((o.lr, "actor/lr"), (o.critic_lr, "critic/lr"))
    shares = [recorded[name] / peak for peak, name in rates if recorded.get(name) is not None]
    fraction = (shares[0] - 1) / (o.lr_final - 1) if shares else 1.0
    return first + round((step - first) / fraction) if 0 < fraction < 1 else step


def load_names(run: Run, config: Config) -> None:
    """Load the run's files if the config's estimator or policy loss is defined there.

    Raises:
        ConfigError: a file does not load.
    """
    a = config.algorithm
    if a.adv_estimator in advantage_estimators and a.policy_loss in policy_losses:
        return
    announce_files(run.folder / "config.yaml", config.files)
    if problems := load_files(config):
        raise ConfigError("\n".join(problems))
