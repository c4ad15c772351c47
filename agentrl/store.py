"""Trajectories on disk: one parquet file for each step and split, written atomically.

    runs/demo/
      trajectories/
        val-00000000.parquet
        train-00000001.parquet
        train-00000002.parquet
        images/
      learned/
        learned-00000001.parquet
        learned-00000002.parquet

In `trajectories`, each rollout is one row. The arrays of its segments (token ids, masks, logprobs)
are columns of lists of lists, which any parquet reader can use. Structured data (messages, turns,
rewards) is JSON text. A row contains the whole trajectory: reading it returns an object equal to
the one that was written.

Each image is one file in `images`, whose name is the SHA-256 of its content: all rollouts and steps
share it. In JSON text, the name stands for the image. Files of trajectories without images have
neither the column `images` nor the metadata `IMAGE_FILES`.

A rollout is written once. The numbers that the update used for its tokens follow when they are
known, in `learned`: one row for each segment, with a list for each of `LEARNED`. A number that is
not known is null.
"""

from __future__ import annotations

import errno
import json
import logging
import re
import shutil
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import cache, lru_cache, partial
from hashlib import sha256
from itertools import accumulate, pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import TypeAdapter, ValidationError

from agentrl.errors import DataError, RunStopped
from agentrl.images import Image, RowImage
from agentrl.open_files import advice
from agentrl.plural import plural
from agentrl.regular_files import LEFTOVER_PREFIX, atomic_file
from agentrl.trajectory import (
    Group,
    Message,
    Sample,
    Scored,
    Segment,
    Span,
    ToolResult,
    Trajectory,
    Turn,
)

log = logging.getLogger("agentrl")

STREAMS = {
    "prompt_ids": pa.int32(),
    "response_ids": pa.int32(),
    "response_mask": pa.int32(),
    "logprobs": pa.float32(),
    "versions": pa.int32(),
    "kept_ids": pa.int32(),
    "kept_counts": pa.int32(),
    "experts": pa.int16(),
}
"""The fields of a segment."""
ADDED = ("kept_ids", "kept_counts", "experts")
"""Those of `STREAMS` that files of earlier versions do not have."""

LEARNED = {
    "old_logprobs": pa.float32(),
    "reference_logprobs": pa.float32(),
    "teacher_logprobs": pa.float32(),
    "values": pa.float32(),
    "advantages": pa.float32(),
    "returns": pa.float32(),
    "importance_weights": pa.float32(),
    "entropy": pa.float32(),
    "clipped": pa.int32(),
}
"""The numbers of each response token that the update used; `agentrl.learner.learner.Learned`
describes them."""
NEWEST = "teacher_logprobs"
"""The one of `LEARNED` that files of earlier versions do not have."""
LEARNED_SCHEMA = pa.schema(
    [
        ("episode_id", pa.string()),
        ("segment", pa.int32()),
        *((name, pa.list_(kind)) for name, kind in LEARNED.items()),
    ]
)
TOKENS_SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("split", pa.dictionary(pa.int32(), pa.string())),
        ("episode_id", pa.dictionary(pa.int32(), pa.string())),
        ("segment", pa.int32()),
        ("position", pa.int32()),
        ("token_id", pa.int32()),
        ("mask", pa.bool_()),
        ("logprob", pa.float32()),
        ("version", pa.int32()),
        *((name.removesuffix("s"), kind) for name, kind in LEARNED.items()),
    ]
)
"""The columns of `TrajectoryStore.read_tokens`. `position` is the index among the response tokens
of a segment."""
TOKEN_SCHEMA = pa.schema(
    [
        ("token_ids", pa.list_(pa.int32())),
        ("token_mask", pa.list_(pa.int8())),
        ("episode", pa.string()),
        ("step", pa.int32()),
        ("reward", pa.float64()),
    ]
)
"""The columns of a file of `agentrl show --sft`; `token_mask` is 1 for sampled tokens."""
VOCABULARY = b"agentrl.vocabulary"
"""The key of such a file's metadata that has the `hash_vocabulary` of its tokenizer."""
LEARNED_STEPS = 50
"""The number of last steps whose `LEARNED` numbers are kept."""

