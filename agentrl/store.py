"""Trajectories on disk: one parquet file per step and split, there whole or not at all.

    runs/demo/trajectories/
      val-00000000.parquet
      train-00000001.parquet
      train-00000002.parquet

One row a rollout. Streams of tokens are columns of lists of segments, so that any parquet reader
can work with them; what has structure (messages, turns, rewards) is JSON text. A row holds all of
its trajectory: what is read back equals what was written.
"""

from __future__ import annotations

import json
import os
import re
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from itertools import accumulate, pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import TypeAdapter

from agentrl.errors import DataError, RunStopped
from agentrl.open_files import advice
from agentrl.trajectory import (
    Group,
    Message,
    Sample,
    Scored,
    Segment,
    Trajectory,
    Turn,
)

STREAMS = {
    "prompt_ids": pa.int32(),
    "response_ids": pa.int32(),
    "response_mask": pa.int32(),
    "logprobs": pa.float32(),
    "versions": pa.int32(),
}
"""A segment's fields; their arrays have four bytes an item."""

_TRAJECTORY = "scored.trajectory"
_SAMPLE = f"{_TRAJECTORY}.sample"
_COLUMNS = {
    "step": (pa.int32(), "step"),
    "split": (pa.string(), "split"),
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
    "ground_truth": (pa.string(), f"{_SAMPLE}.ground_truth"),
    "messages": (pa.string(), f"{_TRAJECTORY}.messages"),
    "turns": (pa.string(), f"{_TRAJECTORY}.turns"),
    "sample": (pa.string(), _SAMPLE),
    "sampling": (pa.string(), f"{_TRAJECTORY}.sampling"),
    "tool_reward": (pa.float64(), f"{_TRAJECTORY}.tool_reward"),
    "seconds": (pa.float64(), f"{_TRAJECTORY}.seconds"),
    "control_token_attempts": (pa.int32(), f"{_TRAJECTORY}.control_token_attempts"),
}
"""Every column but the streams: its type, and where its value lies in a `Stored`."""
_JSON = {"rewards", "metrics", "ground_truth", "messages", "turns", "sample", "sampling"}
"""The columns that are JSON text."""

SCHEMA = pa.schema(
    [
        *((name, kind) for name, (kind, _) in _COLUMNS.items()),
        *((name, pa.list_(pa.list_(kind))) for name, kind in STREAMS.items()),
    ]
)

_OF_THE_COLUMN_SAMPLE = {f.name for f in fields(Sample)} - {
    path.removeprefix(f"{_SAMPLE}.") for _, path in _COLUMNS.values()
}
"""The fields of a sample that have no column of their own."""

_SAMPLES = TypeAdapter(Sample)
_TURNS = TypeAdapter(tuple[Turn, ...])
_MESSAGES = TypeAdapter(tuple[Message, ...])
_SHARD = re.compile(r"([a-z]+)-(\d+)\.parquet")
_BATCH = 64


@dataclass(frozen=True, slots=True)
class Stored:
    """A rollout as it was stored."""

    step: int
    split: str
    dropped: int
    """How many rollouts its group lost."""
    scored: Scored


class TrajectoryStore:
    """The folder of a run's trajectories. One process writes; any may read at the same time."""

    def __init__(self, folder: Path):
        self.folder = folder

    def write(self, step: int, groups: Sequence[Group], split: str = "train") -> Path:
        """Store a step's rollouts; a step stored before is replaced.

        Raises:
            RunStopped: the file cannot be written (the disk is full).
        """
        path = self.folder / f"{split}-{step:08d}.parquet"
        staging = self.folder / f".{path.name}-{os.getpid()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(staging, "wb") as file:
                pq.write_table(_table(step, groups, split), file, compression="zstd")
                file.flush()
                os.fsync(file.fileno())
            staging.rename(path)
        except OSError as e:
            raise RunStopped(f"cannot write the trajectories to {path}: {e}{advice(e)}") from e
        finally:
            with suppress(OSError):
                staging.unlink()
        return path

    def read(self, step: int | None = None, split: str | None = None) -> Iterator[Stored]:
        """The rollouts of one or all steps and splits, by step.

        Raises:
            DataError: a file is damaged.
        """
        for path, shard_step, shard_split in self._shards():
            if step in (None, shard_step) and split in (None, shard_split):
                yield from _read_shard(path)

    def truncate_after(self, step: int) -> None:
        """Remove what lies after a step (-1: everything), and what killed processes left."""
        for path, shard_step, _ in self._shards():
            if shard_step > step:
                path.unlink()
        for left in self.folder.glob(".*.parquet-*"):
            left.unlink()

    def _shards(self) -> list[tuple[Path, int, str]]:
        """Files with step and split, by step."""
        found = [(p, m) for p in self.folder.glob("*.parquet") if (m := _SHARD.fullmatch(p.name))]
        return sorted(((p, int(m[2]), m[1]) for p, m in found), key=lambda s: (s[1], s[2]))


