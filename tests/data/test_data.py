from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from datetime import date, datetime, time, timedelta
from decimal import Decimal

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import agentrl.agent_loops
import agentrl.interactions
from agentrl import registry
from agentrl.data import RowOrder, check_samples, load_samples, read_rows, write_rows
from agentrl.errors import DataError
from agentrl.tools import tool
from agentrl.trajectory import Message, Sample


@pytest.fixture(autouse=True)
def tools(no_tools):
    """Two function tools and a class tool, registered for the test alone."""

    @tool
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    @tool
    def search(query: str) -> str:
        """Search."""
        return query

    @tool
    class Notebook:
        """Notes."""

        def __init__(self, sample: Sample, capacity: int = 10):
            self.capacity = capacity

        def write(self, line: str) -> str:
            """Write a line."""
            return line


def jsonl(folder, *rows):
    path = folder / "rows.jsonl"
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return str(path)


def parquet(folder, *rows):
    """As pandas or datasets would write it: dictionaries become null-filled structs."""
    path = folder / "rows.parquet"
    names = dict.fromkeys(name for row in rows for name in row)
    pq.write_table(pa.table({name: [row.get(name) for row in rows] for name in names}), path)
    return str(path)


def refused(path, check=False):
    with pytest.raises(DataError) as e:
        samples = load_samples(path, "tool_agent")
        if check:
            check_samples(samples, path)
    return str(e.value)


# -- rows to samples ----------------------------------------------------------------------------


def test_a_plain_row(tmp_path):
    path = jsonl(
        tmp_path,
        {
            "id": "q7",
            "prompt": "What is 2+3?",
            "agent_name": "tool_agent",
            "data_source": "sums",
            "ground_truth": "5",
            "tools": ["add", "notebook"],
            "tools_kwargs": {"notebook": {"create_kwargs": {"capacity": 3}}},
            "interaction": "gsm8k",
            "interaction_kwargs": {"ground_truth": "5"},
            "level": 2,
        },
        {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]},
    )
    first, second = load_samples(path, "react_agent")
    assert first == Sample(
        id="q7",
        prompt=(Message("user", "What is 2+3?"),),
        agent_name="tool_agent",
        data_source="sums",
        ground_truth="5",
        tools=("add", "notebook"),
        tools_kwargs={"notebook": {"create_kwargs": {"capacity": 3}}},
        interaction="gsm8k",
        interaction_kwargs={"ground_truth": "5"},
        extra={"level": 2},
        row=0,
    )
    assert second.prompt == (Message("system", "Be brief."), Message("user", "Hi"))
    assert (second.id, second.agent_name, second.tools) == ("1", "react", ())
    check_samples([first, second], path)


