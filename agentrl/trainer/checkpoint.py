"""Checkpoints that a kill, a crash or a full disk cannot damage.

A checkpoint is a folder that appears completely or not at all. It is written under a temporary
name. Every file is flushed to disk. `meta.json`, with all sizes and hashes, is written last. Then
one rename publishes the folder. (A folder that is overwritten in place is unusable after half of
all random kills.)

    runs/demo/
      global_step_00000010/                a checkpoint: the files of `write`, and meta.json
      global_step_00000020/
      latest_checkpointed_iteration.txt    20
      .tmp-global_step_00000030-4711/      being written by process 4711

A run starts with `run_lock` on the folder. Then it calls `recover`, `find_start` (of
`agentrl.trainer.resume`), and `remove_later_checkpoints` for the step that it resumes from.

One process works in a folder at a time (`run_lock`).
"""

from __future__ import annotations

import errno
import fcntl
import filecmp
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import stat
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from agentrl.errors import ConfigError, RunStopped, UserError
from agentrl.record import METRICS, read_metrics
from agentrl.regular_files import atomic_file, flush, open_lock, open_regular, staging_folder

log = logging.getLogger("agentrl")

META = "meta.json"
LOCK = ".lock"
LATEST = "latest_checkpointed_iteration.txt"
INITIAL = "initial"
"""The folder in a run's folder with the adapters before the first step, as in a checkpoint: LoRA
starts at random numbers, which depend on the device and on the versions of torch and PEFT."""
BEST = "best"
"""The last part of `RUN/best`, which names the best checkpoint of a run; it is no folder."""
THREADS = min(8, os.cpu_count() or 1)
"""The number of files that are hashed at the same time. One core hashes about 1.5 GB/s."""

_NAME = re.compile(r"global_step_(\d+)")
_LEFTOVER = re.compile(r"\.(tmp|old)-(\w+)-(\d+)")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint's folder. All its files existed, with the right hashes, when it was read."""

    folder: Path
    step: int
    meta: Mapping[str, Any]
    """The `meta` of `save_checkpoint`, read back from JSON."""
    files: tuple[str, ...] = ()
    """The files that `meta.json` lists, relative to the folder; regular files only."""
    skipped: tuple[str, ...] = ()
    """One line for each newer checkpoint that could not be used, with the reason."""


def save_checkpoint(
    root: Path,
    step: int,
    write: Callable[[Path], None],
    meta: Mapping[str, Any],
    *,
    keep: int = 2,
    pinned: int | None = None,
) -> Path:
    """Publish a checkpoint, then remove all but the newest `keep`.

    Args:
        root: the run's folder.
        step: the step that has ended. If a step is saved twice, the later checkpoint is kept.
        write: writes the state into the empty folder that is its argument; regular files only. If
            other processes write too, it returns when all have finished, or raises.
        meta: JSON values, which are returned as `Checkpoint.meta`.
        keep: the number of newest checkpoints to keep; 0: all. By default the newest, and one more
            in case the newest is damaged on disk.
        pinned: the step of a checkpoint that is kept in addition.

    Returns:
        The folder, for example `root/global_step_00000010` for step 10.

    Raises:
        RunStopped: the disk is full or refuses to write. Earlier checkpoints have not changed.
    """
    final = checkpoint_path(root, step)
    try:
        with staging_folder(final) as staging:
            write(staging)
            paths = list(_files(staging))
            with ThreadPoolExecutor(THREADS) as threads:  # hashing and flushing release the GIL
                records = list(threads.map(_flush_and_hash, paths))
            names = (str(file.relative_to(staging)) for file in paths)
            files = dict(zip(names, records, strict=True))
            record = {"step": step, "meta": dict(meta), "files": files}
            (staging / META).write_text(json.dumps(record, indent=1) + "\n")
            for path in [staging / META, *(f for f in staging.rglob("*") if f.is_dir()), staging]:
                flush(path)
            if final.exists():
                # Between these two renames only `staging` holds this step. It is complete, so
                # `recover` publishes it if the process dies here.
                shutil.rmtree(_trash_path(final), ignore_errors=True)
                final.rename(_trash_path(final))
            staging.rename(final)
            flush(root)
            _write_latest(root)
    except Exception as e:
        if isinstance(e, OSError | RunStopped) or is_disk_full(root, e):
            raise RunStopped(_describe_failure(root, step, e)) from e
        raise
    shutil.rmtree(_trash_path(final), ignore_errors=True)
    older = [s for s in find_steps(root) if s < step]
    for s in older[: max(0, len(older) - (keep - 1))] if keep else ():
        if s != pinned:
            _remove(_steps(root)[s])
    return final


