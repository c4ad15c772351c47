"""The rows of one file as Arrow record batches: in memory, or in a cache file that is mapped.

A row becomes a Python object only when it is drawn. When a table is built, the structure of every
row is checked, and columns are added that describe the rows: their kind, the size of the prompt,
their own id. Commands find what they need in these columns, instead of reading all rows.

A table depends on the bytes of the file and on the names of its columns, not on other keys of the
config, nor on the user's files: what these decide (the default agent loop, aliases, the interaction
of verl's rows that name none) is decided when a row is drawn.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b, file_digest
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from agentrl.data.files import Row, decode, find_file, read_batches
from agentrl.data.rows import INNER, ColumnNames, Mistakes, RowReader, near_miss
from agentrl.errors import DataError
from agentrl.installation import home
from agentrl.regular_files import is_trusted, open_regular, secure_folder
from agentrl.trajectory import Sample

FORMAT = 2
"""The version of the cache files. Raise it if a table would be built differently."""
MEMORY_BYTES = 32 << 20
"""A table with fewer bytes stays in memory. It is built in about a second."""
CACHE_BYTES = 64 << 30
"""The size of the cache. Files that were not used for the longest time are removed first."""
BATCH_ROWS = 1024
"""The number of rows in a batch of the table, if they have fewer than `BATCH_BYTES`."""
BATCH_BYTES = 4 << 20
RELEASE_BATCHES = 64
"""The number of batches after which the memory of a file that is read through is released."""
STALE_SECONDS = 86400
"""After this time, a temporary file belongs to a process that was killed."""

DEFAULT_LOOP = "\0default"
"""The `agent_name` of rows without one, in the key of a kind."""
UNNAMED = "\0unnamed"
"""The interaction of verl's rows whose `interaction_kwargs` have no name, in the key of a kind."""
DEFAULT_TOOLS = ("\0default",)
"""The first of the tools of rows that do not name their tools, in the key of a kind."""


class Stored(NamedTuple):
    """The batches of a table, and the file that they are mapped from."""

    batches: list[pa.RecordBatch]
    file: mmap.mmap | None = None

    def release(self) -> None:
        """Let the system take back the memory of the file that was read; it can be read again."""
        if self.file is not None and hasattr(mmap, "MADV_DONTNEED"):
            self.file.madvise(mmap.MADV_DONTNEED)


class Table:
    """The rows of a file."""

    def __init__(self, path: str, digest: str, stored: Stored):
        """Take the batches as they are.

        Args:
            path: the file, as the config names it.
            digest: `hash_file` of the file.
            stored: the rows, as `load_table` stores them.
        """
        self.path = path
        self.folder = Path(path).expanduser().parent
        """The folder of the file, in which the paths of images begin."""
        self.digest = digest
        self._batches = batches = stored.batches
        self._stored = stored
        self._metadata: dict[bytes, bytes] = batches[0].schema.metadata or {}
        self._starts = np.cumsum([0, *(batch.num_rows for batch in batches)])
        self.kinds = self._numbers("kind", np.int32)
        """The code of each row's kind: (rows,) int32. Rows of a kind have equal `kind_of`."""
        self.prompt_bytes = self._numbers("prompt_bytes", np.int64)
        """The size of each prompt's contents in UTF-8: (rows,) int64."""
        stored.release()

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def ids(self) -> pa.ChunkedArray:
        """The rows' own ids; null for rows without one."""
        return pa.chunked_array([batch.column("id") for batch in self._batches], pa.string())

    def rows(self, numbers: range | np.ndarray) -> Iterator[tuple[int, Row]]:
        """Yield rows with their numbers, which ascend; a batch is in memory at a time."""
        if not len(numbers):
            return
        first, last = (
            int(np.searchsorted(self._starts, numbers[end], side="right")) - 1 for end in (0, -1)
        )
        for i in range(first, last + 1):
            begin, end = int(self._starts[i]), int(self._starts[i + 1])
            column = self._batches[i].column("row")
            if isinstance(numbers, range):
                here: range | np.ndarray = range(max(numbers.start, begin), min(numbers.stop, end))
                array = column.slice(here.start - begin, len(here))
            else:
                low, high = np.searchsorted(numbers, [begin, end])
                here = numbers[low:high]
                array = column.take(pa.array(here - begin))
            decoded = decode(array, self._metadata)
            if i > first and i % RELEASE_BATCHES == 0:
                self._stored.release()
            yield from zip(map(int, here), decoded, strict=True)

    def row(self, number: int) -> Row:
        """Return a row, as `read_rows` returns it."""
        return next(self.rows(range(number, number + 1)))[1]

    def _numbers(self, column: str, dtype: type[np.integer]) -> np.ndarray:
        arrays = [batch.column(column) for batch in self._batches]
        return np.concatenate([np.frombuffer(a.buffers()[1], dtype, len(a)) for a in arrays])


