"""The state that a run starts from, and the config keys that may change there.

A run starts from the base model, continues from a checkpoint of its own, or begins as a fork: from
a checkpoint of another run, with its weights and its optimizer, under another config.

    runs/fork/
      fork.json        the checkpoint that a fork began from; the first file of a fork
      changes.jsonl    the config keys that have changed, {"step": 12, "key": ..., "old": ..., ...}
      config.yaml      the present config

A checkpoint has the whole state of a run, the changes until then included. `changes.jsonl` and
`config.yaml` are rewritten from it at every start, after the state is loaded. So a run may be
killed at any moment: the next start writes the same files again, and no change is there twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from hashlib import sha256
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agentrl.config import Config
from agentrl.errors import ConfigError, RunStopped
from agentrl.record import FINAL, METRICS, read_metrics
from agentrl.trainer.checkpoint import BEST, META, Checkpoint, find_checkpoint, replace_file

CHANGES = "changes.jsonl"
CONFIG = "config.yaml"
FORK = "fork.json"

CHANGEABLE_KEYS = frozenset({
    "data.drop_last", "data.train", "data.val", "optim.compile", "optim.critic_lr", "optim.lr",
    "optim.lr_final", "optim.lr_warmup_steps", "optim.micro_batch_tokens", "optim.offload",
    "optim.recompute", "reward.timeout_s", "reward.workers", "rollout.engines",
    "rollout.gpu_memory_utilization", "rollout.launch", "rollout.lora", "rollout.python",
    "rollout.sleep", "rollout.sync", "rollout.tensor_parallel_size", "rollout.timeout_s",
    "rollout.urls", "rollout.workers", "sandbox.slots", "sandbox.timeout_s", "tools.transport",
    "tools.workers", "trainer.experiment_name", "trainer.keep", "trainer.keep_best",
    "trainer.context_parallel_size", "trainer.keep_trajectories", "trainer.logger",
    "trainer.n_gpus_per_node", "trainer.nnodes",
    "trainer.patience", "trainer.placement", "trainer.profile_steps", "trainer.project_name",
    "trainer.ray_address", "trainer.save_freq", "trainer.tags", "trainer.test_freq",
    "trainer.total_epochs", "trainer.total_steps", "trainer.val_before_train", "val.*",
})  # fmt: skip
"""Config keys that a resumed run may change: the learning rate, the length, time limits, and what
does not change the weights except for rounding. The rows of `data.train` are compared by content.
"""

FIXED_KEYS = frozenset(
    {
        "model.freeze_vision_tower",
        "model.lora_alpha",
        "model.lora_rank",
        "model.lora_target_modules",
        "model.quantization",
        "optim.name",
    }
)
"""Config keys that a fork cannot change: they define the tensors that the checkpoint holds."""

UNRECORDED_KEYS = frozenset({"trainer.output", "trainer.resume", "trainer.val_only"})
"""Config keys that describe a command rather than the run. Their changes are not recorded."""


@dataclass(frozen=True, slots=True)
class Change:
    """A config key that has changed. A fork to other rows also changes `rows`, their hash."""

    step: int
    """The last step that was made with the old value."""
    key: str
    old: Any
    """The value as JSON has it; None if the key did not exist."""
    new: Any


@dataclass(frozen=True, slots=True)
class Fork:
    """The record of a fork: the checkpoint that it began from."""

    checkpoint: str
    """The absolute path of its folder."""
    step: int
    meta_sha256: str
    """The hash of its `meta.json`, which has the hashes of all other files."""


@dataclass(frozen=True, slots=True)
class Start:
    """The state that a run starts from."""

    total_steps: int
    """The length of the run; steps are counted from the beginning of the first run."""
    checkpoint: Checkpoint | None = None
    """None: the run starts from the base model."""
    fork: Fork | None = None
    """The record of the fork; None if the run is not a fork."""
    is_new_fork: bool = False
    """True if the run has no step of its own yet: `checkpoint` is that of the other run."""
    position: int = 0
    """The number of rows that the run has taken, in the present order of rows."""
    order_start: int = 0
    """The step after which the present order of rows began."""
    changes: tuple[Change, ...] = ()
    """All changes until now, oldest first."""
    new_changes: tuple[Change, ...] = ()
    """The changes of this start."""

    @property
    def first_step(self) -> int:
        """The step that the run began after: 0, or the step of the checkpoint that was forked."""
        return self.fork.step if self.fork else 0

    @property
    def restarts_rows(self) -> bool:
        """True if training starts again with the first row of the order here."""
        return _restarts_rows(self.new_changes)

    def describe(self) -> list[str]:
        """Return lines for the user: the checkpoint, the changes, the order of rows."""
        if self.checkpoint is None:
            return []
        step, folder = self.checkpoint.step, self.checkpoint.folder
        lines = [f"skipped: {line}" for line in self.checkpoint.skipped]
        if self.is_new_fork:
            lines.append(f"fork of {folder}: weights and optimizer are those after step {step}")
        else:
            lines.append(f"resuming from step {step} ({folder})")
        lines += [f"changed after step {c.step}: {_describe(c)}" for c in self.new_changes]
        if self.restarts_rows:
            lines.append(
                f"the rows or their order differ from those of {folder}: training begins with the"
                f" first row of the new order, and ends after step {self.total_steps}"
            )
        return lines


def find_start(config: Config, rows: str, steps: int) -> Start:
    """Return the state that a run starts from, checked. This changes no file.

    Args:
        config: the present config.
        rows: the fingerprint of the training rows.
        steps: `trainer.total_steps`, or the steps of `trainer.total_epochs` passes over the rows.

    Raises:
        ConfigError: `trainer.resume` names no usable checkpoint, the folder holds another run, or
            keys differ that must not.
    """
    folder, resume = Path(config.trainer.output), config.trainer.resume
    checkpoint = None if resume == "never" else _choose_checkpoint(folder, resume)
    if checkpoint is None:
        return Start(steps)
    meta, step = checkpoint.meta, checkpoint.step
    is_new_fork = checkpoint.folder.parent.resolve() != folder.resolve()
    new_changes = find_changes(checkpoint, config, rows)
    if is_new_fork:
        _check_fork(checkpoint, config, new_changes)
    else:
        _check_same_run(checkpoint, new_changes)
    order_start = step if _restarts_rows(new_changes) else meta["order_start"]
    total_steps = steps + (0 if config.trainer.total_steps else order_start)
    if not config.trainer.val_only and total_steps < step + is_new_fork:
        length = "total_steps" if config.trainer.total_steps else "total_epochs"
        raise ConfigError(
            f"trainer.{length}={config.value(f'trainer.{length}')}: the run would end after step"
            f" {total_steps}, but {checkpoint.folder} has made step {step} already. Steps are"
            " counted from the beginning of the first run: set trainer.total_steps to"
            f" {step + is_new_fork} or more"
        )
    return Start(
        total_steps,
        checkpoint,
        _make_fork(checkpoint) if is_new_fork else read_fork(folder),
        is_new_fork,
        0 if _restarts_rows(new_changes) else meta["position"],
        order_start,
        (*(Change(**change) for change in meta["changes"]), *new_changes),
        tuple(new_changes),
    )


def write_fork(folder: Path, start: Start) -> None:
    """Write `fork.json` if a fork begins. Call it before anything else is written.

    Raises:
        RunStopped: the folder cannot be written.
    """
    if start.is_new_fork and start.fork is not None:
        _replace(folder / FORK, json.dumps(asdict(start.fork), indent=1) + "\n")


def write_config(folder: Path, config: Config, start: Start) -> None:
    """Write `changes.jsonl` and `config.yaml`. Call it when the state is loaded.

    If the run starts from the base model, the record of a former fork is removed.

    Raises:
        RunStopped: the folder cannot be written.
    """
    if start.checkpoint is None:
        (folder / FORK).unlink(missing_ok=True)
    lines = [json.dumps(asdict(change)) + "\n" for change in start.changes]
    if lines:
        _replace(folder / CHANGES, "".join(lines))
    else:
        (folder / CHANGES).unlink(missing_ok=True)
    _replace(folder / CONFIG, config.resolved_yaml())


# --- the checkpoint ------------------------------------------------------------------------------


def _choose_checkpoint(folder: Path, resume: str) -> Checkpoint | None:
    """Return the checkpoint to start from; None: the base model.

    A fork that has no checkpoint of its own begins again from the checkpoint in its `fork.json`.
    """
    path = Path(resume).expanduser().resolve()
    if resume != "auto" and folder.resolve() in (path, path.parent):
        return find_checkpoint(folder, resume)
    fork, own = read_fork(folder), find_checkpoint(folder, "auto")
    if resume != "auto":
        is_same = False
        if fork is not None:
            source_run = Path(fork.checkpoint).parent
            is_same = path in (Path(fork.checkpoint), source_run, source_run / BEST)
        if not is_same and (own is not None or read_metrics(folder / METRICS)):
            held = f"a fork of {fork.checkpoint}" if fork else "the record of a run"
            raise ConfigError(
                f"trainer.resume={resume} is a checkpoint of another run, but {folder} already"
                f" holds {held}. Use trainer.resume=auto to resume that run, or another --output"
            )
        if not is_same:
            return find_checkpoint(folder, resume)
    if own is not None:
        return own
    if fork is not None:
        return open_fork(folder, fork)
    if (folder / FINAL).exists() and any(step for step, _ in read_metrics(folder / METRICS)):
        raise ConfigError(
            f"{folder} holds a finished run without a checkpoint, which cannot be continued. Use"
            " another --output; or trainer.resume=never, which deletes that run"
        )
    return None


def _make_fork(checkpoint: Checkpoint) -> Fork:
    digest = sha256((checkpoint.folder / META).read_bytes()).hexdigest()
    return Fork(str(checkpoint.folder.resolve()), checkpoint.step, digest)


def read_fork(folder: Path) -> Fork | None:
    """Return the record of a fork; None if the folder has none."""
    try:
        return Fork(**json.loads((folder / FORK).read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as e:
        raise ConfigError(
            f"{folder / FORK} cannot be read: {e}. Restore it, or use another --output"
        ) from None


def open_fork(folder: Path, fork: Fork) -> Checkpoint:
    """Return the checkpoint that a fork began from, unchanged."""
    problem = ""
    try:
        checkpoint = find_checkpoint(folder, fork.checkpoint)
    except ConfigError as e:
        checkpoint, problem = None, str(e)
    if checkpoint is None or _make_fork(checkpoint).meta_sha256 != fork.meta_sha256:
        raise ConfigError(
            f"{folder} is a fork of {fork.checkpoint} without a checkpoint of its own, so it must"
            f" begin there again. But {problem or 'that checkpoint has been replaced since'}."
            " For a fork of another checkpoint, use another --output"
        )
    return checkpoint


# --- the config ----------------------------------------------------------------------------------


def find_changes(checkpoint: Checkpoint, config: Config, rows: str) -> list[Change]:
    """Return what differs between the config and rows of a checkpoint and the present ones.

    Args:
        checkpoint: the checkpoint of a training run.
        config: the present config.
        rows: the fingerprint of the present training rows.
    """
    saved = _fill_defaults(checkpoint.meta["config"])
    current = dict(flatten_config(config.model_dump(mode="json")))
    saved["rows"], current["rows"] = checkpoint.meta["rows"], rows
    return [
        Change(checkpoint.step, key, saved.get(key), current.get(key))
        for key in sorted(saved.keys() | current.keys())
        if saved.get(key) != current.get(key) and key not in UNRECORDED_KEYS
    ]


def _check_same_run(checkpoint: Checkpoint, changes: Sequence[Change]) -> None:
    """Raise `ConfigError` if a run cannot resume with these changes."""
    refused = [c for c in changes if not any(fnmatch(c.key, key) for key in CHANGEABLE_KEYS)]
    if not refused:
        return
    values = "".join(f"\n  {_describe(c)}" for c in refused)
    raise ConfigError(
        f"{checkpoint.folder} was made with other values of keys that change what is learned"
        f" (checkpoint -> now):{values}\nTo resume, use the values of the checkpoint. To continue"
        f" from it with the present values, start a fork: trainer.resume={checkpoint.folder} with"
        " another --output. To start over in this folder, use trainer.resume=never: this deletes"
        " the run in it."
    )


def _check_fork(checkpoint: Checkpoint, config: Config, changes: Sequence[Change]) -> None:
    """Raise `ConfigError` if a fork cannot begin with these changes."""
    fixed = FIXED_KEYS | ({"model.path"} if config.model.lora_rank else set())
    refused = [c for c in changes if c.key in fixed]
    if refused:
        values = "".join(f"\n  {_describe(c)}" for c in refused)
        raise ConfigError(
            f"a fork of {checkpoint.folder} keeps its weights and its optimizer state, so these"
            f" keys must have the values of the checkpoint (checkpoint -> now):{values}\nFor a new"
            " run with other values from these weights, export the checkpoint (agentrl export"
            " --merge) and use the exported folder as --model."
        )
    if config.algorithm.critic and not (checkpoint.folder / "critic").is_dir():
        raise ConfigError(
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} needs a critic, and"
            f" {checkpoint.folder} has none. Use an estimator without a critic, or export the"
            " checkpoint (agentrl export --merge) and start a run with the exported folder as"
            " --model"
        )


def _restarts_rows(changes: Sequence[Change]) -> bool:
    """Return whether these changes give training another order of rows."""
    return any(c.key in ("rows", "trainer.seed", "data.shuffle") for c in changes)


def _describe(change: Change) -> str:
    if change.key == "rows":
        return "data.train has other rows, or files with other weights or in another order"
    old, new = ("not set" if v is None else json.dumps(v) for v in (change.old, change.new))
    return f"{change.key}: {old} -> {new}"


def _fill_defaults(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dotted keys of a saved config, and those that were added since at their defaults.

    Keys and values that no longer exist stay as they are: they are changes.
    """
    values = dict(flatten_config(saved))
    try:
        return dict(flatten_config(Config.model_validate(saved).model_dump(mode="json")))
    except ValidationError as e:
        gone = {".".join(map(str, error["loc"][:2])) for error in e.errors()}
    known = {
        name: {key: value for key, value in section.items() if f"{name}.{key}" not in gone}
        if isinstance(section, Mapping)
        else section
        for name, section in saved.items()
    }
    if known == saved:  # keys contradict each other now
        return values
    return _fill_defaults(known) | {key: values[key] for key in gone if key in values}


def flatten_config(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield dotted keys with their values. A value may be a mapping, whose names may have dots."""
    for section, values in config.items():
        if isinstance(values, Mapping):
            yield from ((f"{section}.{leaf}", value) for leaf, value in values.items())
        else:
            yield section, values


def _replace(file: Path, text: str) -> None:
    try:
        replace_file(file, text)
    except OSError as e:
        raise RunStopped(f"cannot write {file}: {e.strerror}") from e