_TRAJECTORY = "scored.trajectory"
_SAMPLE = f"{_TRAJECTORY}.sample"
_COLUMNS = {
    "step": (pa.int32(), "step"),
    "split": (pa.string(), "split"),
    "group": (pa.int32(), "group"),
    "sample_id": (pa.string(), f"{_SAMPLE}.id"),
    "episode_id": (pa.string(), f"{_TRAJECTORY}.episode_id"),
    "rollout": (pa.int32(), f"{_TRAJECTORY}.rollout"),
    "agent_name": (pa.string(), f"{_SAMPLE}.agent_name"),
    "data_source": (pa.string(), f"{_SAMPLE}.data_source"),
    "reward": (pa.float64(), "scored.reward"),
    "rewards": (pa.string(), "scored.rewards"),
    "metrics": (pa.string(), "scored.metrics"),
    "masked": (pa.bool_(), "scored.masked"),
    "stop_reason": (pa.string(), f"{_TRAJECTORY}.stop_reason"),
    "dropped": (pa.int32(), "dropped"),
    "drop_causes": (pa.list_(pa.string()), "drop_causes"),
    "ground_truth": (pa.string(), f"{_SAMPLE}.ground_truth"),
    "messages": (pa.string(), f"{_TRAJECTORY}.messages"),
    "turns": (pa.string(), f"{_TRAJECTORY}.turns"),
    "sample": (pa.string(), _SAMPLE),
    "sampling": (pa.string(), f"{_TRAJECTORY}.sampling"),
    "error": (pa.string(), f"{_TRAJECTORY}.error"),
    "tool_reward": (pa.float64(), f"{_TRAJECTORY}.tool_reward"),
    "seconds": (pa.float64(), f"{_TRAJECTORY}.seconds"),
    "control_token_attempts": (pa.int32(), f"{_TRAJECTORY}.control_token_attempts"),
    "started": (pa.float64(), f"{_TRAJECTORY}.started"),
    "spans": (pa.string(), f"{_TRAJECTORY}.spans"),
    "as_text": (pa.list_(pa.string()), "as_text"),
}
"""The type of each column, and the attribute of a `StoredRollout` that it contains. The columns of
the segments' arrays are in `STREAMS`."""
_JSON = {"rewards", "metrics", "ground_truth", "messages", "turns", "sample", "sampling", "spans"}
"""The columns that contain JSON text."""
_WITH_MESSAGES = {"messages", "turns", "sample"}
"""Those of `_JSON` in which images may be."""

SCHEMA = pa.schema(
    [
        *((name, kind) for name, (kind, _) in _COLUMNS.items()),
        *((name, pa.list_(pa.list_(kind))) for name, kind in STREAMS.items()),
    ]
)

IMAGES = pa.field("images", pa.string())
"""The column of a file with images. As JSON: for each segment, its images (`RowImage`), with the
name of the file with the pixels as `data`."""
IMAGE_FILES = b"agentrl.images"
"""The key of a file's metadata that has the names of all its images."""

EPISODES_SCHEMA = pa.schema([SCHEMA.field(name) for name in _COLUMNS])
"""The columns of `TrajectoryStore.read_episodes`: the columns of `SCHEMA` without the tokens."""

_OTHER_SAMPLE_FIELDS = {f.name for f in fields(Sample)} - {
    path.removeprefix(f"{_SAMPLE}.") for _, path in _COLUMNS.values()
}
"""The fields of a sample without their own column; the column `sample` contains them."""

BYTES_PER_TOKEN = 11
"""The size of a stored token, compressed: 5 to 11 were measured, with the messages as text."""
LEARNED_BYTES_PER_TOKEN = 26
"""The size of the `LEARNED` numbers of a token, compressed: 17 were measured for GRPO with a KL
term, 26 for PPO."""
TRAINING = ("train", "evicted", "baseline")
"""The splits of a training step. The others belong to validations."""

_ADAPTERS: dict[str, TypeAdapter[Any]] = {
    "turns": TypeAdapter(tuple[Turn, ...]),
    "messages": TypeAdapter(tuple[Message, ...]),
    "spans": TypeAdapter(tuple[Span, ...]),
    **dict.fromkeys(("rewards", "metrics", "sampling", "sample"), TypeAdapter(dict[str, Any])),
}
"""The content of the columns in `_JSON`; `ground_truth` may be any JSON value."""
_SAMPLES = TypeAdapter(Sample)
_LONG_NUMBER = re.compile(r"[0-9]{19}")
_ImageNames = dict[bytes, str]
"""The names of the images of a file of trajectories, by their contents."""
_IMAGE_NAME = re.compile(r"[0-9a-f]{64}")
_SHARD = re.compile(r"([a-z]+)-(\d+)\.parquet")
_ROW_GROUP = 16
"""The rollouts of a row group, the part of a file that is read and decoded at once.

Of 256 episodes, one is read in 5 ms, and all are read without their tokens in 17 ms. With row
groups of 8 this takes 5 and 30 ms, with a single row group 23 and 6 ms.
"""


@dataclass(frozen=True, slots=True)
class StoredRollout:
    """A scored rollout with its position in the store."""

    step: int
    split: str
    dropped: int
    """The number of dropped rollouts in its group."""
    scored: Scored
    group: int
    """The index of its group among those of the step and split."""
    as_text: Sequence[str]
    """The values of the dataset row that JSON does not restore, such as `extra.when` for a date,
    which is stored as text."""
    drop_causes: Sequence[str]
    """Why the dropped rollouts of its group were dropped (`Group.drop_causes`)."""


