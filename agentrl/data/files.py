"""Read and write rows, one dictionary each, as .parquet and .jsonl.

Files are read in batches. `RowBatch.array` holds the rows as Arrow: the lines of a JSONL file as
they are, or the columns of a Parquet file as one struct. So both are kept exactly, and `decode`
makes the same dictionaries from them at any time.

A Parquet column of dictionaries gives every row the keys of all rows, with nulls. So `write_rows`
writes a column that would change that way as JSON and lists it in the file's metadata, and
`read_rows` restores it exactly. In files of other programs, null keys are removed only in the
columns `KWARGS`, where rows usually have different keys.
"""

from __future__ import annotations

import json
import os
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.errors import DataError
from agentrl.installation import home
from agentrl.plural import plural
from agentrl.registry import did_you_mean, suggest_door
from agentrl.regular_files import atomic_file

KWARGS = ("extra_info", "tools_kwargs", "interaction_kwargs", "environment_kwargs")
"""The columns in which keys with null values are removed."""
JSON_COLUMNS = b"agentrl.json_columns"
"""The key of the file's metadata that lists the columns written as JSON."""
MAX_BYTES = 2 << 30
"""The maximum size of a decoded file. Footers can be wrong, so the decoded bytes are counted."""
BATCH_ROWS = 64
"""The maximum number of rows in a batch. A small Parquet file can decode to batches of any size, so
the decoded bytes are counted after each."""
BATCH_BYTES = 1 << 20
"""The number of bytes of JSON lines that ends a batch."""
SUFFIXES = (".parquet", ".jsonl")
ALL_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
LONG_NUMBER = b"0" * 19
"""A text without so many digits in a row, translated by `ALL_ZEROS`, has no integer that needs more
than 64 bits."""

Row = dict[str, Any]


class RowBatch(NamedTuple):
    """Some consecutive rows of a file."""

    array: pa.Array
    """The rows: lines of JSON (`large_binary`), or structs of a Parquet file's columns."""
    rows: list[Row]
    """The rows, decoded."""
    metadata: dict[bytes, bytes]
    """The metadata of the file's schema, for `decode`."""


def read_rows(path: str | Path, max_bytes: int = MAX_BYTES) -> list[Row]:
    """Read all rows of a .parquet or .jsonl file into memory.

    Null values of a parquet row are dropped.

    Raises:
        DataError: the file is missing, damaged, empty, has another format, or has more than
            `max_bytes` when decoded.
    """
    rows: list[Row] = []
    size = 0
    for batch in read_batches(path):
        rows += batch.rows
        size += batch.array.nbytes
        if size > max_bytes:
            raise DataError(
                f"{path}: has more than {max_bytes >> 20:,} MiB when decoded (at row"
                f" {len(rows):,}). Split the file"
            )
    return rows


def read_batches(
    path: str | Path, select: Callable[[pa.StructArray], pa.StructArray] | None = None
) -> Iterator[RowBatch]:
    """Yield the rows of a .parquet or .jsonl file in batches of at most `BATCH_ROWS`.

    Args:
        path: the file.
        select: returns the part of a Parquet batch to decode into `RowBatch.rows`; None: all of it.

    Raises:
        DataError: the file is missing, damaged, empty or has another format.
    """
    file = find_file(path)
    is_empty = True
    try:
        for batch in _read_jsonl(file) if file.suffix == ".jsonl" else _read_parquet(file, select):
            is_empty = False
            yield batch
    except OSError as e:
        raise DataError(f"{path}: cannot be read ({e})") from None
    if is_empty:
        raise DataError(f"{path}: has no rows")


def find_file(path: str | Path) -> Path:
    """Return the file at a path, after `~` is replaced.

    Raises:
        DataError: there is no such file, or its name has another ending.
    """
    file = Path(path).expanduser()
    if file.suffix not in SUFFIXES:
        raise DataError(f"{path}: a dataset is a .parquet or a .jsonl file.{suggest_door(path)}")
    if file.exists() and not file.is_file():
        raise DataError(f"{path}: is not a regular file. For the files of a folder: {path}/*")
    if not file.is_file():
        siblings = [f.name for f in file.parent.glob("*")] if file.parent.is_dir() else []
        hint = did_you_mean(file.name, siblings)
        raise DataError(f"no such file: {path} (resolved to {file.resolve()}).{hint}")
    return file


