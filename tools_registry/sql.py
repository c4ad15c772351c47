r"""Runs read-only SQL queries on SQLite databases, with bounded time, memory and output.

The environment variable AGENTRL_SQL_DATABASES names the folder of the databases, or your own file
calls `use_databases`:

    from agentrl.registry import load_file

    load_file("shelf:sql").use_databases("data/databases")

A row names one of its files without the suffix: `"tools_kwargs": {"sql": {"create_kwargs":
{"database": "shop"}}}` for `shop.db`. It cannot name other files. Every query has its own
connection, which may read tables and call functions. SQLite itself refuses everything else.

    $ AGENTRL_SQL_DATABASES=examples/orders/databases \
        agentrl tools call sql '{"query": "SELECT count(*) AS n FROM orders"}' --file shelf:sql \
        --create-kwargs '{"database": "books"}'
    n
    240
    (1 row)
"""

from __future__ import annotations

import os
import re
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from agentrl import ToolError, tool
from agentrl.errors import DataError, Infrastructure, UserError
from agentrl.registry import did_you_mean

DATABASES = "AGENTRL_SQL_DATABASES"
SUFFIXES = (".db", ".sqlite", ".sqlite3")
MAX_SECONDS = 2.0
MAX_ROWS = 50
MAX_CELL = 200
MAX_ANSWER = 8000
MAX_QUERY = 5000
MAX_VALUE = 20_000
"""Limit of an intermediate value in bytes. A single step of SQLite on a value cannot be
interrupted."""
MAX_PATTERN = 100
"""Limit of a LIKE or GLOB pattern in bytes. The time grows with the product of both lengths."""
MAX_FUNCTIONS = 100
"""Limit of function calls per row. All of them may run once between two checks of the clock."""
MAX_PROGRAM = 10_000
"""Limit of instructions in the program that SQLite compiles from a query."""
MEMORY = 64 * 1024 * 1024
"""Memory limit of all queries in a process. It also bounds a sort, which is a single step."""
STEPS = 25
"""How often SQLite calls the function that checks the clock, in instructions."""

_ALLOWED = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}
_REFUSED_FUNCTIONS = {"load_extension", "fts3_tokenizer", "json_patch"}
"""Functions that are not allowed. json_patch compares all keys with all keys in a single step."""

_EXPLAIN = re.compile(r"\s*explain\b", re.IGNORECASE)
_COMMENTS = re.compile(r"--[^\n]*+|/\*[\s\S]*?(?:\*/|\Z)|;")

_folder: Path | None = None


def use_databases(folder: str | Path) -> None:
    """Let rows name the databases of this folder, in this process.

    Raises:
        UserError: the folder does not exist, or contains no database.
    """
    global _folder
    path = Path(folder).expanduser().resolve()
    if not path.is_dir() or not _databases(path):
        raise UserError(
            f"no databases in {folder} (looked at {path}): give a folder with files"
            f" *{', *'.join(SUFFIXES)}"
        )
    _folder = path


@tool(timeout=30, idempotent=True)
class Sql:
    """A read-only database for the episode."""

    def __init__(self, database: str = "") -> None:
        """Find the database.

        Args:
            database: the name of a file in the folder, without its suffix. Optional if it is the
                only one.

        Raises:
            DataError: there is no such database.
        """
        self.file = _file(database)

    def sql(self, query: str) -> str:
        """Run a read-only SQL query (SQLite).

        Args:
            query: one SELECT statement
        """
        return run_query(self.file, query)

    def sql_schema(self) -> str:
        """Return the CREATE statements of the tables and views."""
        return schema(self.file)


def run_query(file: Path, query: str) -> str:
    """Return the result of a query as text: column names, rows, number of rows.

    Raises:
        ToolError: SQLite refuses the query, or it exceeds a limit.
        Infrastructure: the database cannot be opened.
    """
    if len(query) > MAX_QUERY:
        raise ToolError(f"the query has {len(query)} characters, maximum {MAX_QUERY}")
    with closing(_connect(file)) as connection:
        try:
            _check(connection, query)
            cursor = connection.execute(query)
            rows = cursor.fetchmany(MAX_ROWS + 1)
        except (sqlite3.Error, sqlite3.Warning) as e:
            raise ToolError(_describe_error(e)) from None
        except MemoryError:
            raise ToolError("the query needs too much memory") from None
    if cursor.description is None:
        raise ToolError("use one SELECT statement")
    return _table([d[0] for d in cursor.description], rows)


def _check(connection: sqlite3.Connection, query: str) -> None:
    """Refuse queries that could run for long without a check of the clock.

    The compiled program is counted, not the text: SQLite copies the expressions of a subquery to
    each of its uses.
    """
    if _EXPLAIN.match(query):
        return  # EXPLAIN shows the program and does not run it
    try:
        program = connection.execute(f"EXPLAIN {query}").fetchall()
    except sqlite3.OperationalError as e:
        if str(e) == "incomplete input" and not _COMMENTS.sub("", query).strip():
            raise ToolError("use one SELECT statement") from None
        raise
    calls = sum(opcode in ("Function", "PureFunc") for _, opcode, *_ in program)
    for count, what, maximum in (
        (len(program), "instructions", MAX_PROGRAM),
        (calls, "function calls", MAX_FUNCTIONS),
    ):
        if count > maximum:
            raise ToolError(f"the query has {count} {what}, maximum {maximum}: use a simpler query")


