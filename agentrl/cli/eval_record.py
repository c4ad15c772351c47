"""The folder of `agentrl eval --output`: what was played stays in it, also if it is killed.

evals/a/
settings.json       what the episodes depend on
played/             a file for each row that was played, until all are
trajectories/
metrics.json
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import blake2b
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.cli.generate import check_settings, read_state, settings_of
from agentrl.data import Rows
from agentrl.errors import UserError
from agentrl.store import TrajectoryStore
from agentrl.trainer.checkpoint import replace_file, run_lock
from agentrl.trajectory import Group

if TYPE_CHECKING:
    from agentrl.evaluate import Evaluation
    from agentrl.preflight import Plan

SETTINGS = (
    *("reward.function", "reward.functions", "reward.kwargs", "reward.outcome_weight"),
    *("reward.tool_weight", "reward.turn_weight", "rollout.timeout_s", "rollout.urls"),
    *("val.greedy", "val.n", "val.without_tools"),
)
"""The config keys on which an evaluation depends, besides those of `agentrl generate`."""
METRICS = "metrics.json"


class SplitRecord:
    """The groups of one split; a `GroupRecord` of `agentrl.rollout`."""

    def __init__(self, store: TrajectoryStore, split: str, thread: ThreadPoolExecutor):
        self._store, self._split, self._thread = store, split, thread
        self._pending: list[Future[Path]] = []
        rows = groupby(store.read(split=split), key=lambda rollout: rollout.step)
        played = ((row, tuple(r.scored for r in rollouts)) for row, rollouts in rows)
        self.groups = {row: Group(s[0].trajectory.sample, s) for row, s in played}

    def add(self, group: Group) -> None:
        """Write a group in the thread.

        Raises:
            RunStopped: an earlier group could not be written.
        """
        write = self._thread.submit(self._store.write, group.sample.row, [group], self._split)
        self._pending.append(write)
        while self._pending and self._pending[0].done():
            self._pending.pop(0).result()


class EvalRecord:
    """The open folder of an evaluation.

    Attributes:
        metrics: the metrics, if everything was played before; else {}.
    """

    def __init__(self, folder: Path, thread: ThreadPoolExecutor):
        self._folder, self._thread = folder, thread
        self._played = TrajectoryStore(folder / "played")
        file = folder / METRICS
        self.metrics: dict[str, float] = read_state(file) if file.exists() else {}

    def of(self, split: str) -> SplitRecord:
        """Return the record of a split."""
        return SplitRecord(self._played, split, self._thread)

    def finish(self, result: Evaluation) -> None:
        """Write the trajectories and then the metrics, which say that all is played."""
        self._thread.shutdown()
        store = TrajectoryStore(self._folder / "trajectories")
        for split, groups in result.splits.items():
            store.write(0, groups, split=split)
        replace_file(self._folder / METRICS, json.dumps(dict(result.metrics), indent=2) + "\n")
        shutil.rmtree(self._played.folder, ignore_errors=True)


@contextmanager
def open_record(folder: Path, plan: Plan) -> Iterator[EvalRecord]:
    """Open the folder of an evaluation, and lock it.

    Raises:
        UserError: it has the results of other rows, models, code or settings, or of something else,
            or another process uses it.
        RunStopped: it cannot be written.
    """
    assert isinstance(plan.train, Rows)  # `make_plan` reads them from files
    settings = {"rows": plan.train.fingerprint, **settings_of(plan.config, SETTINGS)}
    settings |= {"weights": _weights_of(plan), "code": _code_of(plan)}
    file = folder / "settings.json"
    with run_lock(folder), ThreadPoolExecutor(1, thread_name_prefix="record") as thread:
        if file.exists():
            check_settings(folder, read_state(file), settings)
        elif (folder / METRICS).exists() or (folder / "metrics.jsonl").exists():
            raise UserError(f"--output {folder} has other results already: choose another folder")
        else:
            replace_file(file, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
        yield EvalRecord(folder, thread)


def _weights_of(plan: Plan) -> str:
    """Return a text that changes when the files of the model do; "" for a model of a hub."""
    files = sorted(Path(plan.config.model.path).glob("*.safetensors"))
    stats: list[Any] = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return blake2b(repr(stats).encode(), digest_size=8).hexdigest() if files else ""


def _code_of(plan: Plan) -> str:
    """Return a hash of the user's files."""
    files = map(Path, chain(plan.config.all_files, plan.config.reward.files))
    content = b"\0".join(file.read_bytes() for file in files if file.is_file())
    return blake2b(content, digest_size=8).hexdigest()