def load_trajectories(
    folder: Path, step: int | None = None, split: str | None = None
) -> Iterator[Scored]:
    """The scored trajectories of a run.

    Args:
        folder: a folder that a `TrajectoryStore` wrote (`runs/NAME/trajectories`).
        step: one step, or all.
        split: "train", "evicted", "baseline", "val", "greedy", or all.

    Raises:
        DataError: no such folder, or a file is damaged.
    """
    if not folder.is_dir():
        raise DataError(f"no trajectories: {folder} is not a folder")
    for stored in TrajectoryStore(folder).read(step, split):
        yield stored.scored


# -- writing --------------------------------------------------------------------------------------


def _table(step: int, groups: Sequence[Group], split: str) -> pa.Table:
    rows = [Stored(step, split, g.dropped, scored) for g in groups for scored in g.scored]
    columns = [
        pa.array([_cell(name, path, row) for row in rows], kind)
        for name, (kind, path) in _COLUMNS.items()
    ]
    segments = [row.scored.trajectory.segments for row in rows]
    columns += [
        _list_column([[getattr(s, name) for s in row] for row in segments], kind)
        for name, kind in STREAMS.items()
    ]
    return pa.table(columns, schema=SCHEMA)


def _cell(name: str, path: str, row: Stored) -> Any:
    value = attrgetter(path)(row)
    if name == "sample":
        kept = _OF_THE_COLUMN_SAMPLE
        value = {f.name: getattr(value, f.name) for f in fields(value) if f.name in kept}
    if name in _JSON:
        value = json.dumps(value, default=_plain, ensure_ascii=False)
    if isinstance(value, str):  # UTF-8 cannot hold a lone surrogate: `?` in its place
        return value.encode("utf-8", "replace").decode()
    return value


def _list_column(rows: Sequence[Sequence[array[Any]]], item: pa.DataType) -> pa.Array:
    """Lists of segments of items, from arrays by their bytes: no item becomes an object."""
    segments = [segment for row in rows for segment in row]
    items = pa.py_buffer(b"".join(s.tobytes() for s in segments))
    n = sum(map(len, segments))
    leaf = pa.Array.from_buffers(item, n, [None, items])
    inner = pa.ListArray.from_arrays(_offsets(segments), leaf)
    return pa.ListArray.from_arrays(_offsets(rows), inner)


def _offsets(lists: Sequence[Sequence[Any]]) -> pa.Array:
    return pa.array(accumulate(map(len, lists), initial=0), pa.int32())


def _plain(value: Any) -> Any:
    """What JSON does not know: our own types by field, other mappings, and text for the rest."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    return str(value)


# -- reading --------------------------------------------------------------------------------------


def _read_shard(path: Path) -> Iterator[Stored]:
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(_BATCH):
                streams = [_arrays(batch.column(name)) for name in STREAMS]
                rows = batch.drop_columns(list(STREAMS)).to_pylist()
                for row, *lists in zip(rows, *streams, strict=True):
                    segments = tuple(Segment(*s) for s in zip(*lists, strict=True))
                    yield _stored(row, segments)
    except (pa.ArrowException, OSError, KeyError, ValueError, TypeError) as e:
        raise DataError(f"{path} holds no trajectories that can be read: {e!r}") from e


def _stored(row: Mapping[str, Any], segments: tuple[Segment, ...]) -> Stored:
    row = {"control_token_attempts": 0, **row}  # older files lack it
    parts: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, (_, path) in _COLUMNS.items():
        owner, _, field = path.rpartition(".")
        parts[owner][field] = json.loads(row[name]) if name in _JSON else row[name]
    plain = parts[_TRAJECTORY]
    sampling = plain["sampling"].items()
    plain |= {
        "sample": _SAMPLES.validate_python(plain["sample"] | parts[_SAMPLE]),
        "turns": _TURNS.validate_python(plain["turns"]),
        "messages": _MESSAGES.validate_python(plain["messages"]),
        "sampling": {k: tuple(v) if isinstance(v, list) else v for k, v in sampling},
    }
    scored = Scored(Trajectory(segments=segments, **plain), **parts["scored"])
    return Stored(scored=scored, **parts[""])


def _arrays(column: pa.ListArray) -> list[list[array[Any]]]:
    """The inverse of `_list_column`."""
    inner = column.values
    leaf = inner.values
    code = "f" if leaf.type == pa.float32() else "i"
    buffer = leaf.buffers()[1]
    data = memoryview(buffer if buffer is not None else b"")
    ends = [4 * (leaf.offset + end) for end in inner.offsets.to_pylist()]
    segments = [array(code, data[a:b].tobytes()) for a, b in pairwise(ends)]
    rows = column.offsets.to_pylist()
    return [segments[a:b] for a, b in pairwise(rows)]
