"""The rows of a run, from one file or several, as a sequence of samples.

The rows are stored in one `Table` for each file, and a row becomes a `Sample` when it is drawn. A
row's index counts the rows of all files, in the order of the files.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from glob import glob, has_magic
from hashlib import blake2b
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa

from agentrl.data.order import RowOrder
from agentrl.data.recorded import recorded_rows
from agentrl.data.rows import (
    COLUMN_NAMES,
    ColumnNames,
    Mistakes,
    Origins,
    RowReader,
    find_unnamed_interaction,
    tools_of_files,
)
from agentrl.data.table import DEFAULT_LOOP, UNNAMED, Table, kind_of, load_table
from agentrl.errors import DataError
from agentrl.file_loaders import RECORDED, door_of, file_loaders
from agentrl.registry import suggest_door
from agentrl.trajectory import Sample

log = logging.getLogger("agentrl")

Source = str | Sequence[str | Mapping[str, Any]]
"""A value of `data.train`: a file or a glob, or a list of files and globs, each with a weight."""
SAMPLED_ABOVE = 200_000
"""Above this number of rows, checks that read whole rows are limited to `SAMPLED_ROWS` of them."""
SAMPLED_ROWS = 50_000


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """Rows with the same loop, data source, tools, interaction and roles of messages."""

    sample: Sample
    """The first of them."""
    rows: np.ndarray
    """The indices of all of them in the sequence, ascending: (rows,) int64."""

    @property
    def has_system(self) -> bool:
        """True if the prompts have a system message."""
        return any(m.role == "system" for m in self.sample.prompt)


class Rows(Sequence[Sample]):
    """The rows of one file or several.

    Example: `open_rows("train.parquet")[3]` is the `Sample` of the fourth row.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        weights: Sequence[float],
        names: ColumnNames = COLUMN_NAMES,
        agent_name: str = "single_turn",
        tools: str = "row",
    ):
        """Concatenate the rows of tables.

        Args:
            tables: the rows of each file.
            weights: how often the rows of each file are played in an epoch.
            names: the names of columns.
            agent_name: the loop of rows without one.
            tools: `data.tools`.
        """
        self._tables = list(tables)
        self.weights = list(weights)
        self._starts = np.cumsum([0, *map(len, tables)])
        self._origins = Origins()
        for table, start in zip(tables, self._starts, strict=False):
            self._origins.append(table.path, int(start))
        unnamed, _ = find_unnamed_interaction()
        defaults = {"default_tools": tools_of_files} if tools == "all" else {}
        self._reader = RowReader(Mistakes(), names, agent_name, unnamed, **defaults)
        self._lock = threading.Lock()  # the reader holds the row that it reads
        self.names = names

    def __len__(self) -> int:
        return int(self._starts[-1])

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = index + len(self) if index < 0 else index
        if not 0 <= i < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        table = int(np.searchsorted(self._starts, i, side="right")) - 1
        row = self._tables[table].row(i - int(self._starts[table]))
        return self._read(self._tables[table], row, i)

    def __iter__(self) -> Iterator[Sample]:
        return self.draw(range(len(self)))

    def draw(self, rows: range | np.ndarray) -> Iterator[Sample]:
        """Yield the samples of some rows, in ascending order; a batch is in memory at a time."""
        for table, start in zip(self._tables, self._starts.tolist(), strict=False):
            if isinstance(rows, range):
                low, high = max(rows.start, start), min(rows.stop, start + len(table))
                numbers: range | np.ndarray = range(low - start, max(low, high) - start)
            else:
                numbers = rows[(rows >= start) & (rows < start + len(table))] - start
            for number, row in table.rows(numbers):
                yield self._read(table, row, start + number)

    def _read(self, table: Table, row: dict[str, Any], number: int) -> Sample:
        with self._lock:
            self._reader.folder = table.folder
            return self._reader.read(row, number)

    def require_images(self) -> None:
        """From now on, raise `DataError` for a row with an image that cannot be read."""
        self._reader.raises = True

    def origin(self, index: int) -> tuple[str, int]:
        """Return the file of a row, and the row's number in that file, from 0."""
        return self._origins.find(index)

    def raw(self) -> Iterator[dict[str, Any]]:
        """Yield the rows as `read_rows` returns them, one file after the other."""
        for table in self._tables:
            yield from (row for _, row in table.rows(range(len(table))))

    def columns(self, index: int) -> list[str]:
        """Return the names of the columns that a row has a value for."""
        path, number = self.origin(index)
        table = next(table for table in self._tables if table.path == path)
        return list(table.row(number))

    @property
    def files(self) -> list[tuple[str, range]]:
        """Each file with the indices of its rows."""
        edges = [int(start) for start in self._starts]
        ranges = map(range, edges, edges[1:])
        return [(t.path, rows) for t, rows in zip(self._tables, ranges, strict=True)]

    @property
    def fingerprint(self) -> str:
        """A hash of the files and their weights. For one file of weight 1, its `hash_file`."""
        if len(self._tables) == 1 and self.weights == [1.0]:
            return self._tables[0].digest
        pairs = zip(self._tables, self.weights, strict=True)
        text = "\n".join(f"{table.digest} {weight!r}" for table, weight in pairs)
        return blake2b(text.encode()).hexdigest()[:32]

    def order(self, seed: int, shuffle: bool = True) -> RowOrder:
        """Return the order in which training takes the rows."""
        if all(weight == 1 for weight in self.weights):
            return RowOrder(len(self), seed, shuffle)
        sizes = map(len, self._tables)
        weighted = tuple(zip(sizes, self.weights, strict=True))
        return RowOrder(len(self), seed, shuffle, weighted)

    @cached_property
    def prompt_bytes(self) -> np.ndarray:
        """The size of each prompt's contents in UTF-8: (rows,) int64."""
        return np.concatenate([table.prompt_bytes for table in self._tables])

    @cached_property
    def kinds(self) -> list[Kind]:
        """The kinds of rows, in the order of their first rows."""
        kinds: list[Kind] = []
        for table, start in zip(self._tables, self._starts, strict=False):
            groups = _group(table.kinds)
            kinds += [Kind(self[int(start + rows[0])], start + rows) for rows in groups]
        return kinds


