"""Find the episodes of a run with a query such as `tool=search error=timeout reward<0.5`.

A query consists of terms `FIELD OP VALUE` without spaces and of words. An episode is found if all
terms hold and its messages contain all words. Quotes join words: `"two words"`, `source="a b"`.

A value that was not recorded is unknown: no term holds for it, `!=` included.
"""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter, deque
from collections.abc import Collection, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute

from agentrl.errors import UserError
from agentrl.registry import did_you_mean
from agentrl.report.run import Run
from agentrl.store import EPISODES_SCHEMA, calls_of, parse_json

pc: Any = pyarrow.compute  # its functions are made at run time, unknown to type checkers

COLUMNS = {
    "step": "step", "split": "split", "group": "group", "rollout": "rollout",
    "episode": "episode_id", "sample": "sample_id", "agent": "agent_name", "source": "data_source",
    "reward": "reward", "masked": "masked", "stop": "stop_reason", "dropped": "dropped",
    "seconds": "seconds",
}  # fmt: skip
"""The fields that are columns of the stored episodes (`agentrl.store.SCHEMA`)."""
_FOUND = {name: EPISODES_SCHEMA.field(column).type for name, column in COLUMNS.items()} | {
    **dict.fromkeys(("turns", "tokens", "calls", "failed"), pa.int32()),
    **dict.fromkeys(("tool", "error"), pa.list_(pa.string())),
}
FOUND_SCHEMA = pa.schema(list(_FOUND.items()))
"""The columns of `Found.rows`, which are the fields of a query. `tokens` counts the sampled tokens,
`calls` the tool calls that were run, `failed` those of them that failed. `tool` has the name of the
tool of each call and `error` its kind of error, "" if it succeeded (`ToolResult.error`)."""
_OPERATORS = {
    "=": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_WORD = re.compile(r'(?:"[^"]*"|[^\s"])+')
_TERM = re.compile(r"([A-Za-z_]+)(<=|>=|!=|=|<|>)(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Term:
    """A comparison of a field with a value."""

    name: str
    operator: str
    value: str | float | bool


@dataclass(frozen=True, slots=True)
class Query:
    """All terms must hold, and the messages must contain all words; case does not matter."""

    terms: Sequence[Term] = ()
    words: Sequence[str] = ()

    def values(self, name: str) -> list[Any]:
        """Return the values that a field must equal."""
        return [t.value for t in self.terms if t.name == name and t.operator == "="]


@dataclass(frozen=True, slots=True)
class Found:
    """Some of the episodes that a query finds, in the order of steps."""

    rows: pa.Table
    """The columns `FOUND_SCHEMA`."""
    total: int
    """The number of all episodes that the query finds."""
    choices: dict[str, list[str]] = field(default_factory=dict)
    """If nothing was found: the values of each text field that the query names and that no episode
    of the chosen steps has as asked for."""


def parse_query(text: str) -> Query:
    """Return the query of a text.

    Raises:
        UserError: a field is unknown, or its operator or value does not fit.
    """
    if text.count('"') % 2:
        raise UserError(f"the query {text!r} has a quote without its end: add a '\"'")
    terms, words = [], []
    for part in _WORD.findall(text):
        match = _TERM.fullmatch(part)
        if match:
            terms.append(_parse_term(part, *match.groups()))
        elif word := part.replace('"', ""):
            words.append(word)
    return Query(terms, words)


def _parse_term(part: str, name: str, operator: str, value: str) -> Term:
    if name not in _FOUND:
        other = next((n for n, column in COLUMNS.items() if column == name), None)
        hint = f" Did you mean {other!r}?" if other else did_you_mean(name, _FOUND)
        raise UserError(
            f"unknown field {name!r} in {part!r}.{hint} Fields: {', '.join(_FOUND)}."
            f" To search for the text, write it in quotes: '\"{part}\"'"
        )
    kind, value = _FOUND[name], value.replace('"', "")
    if pa.types.is_boolean(kind):
        if operator != "=" or value.lower() not in ("true", "false"):
            raise UserError(f"{part!r}: {name} is true or false: {name}=true or {name}=false")
        return Term(name, operator, value.lower() == "true")
    if pa.types.is_string(kind) or pa.types.is_list(kind):
        if operator not in ("=", "!="):
            raise UserError(f"{part!r}: {name} is text, so {operator} cannot be used: = or !=")
        return Term(name, operator, value)
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if number != number:
        raise UserError(f"{part!r}: {name} is a number, and {value!r} is none: {name}{operator}1")
    return Term(name, operator, number)


@dataclass(frozen=True, slots=True)
class SearchProgress:
    """The result of a search in one more file."""

    rows: pa.Table
    """Those of the chosen rows that the file has; the columns `FOUND_SCHEMA`."""
    total: int
    """The number of episodes that were found until now."""
    searched: int
    """The number of files that were searched until now."""
    files: int
    """The number of files to search."""


def find_episodes(run: Run, query: Query, after: int = 0, limit: int | None = None) -> Found:
    """Return the episodes that a query finds.

    The numbers of an episode's turns are decoded only for rows that the query or the result needs,
    so that a run of 20,000 episodes takes less than a second.

    Args:
        run: the run; it may still be training.
        query: the result of `parse_query`.
        after: the number of found episodes to skip.
        limit: the number of episodes to return; None: all.

    Raises:
        DataError: a file is damaged.
    """
    tables, total = [FOUND_SCHEMA.empty_table()], 0
    for progress in search_files(run, query, after, limit):
        tables.append(progress.rows)
        total = progress.total
    return Found(pa.concat_tables(tables), total, {} if total else find_choices(run, query))


def search_files(
    run: Run, query: Query, after: int = 0, limit: int | None = None
) -> Generator[SearchProgress, None, None]:
    """Yield what a query finds file by file, in the order of steps.

    A few files are searched ahead. If the iterator is closed, the files that follow are not read.
    It has the arguments and errors of `find_episodes`.
    """
    files = [f for f in run.store.files() if run.has_step(f[1]) and _may_contain(query, f)]
    ahead: deque[Future[pa.Table]] = deque()
    waiting, total = iter(files), 0
    threads = min(4, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as pool:
        try:
            for searched, (path, _, _) in enumerate(files, 1):
                for file in itertools.islice(waiting, 4 * threads - len(ahead)):
                    ahead.append(pool.submit(_find_in_file, run, query, file[0]))
                part = ahead.popleft().result()
                start, total = total, total + len(part)
                end = total if limit is None else after + limit
                chosen = part.slice(max(0, after - start), max(0, end - max(start, after)))
                rows = FOUND_SCHEMA.empty_table()
                if len(chosen):
                    rows = _read_fields(run, path, COLUMNS).take(chosen["row"])
                    rows = _with_turns(run, path, rows).select(FOUND_SCHEMA.names)
                yield SearchProgress(rows, total, searched, len(files))
        finally:
            pool.shutdown(cancel_futures=True)


def _may_contain(query: Query, file: tuple[Path, int, str]) -> bool:
    """Return whether the terms on step and split hold for a file."""
    of_file = {"step": file[1], "split": file[2]}
    return all(
        _OPERATORS[t.operator](of_file[t.name], t.value).as_py()
        for t in query.terms
        if t.name in of_file
    )


def _find_in_file(run: Run, query: Query, path: Path) -> pa.Table:
    """Return the rows of a file that the query finds: `row`, their position in the file.

    Only the columns that the terms name are read.
    """
    of_columns = [term for term in query.terms if term.name in COLUMNS]
    of_turns = [term for term in query.terms if term.name not in COLUMNS]
    table = _read_fields(run, path, {term.name for term in of_columns})
    for term in of_columns:
        table = table.filter(_OPERATORS[term.operator](table[term.name], term.value))
    if of_turns and len(table):
        table = _with_turns(run, path, table)
        for term in of_turns:
            table = table.filter(_holds_for_turns(table, term, query.values("tool")))
    if query.words and len(table):
        table = table.filter(_contains(run, path, table, query.words))
    return table.select(["row"])


def _read_fields(run: Run, path: Path, names: Collection[str]) -> pa.Table:
    """Return fields of `COLUMNS` for all rows of a file, and `row`."""
    stored = run.store.read_columns(path, [COLUMNS[name] for name in names] or ["step"])
    table = pa.table({"row": np.arange(len(stored))})
    for name in names:
        table = table.append_column(name, stored[COLUMNS[name]].cast(_FOUND[name]))
    return table


def _with_turns(run: Run, path: Path, table: pa.Table) -> pa.Table:
    """Add the fields that follow from the turns of the rows."""
    texts = run.store.read_columns(path, ["turns"])["turns"].take(table["row"])
    rows = []
    for row, text in zip(table["row"].to_pylist(), texts.to_pylist(), strict=True):
        with run.store.row_of(path, row):
            rows.append(_summarize(parse_json(text)))
    for name, kind in _FOUND.items():
        if name not in COLUMNS:
            table = table.append_column(name, pa.array([row[name] for row in rows], kind))
    return table


def _summarize(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    calls = [*calls_of(turns)]
    return {
        "turns": len(turns),
        "tokens": sum(turn["end"] - turn["start"] for turn in turns),
        "calls": len(calls),
        "failed": sum(not result["ok"] for _, _, result in calls),
        "tool": [call["name"] for _, call, _ in calls],
        "error": [result["error"] for _, _, result in calls],
    }


def _holds_for_turns(table: pa.Table, term: Term, tools: Sequence[str]) -> Any:
    """Return for each row whether a term on a field of its turns holds.

    A term on `error` is about the calls of the tools that the query asks for, if it names any.
    """
    if not pa.types.is_list(_FOUND[term.name]):
        return _OPERATORS[term.operator](table[term.name], term.value)
    names = table["tool"].to_pylist()
    values = table[term.name].to_pylist()
    only = tools if term.name == "error" else ()
    has_value = (
        any(v == term.value and (not only or n in only) for n, v in zip(*row, strict=True))
        for row in zip(names, values, strict=True)
    )
    return pa.array([has == (term.operator == "=") for has in has_value], pa.bool_())


def _contains(run: Run, path: Path, table: pa.Table, words: Iterable[str]) -> Any:
    """Return for each row whether its messages contain all words."""
    texts = run.store.read_columns(path, ["messages"])["messages"].take(table["row"])
    # First the JSON text, which contains a word if a message does; then the messages themselves,
    # because the JSON also contains the names of keys.
    mask = np.ones(len(texts), bool)
    for word in words:
        as_json = orjson.dumps(word).decode()[1:-1]
        mask &= pc.match_substring(texts, as_json, ignore_case=True).to_numpy()
    rows = np.flatnonzero(mask)
    joined = []
    for row, text in zip(
        table["row"].take(rows).to_pylist(), texts.take(rows).to_pylist(), strict=True
    ):
        with run.store.row_of(path, row):
            joined.append("\0".join(message["content"] for message in parse_json(text)))
    joined = pa.array(joined, pa.string())
    for word in words:
        mask[rows] &= pc.match_substring(joined, word, ignore_case=True).to_numpy(False)
    return pa.array(mask)


def find_choices(run: Run, query: Query) -> dict[str, list[str]]:
    """Return the values of each text field whose value in the query no episode has.

    If no episode is of the chosen steps, return the first and the last step of the run instead.
    """
    names = [t.name for t in query.terms if t.operator == "=" and isinstance(t.value, str)]
    names = [name for name in names if name not in ("episode", "sample")]
    steps = run.store.all_steps()
    asked = [t for t in query.terms if t.name == "step"]
    files = [file for file in run.store.files() if run.has_step(file[1])]
    if steps and not any(_may_contain(Query(asked), file) for file in files):
        return {"step": [f"{steps[0]} to {steps[-1]}"]}
    if not names:
        return {}
    kept = {"step", "split"} - set(names)
    rows = find_episodes(run, Query([t for t in query.terms if t.name in kept])).rows
    choices = {}
    for name in names:
        column = rows[name]
        values = pc.list_flatten(column) if pa.types.is_list(column.type) else column
        counts = Counter(value for value in values.to_pylist() if value)
        existing = [value for value, _ in sorted(counts.items(), key=lambda kv: (-kv[1], kv[0]))]
        if not set(query.values(name)) <= set(existing):
            choices[name] = existing
    return choices