def kind_of(sample: Sample) -> tuple[Any, ...]:
    """Return the key of a row's kind, which all rows of the kind have in common.

    That is agent loop, data source, tools, interaction, and the roles of the prompt's messages,
    each with whether its content is not blank, and whether it has images.
    """
    shape = tuple(
        [(m.role, bool(m.content.strip()), *[True] * bool(m.images)) for m in sample.prompt]
    )
    return sample.agent_name, sample.data_source, sample.tools, sample.interaction, shape


def load_table(path: str, names: ColumnNames, mistakes: Mistakes) -> Table:
    """Return the table of a file, from the cache if it is there.

    Args:
        path: a .parquet or .jsonl file.
        names: the names of columns.
        mistakes: gets the mistakes of rows. Its last file is this one.

    Raises:
        DataError: the file cannot be read, or changes while it is read; or it has more than
            `MEMORY_BYTES` and no cache file can be written.
    """
    file = find_file(path)
    try:
        before = _state(file)
        digest = hash_file(path)
    except OSError as e:
        raise DataError(f"{path}: cannot be read ({e})") from None
    key = blake2b(f"{FORMAT} {digest} {names}".encode(), digest_size=16).hexdigest()
    folder = home() / "rows"
    is_private = secure_folder(folder)
    if is_private and (table := _find(folder, key, path, digest)):
        return table
    start = mistakes.origins.start
    own = Mistakes()
    own.origins = mistakes.origins
    rows = _describe(path, names, own, start)
    try:
        with _store(rows, folder if is_private else None) as (stored, stored_file):
            if _state(file) != before:
                raise DataError(f"{path}: changed while it was read. Start again")
            if stored_file and is_private and not len(own):
                os.replace(stored_file, folder / f"{key}-{_hash(stored)}.arrow")
                _limit_size(folder, key)
    except (OSError, pa.ArrowException) as e:
        raise DataError(
            f"{path}: has more than {MEMORY_BYTES >> 20} MiB when decoded, so it needs a cache"
            f" file, and none can be written ({e}). Set AGENTRL_HOME to a folder on a disk with"
            " more free space"
        ) from None
    mistakes.merge(own)
    return Table(path, digest, stored)


def hash_file(path: str) -> str:
    """Return a hash of a file; "" if `path` is empty."""
    if not path:
        return ""
    with open(Path(path).expanduser(), "rb") as f:
        return file_digest(f, "blake2b").hexdigest()[:32]


def _state(file: Path) -> tuple[int, ...]:
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


# -- columns that describe the rows ---------------------------------------------------------------