def find_kinds(samples: Sequence[Sample]) -> list[Kind]:
    """Return the kinds of rows; `Rows` knows its kinds without reading the rows."""
    if isinstance(samples, Rows):
        return samples.kinds
    codes: dict[Any, int] = {}
    of_rows = [codes.setdefault(kind_of(sample), len(codes)) for sample in samples]
    return [Kind(samples[int(rows[0])], rows) for rows in _group(np.array(of_rows, np.int64))]


def prompt_bytes(samples: Sequence[Sample]) -> np.ndarray:
    """Return the size of each prompt's contents in UTF-8: (rows,) int64."""
    if isinstance(samples, Rows):
        return samples.prompt_bytes
    return np.array([sum(len(m.content.encode()) for m in s.prompt) for s in samples], np.int64)


def sample_rows(samples: Sequence[Sample]) -> np.ndarray | None:
    """Return the rows to read in checks of whole rows; None: all of them.

    Above `SAMPLED_ABOVE` rows these are `SAMPLED_ROWS` rows at equal distances and the first row of
    each kind. They depend on the rows alone.
    """
    if len(samples) <= SAMPLED_ABOVE:
        return None
    spread = np.linspace(0, len(samples) - 1, SAMPLED_ROWS).astype(np.int64)
    return np.union1d(spread, [kind.rows[0] for kind in find_kinds(samples)])


def draw(samples: Sequence[Sample], rows: np.ndarray | None = None) -> Iterator[Sample]:
    """Yield the samples of these rows, which ascend; None: all."""
    if rows is None:
        return iter(samples)
    if isinstance(samples, Rows):
        return samples.draw(rows)
    return (samples[int(row)] for row in rows)


def parts_to_check(
    samples: Sequence[Sample],
) -> list[tuple[str, int, Callable[[], Iterator[Sample]]]]:
    """Return for each file: its name, the index of its first row, and its rows of `sample_rows`."""
    if not isinstance(samples, Rows):
        return [("", 0, lambda: iter(samples))] if samples else []
    checked = sample_rows(samples)
    parts = []
    for file, rows in samples.files:
        chosen: range | np.ndarray = rows
        if checked is not None:
            chosen = checked[(checked >= rows.start) & (checked < rows.stop)]
        parts.append((file, rows.start, partial(samples.draw, chosen)))
    return parts


def describe_row(samples: Sequence[Sample], path: str, row: int) -> str:
    """Return `a.jsonl: row 3`; `path` is the file of rows that are not `Rows`."""
    if isinstance(samples, Rows):
        path, row = samples.origin(row)
    return f"{path}: row {row}"


def row_order(samples: Sequence[Sample], seed: int, shuffle: bool = True) -> RowOrder:
    """Return the order in which training takes rows."""
    if isinstance(samples, Rows):
        return samples.order(seed, shuffle)
    return RowOrder(len(samples), seed, shuffle)


def _group(codes: np.ndarray) -> list[np.ndarray]:
    """Return the indices of each code, ordered by the first index of each."""
    order = np.argsort(codes, kind="stable")
    edges = np.flatnonzero(np.diff(codes[order])) + 1
    return sorted(np.split(order, edges), key=lambda rows: rows[0]) if len(codes) else []


# -- opening --------------------------------------------------------------------------------------