class TrajectoryStore:
    """The folder of a run's trajectories. One process writes it; any process may read it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.images = folder / "images"
        self.learned = folder.parent / "learned"

    def write(self, step: int, groups: Sequence[Group], split: str = "train") -> Path:
        """Store the rollouts of a step and return the file. An existing file is replaced.

        Raises:
            RunStopped: the file cannot be written, for example because the disk is full.
        """
        path = self.folder / f"{split}-{step:08d}.parquet"
        images: _ImageNames = {}
        table = _table(step, groups, split, images)
        try:
            for data, name in images.items():
                _write_image(self.images / name, data)
            _write_file(path, table)
        except OSError as e:
            advised = advice(e)
            if e.errno in (errno.ENOSPC, errno.EDQUOT):
                advised = ". Free disk space; to keep fewer: trainer.keep_trajectories"
            raise RunStopped(f"cannot write the trajectories to {path}: {e}{advised}") from e
        return path

    def write_learned(self, step: int, table: pa.Table) -> Path:
        """Store the numbers that the update of a step used, and return the file.

        Args:
            step: the step.
            table: one row for each segment, with the columns of `LEARNED_SCHEMA`.

        Raises:
            OSError: the file cannot be written.
        """
        path = self._learned_file(step)
        _write_file(path, table.cast(LEARNED_SCHEMA))
        return path

    def read_learned(self, step: int) -> pa.Table:
        """Return what `write_learned` stored of a step; a table without rows if there is no file.

        Raises:
            DataError: the file is damaged.
        """
        path = self._learned_file(step)
        if not path.exists():
            return LEARNED_SCHEMA.empty_table()
        with _readable(path):
            if NEWEST in pq.read_schema(path).names:
                return _read_columns(path, LEARNED_SCHEMA)
            # A run of a version without teachers has stored it.
            index = LEARNED_SCHEMA.get_field_index(NEWEST)
            table = _read_columns(path, LEARNED_SCHEMA.remove(index))
            lists = table["advantages"].combine_chunks()
            nulls = pa.nulls(len(lists.flatten()), LEARNED[NEWEST])
            column = pa.ListArray.from_arrays(lists.offsets, nulls)
            return table.add_column(index, LEARNED_SCHEMA.field(index), column)

    def read(
        self,
        step: int | None = None,
        split: str | None = None,
        is_wanted: Callable[[int], bool] = lambda step: True,
    ) -> Iterator[StoredRollout]:
        """Yield the rollouts of one step or split, or of all of them, in the order of steps.

        Args:
            step: one step; None: all that `is_wanted` chooses.
            split: one split; None: all.
            is_wanted: chooses steps.

        Raises:
            DataError: a file is damaged.
        """
        for path, shard_step, shard_split in self.files():
            is_chosen = step in (None, shard_step) and split in (None, shard_split)
            if is_chosen and is_wanted(shard_step):
                yield from _read_shard(path)

    def read_episode(self, episode_id: str, step: int | None = None) -> StoredRollout:
        """Return one rollout. Only a few rows of its file are decoded.

        Args:
            episode_id: the id of the episode.
            step: its step; None: look into the files of all steps, the last ones first.

        Raises:
            DataError: there is no such episode, or a file is damaged.
        """
        for path, shard_step, _ in reversed(self.files()):
            if step in (None, shard_step):
                with _readable(path), pq.ParquetFile(path) as file:
                    ids = file.read(["episode_id"]).column("episode_id")
                    row = ids.index(episode_id).as_py()
                    for i in range(file.num_row_groups if row >= 0 else 0):
                        rows = file.metadata.row_group(i).num_rows
                        if row < rows:
                            [batch] = file.read_row_group(i).slice(row, 1).to_batches()
                            return next(_read_rows(path, ids.index(episode_id).as_py(), batch))
                        row -= rows
        where = self.folder if step is None else f"the files of step {step} in {self.folder}"
        raise DataError(f"there is no episode {episode_id!r} in {where}")

    def has_images(self, path: Path) -> bool:
        """Return whether the rollouts of a file have images.

        Raises:
            DataError: the file is damaged.
        """
        with _readable(path):
            return bool(_image_files(path))

    def read_image(self, name: str) -> Image:
        """Return the image of a file in `images`.

        Raises:
            DataError: there is none, or it is damaged.
        """
        try:
            return _read_image(self.images, name)
        except ValueError as e:
            raise DataError(str(e)) from None

    def steps(self, split: str) -> list[int]:
        """Return the steps that have a file of this split, in order."""
        return [step for _, step, shard_split in self.files() if shard_split == split]

    def all_steps(self) -> list[int]:
        """Return the steps that have a file of any split, in order."""
        return sorted({step for _, step, _ in self.files()})

    def read_episodes(self, is_wanted: Callable[[int], bool] = lambda step: True) -> pa.Table:
        """Return the rollouts of the chosen steps as rows, without their tokens.

        Raises:
            DataError: a file is damaged.
        """
        tables = [EPISODES_SCHEMA.empty_table()]
        tables += [self.read_file(path) for path, step, _ in self.files() if is_wanted(step)]
        return pa.concat_tables(tables)

    def read_file(self, path: Path) -> pa.Table:
        """Return the rollouts of a file as rows, without their tokens.

        Raises:
            DataError: the file is damaged.
        """
        return _read_columns(path, EPISODES_SCHEMA)

    def read_tokens(self, is_wanted: Callable[[int], bool] = lambda step: True) -> pa.Table:
        """Return the response tokens of the chosen steps as rows, with the columns `TOKENS_SCHEMA`.

        `logprob` and `version` are null where the policy did not sample the token, the `LEARNED`
        numbers where they are unknown.

        Raises:
            DataError: a file is damaged.
        """
        tables = [TOKENS_SCHEMA.empty_table()]
        for path, step, split in self.files():
            if is_wanted(step):
                learned = self.read_learned(step) if split == "train" else None
                tables.append(_read_tokens(path, step, split, learned))
        return pa.concat_tables(tables).unify_dictionaries()

    def read_columns(self, path: Path, names: Sequence[str]) -> pa.Table:
        """Return the columns `names` of a file.

        Raises:
            DataError: the file is damaged.
        """
        return _read_columns(path, pa.schema([SCHEMA.field(name) for name in names]))

    @contextmanager
    def row_of(self, path: Path, row: int) -> Iterator[None]:
        """Raise a `DataError` that names file, row and column if the block cannot read a row.

        Args:
            path: the file.
            row: the row's index in the file.
        """
        try:
            yield
        except (ValueError, KeyError, TypeError, AttributeError, LookupError):
            table = self.read_file(path).slice(row, 1)
            for name in _JSON:
                _parse_cell(path, row, name, table[name][0].as_py())
            raise

    def truncate_after(self, step: int) -> None:
        """Remove all files after a step (-1: all) and temporary files of killed processes."""
        for path, shard_step, _ in [*self.files(), *self._learned_files()]:
            if shard_step > step:
                path.unlink()
        for folder in (self.folder, self.learned, self.images):
            for staging in folder.glob(f"{LEFTOVER_PREFIX}*"):
                staging.unlink()
        self._remove_unused_images()

    def remove_training(self, step: int) -> None:
        """Remove the files of training up to a step. Those of validations stay."""
        for path, shard_step, split in self.files():
            if split in TRAINING and shard_step <= step:
                path.unlink()
        self._remove_unused_images()

    def _remove_unused_images(self) -> None:
        """Remove the images that no file names."""
        if not self.images.is_dir():
            return
        try:
            used = {name for path, _, _ in self.files() for name in _image_files(path)}
        except (pa.ArrowException, OSError):
            return  # A file cannot be read, so it is not known which images it names.
        for image in self.images.iterdir():
            if image.name not in used:
                image.unlink()

    def remove_learned(self, step: int) -> None:
        """Remove the files of `write_learned` up to a step."""
        for path, learned_step, _ in self._learned_files():
            if learned_step <= step:
                path.unlink()

    def files(self) -> list[tuple[Path, int, str]]:
        """Return the files with their steps and splits, in the order of steps."""
        return _shards_in(self.folder)

    def _learned_files(self) -> list[tuple[Path, int, str]]:
        return [shard for shard in _shards_in(self.learned) if shard[2] == "learned"]

    def _learned_file(self, step: int) -> Path:
        return self.learned / f"learned-{step:08d}.parquet"


def _shards_in(folder: Path) -> list[tuple[Path, int, str]]:
    files = [(p, m) for p in folder.glob("*.parquet") if (m := _SHARD.fullmatch(p.name))]
    return sorted(((p, int(m[2]), m[1]) for p, m in files), key=lambda s: (s[1], s[2]))


def load_trajectories(
    folder: Path, step: int | None = None, split: str | None = None
) -> Iterator[Scored]:
    """Yield the scored trajectories of a run.

    Args:
        folder: a folder that a `TrajectoryStore` wrote (`runs/NAME/trajectories`).
        step: one step; None for all.
        split: "train", "evicted", "baseline", "val" or "greedy"; None for all.

    Raises:
        DataError: the folder does not exist, or a file is damaged.
    """
    if not folder.is_dir():
        raise DataError(f"no trajectories: {folder} is not a folder")
    for rollout in TrajectoryStore(folder).read(step, split):
        yield rollout.scored


class TrajectoryWriter:
    """Writes the trajectories of a training run in its own thread, so that no step waits.

    At most one step is being written: a call of `write` for another step waits for it, so that few
    trajectories are in memory. After an error nothing more is written.
    """

    def __init__(
        self, store: TrajectoryStore, keep: str = "all", warn: Callable[[str], None] = log.warning
    ):
        """Start the thread.

        Args:
            store: the folder to write to.
            keep: `trainer.keep_trajectories`: "all", "last:N" or "every:N" training steps.
            warn: called with a warning, from the thread.
        """
        self._store = store
        rule, _, number = keep.partition(":")
        self._every = int(number) if rule == "every" else 1
        self._last = int(number) if rule == "last" else 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trajectories")
        self._pending: list[tuple[int, Future[None]]] = []
        self._error: BaseException | None = None
        self._warn = warn
        self._has_warned = False

    def write(self, step: int, groups: Sequence[Group], split: str = "train") -> None:
        """Write the rollouts of a step, unless they are of a training step that is not kept.

        Raises:
            RunStopped: trajectories of this step or an earlier one cannot be written.
        """
        self.check()
        if any(pending != step for pending, _ in self._pending):
            self.wait()
        if split not in TRAINING or step % self._every == 0:
            self._pending.append((step, self._thread.submit(self._write, step, groups, split)))

    def write_learned(self, step: int, make_table: Callable[[], pa.Table]) -> None:
        """Write the numbers that the update of a step used, if its trajectories are kept.

        Training does not need them. If they cannot be written, this is one warning per run.

        Args:
            step: the step.
            make_table: returns the table for `TrajectoryStore.write_learned`. It is called in the
                thread.
        """
        if step % self._every == 0:
            self._pending.append((step, self._thread.submit(self._write_learned, step, make_table)))

    def describe_size(self, steps: int, episodes: int, tokens: int, top_k: int = 0) -> str:
        """Return a line about the disk space that the trajectories of training take.

        Args:
            steps: the steps of the run.
            episodes: the episodes of a step.
            tokens: `rollout.max_trajectory_tokens`.
            top_k: `rollout.top_k`: so many ids may be kept for each token.
        """
        kept = min(steps, self._last) if self._last else steps // self._every
        learned = min(kept, LEARNED_STEPS // self._every)
        learned_size = learned * episodes * tokens * LEARNED_BYTES_PER_TOKEN
        size = kept * episodes * tokens * (BYTES_PER_TOKEN + 4 * top_k)
        free = shutil.disk_usage(self._store.folder.parent).free
        line = (
            f"trajectories of training: up to {_describe_bytes(size)} for {plural(kept, 'step')} of"
            f" episodes with rollout.max_trajectory_tokens={tokens}, and"
            f" {_describe_bytes(learned_size)} for what the last {plural(learned, 'step')} learned"
            f" from. {_describe_bytes(free)} are free"
        )
        if size + learned_size > free:
            line += ". To keep fewer: trainer.keep_trajectories=last:100, or every:10"
        return line

    def check(self) -> None:
        """Raise the error of a file that could not be written, if it is known by now."""
        done = [future for _, future in self._pending if future.done()]
        self._pending = [(step, future) for step, future in self._pending if future not in done]
        for future in done:
            self._error = self._error or future.exception()
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Wait until all trajectories are on the disk.

        Raises:
            RunStopped: they cannot be written, for example because the disk is full.
        """
        wait([future for _, future in self._pending])
        self.check()

    def close(self) -> None:
        """Finish what is being written, and end the thread. Closing twice does nothing."""
        self._thread.shutdown()

    def _write(self, step: int, groups: Sequence[Group], split: str) -> None:
        self._store.write(step, groups, split)
        if self._last and split in TRAINING:
            self._store.remove_training(step - self._last)

    def _write_learned(self, step: int, make_table: Callable[[], pa.Table]) -> None:
        try:
            self._store.write_learned(step, make_table())
            self._store.remove_learned(step - min(self._last or LEARNED_STEPS, LEARNED_STEPS))
        except Exception as e:
            if not self._has_warned:
                self._warn(
                    f"warning: cannot write {self._store.learned}: {e or type(e).__name__}."
                    " Training goes on; the advantages and logprobs of tokens are not recorded"
                )
            self._has_warned = True