def find_steps(root: Path) -> list[int]:
    """Return the steps of the published checkpoints, oldest first."""
    return list(_steps(root))


def find_checkpoint(root: Path, resume: str | Path) -> Checkpoint | None:
    """Return the checkpoint to resume from. This reads every byte of it and changes nothing.

    Args:
        root: the run's folder; it need not exist.
        resume: "auto" for the newest valid checkpoint in `root`, "never", or a path as
            `open_checkpoint` takes it.

    Returns:
        None for "never", and for "auto" if `root` holds no checkpoint.

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
        available = ", ".join(f.name for f in reversed(_steps(root).values())) or "none"
        raise ConfigError(
            f"trainer.resume={resume}: {e}. Choose auto, never, a checkpoint, a run's folder, or"
            f" RUN/best; checkpoints in {root}: {available}"
        ) from None


def open_checkpoint(path: Path) -> Checkpoint:
    """Return a checkpoint. This reads every byte of it.

    Args:
        path: a checkpoint's folder, a run's folder for its newest valid checkpoint, or `RUN/best`
            for the checkpoint with the highest `trainer.keep_best`.

    Raises:
        ConfigError: the path is none of these, or the checkpoint is damaged.
    """
    if _is_best(path):
        path = _find_best(path.parent)
    if (path / META).exists():
        try:
            return _verify(path)
        except ValueError as e:
            raise ConfigError(str(e)) from None
    if path.is_dir() and _steps(path):
        return _find_newest(path)
    why = f"no {META} in it" if path.is_dir() else "no such folder"
    if siblings := [*reversed(_steps(path.parent).values())]:
        why += f"; {path.parent} has {', '.join(folder.name for folder in siblings)}"
    raise ConfigError(f"{path} is not a checkpoint: {why}")


def checkpoint_folders(path: Path) -> list[Path]:
    """Return the checkpoint at a path, or those of a run's folder, newest first, unverified.

    The result is empty if the path is neither. `RUN/best` is one checkpoint.

    Raises:
        ConfigError: the path is `RUN/best`, and the best checkpoint is not known.
    """
    if _is_best(path):
        return [_find_best(path.parent)]
    if (path / META).is_file():
        return [path]
    return [*reversed(_steps(path).values())] if path.is_dir() else []


def recover(root: Path) -> None:
    """Remove the leftovers of killed processes. Call it first, while holding the `run_lock`.

    A complete checkpoint that lacks only its rename is published.
    """
    for leftover in sorted(root.glob(".*")) if root.is_dir() else ():
        match = _LEFTOVER.fullmatch(leftover.name)
        if not match or _is_alive(int(match[3])):
            continue
        if leftover.is_file():
            leftover.unlink()
        elif match[1] == "tmp":
            _publish_complete(leftover)
        shutil.rmtree(leftover, ignore_errors=True)


def remove_later_checkpoints(root: Path, step: int) -> None:
    """Remove the checkpoints of later steps: the run resumes from `step` (0: from the start).

    Otherwise the next resume would use a later step, which this run abandons.
    """
    later = [folder for s, folder in _steps(root).items() if s > step]
    for folder in later:
        _remove(folder)
    if later:
        _write_latest(root)


def replace_file(file: Path, text: str) -> None:
    """Write a file of the run's folder; a kill leaves the old content or the new one."""
    with atomic_file(file) as staging:
        staging.write_text(text)
    flush(file.parent)


def replace_folder(folder: Path, write: Callable[[Path], object]) -> None:
    """Write a folder within the run's folder, unless it has the same files already.

    A kill leaves the old content, the new one, or no folder.

    Args:
        folder: the folder.
        write: writes the new content into an empty folder.
    """
    with staging_folder(folder) as staging:
        write(staging)
        names = [sorted(f.name for f in at.glob("*")) for at in (folder, staging)]
        _, differ, failed = filecmp.cmpfiles(folder, staging, names[1], shallow=False)
        if names[0] != names[1] or differ or failed:
            shutil.rmtree(folder, ignore_errors=True)
            staging.rename(folder)
            flush(folder.parent)