VERL = {
    "data_source": "openai/gsm8k",
    "agent_name": "tool_agent",
    "prompt": [{"role": "user", "content": "What is 2+3?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "5"},
    "extra_info": {
        "split": "train",
        "index": 0,
        "question": "What is 2+3?",
        "need_tools_kwargs": True,
        "tools_kwargs": {"notebook": {"create_kwargs": {"capacity": 3}}},
        "interaction_kwargs": {
            "name": "gsm8k", "query": "What is 2+3?", "ground_truth": "5",
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_a_verl_row(tmp_path, write):
    path = write(tmp_path, VERL)
    (sample,) = load_samples(path)
    assert sample == Sample(
        id="0",
        prompt=(Message("user", "What is 2+3?"),),
        agent_name="tool_agent",
        data_source="openai/gsm8k",
        ground_truth="5",
        tools=("notebook",),
        tools_kwargs={"notebook": {"create_kwargs": {"capacity": 3}}},
        interaction="gsm8k",
        interaction_kwargs={"query": "What is 2+3?", "ground_truth": "5"},
        extra={"ability": "math", "split": "train", "index": 0, "question": "What is 2+3?"},
        row=0,
    )
    check_samples([sample], path)


UNNAMED = {
    **VERL,
    "extra_info": {
        "interaction_kwargs": {"query": "What is 2+3?", "ground_truth": "5"},
    },
}
"""A row of verl's scripts for runs with tools: its interaction_kwargs name no interaction."""


def test_interaction_kwargs_without_a_name_are_ignored_as_in_verl(tmp_path, caplog):
    (sample,) = load_samples(jsonl(tmp_path, UNNAMED))
    assert (sample.interaction, sample.interaction_kwargs) == ("", {})
    assert "rows.jsonl: interaction_kwargs without a name are ignored" in caplog.text
    assert "(rows: 1)" in caplog.text
    caplog.clear()
    load_samples(jsonl(tmp_path, VERL))
    assert not caplog.text


def test_interaction_kwargs_without_a_name_are_those_of_gsm8k_if_a_file_defines_it(tmp_path):
    class Teacher(agentrl.Interaction):
        async def respond(self, messages):
            return None

    with registry.interactions.isolated():
        agentrl.interaction("riddle")(Teacher)
        with pytest.raises(DataError, match=r"has no name, and the files of the run define riddle"):
            load_samples(jsonl(tmp_path, UNNAMED))
        agentrl.interaction("gsm8k")(Teacher)
        (sample,) = load_samples(jsonl(tmp_path, UNNAMED))
    assert sample.interaction == "gsm8k"
    assert sample.interaction_kwargs == {"query": "What is 2+3?", "ground_truth": "5"}


def test_kwargs_written_as_json_in_parquet(tmp_path):
    extra = VERL["extra_info"]
    inner = {key: json.dumps(extra[key]) for key in ("tools_kwargs", "interaction_kwargs")}
    structs = load_samples(parquet(tmp_path, VERL))
    assert load_samples(parquet(tmp_path, {**VERL, "extra_info": extra | inner})) == structs
    whole = {**VERL, "extra_info": json.dumps(extra), "reward_model": '{"ground_truth": "5"}'}
    assert load_samples(parquet(tmp_path, whole)) == structs


ROWS = [
    {"prompt": "a", "tools": ["add"]},
    {"prompt": "b", "tools_kwargs": {"notebook": {"create_kwargs": {"capacity": 3}}}},
    {"prompt": "c", "tools_kwargs": {"search": {"create_kwargs": {"k": 2}}}},
    {"prompt": "d", "interaction": "gsm8k", "interaction_kwargs": {"ground_truth": "5"}},
    {"prompt": "e", "extra_info": {"tool_selection": ["search"], "y": {"z": 1.5}}},
    {"prompt": "f", "extra_info": {"x": [1]}},
]


def test_rows_with_different_tools_are_kept_by_every_format(tmp_path):
    expected = load_samples(jsonl(tmp_path, *ROWS))
    assert [s.tools for s in expected[:3]] == [("add",), ("notebook",), ("search",)]
    write_rows(tmp_path / "ours.parquet", ROWS)
    assert load_samples(str(tmp_path / "ours.parquet")) == expected
    foreign = parquet(tmp_path, *ROWS)
    filled = {"notebook": {"create_kwargs": {"capacity": 3}}, "search": None}
    assert pq.read_table(foreign)["tools_kwargs"][1].as_py() == filled
    assert load_samples(foreign) == expected


def test_empty_kwargs_are_kept_by_parquet(tmp_path):
    rows = [*ROWS, {"prompt": "f", "tools_kwargs": {"search": {"create_kwargs": {}}}}]
    write_rows(tmp_path / "ours.parquet", rows)
    assert load_samples(str(tmp_path / "ours.parquet"))[-1].tools == ("search",)


def test_nulls_are_removed_below_kwargs_only(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "extra_info": {"limit": null}, "state": {"x": null}}\n')
    (sample,) = load_samples(str(path))
    assert sample.extra == {"limit": None, "state": {"x": None}}  # JSON's own nulls are meant
    rows = [{"prompt": "a", "state": {"x": 1}}, {"prompt": "b", "state": {"y": 2}}]
    assert load_samples(parquet(tmp_path, *rows))[0].extra == {"state": {"x": 1, "y": None}}


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(
    st.lists(
        st.dictionaries(st.sampled_from(["a", "b.c", ""]), values, min_size=1),
        min_size=1,
        max_size=4,
    )
)
def test_written_rows_are_read_back(tmp_path_factory, nested):
    rows = [{"prompt": "p", "extra_info": row} for row in nested]
    for suffix in ("parquet", "jsonl"):
        path = tmp_path_factory.mktemp("rows") / f"rows.{suffix}"
        write_rows(path, rows)
        assert read_rows(path) == rows


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_integers_of_64_bits_are_written_exactly(tmp_path, suffix):
    rows = [{"truth": 2**63, "extra": {"a": [2**64 - 1]}}, {"truth": -(2**63), "extra": {"a": []}}]
    write_rows(tmp_path / f"x.{suffix}", rows)
    assert read_rows(tmp_path / f"x.{suffix}") == rows


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (2**64, "more than 64 bits: 18446744073709551616. Write it as a text"),
        (-(2**63) - 1, "more than 64 bits: -9223372036854775809. Write"),
        (float("nan"), "JSON has neither NaN nor infinities"),
        (float("-inf"), "JSON has neither NaN nor infinities"),
    ],
)
def test_numbers_that_json_would_change_are_not_written(tmp_path, suffix, value, message):
    with pytest.raises(DataError, match=message):
        write_rows(tmp_path / f"x.{suffix}", [{"extra": {"a": value}}, {"extra": {"b": None}}])


@pytest.mark.parametrize(
    "column", ["reward_model", "extra_info", "tools_kwargs", "interaction_kwargs"]
)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f'{{"a": {2**64}}}', "has an integer that needs more than 64 bits: 18446744073709551616"),
        ('{"a": {"b": 1, "c": 2, "b": 3}}', "has the key 'b' twice. Remove one"),
        (r'{"a": 1, "a": "\u003A"}', "has the key 'a' twice. Remove one"),
        ('{"a": 1e400}', "is neither a mapping nor JSON"),
        ('{"a": NaN}', "is neither a mapping nor JSON"),
    ],
)
def test_json_texts_that_would_be_read_as_other_values(tmp_path, column, text, message):
    assert f"row 0, {column}: {message}" in refused(jsonl(tmp_path, {"prompt": "q", column: text}))