# -- writing --------------------------------------------------------------------------------------


def _write_file(path: Path, table: pa.Table) -> None:
    """Write a table so that the file is either complete or does not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as staging:
        pq.write_table(table, staging, compression="zstd", row_group_size=_ROW_GROUP)


def _name_image(images: _ImageNames, image: Image | RowImage) -> str:
    """Return the name of an image's file, and add it to those of a file of trajectories."""
    if image.data not in images:
        is_whole = isinstance(image, Image)
        images[image.data] = image.key if is_whole else sha256(image.data).hexdigest()
    return images[image.data]


def _write_image(path: Path, data: bytes) -> None:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as staging:
            staging.write_bytes(data)


def _image_files(path: Path) -> list[str]:
    """Return the names of the images of a file of trajectories."""
    return ((pq.read_schema(path).metadata or {}).get(IMAGE_FILES, b"")).decode().split()


def _table(step: int, groups: Sequence[Group], split: str, images: _ImageNames) -> pa.Table:
    rows = [
        StoredRollout(step, split, group.dropped, scored, index, as_text, group.drop_causes)
        for index, group in enumerate(groups)
        for as_text in [_find_changed_values(group.sample)]
        for scored in group.scored
    ]
    columns = [
        pa.array([_cell(name, path, row, images) for row in rows], kind)
        for name, (kind, path) in _COLUMNS.items()
    ]
    segments = [row.scored.trajectory.segments for row in rows]
    columns += [
        _list_column([[getattr(s, name) for s in row] for row in segments], kind)
        for name, kind in STREAMS.items()
    ]
    table = pa.table(columns, schema=SCHEMA)
    if not images and not any(s.images for row in segments for s in row):
        return table
    cells = [
        json.dumps([[asdict(i) | {"data": _name_image(images, i)} for i in s.images] for s in row])
        for row in segments
    ]
    table = table.append_column(IMAGES, pa.array(cells, IMAGES.type))
    return table.replace_schema_metadata({IMAGE_FILES: " ".join(images.values())})