# -- folders of checkpoints -----------------------------------------------------------------------


def _steps(root: Path) -> dict[int, Path]:
    """Return the published checkpoints by step, oldest first, valid or not."""
    by_step = {}
    for folder in root.glob("global_step_*"):
        if (match := _NAME.fullmatch(folder.name)) and folder.is_dir():
            by_step[int(match[1])] = folder
    return dict(sorted(by_step.items()))


def _is_best(path: Path) -> bool:
    """Return whether a path is `RUN/best`, which names a checkpoint but is no folder."""
    return path.name == BEST and not path.exists()


def _find_best(run: Path) -> Path:
    """Return the run's checkpoint with the highest value of its `trainer.keep_best`."""
    folders = checkpoint_folders(run)
    if not folders:
        raise ConfigError(f"{run} is not the folder of a run with checkpoints")
    try:
        record = _read_record(folders[0])
        metric = record["meta"]["config"]["trainer"]["keep_best"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ConfigError(f"{folders[0] / META} cannot be read: {e!r}") from None
    listed = ", ".join(folder.name for folder in folders)
    if not metric:
        raise ConfigError(
            f"{run}: no checkpoint is known to be the best, because trainer.keep_best is empty."
            f" Name one of {listed}"
        )
    values = {step: data.get(metric) for step, data in read_metrics(run / METRICS)}
    scored = [
        (value, folder)
        for folder in folders
        if (value := values.get(int(folder.name.rpartition("_")[2]))) is not None
    ]
    if not scored:
        raise ConfigError(
            f"{run}: no checkpoint is known to be the best, because {METRICS} has no {metric} of"
            f" {listed}. Name one of them"
        )
    return max(scored, key=lambda pair: pair[0])[1]  # of equal values the newest


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
        + "\nRestore one from a backup, or start over with trainer.resume=never"
    )


def _verify(folder: Path) -> Checkpoint:
    """Return the checkpoint, or raise a ValueError that says what is wrong with it."""
    try:
        record = _read_record(folder)
        step, meta, files = int(record["step"]), dict(record["meta"]), dict(record["files"])
    except FileNotFoundError:
        raise ValueError(f"{folder} is incomplete: it has no {META}") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
        raise ValueError(f"{folder / META} cannot be read: {e!r}") from None
    with ThreadPoolExecutor(THREADS) as threads:
        for _ in threads.map(partial(_check_file, folder), files, files.values()):
            pass  # the first error is raised here
    # All tensor files of a folder are read, so one more would replace weights.
    for extra in sorted(folder.rglob("*.safetensors")):
        if str(extra.relative_to(folder)) not in files:
            raise ValueError(f"{folder} is damaged: {META} does not list {extra.name} ({extra})")
    return Checkpoint(folder, step, meta, tuple(files))


def _read_record(folder: Path) -> Any:
    """Return the content of a checkpoint's `META`.

    Raises:
        OSError: it is no regular file.
        ValueError: it is not JSON, or has numbers that are not finite.
    """
    with open_regular(folder / META) as file:
        text = file.read()
    orjson.loads(text)  # refuses Infinity, NaN and 1e999
    return json.loads(text)  # keeps integers of more than 64 bits


def _check_file(folder: Path, name: str, saved: Mapping[str, Any]) -> None:
    """Raise a ValueError if a file of a checkpoint is not the one that was saved."""
    file = folder / name
    # A link, an absolute name, or one with `..`, may lead outside of the folder.
    if Path(name).is_absolute() or file.resolve() != folder.resolve() / name:
        raise ValueError(f"{folder} is damaged: {name} is outside of it")
    try:
        same = _file_record(file) == saved
    except OSError as e:
        raise ValueError(f"{folder} is damaged: {name}: {e.strerror}") from None
    if not same:
        raise ValueError(f"{folder} is damaged: {name} has changed since it was saved")


def _publish_complete(staging: Path) -> None:
    """Publish a checkpoint that is complete, unless its step has one already."""
    try:
        step = _verify(staging).step
    except ValueError:
        return
    if step not in _steps(staging.parent):
        staging.rename(checkpoint_path(staging.parent, step))
        flush(staging.parent)
        _write_latest(staging.parent)


def checkpoint_path(root: Path, step: int) -> Path:
    """Return the folder of the checkpoint of a step."""
    return root / f"global_step_{step:08d}"


