"""Checkpoints that a kill, a crash or a full disk cannot spoil.

A checkpoint is a folder that appears whole or not at all: it is written under a temporary name,
every file is flushed to the disk, `meta.json` with all sizes and hashes comes last, and one rename
publishes it. Overwriting a folder in place leaves it unusable in half of all random kills.

    runs/demo/
      global_step_00000010/                a checkpoint: files of `write`, and meta.json
      global_step_00000020/
      latest_checkpointed_iteration.txt    20
      .tmp-30-4711/                        being written by process 4711

How a run starts: with the folder's `run_lock` held, `recover`; then `find_checkpoint`, and
`remove_later_checkpoints` the step it goes on from.

One process works in a folder at a time (`run_lock`), and a run goes on under one config
(`check_resumable`).
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from hashlib import file_digest
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agentrl.config import Config
from agentrl.errors import ConfigError, RunStopped, UserError
from agentrl.trainer.tracking import METRICS

META = "meta.json"
LATEST = "latest_checkpointed_iteration.txt"
KEEP = 2
"""The newest, and one more: should the newest be damaged on the disk, the run goes back one."""

_NAME = re.compile(r"global_step_(\d+)")
_LEFTOVER = re.compile(r"\.(tmp|old)-(\w+)-(\d+)")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder whose files were all there, with the right hashes, when it was found."""

    folder: Path
    step: int
    meta: Mapping[str, Any]
    """What `save_checkpoint` was given, as it comes back from JSON."""
    skipped: tuple[str, ...] = ()
    """One line for each newer checkpoint that could not be used, with the reason."""


def save_checkpoint(
    root: Path, step: int, write: Callable[[Path], None], meta: Mapping[str, Any]
) -> Path:
    """Publish a checkpoint, then remove all but the newest `KEEP`.

    Args:
        root: the run's folder.
        step: the step whose end it holds; of a step saved twice the later one stays.
        write: puts the state into the (empty) folder it is given. Regular files only. Where other
            processes write too, it returns when all are done, or raises.
        meta: values that JSON can hold; they come back as `Checkpoint.meta`.

    Returns:
        The folder, `root/global_step_00000010` for step 10.

    Raises:
        RunStopped: the disk is full or refuses; earlier checkpoints are as they were.
    """
    final = _checkpoint_path(root, step)
    staging = root / f".tmp-{step}-{os.getpid()}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        write(staging)
        files = {}
        for file in _files(staging):
            _fsync(file)
            files[str(file.relative_to(staging))] = _file_record(file)
        record = {"step": step, "meta": dict(meta), "files": files}
        _write(staging / META, json.dumps(record, indent=1) + "\n")
        for folder in [f for f in staging.rglob("*") if f.is_dir()] + [staging]:
            _fsync(folder)
        if final.exists():
            # Between these two renames only `staging` holds this step, complete: `recover`
            # publishes it, should the process die here.
            shutil.rmtree(_trash_path(final), ignore_errors=True)
            final.rename(_trash_path(final))
        staging.rename(final)
        _fsync(root)
        _write_latest(root)
    except Exception as e:
        if isinstance(e, OSError | RunStopped) or _is_disk_full(root, e):
            raise RunStopped(_describe_failure(root, step, e)) from e
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    shutil.rmtree(_trash_path(final), ignore_errors=True)
    older = [folder for s, folder in _steps(root).items() if s < step]
    for folder in older[: len(older) - (KEEP - 1)]:
        _remove(folder)
    return final


def find_checkpoint(root: Path, resume: str | Path) -> Checkpoint | None:
    """The checkpoint to go on from. Reads every byte of it, changes nothing.

    Args:
        root: the run's folder; it need not exist.
        resume: "auto" for the newest in `root` that verifies, "never", or the path of a checkpoint
            or of another run's folder.

    Returns:
        None for "never", and for "auto" where `root` holds no checkpoint.

    Raises:
        ConfigError: `resume` names no usable checkpoint, or every one in `root` is damaged.
    """
    if resume == "never":
        return None
    if resume == "auto":
        return _find_newest(root) if _steps(root) else None
    try:
        return open_checkpoint(Path(resume).expanduser())
    except ConfigError as e:
        here = ", ".join(f.name for f in reversed(_steps(root).values())) or "none"
        raise ConfigError(
            f"trainer.resume={resume}: {e}. Choose auto, never, or a folder; checkpoints in {root}:"
            f" {here}"
        ) from None