def load_json(text: bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: the text is not JSON, has an integer that needs more than 64 bits, or a key
            twice in one object. The message continues a sentence whose subject is the text.
    """
    try:
        value = orjson.loads(text)
        # orjson drops a key that occurs twice, so the value that is written again has fewer colons.
        # It has more of them if the text writes a colon as \u003a, so the slow parser reads these.
        is_unusual = LONG_NUMBER in text.translate(ALL_ZEROS) or b"\\u003" in text
        if is_unusual or text.count(b":") != orjson.dumps(value).count(b":"):
            json.loads(text, object_pairs_hook=_refuse_repeated_keys, parse_int=_refuse_long)
    except orjson.JSONDecodeError as e:
        raise ValueError(f"is not JSON: {e.msg}, at character {e.pos}") from None
    except (orjson.JSONEncodeError, RecursionError):
        raise ValueError("is nested too deeply") from None
    return value


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> None:
    keys: set[str] = set()
    for key, _ in pairs:
        if key in keys:
            raise ValueError(f"has the key {key!r:.60} twice. Remove one")
        keys.add(key)


def _refuse_long(digits: str) -> None:
    if not -(2**63) <= int(digits) < 2**64:
        raise ValueError(
            f"has an integer that needs more than 64 bits: {digits:.60}. Write it as a text:"
            f' "{digits:.60}"'
        )


def dump_json(value: Any) -> bytes:
    """Return JSON from which `load_json` makes the same value.

    Raises:
        ValueError: the value has an integer that needs more than 64 bits, NaN or an infinity.
        TypeError: JSON does not have the type of a value.
    """
    try:
        text = orjson.dumps(value, option=orjson.OPT_PASSTHROUGH_DATETIME)
        if b"null" in text:  # orjson writes NaN and infinities as null
            json.dumps(value, default=str, allow_nan=False)
        return text
    except ValueError:
        raise ValueError("JSON has neither NaN nor infinities. Write them as texts") from None
    except orjson.JSONEncodeError:
        json.loads(json.dumps(value, default=str), parse_int=_refuse_long)
        raise


def decode(values: pa.Array, metadata: Mapping[bytes, bytes]) -> list[Row]:
    """Return the rows in `RowBatch.array` of a batch with this metadata.

    Null values of a parquet row are dropped.

    Raises:
        DataError: Python has no value for a cell, such as a date of the year 60000.
    """
    if not isinstance(values, pa.StructArray):
        return [orjson.loads(line) for line in values.to_pylist()]
    try:
        paths = metadata.get(JSON_COLUMNS)
        clean = partial(_decode_json, orjson.loads(paths)) if paths else _without_null_kwargs
        rows = pa.RecordBatch.from_struct_array(values).to_pylist()
        return [clean({k: v for k, v in row.items() if v is not None}) for row in rows]
    except (pa.ArrowException, ArithmeticError, AttributeError, TypeError, ValueError) as e:
        raise DataError(f"a cell cannot be read: {e}") from None


def _read_jsonl(file: Path) -> Iterator[RowBatch]:
    wrong: list[str] = []
    rows: list[Row] = []
    kept: list[bytes] = []
    size = 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = load_json(line)
            except ValueError as e:
                wrong.append(f"{file}: line {number} {e}")
                continue
            if not isinstance(row, dict):
                wrong.append(f"{file}: line {number} is not a JSON object but {line[:40]!r}")
                continue
            rows.append(row)
            kept.append(line)
            size += len(line)
            if len(rows) == BATCH_ROWS or size >= BATCH_BYTES:
                yield RowBatch(_binary_array(kept), rows, {})
                rows, kept, size = [], [], 0
    if wrong:
        last_line = [f"and {plural(len(wrong) - 20, 'more line')}"] if len(wrong) > 20 else []
        raise DataError("\n".join([*wrong[:20], *last_line]))
    if rows:
        yield RowBatch(_binary_array(kept), rows, {})


def _binary_array(values: Sequence[bytes]) -> pa.LargeBinaryArray:
    """Return an Arrow array of bytes; `pa.array` would import pandas, which takes half a second."""
    ends = array("q", [0, *accumulate(map(len, values))])
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(values))]
    return pa.Array.from_buffers(pa.large_binary(), len(values), buffers)


def _read_parquet(
    file: Path, select: Callable[[pa.StructArray], pa.StructArray] | None
) -> Iterator[RowBatch]:
    try:
        # Without `pre_buffer`, whole row groups are not held in memory.
        with pq.ParquetFile(file, pre_buffer=False) as parquet:
            paths = (parquet.schema_arrow.metadata or {}).get(JSON_COLUMNS)
            metadata = {JSON_COLUMNS: paths} if paths else {}
            for part in parquet.iter_batches(BATCH_ROWS, use_threads=False):
                whole = _without_dictionaries(part).to_struct_array()
                whole.validate(full=True)  # UTF-8 also of the columns that are not decoded here
                yield RowBatch(
                    whole, decode(select(whole) if select else whole, metadata), metadata
                )
    except (pa.ArrowException, UnicodeDecodeError, orjson.JSONDecodeError, DataError) as e:
        reason = str(e).splitlines()[0]
        raise DataError(f"{file}: damaged, or not a Parquet file ({reason})") from None


def _without_dictionaries(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch whose dictionary columns hold their values.

    A dictionary may differ between batches, which an Arrow file does not allow.
    """
    for i, column in enumerate(batch.columns):
        if isinstance(column, pa.DictionaryArray):
            batch = batch.set_column(i, batch.schema.names[i], column.dictionary_decode())
    return batch


def _decode_json(paths: Iterable[Sequence[str]], row: Row) -> Row:
    """Return a row that `write_rows` wrote, with the values at these paths parsed from JSON."""
    for *parents, leaf in paths:
        inner: Any = row
        for parent in parents:
            inner = inner.get(parent) or {}
        if isinstance(inner.get(leaf), str):
            inner[leaf] = orjson.loads(inner[leaf])
    return row


def _without_null_kwargs(row: Row) -> Row:
    """Return a row of another program's file, without the null keys that Parquet added."""
    return {k: _without_nulls(v) if k in KWARGS else v for k, v in row.items()}


def _without_nulls(value: Any) -> Any:
    """Remove keys whose value is null, or is empty after the removal."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if not isinstance(value, dict):
        return value
    cleaned = {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return {k: v for k, v in cleaned.items() if v != {} or value[k] == {}}


def write_rows(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows to a .parquet or .jsonl file. `read_rows` returns the same rows.

    The file gets its name only when it is complete.

    Raises:
        DataError: the file's name has another ending, a parquet column has values of different
            types, or JSON does not have a value.
    """
    file = Path(path).expanduser()
    writer = {".parquet": _write_parquet, ".jsonl": _write_jsonl}.get(file.suffix)
    if writer is None:
        raise DataError(f"{path}: a dataset is a .parquet or a .jsonl file")
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with atomic_file(file) as staging:
            writer(staging, rows)
    except (pa.ArrowException, TypeError, ValueError) as e:
        raise DataError(f"{path}: cannot be written: {e}") from None


def write_generated(address: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Write the rows of an address of `data.train` to a file in `home()`, and return the file.

    The name depends on the content: a run keeps its file if the address has other rows later.
    """
    digest = blake2b(orjson.dumps(rows, default=str), digest_size=6).hexdigest()
    stem = re.sub(r"[^A-Za-z0-9.=-]+", "_", address)[-80:]
    file = home() / "rows" / f"{stem}-{digest}.jsonl"
    if not file.exists():
        part = file.with_stem(f"{file.stem}-{token_hex(4)}")
        write_rows(part, rows)
        try:
            os.link(part, file)  # A replacement would fail a process that reads the same rows.
        except OSError:
            part.replace(file)
        part.unlink(missing_ok=True)
    return str(file)


def _write_jsonl(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with file.open("wb") as lines:
        for row in rows:
            cells = {name: orjson.Fragment(_dump_cell(name, v)) for name, v in row.items()}
            lines.write(orjson.dumps(cells, option=orjson.OPT_APPEND_NEWLINE))


def _dump_cell(column: str, value: Any) -> bytes:
    """Return the JSON of a cell.

    Raises:
        TypeError: JSON has no form of the value; the message names the column.
    """
    try:
        return dump_json(value)
    except TypeError as e:
        raise TypeError(
            f"column {column}: {e}. Write it as a text, or in a column of its own of a .parquet"
            " file"
        ) from None


def _write_parquet(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    encoded: list[Sequence[str]] = []
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: _column((name,), [row.get(name) for row in rows], encoded) for name in names}
    table = pa.table(columns).replace_schema_metadata({JSON_COLUMNS: orjson.dumps(encoded)})
    pq.write_table(table, file, compression="zstd")


def _column(path: tuple[str, ...], values: list[Any], encoded: list[Sequence[str]]) -> pa.Array:
    """Return an Arrow column, as JSON if Arrow would not restore the values unchanged."""
    present = [v for v in values if v is not None]
    if present and all(isinstance(v, dict) and v and list(v) == list(present[0]) for v in present):
        children = [
            _column((*path, key), [v and v[key] for v in values], encoded) for key in present[0]
        ]
        nulls = pa.array([v is None for v in values])
        return pa.StructArray.from_arrays(children, list(present[0]), mask=nulls)
    nested = any(isinstance(v, dict | list) for v in present)
    try:
        array = pa.array(values)
        # `repr` also compares the order of keys: in `tools_kwargs` it is the order of the tools.
        if not nested or (repr(array.to_pylist()) == repr(values) and not _has_empty_dict(present)):
            return array
    except (pa.ArrowException, OverflowError) as e:
        if not nested and not isinstance(e, OverflowError):
            raise TypeError(f"column {'.'.join(path)}: {e}") from None
    encoded.append(path)
    return pa.array([None if v is None else _dump_cell(".".join(path), v).decode() for v in values])


def _has_empty_dict(value: Any) -> bool:
    """Return whether a value contains an empty dictionary, which Parquet cannot store."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return value == {} or any(map(_has_empty_dict, inner))