def _cell(name: str, path: str, row: StoredRollout, images: _ImageNames) -> Any:
    value = attrgetter(path)(row)
    if name == "sample":
        names = [f.name for f in fields(value) if f.name in _OTHER_SAMPLE_FIELDS]
        value = {field: getattr(value, field) for field in names}
    if name == "metrics" and row.scored.answer is not None:
        value = {**value, "answer": row.scored.answer}
    if name in _JSON:
        value = json.dumps(value, default=partial(_to_json, images), ensure_ascii=False)
    if isinstance(value, str):  # UTF-8 has no lone surrogates: replace them with `?`
        return value.encode("utf-8", "replace").decode()
    return value


def _describe_bytes(size: float) -> str:
    unit, name = next(((u, n) for u, n in ((1e9, "GB"), (1e6, "MB")) if size >= u), (1e3, "kB"))
    return f"{size / unit:,.1f} {name}"


def _list_column(rows: Sequence[Sequence[array[Any]]], item: pa.DataType) -> pa.ChunkedArray:
    """Build a column of lists of lists, with a chunk for each row group.

    Arrow's lists in one chunk have up to 2^31 numbers. A step may have more `experts`.
    """
    starts = range(0, len(rows), _ROW_GROUP)
    chunks = [_list_chunk(rows[i : i + _ROW_GROUP], item) for i in starts]
    return pa.chunked_array(chunks, pa.list_(pa.list_(item)))