def _describe(
    path: str, names: ColumnNames, mistakes: Mistakes, start: int
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file with the columns that describe them, and find their mistakes.

    Args:
        path: the file.
        names: the names of columns.
        mistakes: gets the mistakes.
        start: the number of rows in earlier files.
    """
    reader = RowReader(mistakes, names, DEFAULT_LOOP, UNNAMED, lambda agent_name: DEFAULT_TOOLS)
    reader.folder = find_file(path).parent
    codes: dict[tuple[Any, ...], int] = {}
    parts: list[pa.Array] = []
    kinds: list[int] = []
    sizes: list[int] = []
    ids: list[str | None] = []
    size = 0
    metadata: dict[bytes, bytes] = {}

    def assemble() -> pa.RecordBatch:
        row = pa.concat_arrays(parts)
        own = pa.lib.StringBuilder()  # type: ignore[attr-defined]
        own.append_values(ids)
        columns = {
            "row": row,
            "kind": _number_array(kinds, np.int32, pa.int32()),
            "prompt_bytes": _number_array(sizes, np.int64, pa.int64()),
            "id": own.finish(),
        }
        batch = pa.RecordBatch.from_arrays(list(columns.values()), list(columns))
        return batch.replace_schema_metadata(metadata)

    number = start
    for batch in read_batches(path, _part_to_check(reader)):
        metadata = batch.metadata
        for row in batch.rows:
            sample = reader.read(row, number)
            kinds.append(codes.setdefault(kind_of(sample), len(codes)))
            sizes.append(sum([len(m.content.encode()) for m in sample.prompt]))
            ids.append(sample.id if row.get("id") is not None else None)
            number += 1
        parts.append(batch.array)
        size += batch.array.nbytes
        if len(kinds) >= BATCH_ROWS or size >= BATCH_BYTES:
            yield assemble()
            parts, kinds, sizes, ids, size = [], [], [], [], 0
    if kinds:
        yield assemble()


# `pa.array` and `to_numpy` would import pandas, which takes half a second.
def _number_array(values: list[int], dtype: type[np.integer], kind: pa.DataType) -> pa.Array:
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(np.array(values, dtype))])


def _part_to_check(reader: RowReader) -> Callable[[pa.StructArray], pa.StructArray]:
    """Return a function that removes the columns without meaning for agentrl from a batch.

    They are a large part of verl's rows (`extra_info.answer`, `question`), and cannot be wrong,
    except for a name that is nearly a known one.
    """

    def select(array: pa.StructArray, known: tuple[str, ...]) -> pa.StructArray:
        fields, children = [], []
        for i, field in enumerate(array.type):
            if field.name not in known and not near_miss(field.name, known):
                continue
            child = array.field(i)
            if field.name == "extra_info" in known and pa.types.is_struct(child.type):
                child = select(child, INNER)
                field = pa.field(field.name, child.type)
            fields.append(field)
            children.append(child)
        if not fields:
            return array
        mask = array.is_null() if array.null_count else None
        return pa.StructArray.from_arrays(children, fields=fields, mask=mask)

    return lambda array: select(array, reader.columns)


# -- cache files ----------------------------------------------------------------------------------


@contextmanager
def _store(
    batches: Iterator[pa.RecordBatch], folder: Path | None
) -> Iterator[tuple[Stored, Path | None]]:
    """Store the batches of a table: in memory, or in a file if there are many.

    The file is removed at the end of the block, if it was not moved. Its batches stay valid.

    Args:
        batches: the batches.
        folder: the folder of the file; None: that for temporary files.

    Yields:
        The batches, and the file; None if they are in memory.

    Raises:
        OSError: the file cannot be written.
    """
    kept: list[pa.RecordBatch] = []
    while sum(batch.nbytes for batch in kept) <= MEMORY_BYTES:
        if (batch := next(batches, None)) is None:
            yield Stored(kept), None
            return
        kept.append(batch)
    if folder:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(".partial", ".rows-", folder)  # mode 0600
    os.close(descriptor)
    try:
        with pa.OSFile(name, "wb") as out, pa.ipc.new_file(out, kept[0].schema) as writer:
            for batch in chain(kept, batches):
                writer.write_batch(batch)
        yield _map(Path(name)), Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def _find(folder: Path, key: str, path: str, digest: str) -> Table | None:
    """Return the table with a key in the cache; None if it is missing or damaged."""
    files: list[Path] = []
    with suppress(OSError):
        files = sorted(folder.glob(f"{key}-*.arrow"))
    for file in files:
        try:
            stored = _map(file)
            is_whole = file.stem.partition("-")[2] == _hash(stored)
            if is_whole:
                with suppress(OSError):  # a cache that can only be read
                    os.utime(file)
                return Table(path, digest, stored)
        except (OSError, ValueError, pa.ArrowException, KeyError, IndexError):
            pass
        with suppress(OSError):
            file.unlink()
    return None


def _hash(stored: Stored) -> str:
    """Return the hash of the bytes that the batches are mapped from, as `hash_file` does."""
    return blake2b(stored.file or b"").hexdigest()[:32]


def _map(file: Path) -> Stored:
    """Return the batches of an Arrow file. They stay valid if the file is removed.

    Raises:
        OSError: the file is a link, or another user can write to it.
    """
    with open_regular(file) as opened:
        if not is_trusted(os.fstat(opened.fileno())):
            raise OSError(errno.EPERM, "another user can write to it", str(file))
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    reader = pa.ipc.open_file(pa.py_buffer(mapped))
    return Stored([reader.get_batch(i) for i in range(reader.num_record_batches)], mapped)


def _limit_size(folder: Path, key: str) -> None:
    """Remove the files that were not used for the longest time, but keep the files of `key`."""
    files = []
    for file in folder.iterdir():
        with suppress(OSError):  # another process may remove it
            status = file.stat()
            if file.suffix == ".partial" and status.st_mtime < time.time() - STALE_SECONDS:
                file.unlink()
            else:
                files.append((status.st_mtime, status.st_size, file))
    total = sum(size for _, size, _ in files)
    for _, size, file in sorted(files):
        if total <= CACHE_BYTES:
            return
        if file.suffix == ".arrow" and not file.name.startswith(key):
            with suppress(OSError):
                file.unlink()
                total -= size
