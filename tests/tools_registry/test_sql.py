"""The shelf's SQL: it answers what can be read, and nothing else happens, whatever is asked."""

from __future__ import annotations

import resource
import sqlite3
import tempfile
import time
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl import Infrastructure, ToolError, UserError
from agentrl.errors import DataError
from agentrl.registry import load_file


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "databases"
    path.mkdir()
    with sqlite3.connect(path / "shop.db") as db:
        db.execute("CREATE TABLE goods (name TEXT, price INTEGER, photo BLOB)")
        rows = [("pen", 3, b"\x01\x02"), ("ink | blue", 7, None), ("cup", 9, None)]
        db.executemany("INSERT INTO goods VALUES (?, ?, ?)", rows)
        db.execute("CREATE TABLE many (n INTEGER)")
        db.executemany("INSERT INTO many VALUES (?)", [(n,) for n in range(500)])
    db.close()
    return path


@pytest.fixture
def sql(folder, monkeypatch):
    monkeypatch.delenv("AGENTRL_SQL_DATABASES", raising=False)
    module = load_file("shelf:sql")
    module.use_databases(folder)
    return module


def test_answers(sql):
    shop = sql.Sql("shop")
    assert shop.sql("SELECT name, price FROM goods WHERE price < 8 ORDER BY price;") == (
        "name | price\npen | 3\nink | blue | 7\n(2 rows)"
    )
    assert shop.sql("SELECT photo FROM goods LIMIT 2") == "photo\nx'0102'\nNULL\n(2 rows)"
    assert shop.sql("-- how much?\nSELECT sum(price) AS s FROM goods") == "s\n19\n(1 row)"
    assert shop.sql("WITH g AS (SELECT 1 AS a) SELECT a FROM g") == "a\n1\n(1 row)"
    assert shop.sql("SELECT 1 WHERE 0") == "1\n(0 rows)"
    assert shop.sql_schema().startswith(
        "CREATE TABLE goods (name TEXT, price INTEGER, photo BLOB);"
    )


def test_long_answers_are_cut(sql):
    shop = sql.Sql("shop")
    lines = shop.sql("SELECT n FROM many").splitlines()
    assert len(lines) == 52 and lines[-1] == "(first 50 rows shown; there are more)"
    wide = shop.sql("SELECT printf('%.*c', 19000, 'x') AS w FROM many")
    assert len(wide) < 8200 and "x" * 200 + "..." in wide and "characters omitted" in wide


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("SELECT prise FROM goods", "no such column: prise"),
        ("SELEC 1", 'near "SELEC": syntax error'),
        ("", "use one SELECT statement"),
        ("SELECT 1; SELECT 2", "one statement at a time"),
        ("SELECT ?", "Incorrect number of bindings"),
        ("SELECT '" + "x" * 5000 + "'", "maximum 5000"),
        ("INSERT INTO goods VALUES ('x', 1, NULL)", "is read-only"),
        ("UPDATE goods SET price = 0", "is read-only"),
        ("DELETE FROM goods", "is read-only"),
        ("DROP TABLE goods", "is read-only"),
        ("CREATE TEMP TABLE t (a)", "is read-only"),
        ("ATTACH '{folder}/other.db' AS other", "is read-only"),
        ("VACUUM INTO '{folder}/copy.db'", "is read-only"),
        ("PRAGMA journal_mode = WAL", "is read-only"),
        ("PRAGMA query_only = 0", "is read-only"),
        ("PRAGMA writable_schema = 1", "is read-only"),
        ("SELECT * FROM pragma_database_list", "is read-only"),
        ("BEGIN EXCLUSIVE", "is read-only"),
        ("SELECT load_extension('/lib/x86_64-linux-gnu/libc.so.6')", "is read-only"),
        ("SELECT fts3_tokenizer('simple')", "is read-only"),
        ("SELECT readfile('/etc/passwd')", "no such function"),
        ("SELECT writefile('{folder}/x', 'y')", "no such function"),
        ("SELECT hex(zeroblob(1000000000))", "too big"),
        ("SELECT hex(zeroblob(10001))", "too big"),
        ("SELECT 'a' LIKE '%" + "a" * 100 + "'", "pattern too complex"),
        ("SELECT 'a' GLOB '*" + "a" * 100 + "'", "pattern too complex"),
        ("SELECT json_patch('{{}}', '{{}}')", "not authorized to use function: json_patch"),
        ("; SELECT " + "+".join(["abs(n)"] * 101) + " FROM many", "syntax error"),
        ("SELECT " + "+".join(["abs(n)"] * 101) + " FROM many", "101 function calls, maximum"),
        ("-- nothing", "use one SELECT statement"),
        ("REINDEX", "use one SELECT statement"),
        ("ANALYZE", "is read-only"),
    ],
)  # fmt: skip
def test_other_statements_are_refused(sql, folder, query, message):
    before = {f.name: f.read_bytes() for f in folder.iterdir()}
    with pytest.raises(ToolError) as e:
        sql.Sql("shop").sql(query.format(folder=folder))
    assert message in str(e.value)
    assert {f.name: f.read_bytes() for f in folder.iterdir()} == before


ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) "