def _trash_path(final: Path) -> Path:
    """Return the name of a checkpoint until it is deleted."""
    return final.parent / f".old-{final.name}-{os.getpid()}"


def _remove(folder: Path) -> None:
    """Rename a checkpoint, then delete it.

    If the process is killed meanwhile, no incomplete folder has the name of a checkpoint.
    """
    trash = _trash_path(folder)
    shutil.rmtree(trash, ignore_errors=True)
    folder.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def _write_latest(root: Path) -> None:
    """Write `latest_checkpointed_iteration.txt`, as verl's tools read it."""
    steps = _steps(root)
    if not steps:
        (root / LATEST).unlink(missing_ok=True)
        return
    replace_file(root / LATEST, str(max(steps)))


def is_disk_full(root: Path, error: Exception) -> bool:
    """Return whether a full disk is the cause of an error of safetensors or torch.

    safetensors quotes the message of the operating system and removes its file; torch does neither.
    """
    return os.strerror(errno.ENOSPC) in str(error) or shutil.disk_usage(root).free < 1 << 20


def _describe_failure(root: Path, step: int, error: Exception) -> str:
    steps = list(_steps(root))
    intact = f"The checkpoint of step {steps[-1]} is intact" if steps else "No earlier one exists"
    free = shutil.disk_usage(root).free / 2**20 if root.exists() else 0
    full = isinstance(error, OSError) or is_disk_full(root, error)
    return (
        f"cannot write the checkpoint of step {step} to {root}: {error} ({free:.0f} MiB free)."
        f" {intact}. {'Free disk space and run' if full else 'Run'} the same command again."
    )


def _files(folder: Path) -> Iterator[Path]:
    for file in sorted(folder.rglob("*")):
        if file.is_symlink() or not (file.is_dir() or file.is_file()):
            raise ValueError(f"a checkpoint holds regular files only, but {file} is not one")
        if file == folder / META:
            raise ValueError(f"a checkpoint's own {META} is written last, not by `write`")
        if file.is_file():
            yield file


def _file_record(file: Path) -> dict[str, Any]:
    with open_regular(file) as f:
        return {
            "bytes": os.fstat(f.fileno()).st_size,
            "sha256": hashlib.file_digest(f, "sha256").hexdigest(),
        }


def _flush_and_hash(file: Path) -> dict[str, Any]:
    flush(file)
    return _file_record(file)


def _is_alive(pid: int) -> bool:
    """Return whether a process other than this one has that id.

    If this process has it, the system has reused the id of a process that ended.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid != os.getpid()


# --- the lock of a run's folder -------------------------------------------------------------------


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold a run's folder for this process.

    The kernel releases the lock when the process ends, for whatever reason.

    Raises:
        UserError: another process holds the folder; the message names it.
        RunStopped: the folder cannot be created or written.
    """
    make_private_folder(folder)
    try:
        fd = open_lock(folder / LOCK)
    except OSError as e:
        raise RunStopped(f"cannot write {folder / LOCK}: {e.strerror}") from e
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{folder} is in use by {os.read(fd, 1000).decode() or 'another process'}. Wait"
                " until it ends, stop it, or use another --output."
            ) from None
        try:
            os.ftruncate(fd, 0)
            os.write(fd, f"process {os.getpid()} on {socket.gethostname()}".encode())
        except OSError as e:
            raise RunStopped(
                f"cannot write {folder / LOCK}: {e.strerror}. Free disk space and run the same"
                " command again"
            ) from e
        yield
    finally:
        os.close(fd)


def make_private_folder(folder: Path) -> None:
    """Create a folder for results that only its owner can read (mode 0700).

    An existing folder keeps its mode, unless it is empty. If others can read a folder with other
    files, that is reported.

    Raises:
        RunStopped: the folder cannot be created.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        mode = stat.S_IMODE(folder.stat().st_mode)
        if not mode & 0o077:
            return
        if not any(folder.iterdir()):
            folder.chmod(0o700)
        elif not (folder / LOCK).exists():
            log.warning(
                "other users can read %s (mode 0%o): it held other files before, so its mode was"
                " not changed. To make it private: chmod 700 %s",
                *(folder, mode, folder),
            )
    except OSError as e:
        raise RunStopped(f"cannot create {folder}: {e.strerror}") from e