def test_a_key_twice_in_a_line(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a:b"}\n{"prompt": "c", "prompt" : "d:e"}\n')
    message = refused(str(tmp_path / "rows.jsonl"))
    assert message.endswith("rows.jsonl: line 2 has the key 'prompt' twice. Remove one")


def test_a_column_of_mixed_types_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"x\.parquet: cannot be written: column ground_truth: "):
        write_rows(tmp_path / "x.parquet", [{"ground_truth": 1}, {"ground_truth": "one"}])
    assert list(tmp_path.iterdir()) == []


def test_dates_are_kept_or_refused(tmp_path):
    """Parquet has dates; JSON does not."""
    rows = [{"when": datetime(2024, 5, 1)}, {"when": datetime(2024, 5, 2)}]
    write_rows(tmp_path / "x.parquet", rows)
    assert read_rows(tmp_path / "x.parquet") == rows
    for name, cell in [("y.jsonl", rows[0]["when"]), ("y.jsonl", [time(1)]), ("y.parquet", [])]:
        mixed = [{"a": 1, "when": cell}, {"a": 1, "when": [{"x": 1}, {"y": date(2024, 5, 1)}]}]
        with pytest.raises(DataError, match=r"written: column when: Type is not.*date.*as a text"):
            write_rows(tmp_path / name, mixed)
        assert not (tmp_path / name).exists()


# -- what is wrong with a file ------------------------------------------------------------------