def _list_chunk(rows: Sequence[Sequence[array[Any]]], item: pa.DataType) -> pa.Array:
    """Build lists of lists from the bytes of the arrays, without Python objects."""
    segments = [segment for row in rows for segment in row]
    items = pa.py_buffer(b"".join(s.tobytes() for s in segments))
    n = sum(map(len, segments))
    leaf = pa.Array.from_buffers(item, n, [None, items])
    inner = pa.ListArray.from_arrays(_offsets(segments), leaf)
    return pa.ListArray.from_arrays(_offsets(rows), inner)


def _offsets(lists: Sequence[Sequence[Any]]) -> pa.Array:
    return pa.array(accumulate(map(len, lists), initial=0), pa.int32())


def _to_json(images: _ImageNames, value: Any) -> Any:
    """Convert a value that JSON does not support: dataclass, mapping, or anything else as text."""
    if isinstance(value, Image):
        return _name_image(images, value)
    if (names := _field_names(type(value))) is not None:
        cell = {name: getattr(value, name) for name in names}
        if isinstance(value, Message | ToolResult) and not value.images:
            del cell["images"]
        return cell
    return dict(value) if isinstance(value, Mapping) else str(value)


@cache
def _field_names(kind: type) -> tuple[str, ...] | None:
    """Return the names of a dataclass's fields; None for another class. A step asks often."""
    return tuple(f.name for f in fields(kind)) if is_dataclass(kind) else None


def _find_changed_values(sample: Sample) -> list[str]:
    """Return the paths of a row's values that the file does not restore, such as dates and tuples.

    Python's JSON restores infinities, and integers of any length.
    """
    return [path for path, value in sample.find_non_json() if not isinstance(value, int | float)]


# -- reading --------------------------------------------------------------------------------------


def _read_shard(path: Path) -> Iterator[StoredRollout]:
    with _readable(path), pq.ParquetFile(path) as file:
        first = 0
        for batch in file.iter_batches(_ROW_GROUP):
            yield from _read_rows(path, first, batch)
            first += len(batch)


def _read_rows(path: Path, first: int, batch: pa.RecordBatch) -> Iterator[StoredRollout]:
    """Yield the rollouts of a batch, whose first row is the row `first` of the file."""
    present = batch.schema.names
    _check_columns(present, pa.schema([f for f in SCHEMA if f.name not in ADDED]))
    table = pa.Table.from_batches([batch])
    names = [name for name in STREAMS if name in present]
    streams = [_arrays(_read_stream(table, name)) for name in names]
    rows = batch.drop_columns(names).to_pylist()
    for index, (row, *lists) in enumerate(zip(rows, *streams, strict=True), first):
        segments = tuple(
            [Segment(**dict(zip(names, s, strict=True))) for s in zip(*lists, strict=True)]
        )
        if row.get("images") is not None:
            segments = _with_row_images(path, index, segments, row["images"])
        for name in _JSON:
            row[name] = _parse_cell(path, index, name, row[name])
        try:
            yield _rollout_from_cells(row, segments)
        except (ValueError, TypeError) as e:
            raise _damaged(path, index, "sample", e) from e