def open_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint's folder, or the newest that verifies in a run's. Reads every byte of it.

    Raises:
        ConfigError: it is neither, or damaged.
    """
    if (path / META).exists():
        try:
            return _verify(path)
        except ValueError as e:
            raise ConfigError(str(e)) from None
    if path.is_dir() and _steps(path):
        return _find_newest(path)
    why = f"no {META} in it" if path.is_dir() else "no such folder"
    raise ConfigError(f"{path} is no checkpoint: {why}")


def recover(root: Path) -> None:
    """Clear what killed processes left. Call it first, with the `run_lock` held.

    A complete checkpoint that only lacked its rename is published; the rest is removed.
    """
    for left in sorted(root.glob(".*")) if root.is_dir() else ():
        match = _LEFTOVER.fullmatch(left.name)
        if not match or _is_alive(int(match[3])):
            continue
        if left.is_file():
            left.unlink()
        elif match[1] == "tmp":
            _publish_complete(left)
        shutil.rmtree(left, ignore_errors=True)


def remove_later_checkpoints(root: Path, step: int) -> None:
    """Remove the checkpoints of later steps: the run goes on from `step` (0: from the start).

    Without it, those of an abandoned future would be the newest again.
    """
    later = [folder for s, folder in _steps(root).items() if s > step]
    for folder in later:
        _remove(folder)
    if later:
        _write_latest(root)


# -- folders --------------------------------------------------------------------------------------


def _steps(root: Path) -> dict[int, Path]:
    """Published checkpoints by step, oldest first, whole or not."""
    by_step = {}
    for folder in root.glob("global_step_*"):
        if (match := _NAME.fullmatch(folder.name)) and folder.is_dir():
            by_step[int(match[1])] = folder
    return dict(sorted(by_step.items()))


def _find_newest(root: Path) -> Checkpoint:
    skipped: list[str] = []
    for folder in reversed(_steps(root).values()):
        try:
            return replace(_verify(folder), skipped=tuple(skipped))
        except ValueError as e:
            skipped.append(str(e))
    raise ConfigError(
        f"no checkpoint in {root} can be used:\n  "
        + "\n  ".join(skipped)
        + "\nMend one, or start over with trainer.resume=never"
    )


def _verify(folder: Path) -> Checkpoint:
    """The checkpoint, or a ValueError that says what is wrong with it."""
    try:
        record = json.loads((folder / META).read_bytes())
        step, meta, files = record["step"], dict(record["meta"]), dict(record["files"])
    except FileNotFoundError:
        raise ValueError(f"{folder} is incomplete: it has no {META}") from None
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ValueError(f"{folder / META} cannot be read: {e!r}") from None
    for name, saved in files.items():
        file = folder / name
        # A link, or a name with `..`, resolves to elsewhere.
        if file.resolve() != folder.resolve() / name:
            raise ValueError(f"{folder} is damaged: {name} lies outside of it")
        try:
            same = _file_record(file) == saved
        except OSError as e:
            raise ValueError(f"{folder} is damaged: {name}: {e.strerror}") from None
        if not same:
            raise ValueError(f"{folder} is damaged: {name} is not what was saved")
    return Checkpoint(folder, step, meta)


def _publish_complete(staging: Path) -> None:
    """Give a checkpoint its name if all but that was done, and nothing else has the name."""
    try:
        step = _verify(staging).step
    except ValueError:
        return
    if step not in _steps(staging.parent):
        staging.rename(_checkpoint_path(staging.parent, step))
        _fsync(staging.parent)
        _write_latest(staging.parent)


def _checkpoint_path(root: Path, step: int) -> Path:
    return root / f"global_step_{step:08d}"


def _trash_path(final: Path) -> Path:
    """The name under which a checkpoint waits to be deleted."""
    return final.parent / f".old-{final.name}-{os.getpid()}"


def _remove(folder: Path) -> None:
    """Delete a checkpoint; a kill midway leaves no half of it under its own name."""
    aside = _trash_path(folder)
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def _write_latest(root: Path) -> None:
    """`latest_checkpointed_iteration.txt`, as verl's tools read it."""
    steps = _steps(root)
    if not steps:
        (root / LATEST).unlink(missing_ok=True)
        return
    staging = root / f".tmp-latest-{os.getpid()}"
    _write(staging, str(max(steps)))
    staging.rename(root / LATEST)
    _fsync(root)


def _is_disk_full(root: Path, error: Exception) -> bool:
    """Whether that is what safetensors or torch say by exceptions of their own.

    safetensors quotes the system's words, and removes its file; torch does neither.
    """
    return os.strerror(errno.ENOSPC) in str(error) or shutil.disk_usage(root).free < 1 << 20


def _describe_failure(root: Path, step: int, error: Exception) -> str:
    kept = list(_steps(root))
    intact = f"The checkpoint of step {kept[-1]} is intact" if kept else "No earlier one exists"
    free = shutil.disk_usage(root).free / 2**20 if root.exists() else 0
    full = isinstance(error, OSError) or _is_disk_full(root, error)
    return (
        f"cannot write the checkpoint of step {step} to {root}: {error} ({free:.0f} MiB free)."
        f" {intact}. {'Make room and run' if full else 'Run'} the same command again."
    )


def _files(folder: Path) -> Iterator[Path]:
    for file in sorted(folder.rglob("*")):
        if file.is_symlink() or not (file.is_dir() or file.is_file()):
            raise ValueError(f"a checkpoint holds regular files only, but {file} is none")
        if file == folder / META:
            raise ValueError(f"a checkpoint's own {META} is written last, not by `write`")
        if file.is_file():
            yield file