def test_files_that_cannot_be_read(tmp_path):
    jsonl(tmp_path, {"prompt": "a"})
    assert "Did you mean 'rows.jsonl'?" in refused(str(tmp_path / "row.jsonl"))
    assert "a .parquet or a .jsonl file" in refused(str(tmp_path / "rows.csv"))
    (tmp_path / "empty.jsonl").write_text("\n\n")
    assert "has no rows" in refused(str(tmp_path / "empty.jsonl"))
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "none.parquet")
    assert "has no rows" in refused(str(tmp_path / "none.parquet"))


@pytest.mark.parametrize("damage", [b"", b"PAR1", b"not parquet at all", None])
def test_a_damaged_parquet_file(tmp_path, damage):
    path = tmp_path / "rows.parquet"
    write_rows(path, [{"prompt": f"prompt {i}"} for i in range(1000)])
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if damage is None else damage)
    assert "damaged, or not a Parquet file" in refused(str(path))


def test_random_damage_is_one_error_or_none(tmp_path):
    path = tmp_path / "rows.parquet"
    write_rows(path, ROWS * 20)
    whole = path.read_bytes()
    rng = random.Random(0)
    for _ in range(60):
        broken = bytearray(whole)
        for _ in range(rng.randint(1, 8)):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        path.write_bytes(broken)
        try:
            load_samples(str(path))
        except DataError as e:
            assert str(path) in str(e)


def test_every_line_that_is_not_json_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": NaN}\n\n[1]\n{"prompt": "\\ud800"}\n{"x"\n')
    message = refused(str(path))
    assert [int(part.split()[0]) for part in message.split("line ")[1:]] == [2, 4, 5, 6]