@pytest.mark.parametrize(
    "query",
    [
        ENDLESS + "SELECT max(x) FROM c",
        ENDLESS + "SELECT x, hex(randomblob(9000)) AS h FROM c ORDER BY h LIMIT 1",
        "WITH RECURSIVE c(x) AS (SELECT 1 UNION SELECT x + 1 FROM c) SELECT count(*) FROM c",
        "SELECT count(*) FROM many a, many b, many c, many d",
        ENDLESS + "SELECT sum(instr(hex(zeroblob(9900)), hex(zeroblob(4900)) || '1')) FROM c",
        "SELECT sum(replace(hex(zeroblob(9900)), '0', 'a') LIKE '%a%a%a%a%ab%b' || a.n)"
        " FROM many a, many b",
    ],
    ids=["endless", "sort", "set", "join", "quadratic", "like"],
)  # fmt: skip
def test_queries_that_take_too_much_are_ended(sql, query, monkeypatch):
    monkeypatch.setattr(sql, "MAX_SECONDS", 0.3)
    monkeypatch.setattr(sql, "MEMORY", 64 * 1024 * 1024)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.thread_time()
    with pytest.raises(ToolError, match=r"timed out after 0\.3 s|too much memory"):
        sql.Sql("shop").sql(query)
    assert time.thread_time() - began < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 150 * 1024


ROW = (
    "WITH v AS MATERIALIZED (SELECT hex(zeroblob(5000)) AS h, hex(zeroblob(2500)) || '1' AS p,"
    " replace(hex(zeroblob(800)), '0', 'b') || '0' AS t,"
    " replace(hex(zeroblob(700)), '0', '1,') AS j) "
)
STEPS = {
    "instr": "instr(h, p)",
    "replace": "length(replace(h, p, ''))",
    "like": "h LIKE '" + "%0" * 45 + "1'",
    "glob": "h GLOB '" + "*[a-z0-9]" * 9 + "1'",
    "trim": "length(trim(h, t))",
    "printf": "length(printf('%.*f', 19000, 1e300 / 3))",
    "json": "json_valid('[' || j || '1]')",
}


@pytest.mark.parametrize("expression", STEPS.values(), ids=STEPS)
def test_no_step_is_long(sql, expression, monkeypatch):
    """A row of a subquery that is used 32 times is one step: by its time the cap is exceeded."""
    monkeypatch.setattr(sql, "MAX_SECONDS", 0.1)
    query = (
        f"{ROW}, a AS (SELECT {expression} AS x FROM v), b AS (SELECT x+x+x+x+x+x+x+x AS x FROM a)"
        f" SELECT x+x+x+x AS x FROM b"
    )
    began = time.thread_time()
    try:
        sql.Sql("shop").sql(query)
    except ToolError as e:
        assert "timed out after" in str(e)
    assert time.thread_time() - began < 1