def _with_row_images(
    path: Path, row: int, segments: Sequence[Segment], cell: str
) -> tuple[Segment, ...]:
    """Return the segments of a row with the images that its cell in `IMAGES` names."""
    folder = path.parent / "images"
    try:
        images = [
            tuple(
                [RowImage(**i | {"data": _read_image(folder, i["data"]).data}) for i in of_segment]
            )
            for of_segment in parse_json(cell)
        ]
        return tuple(
            [replace(s, images=i) if i else s for s, i in zip(segments, images, strict=True)]
        )
    except (ValueError, TypeError, LookupError) as e:
        raise _damaged(path, row, IMAGES.name, e) from e


@lru_cache(16)
def _read_image(folder: Path, name: str) -> Image:
    """Return an image of the folder `images`. Rollouts of a group share one object.

    Raises:
        ValueError: there is none, or it is damaged.
    """
    if not _IMAGE_NAME.fullmatch(name):
        raise ValueError(f"{name[:80]!r} is not the name of an image: 64 hexadecimal digits")
    try:
        image = Image((folder / name).read_bytes())
    except OSError as e:
        raise ValueError(f"the image {folder / name} cannot be read: {e.strerror}") from None
    if image.key != name:
        raise ValueError(f"the image {folder / name} is damaged: its SHA-256 is {image.key}")
    return image


def _load_images(folder: Path, column: str, cell: Any) -> None:
    """Replace the names of images in a cell by the images."""
    messages = cell["prompt"] if column == "sample" else cell
    if column == "turns":
        messages = [result for turn in cell for result in turn["tool_results"]]
    for message in messages:
        if names := message.get("images"):
            message["images"] = tuple([_read_image(folder, name) for name in names])


def _read_tokens(path: Path, step: int, split: str, learned: pa.Table | None) -> pa.Table:
    """Return the response tokens of a file as rows; `learned` is null if it is None."""
    names = ["episode_id", "response_ids", "response_mask", "logprobs", "versions"]
    table = _read_columns(path, pa.schema([SCHEMA.field(name) for name in names]))
    with _readable(path):
        lists = {name: _read_stream(table, name).flatten() for name in names[1:]}
    flat = {name: inner.flatten() for name, inner in lists.items()}
    n_segments = table["response_ids"].combine_chunks().value_lengths().to_numpy()
    lengths = lists["response_ids"].value_lengths().to_numpy()
    episode, segment = _count_within(n_segments)  # of each segment
    row, position = _count_within(lengths)  # of each token
    mask = flat["response_mask"].to_numpy() == 1
    columns: dict[str, Any] = {
        "step": np.full(len(row), step, np.int32),
        "split": pa.DictionaryArray.from_arrays(np.zeros(len(row), np.int32), [split]),
        "episode_id": pa.DictionaryArray.from_arrays(
            episode[row], table["episode_id"].combine_chunks()
        ),
        "segment": segment[row],
        "position": position,
        "token_id": flat["response_ids"],
        "mask": mask,
        "logprob": pa.array(flat["logprobs"].to_numpy(), mask=~mask),
        "version": pa.array(flat["versions"].to_numpy(), mask=~mask),
    }
    if learned is None or not len(learned):
        columns |= {name.removesuffix("s"): pa.nulls(len(row), k) for name, k in LEARNED.items()}
        return pa.table(columns, schema=TOKENS_SCHEMA)
    ids = learned["episode_id"].to_pylist(), learned["segment"].to_pylist()
    learned_rows = {key: i for i, key in enumerate(zip(*ids, strict=True))}
    keys = zip(table["episode_id"].take(episode).to_pylist(), segment.tolist(), strict=True)
    rows = np.array([learned_rows.get(key, -1) for key in keys], np.int64)
    learned_lengths = learned["advantages"].combine_chunks().value_lengths().to_numpy()
    if (learned_lengths[rows] != lengths)[rows >= 0].any():
        raise DataError(f"{path} has other tokens than what step {step} learned from")
    starts = (learned_lengths.cumsum() - learned_lengths)[rows]
    at = pa.array(starts[row] + position, mask=(rows < 0)[row])
    for name in LEARNED:
        columns[name.removesuffix("s")] = learned[name].combine_chunks().flatten().take(at)
    return pa.table(columns, schema=TOKENS_SCHEMA)