def schema(file: Path) -> str:
    """Return the statements that created the tables and views."""
    with closing(_connect(file)) as connection:
        statements = connection.execute(
            "SELECT sql FROM sqlite_master WHERE type IN ('table', 'view')"
            " AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\' ORDER BY name"
        )
        return _cut("\n".join(f"{sql};" for (sql,) in statements)) or "(no tables)"


def _connect(file: Path) -> sqlite3.Connection:
    """Open a connection that can only read this file, for `MAX_SECONDS` from now."""
    try:
        connection = sqlite3.connect(f"file:{quote(str(file))}?mode=ro", uri=True)
        connection.execute("SELECT count(*) FROM sqlite_master")
    except sqlite3.Error as e:
        raise Infrastructure(f"the database {file} cannot be opened: {e}") from e
    connection.text_factory = lambda text: text.decode("utf-8", "replace")
    connection.execute("PRAGMA query_only = 1")
    connection.execute("PRAGMA temp_store = MEMORY")  # a sort must not write to the disk
    connection.execute(f"PRAGMA hard_heap_limit = {MEMORY}")
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, MAX_PATTERN)
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    for name, strip in (("trim", str.strip), ("ltrim", str.lstrip), ("rtrim", str.rstrip)):
        connection.create_function(name, 2, partial(_trim, strip), deterministic=True)
    connection.set_authorizer(_authorize)
    end = time.monotonic() + MAX_SECONDS
    connection.set_progress_handler(lambda: time.monotonic() > end, STEPS)
    return connection


def _trim(strip: Callable[[str, str], str], value: Any, characters: Any) -> str | None:
    """Replace SQLite's trim, which compares all characters with all characters in a single step."""
    if value is None or characters is None:
        return None
    return strip(_text(value), "".join(set(_text(characters))))


def _text(value: str | bytes | float) -> str:
    """Return the text of a value as SQLite writes it."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, float):  # How digits are rounded depends on SQLite's version.
        with closing(sqlite3.connect(":memory:")) as database:
            return database.execute("SELECT CAST(? AS TEXT)", (value,)).fetchone()[0]
    return str(value)


def _authorize(action: int, first: Any, second: Any, *_: Any) -> int:
    if action == sqlite3.SQLITE_FUNCTION and str(second).lower() in _REFUSED_FUNCTIONS:
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK if action in _ALLOWED else sqlite3.SQLITE_DENY


def _describe_error(error: Exception) -> str:
    text = str(error)
    if text == "interrupted":
        return f"the query timed out after {MAX_SECONDS:g} s"
    if "authoriz" in text or "prohibited" in text:
        return f"{text}: the database is read-only, use one SELECT statement"
    return text


def _table(columns: list[str], rows: list[tuple[Any, ...]]) -> str:
    visible = rows[:MAX_ROWS]
    lines = [" | ".join(columns), *(" | ".join(map(_cell, row)) for row in visible)]
    if len(rows) > MAX_ROWS:
        end = f"(first {MAX_ROWS} rows shown; there are more)"
    else:
        end = f"({len(rows)} row{'s' * (len(rows) != 1)})"
    return f"{_cut(chr(10).join(lines))}\n{end}"


def _cell(value: Any) -> str:
    if value is None:
        return "NULL"
    text = f"x'{value[: MAX_CELL // 2].hex()}'" if isinstance(value, bytes) else str(value)
    return text if len(text) <= MAX_CELL else f"{text[:MAX_CELL]}..."


def _cut(text: str) -> str:
    if len(text) <= MAX_ANSWER:
        return text
    omitted = len(text) - MAX_ANSWER
    return f"{text[:MAX_ANSWER]}\n[... {omitted} characters omitted; select fewer columns or rows]"


def _databases(folder: Path) -> dict[str, Path]:
    """Return the databases that rows can name. A link counts if its target is in the folder."""
    files = (f for f in sorted(folder.iterdir()) if f.suffix in SUFFIXES and f.is_file())
    return {f.stem: f for f in files if f.resolve().parent == folder}


def _file(name: str) -> Path:
    if _folder is None:
        raise Infrastructure(
            f"shelf:sql has no databases: set {DATABASES} to their folder before the run or the"
            " tool server starts, or call its use_databases(FOLDER)"
        )
    databases = _databases(_folder)
    if not name and len(databases) == 1:
        return next(iter(databases.values()))
    if name not in databases:
        raise DataError(
            f"no database {name!r}.{did_you_mean(name, databases)} There are:"
            f" {', '.join(databases)}"
        )
    return databases[name]


if os.environ.get(DATABASES):
    use_databases(os.environ[DATABASES])