@pytest.mark.parametrize(
    "query",
    [
        "SELECT "
        + "+".join(
            f"(hex(zeroblob(9990)) LIKE '%'||substr(hex(zeroblob(9000)),1,9000)||'{i}')"
            for i in range(6)
        ),
        "WITH a AS (SELECT instr(price, 'x') AS x FROM goods), b AS (SELECT x+x+x+x+x+x+x+x AS x"
        " FROM a), c AS (SELECT x+x+x+x+x+x+x+x AS x FROM b) SELECT x+x FROM c",
        "WITH x0 AS (SELECT 1 AS a),"
        + ",".join(f"x{i} AS (SELECT p.a FROM x{i - 1} p, x{i - 1} q)" for i in range(1, 60))
        + " SELECT * FROM x59",
    ],
    ids=["likes", "copied", "doubled"],
)
def test_queries_that_could_not_be_interrupted_are_refused(sql, query, monkeypatch):
    monkeypatch.setattr(sql, "MEMORY", 32 * 1024 * 1024)
    began = time.thread_time()
    with pytest.raises(ToolError, match=r"too complex|128 function calls|too much memory"):
        sql.Sql("shop").sql(query)
    assert time.thread_time() - began < 2


def test_explanations_are_given(sql):
    assert "SCAN goods" in sql.Sql("shop").sql(" explain QUERY PLAN SELECT * FROM goods")


TRIMMED = (
    st.none()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.integers(10**14, 10**15).map(lambda n: n + 0.5)  # between two texts of 15 digits
    | st.text(" 0ab.e+I", max_size=8)
)


@given(TRIMMED, TRIMMED, st.sampled_from(["trim", "ltrim", "rtrim"]))
def test_trim_is_that_of_sqlite(value, characters, name):
    module = load_file("shelf:sql")
    with closing(sqlite3.connect(":memory:")) as own, tempfile.NamedTemporaryFile() as file:
        query = f"SELECT {name}(?, ?)"
        with closing(module._connect(Path(file.name))) as shelf:
            ours = shelf.execute(query, (value, characters)).fetchone()
        assert ours == own.execute(query, (value, characters)).fetchone()


def test_rows_name_databases_of_the_folder_alone(sql, folder, tmp_path):
    with sqlite3.connect(tmp_path / "secret.db") as db:
        db.execute("CREATE TABLE t (a)")
    db.close()
    (folder / "link.db").symlink_to(tmp_path / "secret.db")
    outside = ("../secret", "../secret.db", str(tmp_path / "secret"), "secret", "link", "/", ".")
    for name in (*outside, "shop.db", "file:shop", "shop.db?mode=rw"):
        with pytest.raises(DataError, match=r"no database .* There are: shop"):
            sql.Sql(name)
    assert sql.Sql().file == folder / "shop.db"


def test_a_missing_folder_of_databases_is_an_error_with_advice(sql, tmp_path, folder):
    with pytest.raises(UserError, match=r"no databases in .*give a folder with files \*\.db"):
        sql.use_databases(tmp_path)
    sql._folder = None
    with pytest.raises(Infrastructure, match="set AGENTRL_SQL_DATABASES to their folder"):
        sql.Sql("shop")
    (folder / "torn.db").write_bytes(b"no database at all, but longer than a header" * 50)
    sql.use_databases(folder)
    with pytest.raises(Infrastructure, match=r"torn\.db cannot be opened: file is not a database"):
        sql.Sql("torn").sql("SELECT 1")


def test_the_variable_names_the_folder(folder, monkeypatch):
    monkeypatch.setenv("AGENTRL_SQL_DATABASES", str(folder))
    assert load_file("shelf:sql").Sql("shop").sql("SELECT 2 AS two") == "two\n2\n(1 row)"
    monkeypatch.setenv("AGENTRL_SQL_DATABASES", str(folder / "nowhere"))