def test_a_decompression_bomb_is_stopped_by_its_decoded_size(tmp_path):
    # Dictionary encoding: a file of some kilobytes that decodes to 256 MiB.
    path = tmp_path / "bomb.parquet"
    pq.write_table(pa.table({"prompt": ["x" * (1 << 20)] * 256}), path)
    assert path.stat().st_size < 1 << 20
    script = (
        "from agentrl.data import read_rows\n"
        "from agentrl.errors import DataError\n"
        "import resource\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"try: read_rows({str(path)!r}, 32 << 20)\n"
        "except DataError as e: print(e)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    message, grown = done.stdout.splitlines()
    assert "has more than 32 MiB when decoded" in message
    unit = 1 if sys.platform == "darwin" else 1024
    assert int(grown) * unit < 180 << 20


# -- what is wrong with rows --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": 3}, "prompt: must be a string or a list of messages, not 3"),
        ({"prompt": ["hi"]}, 'prompt[0]: must be {"role": ..., "content": ...}'),
        ({"prompt": [{"role": "bot", "content": "x"}]}, "role 'bot' must be one of system, user"),
        ({"prompt": [{"role": "user", "content": 5}]}, "content must be a string, not 5"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "video", "video": "x"}]}]},
            "a part is neither text nor an image",
        ),
        ({"prompt": "a", "videos": ["x"]}, "videos: agentrl trains on texts and images only"),
        ({"prompt": "a", "agentname": "react"}, "did you mean 'agent_name'?"),
        ({"prompt": "a", "extra_info": {"tool_kwargs": {}}}, "did you mean 'tools_kwargs'?"),
        ({"prompt": "a", "tools": "add"}, "tools: must be a list of strings, not 'add'"),
        ({"prompt": "a", "tools": ["add", "add"]}, "has a name twice"),
        (
            {"prompt": "a", "tools": ["add"], "tools_kwargs": {"search": {}}},
            "'search' is not one of the row's tools ['add']",
        ),
        (
            {"prompt": "a", "tools_kwargs": {"add": {"x": 1}}},
            "'add' must map to {\"create_kwargs\"",
        ),
        ({"prompt": "a", "tools_kwargs": "{x"}, "is neither a mapping nor JSON"),
        (
            {"prompt": "a", "tools_kwargs": {"add": {"release_kwargs": {"x": 1}}}},
            "only create_kwargs are used",
        ),
        ({"prompt": "a", "extra_info": {"need_tools_kwargs": True}}, "there are no tools_kwargs"),
        ({"prompt": "a", "interaction_kwargs": {"ground_truth": 1}}, "interaction: is missing"),
        (
            {"prompt": "a", "ground_truth": "1", "reward_model": {"ground_truth": "2"}},
            "ground_truth: has two values",
        ),
        ({"prompt": "a", "extra_info": [1]}, "extra_info: must be a mapping, not [1]"),
        ({"prompt": "a", "id": [1]}, "id: must be a string or an integer"),
        ({"prompt": "a", "data_source": 1}, "data_source: must be a string, not 1"),
    ],
)
def test_malformed_rows(tmp_path, row, expected):
    message = refused(jsonl(tmp_path, {"prompt": "fine"}, row))
    assert "row 1, " in message
    assert expected in message


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": " "}, "prompt: is empty"),
        ({}, "prompt: is empty"),
        ({"prompt": []}, "prompt: is empty"),
        (
            {"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            "prompt: ends with an assistant message",
        ),
        ({"prompt": "a", "agent_name": "tool_agnet"}, "Did you mean 'tool_agent'?"),
        (
            {"prompt": "a", "agent_name": "single_turn", "tools": ["add"]},
            "'single_turn' cannot use the row's tools. Loops that can: react, tool_agent",
        ),
        (
            {"prompt": "a", "agent_name": "single_turn_agent", "interaction": "gsm8k"},
            "'single_turn' cannot use the row's interaction",
        ),
        ({"prompt": "a", "tools": ["ad"]}, "no tool named 'ad'. Did you mean 'add'?"),
        ({"prompt": "a", "interaction": "gsm"}, "no interaction named 'gsm'"),
        ({"prompt": "a", "interaction": "gsm8k"}, "missing argument 'ground_truth'"),
        (
            {"prompt": "a", "interaction_kwargs": {"name": "gsm8k", "ground_truth": 1, "qery": 2}},
            "unknown argument 'qery'. Did you mean 'query'?",
        ),
        (
            {"prompt": "a", "tools_kwargs": {"notebook": {"create_kwargs": {"size": 2}}}},
            "tool 'notebook': unknown argument 'size'",
        ),
        (
            {"prompt": "a", "tools_kwargs": {"add": {"create_kwargs": {"a": 2}}}},
            "tool 'add' is a function",
        ),
    ],
)
def test_rows_with_unknown_names(tmp_path, row, expected):
    message = refused(jsonl(tmp_path, {"prompt": "fine"}, row), check=True)
    assert "row 1, " in message
    assert expected in message


def test_constructors_that_rows_cannot_call(tmp_path):
    @tool
    class Named:
        def __init__(self, size: int, /, sample, kind: str, *, more: int = 0): ...

        def name_it(self): ...

    @tool
    class Bag(dict):
        def put_in(self): ...

    kwargs = {"named": {"create_kwargs": {"size": 2}}, "bag": {"create_kwargs": {"size": 2}}}
    rows = [{"prompt": "a", "tools": [t], "tools_kwargs": {t: kwargs[t]}} for t in kwargs]
    message = refused(jsonl(tmp_path, *rows, {"prompt": "b", "tools": ["bag"]}), check=True)
    assert "row 0, tools_kwargs: tool 'named': missing argument 'kind'" in message
    assert "tool 'named': argument 'size' is positional-only" in message
    assert "row 1, tools_kwargs: tool 'bag': " in message and "has no signature" in message
    assert "row 2" not in message