def _count_within(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the list of each item of lists of these lengths, and the item's index in its list."""
    owner = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    starts = (lengths.cumsum() - lengths)[owner]
    return owner, np.arange(len(owner), dtype=np.int32) - starts.astype(np.int32)


def _read_columns(path: Path, schema: pa.Schema) -> pa.Table:
    """Return the columns of a schema, in the schema's types."""
    with _readable(path), pq.ParquetFile(path) as file:
        _check_columns(file.schema_arrow.names, schema)
        return file.read(schema.names).select(schema.names).cast(schema)


def _check_columns(present: Sequence[str], schema: pa.Schema) -> None:
    if missing := [name for name in schema.names if name not in present]:
        raise ValueError(f"it has no column {missing[0]!r}, but {present}")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raise a `DataError` that names the file if the block cannot read it."""
    try:
        if not path.is_file():
            raise OSError("not a regular file")
        yield
    except DataError:  # it names the place already
        raise
    except (pa.ArrowException, OSError, KeyError, ValueError, TypeError) as e:
        raise DataError(f"{path} is not a readable file of trajectories: {e!r}") from e


def parse_json(text: str) -> Any:
    """Return the value of a cell of JSON text, in which Python's json wrote NaN and infinities.

    Raises:
        ValueError: the text is not JSON.
    """
    try:  # orjson rounds integers of more than 64 bits
        return json.loads(text) if _LONG_NUMBER.search(text) else orjson.loads(text)
    except ValueError:
        return json.loads(text)


def calls_of(
    turns: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[int, Mapping[str, Any], Mapping[str, Any]]]:
    """Yield the turn, the call and the result of each tool call that was run.

    Args:
        turns: the value of a cell of the column `turns`.
    """
    for index, turn in enumerate(turns):
        for call, result in zip(turn["tool_calls"], turn["tool_results"], strict=False):
            yield index, call, result


def _parse_cell(path: Path, row: int, name: str, text: str) -> Any:
    """Return the checked content of a column in `_JSON`."""
    try:
        value = parse_json(text)
        if name in _WITH_MESSAGES and '"images"' in text:
            _load_images(path.parent / "images", name, value)
        return _ADAPTERS[name].validate_python(value) if name in _ADAPTERS else value
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError) as e:
        raise _damaged(path, row, name, e) from e


def _damaged(path: Path, row: int, name: str, error: Exception) -> DataError:
    reason = str(error).partition("\n")[0]
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
    return DataError(
        f"{path}: row {row} (counted from 0) has a damaged cell in column {name!r}: {reason}."
        " Restore the file, or move it out of the folder to read the others"
    )


def _rollout_from_cells(cells: Mapping[str, Any], segments: tuple[Segment, ...]) -> StoredRollout:
    parts: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, (_, path) in _COLUMNS.items():
        owner, _, field = path.rpartition(".")
        parts[owner][field] = cells[name]
    values = parts[_TRAJECTORY]
    sampling = values["sampling"].items()
    values |= {
        "sample": _SAMPLES.validate_python(values["sample"] | parts[_SAMPLE]),
        "sampling": {k: tuple(v) if isinstance(v, list) else v for k, v in sampling},
    }
    metrics = parts["scored"]["metrics"]
    answer = metrics.pop("answer") if isinstance(metrics.get("answer"), str) else None
    scored = Scored(Trajectory(segments=segments, **values), **parts["scored"], answer=answer)
    return StoredRollout(scored=scored, **parts[""])


def _read_stream(table: pa.Table, name: str) -> pa.ListArray:
    """Return a column of the segments' arrays in its type. Other programs write 64-bit numbers."""
    leaf = table.schema.field(name).type
    while hasattr(leaf, "value_type"):
        leaf = leaf.value_type
    # A column without any number, such as `kept_ids`, may have no type.
    if not (pa.types.is_integer(leaf) or pa.types.is_floating(leaf) or pa.types.is_null(leaf)):
        raise ValueError(f"the column {name!r} has {leaf} instead of numbers")
    column = table[name].cast(SCHEMA.field(name).type).combine_chunks()
    if column.null_count or column.flatten().null_count or column.flatten().flatten().null_count:
        raise ValueError(f"the column {name!r} has a null")
    return column


_ARRAY_CODES = {pa.float32(): "f", pa.int32(): "i", pa.int16(): "h"}


def _arrays(column: pa.ListArray) -> list[list[array[Any]]]:
    """Return the arrays of a column; the inverse of `_list_column`."""
    inner = column.values
    leaf = inner.values
    code, size = _ARRAY_CODES[leaf.type], leaf.type.byte_width
    buffer = leaf.buffers()[1]
    data = memoryview(buffer if buffer is not None else b"")
    ends = [size * (leaf.offset + end) for end in inner.offsets.to_pylist()]
    segments = [array(code, data[a:b].tobytes()) for a, b in pairwise(ends)]
    rows = column.offsets.to_pylist()
    return [segments[a:b] for a, b in pairwise(rows)]
