"""May this process go on with that run? One process a folder, and one config a run."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatch
from hashlib import file_digest
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agentrl.config import Config
from agentrl.errors import ConfigError, UserError
from agentrl.trainer.checkpoint import Checkpoint
from agentrl.trainer.tracking import METRICS

MAY_CHANGE = frozenset(
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


LENGTH = frozenset({"trainer.total_steps", "trainer.total_epochs"})
"""Config keys that a resumed run may change, too, where the learning rate is the same whatever the
run's length."""


def check_same_run(
    saved_config: Mapping[str, Any],
    config: Mapping[str, Any],
    allowed: Collection[str] = MAY_CHANGE,
) -> None:
    """Refuse to resume under another config: the result would be neither run's.

    Args:
        saved_config: the config in the checkpoint, nested.
        config: the present one, nested.
        allowed: dotted keys, or patterns such as `val.*`, that may differ.

    Raises:
        ConfigError: other keys differ, `LENGTH` among them where `optim.lr_final` is not 1 in both;
            the message lists each with both values.
    """
    saved, now = dict(_flat(saved_config)), dict(_flat(config))
    steady = all(float(c.get("optim.lr_final", "nan")) == 1 for c in (saved, now))
    allowed = {*allowed, *LENGTH} if steady else allowed
    changed = [
        f"  {key}: {saved.get(key, 'not set')} in the checkpoint, {now.get(key, 'not set')} now"
        for key in sorted(saved.keys() | now.keys())
        if saved.get(key) != now.get(key) and not any(fnmatch(key, a) for a in allowed)
    ]
    if changed:
        length = any(line.strip().startswith(tuple(LENGTH)) for line in changed)
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
        rows: the `fingerprint` of the present training rows.

    Raises:
        ConfigError: another config or other rows; or a folder that holds another run's record.
    """
    check_same_run(_completed(checkpoint.meta["config"]), config.model_dump())
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


def fingerprint(path: str) -> str:
    """A hash of a file, to know it again; "" for no file."""
    if not path:
        return ""
    with open(path, "rb") as f:
        return file_digest(f, "blake2b").hexdigest()[:32]


def _completed(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config as it was saved, with the keys that have come since: they were at their defaults."""
    try:
        return Config.model_validate(saved).model_dump()
    except ValidationError:  # with keys or values that are gone: they are named as changed
        return saved


class RunLock:
    """Holds a run's folder for this process: `with RunLock(folder): ...`.

    The kernel frees the lock when the process ends, however it ends.

    Raises:
        UserError: another process holds the folder; the message says which.
    """

    def __init__(self, folder: Path):
        self._path = folder / ".lock"

    def __enter__(self) -> RunLock:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self._path, "a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            holder = self._file.read().strip() or "another process"
            self._file.close()
            raise UserError(
                f"{self._path.parent} is in use by {holder}. Wait until it ends, stop it, or give"
                " another --output."
            ) from None
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}")
        self._file.flush()
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys with their values as JSON: what has been through a file equals what has not."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(value, default=str)