@pytest.mark.parametrize(
    "value",
    [
        *(datetime(2024, 5, 1), date(2024, 5, 1), time(1), timedelta(1), Decimal("1.5"), b"x"),
        *(math.inf, math.nan, [("k", 1)], 2**64, {1: 2}, {"set"}),
    ],
    ids=str,
)
def test_values_that_json_cannot_hold_are_refused_for_tools_that_receive_them(value):
    @tool
    class Reader:
        def __init__(self, sample, data=None): ...

        def read(self): ...

    @tool
    class Blind:
        def __init__(self, data=None): ...

        def look(self): ...

    def check(**fields) -> None:
        check_samples([Sample("a", (Message("user", "x"),), "tool_agent", **fields)], "rows")

    check(tools=("blind",), extra={"inner": [value]})
    for field in ("ground_truth", "extra"):
        with pytest.raises(DataError, match=rf"row 0, {field}\.inner\[0\].*: is .* JSON cannot"):
            check(tools=("reader",), **{field: {"inner": [value]}})
    for name in ("reader", "blind"):
        kwargs = {name: {"create_kwargs": {"data": value}}}
        with pytest.raises(DataError, match=rf"tools_kwargs\.{name}\.create_kwargs\.data"):
            check(tools=(name,), tools_kwargs=kwargs)
    check(tools=("reader",), extra={"a": [1, 2.5, None, True, "x", {"b": []}, 2**64 - 1]})


def test_two_tools_that_offer_the_same_function(tmp_path):
    @tool
    class Diary:
        def write(self, line: str) -> str:
            """Write."""
            return line

    path = jsonl(tmp_path, {"prompt": "a", "tools": ["notebook", "diary"]})
    assert "['notebook', 'diary'] define 'write'" in refused(path, check=True)


def test_a_tool_on_the_shelf_is_named(tmp_path):
    rows = [{"prompt": "a", "tools": [name]} for name in ("calculator", "../calculator", "other")]
    with registry.tools.isolated(keep=()):
        lines = refused(jsonl(tmp_path, *rows), check=True).splitlines()[-3:]
    assert lines[0].endswith("Registered: none. Load its file with --file shelf:calculator")
    assert all(line.endswith("Load its file with --file") for line in lines[1:])


def test_duplicate_ids_are_refused(tmp_path):
    path = jsonl(tmp_path, *({"id": i, "prompt": "a"} for i in ("x", "y", "x")))
    assert "row 2, id: 'x' is already the id of row 0" in refused(path)


def test_all_mistakes_are_reported_at_once_and_each_kind_once(tmp_path):
    rows = [{"prompt": "a", "tools": ["ad"]}] * 500
    rows += [{"prompt": "a", "agent_name": f"loop{i}"} for i in range(30)]
    message = refused(jsonl(tmp_path, *rows), check=True)
    assert message.startswith("530 rows are wrong")
    assert message.count("no tool named 'ad'") == 1 and "and in 499 more rows" in message
    assert message.count("\n") == 21 and message.endswith("and 11 more different mistakes")


# -- order --------------------------------------------------------------------------------------


@given(
    st.integers(1, 40), st.integers(0, 5), st.booleans(), st.integers(0, 100), st.integers(0, 60)
)
def test_order_is_a_pure_function_of_the_position(n, seed, shuffle, position, count):
    order = RowOrder(n, seed, shuffle)
    whole = order.take(0, position + count)
    assert order.take(position, count) == whole[position:]
    for start in range(0, len(whole) - n + 1, n):
        assert sorted(whole[start : start + n]) == list(range(n))


def test_order_depends_on_seed_and_epoch_only():
    order = RowOrder(8, seed=3)
    epochs = [tuple(order.take(e * 8, 8)) for e in range(4)]
    assert len(set(epochs)) == 4
    assert order.take(0, 8) != RowOrder(8, seed=4).take(0, 8)
    assert order.take(0, 8) == [5, 1, 0, 3, 6, 7, 4, 2]  # on every machine, in every Python
    assert RowOrder(3, seed=3, shuffle=False).take(2, 5) == [2, 0, 1, 2, 0]
