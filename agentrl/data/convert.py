"""Convert rows of other formats to a dataset: Hugging Face, pandas, CSV and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
from pyarrow import csv

from agentrl.data.files import Row, load_json, read_rows, write_rows
from agentrl.errors import DataError
from agentrl.images import Image, data_url, is_image
from agentrl.installation import install_command
from agentrl.registry import did_you_mean

HUB = "hf://"
MAX_CELL = 1 << 30
"""The largest cell of a CSV file in bytes."""


def convert_rows(
    source: Any,
    output: str | Path,
    *,
    rename: Mapping[str, str] | None = None,
    split: str = "",
    name: str = "",
) -> int:
    """Write rows of another format to a .parquet or .jsonl file.

    Args:
        source: `hf://OWNER/NAME`, a folder of `save_to_disk` of Hugging Face's datasets, a .csv,
            .json, .jsonl or .parquet file, a pandas DataFrame, or a `datasets.Dataset`.
        output: the file to write; it must not exist.
        rename: new names of columns by their old names, such as `{"question": "prompt"}`.
        split: the split of a Hugging Face dataset with several, such as "train".
        name: the configuration of a dataset of the hub, such as "main".

    Returns:
        The number of rows.

    Raises:
        DataError: the source cannot be read, a column does not exist or has two names, or the
            output exists.
    """
    if Path(output).expanduser().exists():
        raise DataError(f"{output} already exists: choose a new file")
    rows = [_plain(row) for row in _read(source, split, name)]
    if not rows:
        raise DataError(f"{_describe(source)} has no rows")
    write_rows(output, _rename(rows, rename or {}, _describe(source)))
    return len(rows)


def _describe(source: Any) -> str:
    return str(source) if isinstance(source, str | Path) else f"the {type(source).__name__}"


def _read(source: Any, split: str, name: str) -> Sequence[Row]:
    if not isinstance(source, str | Path):
        return _read_object(source)
    if str(source).startswith(HUB):
        return _read_hub(str(source).removeprefix(HUB), split, name)
    path = Path(source).expanduser()
    if name:
        raise DataError(
            f"{source}: only datasets of the hub ({HUB}...) have configurations. Remove --name"
            f" {name}"
        )
    if path.is_dir():
        return _read_saved(path, split)
    if split:
        raise DataError(
            f"{source}: only datasets of Hugging Face have splits. Remove --split {split}"
        )
    readers = {".csv": _read_csv, ".json": _read_json, ".jsonl": read_rows, ".parquet": read_rows}
    if path.suffix not in readers:
        raise DataError(
            f"{source}: unknown format. Choices: {HUB}OWNER/NAME, a folder of save_to_disk,"
            f" {', '.join(readers)}"
        )
    if not path.is_file():
        siblings = [f.name for f in path.parent.glob("*")] if path.parent.is_dir() else []
        raise DataError(f"no such file: {source}.{did_you_mean(path.name, siblings)}")
    return readers[path.suffix](path)


def _read_object(source: Any) -> Sequence[Row]:
    """Read a DataFrame or a `datasets.Dataset`; neither library is imported for that."""
    if hasattr(source, "to_dict") and hasattr(source, "columns"):  # a DataFrame
        source = source.astype(object).where(source.notna(), None)
        names = [str(column) for column in source.columns]
        columns = [source.iloc[:, i].tolist() for i in range(len(names))]
        return [dict(zip(names, cells, strict=True)) for cells in zip(*columns, strict=True)]
    if hasattr(source, "column_names") and hasattr(source, "features"):
        return [dict(row) for row in source]
    raise DataError(
        f"cannot convert a {type(source).__name__}: use a path, a pandas DataFrame, or a"
        " datasets.Dataset"
    )


def _read_hub(path: str, split: str, name: str) -> Sequence[Row]:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise DataError(
            f"{HUB}{path} needs Hugging Face's datasets: {install_command('hf')}. Or download"
            f" its .parquet files and convert these"
        ) from None
    try:
        loaded = datasets.load_dataset(path, name or None)
    except Exception as e:  # of the network, of the hub, and of each format
        raise DataError(f"{HUB}{path} cannot be loaded: {type(e).__name__}: {e}") from e
    return [dict(row) for row in loaded[_choose_split(HUB + path, split, [*map(str, loaded)])]]


def _choose_split(source: str, split: str, splits: Sequence[str]) -> str:
    if not split and len(splits) == 1:
        return splits[0]
    if split not in splits:
        problem = f"no split {split!r}" if split else "several splits"
        raise DataError(f"{source}: {problem}. Choose one of {', '.join(splits)}: --split NAME")
    return split


def _read_saved(folder: Path, split: str) -> Sequence[Row]:
    """Read a folder of `save_to_disk`: Arrow streams in the order that state.json lists."""
    index = folder / "dataset_dict.json"
    try:
        if index.is_file():
            splits = list(orjson.loads(index.read_bytes())["splits"])
            folder = folder / _choose_split(str(folder), split, splits)
        elif split:
            raise DataError(f"{folder} has no splits. Remove --split {split}")
        if not (folder / "state.json").is_file():
            raise DataError(f"{folder} is not a folder of save_to_disk: it has no state.json")
        state = orjson.loads((folder / "state.json").read_bytes())
        if state.get("_indices_data_files"):
            raise DataError(
                f"{folder} has a selection of rows. Call flatten_indices() before save_to_disk"
            )
        rows: list[Row] = []
        for file in state["_data_files"]:
            path = folder / Path(file["filename"]).name
            with pa.OSFile(str(path)) as stream, pa.ipc.open_stream(stream) as reader:
                rows += reader.read_all().to_pylist()
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as e:
        raise DataError(f"{folder} cannot be read: {e}") from e
    return rows


def _read_csv(path: Path) -> Sequence[Row]:
    """Read a CSV file with a header. All cells are texts; empty ones are left out."""
    block = min(path.stat().st_size + 1, MAX_CELL)
    read = csv.ReadOptions(use_threads=False, block_size=block)  # Errors have the row's number.
    parse = csv.ParseOptions(newlines_in_values=True)
    try:
        with csv.open_csv(path, read, parse) as table:
            columns = table.schema.names
        if len(set(columns)) < len(columns):
            raise DataError(f"{path}: two columns have the same name: {', '.join(columns)}")
        texts = csv.ConvertOptions(
            column_types=dict.fromkeys(columns, pa.string()), strings_can_be_null=True
        )
        texts.null_values = [""]
        rows = csv.read_csv(path, read, parse, texts).to_pylist()
    except (pa.ArrowException, UnicodeDecodeError) as e:
        raise DataError(f"{path}: not a CSV file in UTF-8: {e}") from e
    return [{name: cell for name, cell in row.items() if cell is not None} for row in rows]


def _read_json(path: Path) -> Sequence[Row]:
    """Read a JSON file: a list of objects, or an object with one list of them."""
    try:
        content = load_json(path.read_bytes())
    except ValueError as e:
        hint = ". One object per line is a .jsonl file" if "not JSON" in str(e) else ""
        raise DataError(f"{path}: {e}{hint}") from None
    if isinstance(content, dict):
        lists = [value for value in content.values() if isinstance(value, list)]
        content = lists[0] if len(lists) == 1 else content
    if not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
        raise DataError(f"{path}: must be a list of objects, or an object with one such list")
    return content


def _plain(value: Any) -> Any:
    """Return a value as JSON has it, images as data URLs; None and NaN of a row are left out."""
    if isinstance(value, Mapping):
        cells = {str(key): _plain(item) for key, item in value.items()}
        return {key: item for key, item in cells.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if is_image(value):
        return data_url(Image.of(value))
    if hasattr(value, "tolist"):  # numpy
        return _plain(value.tolist())
    if value is None or value != value:
        return None
    if isinstance(value, str | int | float | bool):
        return value
    raise DataError(f"{value!r:.60} is a {type(value).__name__}, which JSON does not have")


def _rename(rows: Sequence[Row], rename: Mapping[str, str], source: str) -> list[Row]:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    for old, new in rename.items():
        if old not in columns:
            raise DataError(
                f"{source}: no column {old!r}; found: {', '.join(columns)}."
                f"{did_you_mean(old, columns)}"
            )
        if new in columns and new not in rename:
            raise DataError(
                f"{source}: {old!r} cannot become {new!r}, which is a column already. Choose"
                " another name"
            )
    if len(set(rename.values())) < len(rename):
        raise DataError(f"two columns would have the same name: {', '.join(rename.values())}")
    return [{rename.get(name, name): value for name, value in row.items()} for row in rows]