def _file_record(file: Path) -> dict[str, Any]:
    with open(file, "rb") as f:
        return {
            "bytes": os.fstat(f.fileno()).st_size,
            "sha256": hashlib.file_digest(f, "sha256").hexdigest(),
        }


def _write(file: Path, text: str) -> None:
    file.write_text(text)
    _fsync(file)


def _fsync(path: Path) -> None:
    """Put a file's content, or a folder's names, on the disk: a power cut undoes what is not."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _is_alive(pid: int) -> bool:
    """Whether another process of that id runs. Our own id is a reused one: we have just begun."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid != os.getpid()


# --- may this process go on with that run? -----------------------------------------------------


CHANGEABLE_KEYS = frozenset(
    {
        "data.val",
        "optim.compile",
        "optim.offload",
        "optim.recompute",
        "tools.transport",
        "rollout.engines",
        "rollout.gpu_memory_utilization",
        "rollout.launch",
        "rollout.lora",
        "rollout.python",
        "rollout.sleep",
        "rollout.sync",
        "rollout.tensor_parallel_size",
        "rollout.urls",
        "trainer.logger",
        "trainer.n_gpus_per_node",
        "trainer.nnodes",
        "trainer.output",
        "trainer.placement",
        "trainer.ray_address",
        "trainer.resume",
        "trainer.save_freq",
        "trainer.test_freq",
        "trainer.val_before_train",
        "trainer.val_only",
        "trainer.watchdog_s",
        "val.*",
    }
)
"""Config keys that a resumed run may change: none of them moves a weight, but by rounding: sums
are made in another order by other ranks, and by compiled layers."""


RUN_LENGTH_KEYS = frozenset({"trainer.total_steps", "trainer.total_epochs"})
"""Config keys that a resumed run may change, too, where the learning rate is the same whatever the
run's length."""


def check_same_run(saved_config: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Refuse to resume under another config: the result would be neither run's.

    Args:
        saved_config: the config in the checkpoint, nested.
        config: the present one, nested.

    Raises:
        ConfigError: keys that are not in `CHANGEABLE_KEYS` differ, `RUN_LENGTH_KEYS` among them where
            `optim.lr_final` is not 1 in both; the message lists each with both values.
    """
    saved, now = dict(_flatten(saved_config)), dict(_flatten(config))
    steady = all(float(c.get("optim.lr_final", "nan")) == 1 for c in (saved, now))
    allowed = CHANGEABLE_KEYS | RUN_LENGTH_KEYS if steady else CHANGEABLE_KEYS
    changed = [
        f"  {key}: {saved.get(key, 'not set')} in the checkpoint, {now.get(key, 'not set')} now"
        for key in sorted(saved.keys() | now.keys())
        if saved.get(key) != now.get(key) and not any(fnmatch(key, a) for a in allowed)
    ]
    if changed:
        length = any(line.strip().startswith(tuple(RUN_LENGTH_KEYS)) for line in changed)
        why = (
            f"\nThe run's length may change only with optim.lr_final=1: with"
            f" {now.get('optim.lr_final', 'another')} the learning rate depends on it."
        )
        raise ConfigError(
            "the checkpoint was made with another config:\n"
            + "\n".join(changed)
            + (why if length else "")
            + "\nTo go on, use the same values; for a new run, give another --output. To start over"
            " in this folder, say trainer.resume=never: that deletes the run that is in it."
        )


def check_resumable(checkpoint: Checkpoint, config: Config, rows: str) -> None:
    """Refuse to go on from another run's checkpoint as if it were this one's.

    Args:
        checkpoint: a trainer's.
        config: the present one.
        rows: the `hash_file` of the present training rows.

    Raises:
        ConfigError: another config or other rows; or a folder that holds another run's record.
    """
    check_same_run(_fill_defaults(checkpoint.meta["config"]), config.model_dump())
    if checkpoint.meta["rows"] != rows:
        raise ConfigError(
            f"{config.data.train} holds other rows than when {checkpoint.folder} was saved."
            " Give the same file, or another --output"
        )
    folder = Path(config.trainer.output)
    foreign = checkpoint.folder.parent.resolve() != folder.resolve()
    if foreign and (folder / METRICS).exists():
        raise ConfigError(
            f"trainer.resume={config.trainer.resume} is another run's, but {folder}"
            " holds the record of one already. Say trainer.resume=auto to go on with"
            " that, or give another --output"
        )


def hash_file(path: str) -> str:
    """A hash of a file, to know it again; "" for no file."""
    if not path:
        return ""
    with open(path, "rb") as f:
        return file_digest(f, "blake2b").hexdigest()[:32]


def _fill_defaults(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config as it was saved, with the keys that have come since: they were at their defaults."""
    try:
        return Config.model_validate(saved).model_dump()
    except ValidationError:  # with keys or values that are gone: they are named as changed
        return saved


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold a run's folder for this process.

    The kernel frees the lock when the process ends, however it ends.

    Raises:
        UserError: another process holds the folder; the message says which.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(
                f"{folder} is in use by {file.read().strip() or 'another process'}. Wait until it"
                " ends, stop it, or give another --output."
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys with their values as JSON: what has been through a file equals what has not."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(value, default=str)