def open_rows(
    source: Source,
    agent_name: str = "single_turn",
    names: ColumnNames = COLUMN_NAMES,
    check: Callable[[Rows, Mistakes], None] | None = None,
    tools: str = "row",
) -> Rows:
    """Open the rows of one file or several.

    Args:
        source: a .parquet or .jsonl file, a glob, or a list of these; an item of the list may be a
            mapping with `path` and `weight`.
        agent_name: the loop of rows without `agent_name`.
        names: the names of columns.
        check: a function that checks the rows and adds their mistakes.
        tools: `data.tools`: with "all", rows that do not name their tools have all tools.

    Raises:
        DataError: a file cannot be read, or rows have mistakes. The message has all of them.
    """
    mistakes = Mistakes()
    tables, weights, problems, start = [], [], [], 0
    for path, weight in list_files(source):
        mistakes.origins.append(path, start)
        try:
            table = load_table(path, names, mistakes)
        except DataError as e:
            problems.append(str(e))
            continue
        tables.append(table)
        weights.append(weight)
        start += len(table)
    if problems and not tables:
        raise DataError("\n".join(problems))
    rows = Rows(tables, weights, names, agent_name, tools)
    _check_ids(rows, tables, mistakes)
    _check_unnamed_interactions(rows, tables, mistakes)
    if check:
        check(rows, mistakes)
    try:
        mistakes.raise_any()
    except DataError as e:
        problems.append(str(e))
    if problems:
        raise DataError("\n".join(problems))
    rows.require_images()
    return rows


def load_samples(path: str, default_agent_name: str = "single_turn") -> list[Sample]:
    """Read a dataset's rows into memory.

    Args:
        path: a .parquet or .jsonl file.
        default_agent_name: the loop of rows without `agent_name`.

    Raises:
        DataError: the file cannot be read, or rows have mistakes. The message has all of them.
    """
    return list(open_rows(path, default_agent_name))


def list_files(source: Source) -> list[tuple[str, float]]:
    """Return the files of `data.train` with their weights; globs are expanded in sorted order.

    The rows of a door (`agentrl.doors`) and of recorded answers are written into a file.

    Raises:
        DataError: no file matches a glob, or a file is listed twice.
    """
    items = [source] if isinstance(source, str) else source
    files: dict[Path, tuple[str, float]] = {}
    for item in items:
        path = item if isinstance(item, str) else str(item["path"])
        weight = 1.0 if isinstance(item, str) else float(item.get("weight", 1.0))
        if door_of(path):
            path = file_loaders["door"]().rows_file(path)
        elif path.startswith(RECORDED):
            path = recorded_rows(path)
        expanded = str(Path(path).expanduser())
        if has_magic(path) and not Path(expanded).exists():
            matching = sorted(glob(expanded, recursive=True))
            if not matching:
                raise DataError(f"no file matches {path} (in {Path.cwd()}).{suggest_door(path)}")
        else:
            matching = [path]
        for file in matching:
            resolved = Path(file).expanduser().resolve()
            if resolved in files:
                raise DataError(f"{file} is listed twice. List it once, with a weight")
            files[resolved] = file, weight
    return list(files.values())


def _check_ids(rows: Rows, tables: Sequence[Table], mistakes: Mistakes) -> None:
    """Add a mistake for each id that occurs twice. Rows without one have their index as id."""
    chunks = [chunk for table in tables for chunk in table.ids.chunks]
    ids = pa.chunked_array(chunks, pa.string())
    if ids.null_count == len(ids) or (not ids.null_count and len(ids.unique()) == len(ids)):
        return
    first: dict[str, int] = {}
    own = (name for chunk in chunks for name in chunk.to_pylist())
    for row, name in enumerate(own):
        name = str(row) if name is None else name
        earlier = first.setdefault(name, row)
        if earlier != row:
            file, number = rows.origin(earlier)
            elsewhere = f" of {file}" if file != rows.origin(row)[0] else ""
            mistakes.add(row, "id", f"{name!r} is already the id of row {number}{elsewhere}")


def _check_unnamed_interactions(rows: Rows, tables: Sequence[Table], mistakes: Mistakes) -> None:
    """Refuse or ignore `interaction_kwargs` without a name, as the run's files decide."""
    reader = RowReader(Mistakes(), rows.names, DEFAULT_LOOP, UNNAMED)
    unnamed, problem = find_unnamed_interaction()
    ignored: dict[str, int] = {}
    for kind in rows.kinds:
        path, number = rows.origin(int(kind.rows[0]))
        table = next(table for table in tables if table.path == path)
        if reader.read(table.row(number), 0).interaction != UNNAMED:
            continue
        if problem:
            for row in kind.rows.tolist():
                mistakes.add(row, "extra_info.interaction_kwargs", problem)
        elif unnamed is None:
            ignored[path] = ignored.get(path, 0) + len(kind.rows)
    for path, count in ignored.items():
        log.warning(
            "%s: interaction_kwargs without a name are ignored, as in verl, because no file of the"
            " run (--file) defines an interaction (rows: %s)",
            path,
            f"{count:,}",
        )
