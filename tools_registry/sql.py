r"""Questions to SQLite databases in SQL: reading only, with bounded time, memory and answers.

Which databases there are is for whoever runs it to say, by a folder: in the variable
AGENTRL_SQL_DATABASES, or in a file of your own:

    from agentrl.registry import load_file

    load_file("shelf:sql").use_databases("data/databases")

A row names one of its files by its stem, `"tools_kwargs": {"sql": {"create_kwargs": {"database":
"shop"}}}` for `shop.db`, and can name nothing else. Every query has a connection of its own, which
may read tables and call functions: whatever else SQL can say is refused by SQLite itself.

    $ AGENTRL_SQL_DATABASES=examples/orders/databases \
        agentrl tools call sql '{"query": "SELECT count(*) AS n FROM orders"}' --file shelf:sql \
        --create-kwargs '{"database": "books"}'
    n
    240
    (1 row)
"""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import closing
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
MAX_VALUE = 100_000
"""Bytes of a value on the way: what one step of SQLite does with it cannot be interrupted."""
MEMORY = 512 * 1024 * 1024
"""Of all queries of a process together; sorted rows count as well."""
STEPS = 100
"""After how many of its instructions SQLite looks at the clock."""

_ALLOWED = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}
_REFUSED_FUNCTIONS = {"load_extension", "fts3_tokenizer"}

_folder: Path | None = None


def use_databases(folder: str | Path) -> None:
    """Let rows name the databases of this folder, in this process.

    Raises:
        UserError: there is no such folder, or no database in it.
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
    """A database for the episode, which can be read."""

    def __init__(self, database: str = "") -> None:
        """Find the database.

        Args:
            database: the stem of a file in the folder; may be left out where it is the only one.

        Raises:
            DataError: there is none of that name.
        """
        self.file = _file(database)

    def sql(self, query: str) -> str:
        """Ask the database in SQL (SQLite). It can only be read.

        Args:
            query: one SELECT statement
        """
        return ask(self.file, query)

    def sql_schema(self) -> str:
        """Read how the tables of the database are defined."""
        return schema(self.file)


def ask(file: Path, query: str) -> str:
    """The rows of a query as text: names of columns, rows, how many there are.

    Raises:
        ToolError: SQLite refuses it, or it takes too much.
        Infrastructure: the database cannot be opened.
    """
    if len(query) > MAX_QUERY:
        raise ToolError(f"the query has {len(query)} characters, at most {MAX_QUERY}")
    with closing(_connect(file)) as connection:
        try:
            cursor = connection.execute(query)
            rows = cursor.fetchmany(MAX_ROWS + 1)
        except (sqlite3.Error, sqlite3.Warning) as e:
            raise ToolError(_said(e)) from None
        except MemoryError:
            raise ToolError("the query needs too much memory") from None
    if cursor.description is None:
        raise ToolError("give one SELECT statement")
    return _table([d[0] for d in cursor.description], rows)


def schema(file: Path) -> str:
    """The statements that made the tables and views."""
    with closing(_connect(file)) as connection:
        made = connection.execute(
            "SELECT sql FROM sqlite_master WHERE type IN ('table', 'view')"
            " AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\' ORDER BY name"
        )
        return _cut("\n".join(f"{sql};" for (sql,) in made)) or "(no tables)"


def _connect(file: Path) -> sqlite3.Connection:
    """A connection that can do nothing but read this file, for `MAX_SECONDS` from now."""
    try:
        connection = sqlite3.connect(f"file:{quote(str(file))}?mode=ro", uri=True)
        connection.execute("SELECT count(*) FROM sqlite_master")
    except sqlite3.Error as e:
        raise Infrastructure(f"the database {file} cannot be opened: {e}") from e
    connection.text_factory = lambda text: text.decode("utf-8", "replace")
    connection.execute("PRAGMA query_only = 1")
    connection.execute("PRAGMA temp_store = MEMORY")  # nothing of a sort goes to the disk
    connection.execute(f"PRAGMA hard_heap_limit = {MEMORY}")
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE)
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    connection.set_authorizer(_authorize)
    end = time.monotonic() + MAX_SECONDS
    connection.set_progress_handler(lambda: time.monotonic() > end, STEPS)
    return connection


def _authorize(action: int, first: Any, second: Any, *_: Any) -> int:
    if action == sqlite3.SQLITE_FUNCTION and str(second).lower() in _REFUSED_FUNCTIONS:
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK if action in _ALLOWED else sqlite3.SQLITE_DENY


def _said(error: Exception) -> str:
    text = str(error)
    if text == "interrupted":
        return f"the query took more than {MAX_SECONDS:g} s"
    if "authoriz" in text or "prohibited" in text:
        return f"{text}: the database can only be read, with one SELECT statement"
    return text


def _table(columns: list[str], rows: list[tuple[Any, ...]]) -> str:
    shown = rows[:MAX_ROWS]
    lines = [" | ".join(columns), *(" | ".join(map(_cell, row)) for row in shown)]
    if len(rows) > MAX_ROWS:
        end = f"(the first {MAX_ROWS} rows; there are more)"
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
    return f"{text[:MAX_ANSWER]}\n[... {len(text) - MAX_ANSWER} characters left out: ask for less]"


def _databases(folder: Path) -> dict[str, Path]:
    """The files that can be named, by stem; a link counts where it stays in the folder."""
    files = (f for f in sorted(folder.iterdir()) if f.suffix in SUFFIXES and f.is_file())
    return {f.stem: f for f in files if f.resolve().parent == folder}


def _file(name: str) -> Path:
    if _folder is None:
        raise Infrastructure(
            f"shelf:sql has no databases: set {DATABASES} to their folder before the run or the"
            " tool server starts, or call its use_databases(FOLDER)"
        )
    known = _databases(_folder)
    if not name and len(known) == 1:
        return next(iter(known.values()))
    if name not in known:
        raise DataError(
            f"no database {name!r}.{did_you_mean(name, known)} There are: {', '.join(known)}"
        )
    return known[name]


if os.environ.get(DATABASES):
    use_databases(os.environ[DATABASES])
