"""Rows of one file or several, from Arrow tables in memory and in cache files."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import threading
import time
from collections import Counter
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl import registry
from agentrl.config import load_config
from agentrl.data import (
    ColumnNames,
    RowOrder,
    Rows,
    find_kinds,
    load_checked,
    open_rows,
    prompt_bytes,
    read_rows,
    sample_rows,
    write_rows,
)
from agentrl.data import dataset as dataset_module
from agentrl.data import table as table_module
from agentrl.data.files import write_generated
from agentrl.errors import ConfigError, DataError
from agentrl.preflight import check_prompts, describe_run, make_plan
from agentrl.tools import tool
from agentrl.trajectory import Message, Sample


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    """The folder of the cache: a new one for each test."""
    folder = tmp_path / "home"
    monkeypatch.setenv("AGENTRL_HOME", str(folder))
    return folder


@pytest.fixture
def cached(monkeypatch):
    """Every table is in a cache file."""
    monkeypatch.setattr(table_module, "MEMORY_BYTES", 0)
    monkeypatch.setattr(table_module, "BATCH_ROWS", 3)


def jsonl(path: Path, *rows) -> str:
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return str(path)


def numbered(path: Path, count: int, **more) -> str:
    return jsonl(path, *({"prompt": f"{path.stem} {i}", **more} for i in range(count)))


def refused(source, **kwargs) -> str:
    with pytest.raises(DataError) as e:
        load_checked(source, **kwargs)
    return str(e.value)


# -- rows to samples ------------------------------------------------------------------------------


texts = st.text(st.characters(codec="utf-8"), max_size=8)
scalars = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | texts
messages = st.lists(
    st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), texts), max_size=3
)


@st.composite
def rows_and_samples(draw):
    """Rows in both layouts, and the samples that they mean."""
    rows, samples = [], []
    for number in range(draw(st.integers(1, 6))):
        prompt = draw(messages | texts)
        truth = draw(st.none() | texts)
        kwargs = draw(st.dictionaries(st.sampled_from(["add", "find"]), st.integers(0, 3)))
        tools_kwargs = {name: {"create_kwargs": {"k": k}} for name, k in kwargs.items()}
        source, agent = draw(texts), draw(st.none() | st.sampled_from(["react", "tool_agent"]))
        name = draw(st.none() | st.just(f"row {number}"))
        level, column = draw(scalars), draw(scalars)
        row = {"data_source": source, "id": name, "agent_name": agent, "c": column}
        row["prompt"] = (
            prompt
            if isinstance(prompt, str)
            else [{"role": role, "content": content} for role, content in prompt]
        )
        inner = {} if level is None else {"level": level}
        if draw(st.booleans()):
            inner |= {"tools_kwargs": tools_kwargs} if tools_kwargs else {}
            row |= {"reward_model": {"ground_truth": truth}, "extra_info": inner}
        else:
            row |= {"ground_truth": truth, "tools_kwargs": tools_kwargs, "extra_info": inner}
        rows.append({k: v for k, v in row.items() if v is not None and v != {}})
        samples.append(
            Sample(
                id=name or str(number),
                prompt=(Message("user", prompt),)
                if isinstance(prompt, str)
                else tuple(Message(*message) for message in prompt),
                agent_name=agent or "single_turn",
                data_source=source,
                ground_truth=truth,
                tools=tuple(tools_kwargs),
                tools_kwargs=tools_kwargs,
                extra={} if column is None else {"c": column},
                row=number,
            )
        )
        if level is not None:
            samples[-1].extra["level"] = level
    return rows, samples


@given(rows_and_samples(), st.sampled_from(["jsonl", "parquet"]), st.booleans())
def test_rows_are_the_samples_of_their_files(tmp_path_factory, made, suffix, in_memory):
    rows, samples = made
    folder = tmp_path_factory.mktemp("rows")
    path = folder / f"rows.{suffix}"
    try:
        write_rows(path, rows)
    except DataError as e:  # a column of different types
        assert suffix == "parquet" and "cannot be written" in str(e)
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTRL_HOME", str(folder / "home"))
        if not in_memory:
            patch.setattr(table_module, "MEMORY_BYTES", 0)
            patch.setattr(table_module, "BATCH_ROWS", 2)
        for _ in ("built", "from the cache"):
            found = open_rows(str(path))
            assert list(found) == samples == [found[i] for i in range(len(found))]
            assert found[-1] == samples[-1] and found[1:3] == samples[1:3]
            assert list(found.draw(np.arange(0, len(samples), 2))) == samples[::2]
            assert list(found.raw()) == read_rows(path)
            assert prompt_bytes(found).tolist() == prompt_bytes(samples).tolist()
            counted = {tuple(kind.rows): kind.sample for kind in found.kinds}
            assert counted == {tuple(kind.rows): kind.sample for kind in find_kinds(samples)}
        assert len(list(folder.glob("home/rows/*.arrow"))) == (not in_memory)


def test_types_that_json_cannot_hold_are_kept(tmp_path, cached):
    column = pa.array([None, 3, 5], pa.timestamp("us"))
    truths = pa.array([float("nan"), 1.5, None])
    words = pa.array(["a", "b", "a"]).dictionary_encode()
    path = tmp_path / "rows.parquet"
    table = {"prompt": ["a", "b", "c"], "when": column, "ground_truth": truths, "word": words}
    pq.write_table(pa.table(table), path)
    for _ in range(2):
        rows = list(open_rows(str(path)))
        assert [s.extra.get("when") for s in rows] == column.to_pylist()
        assert np.isnan(rows[0].ground_truth) and rows[1].ground_truth == 1.5
        assert [s.extra["word"] for s in rows] == ["a", "b", "a"]


def test_renames_and_defaults_apply_when_a_row_is_drawn(tmp_path, cached, home):
    path = jsonl(
        tmp_path / "rows.jsonl", *({"question": f"q{i}", "kind": "sums", "n": i} for i in range(5))
    )
    names = ColumnNames(prompt="question", data_source="kind")
    rows = load_checked(path, names=names)
    assert rows[3] == Sample(
        "3", (Message("user", "q3"),), data_source="sums", extra={"n": 3}, row=3
    )
    assert open_rows(path, "react_agent", names)[0].agent_name == "react"
    assert len(list((home / "rows").iterdir())) == 1
    assert refused(
        path
    ) == f"{path}: row 0, prompt: no column 'prompt'; found: question, kind, n" + (
        ". Name the column of the prompts: data.prompt_key=question (and in 4 more rows)"
    )
    assert "no column 'topic'; found: question, kind, n" in refused(
        path, names=ColumnNames("question", "topic")
    )


def test_many_rows_with_a_misspelt_column_take_linear_time(tmp_path):
    path = numbered(tmp_path / "rows.jsonl", 5_000, agentname="react")
    began = time.thread_time()
    assert "did you mean 'agent_name'? Rename the column (and in 4,999 more" in refused(path)
    assert time.thread_time() - began < 10


# -- the cache ------------------------------------------------------------------------------------


def test_the_cache_is_private_and_used_again(tmp_path, cached, home):
    path = numbered(tmp_path / "a.jsonl", 10)
    before = list(open_rows(path))
    (file,) = (home / "rows").iterdir()
    assert (home / "rows").stat().st_mode & 0o777 == 0o700 and file.stat().st_mode & 0o077 == 0
    made = file.stat().st_ino
    shutil.copy(path, tmp_path / "b.jsonl")  # the content counts, not the name
    assert list(open_rows(str(tmp_path / "b.jsonl"))) == before
    assert [f.stat().st_ino for f in (home / "rows").iterdir()] == [made]
    Path(path).write_text('{"prompt": "other"}\n')
    assert open_rows(path)[0].prompt[0].content == "other"


def test_a_cache_that_can_only_be_read_is_used(tmp_path, cached, home, monkeypatch):
    path = numbered(tmp_path / "a.jsonl", 3)
    open_rows(path)

    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(table_module, "_describe", refuse)
    assert len(open_rows(path)) == 3


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 10**100])
def test_an_integer_that_would_be_rounded(tmp_path, number):
    fine = {"prompt": "x", "truth": [2**64 - 1, -(2**63)], "text": str(number), "float": 1e30}
    path = jsonl(tmp_path / "a.jsonl", fine)
    assert open_rows(path)[0].extra["truth"] == [2**64 - 1, -(2**63)]
    lines = [json.dumps(fine), json.dumps({"prompt": "x", "extra_info": {"truth": [number]}})]
    Path(path).write_text("\n".join(lines))
    message = refused(path)
    assert "line 2 has an integer that needs more than 64 bits" in message
    assert str(number)[:60] in message and len(message) < 400


def test_text_that_is_not_utf8_in_a_column_that_no_check_reads(tmp_path):
    offsets = pa.py_buffer(np.array([0, 1, 2], np.int32))
    notes = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"a\xff")])
    pq.write_table(pa.table({"prompt": ["x", "y"], "notes": notes}), tmp_path / "a.parquet")
    assert "UTF8" in refused(str(tmp_path / "a.parquet"))


@pytest.mark.parametrize("damage", ["cut", "empty", "byte", "text"])
def test_a_damaged_cache_file_is_built_again(tmp_path, cached, home, damage):
    path = numbered(tmp_path / "a.jsonl", 10)
    before = list(open_rows(path))
    (file,) = (home / "rows").iterdir()
    whole = file.read_bytes()
    middle = len(whole) // 2
    changed = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    file.write_bytes(
        {"cut": whole[:middle], "empty": b"", "byte": changed, "text": b"x" * 99}[damage]
    )
    assert list(open_rows(path)) == before
    (file,) = (home / "rows").iterdir()
    assert file.read_bytes() == whole


def test_rows_outlive_their_cache_file(tmp_path, cached, home):
    rows = open_rows(numbered(tmp_path / "a.jsonl", 10))
    before = list(rows)
    shutil.rmtree(home)
    assert list(rows) == before


def test_rows_of_an_address_are_written_once(home):
    """Another process that makes the same rows does not replace the file that this one reads."""
    rows = [{"prompt": "a", "data_source": "b"}]
    files = []
    threads = [
        threading.Thread(target=lambda: files.append(write_generated("door:a", rows)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [file] = {*files}
    before = os.stat(file)
    assert write_generated("door:a", rows) == file and os.stat(file) == before
    assert os.listdir(Path(file).parent) == [Path(file).name] and read_rows(file) == rows


def test_builders_at_the_same_time(tmp_path, cached, home):
    path = numbered(tmp_path / "a.jsonl", 200)
    found: list[list[Sample]] = []
    barrier = threading.Barrier(3)

    def build() -> None:
        barrier.wait()
        found.append(list(open_rows(path)))

    threads = [threading.Thread(target=build) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [list(open_rows(path))] * 3
    assert [file.suffix for file in (home / "rows").iterdir()] == [".arrow"]


def test_a_cache_that_cannot_be_written(tmp_path, cached, home, monkeypatch):
    path = numbered(tmp_path / "a.jsonl", 10)
    home.write_text("a file in the place of the folder")
    assert "Set AGENTRL_HOME to a folder on a disk with more free space" in refused(path)
    monkeypatch.setattr(table_module, "MEMORY_BYTES", 1 << 20)
    assert len(list(open_rows(path))) == 10


def test_the_cache_has_a_limited_size(tmp_path, cached, home, monkeypatch):
    monkeypatch.setattr(table_module, "CACHE_BYTES", 1)
    paths = [numbered(tmp_path / f"{name}.jsonl", 5) for name in "ab"]
    first, second = map(open_rows, paths)
    (kept,) = (home / "rows").iterdir()
    assert first[4].prompt[0].content == "a 4" and second[4].prompt[0].content == "b 4"
    inode = kept.stat().st_ino
    open_rows(paths[1])
    assert [file.stat().st_ino for file in (home / "rows").iterdir()] == [inode]


def test_rows_with_mistakes_are_not_cached(tmp_path, cached, home):
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "a"}, {"prompt": 3})
    for _ in range(2):
        assert "row 1, prompt: must be a string or a list of messages, not 3" in refused(path)
    assert not list((home / "rows").iterdir())


# -- several files --------------------------------------------------------------------------------


def test_several_files_are_one_sequence(tmp_path, cached):
    first = numbered(tmp_path / "a.jsonl", 4)
    (tmp_path / "b").mkdir()
    for name in ("2", "1"):
        write_rows(
            tmp_path / "b" / f"{name}.parquet", [{"prompt": f"{name}.{i}"} for i in range(3)]
        )
    rows = load_checked([first, str(tmp_path / "b" / "*.parquet")])
    assert [s.prompt[0].content for s in rows] == [
        "a 0", "a 1", "a 2", "a 3", "1.0", "1.1", "1.2", "2.0", "2.1", "2.2",
    ]  # fmt: skip
    assert [s.row for s in rows] == list(range(10)) and [s.id for s in rows[8:]] == ["8", "9"]
    assert rows.origin(3) == (first, 3)
    assert rows.origin(8) == (str(tmp_path / "b/2.parquet"), 1)
    assert [kind.rows.tolist() for kind in rows.kinds] == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert load_checked(str(tmp_path / "b" / "*"))[5].prompt[0].content == "2.2"
    assert "no file matches" in refused(str(tmp_path / "c*"))
    (tmp_path / "link.jsonl").symlink_to(first)
    for again in (first, f"{tmp_path}/b/../a.jsonl", str(tmp_path / "link.jsonl")):
        assert "is listed twice" in refused([first, again])
    (tmp_path / "spark.parquet").mkdir()
    assert f"{tmp_path}/spark.parquet/*" in refused(str(tmp_path / "spark.parquet"))


def test_mistakes_name_file_and_row(tmp_path):
    a = jsonl(tmp_path / "a.jsonl", {"prompt": "x", "id": "p"}, {"prompt": "x"})
    b = jsonl(tmp_path / "b.jsonl", {"prompt": "x"}, {"prompt": "x", "id": "p"}, {"prompt": " "})
    message = refused([a, b])
    assert message.startswith("2 rows are wrong")
    assert f"{b}: row 1, id: 'p' is already the id of row 0 of {a}" in message
    assert f"{b}: row 2, prompt: is empty" in message
    # The second file's row has no id of its own, so its id is its index over both files.
    c = jsonl(tmp_path / "c.jsonl", {"prompt": "x"})
    d = jsonl(tmp_path / "d.jsonl", {"prompt": "x", "id": 1})
    assert f"{c}: row 0, id: '1' is already the id of row 0 of {d}" in refused([d, c])


def test_the_fingerprint(tmp_path, cached):
    a, b = numbered(tmp_path / "a.jsonl", 3), numbered(tmp_path / "b.jsonl", 3)
    with open(a, "rb") as file:
        assert open_rows(a).fingerprint == hashlib.file_digest(file, "blake2b").hexdigest()[:32]
    assert open_rows([a]).fingerprint == open_rows(a).fingerprint
    sources = [
        [a, b], [b, a], [{"path": a, "weight": 2}, b], [a, {"path": b, "weight": 2}], [a],
        [{"path": a, "weight": 2}],
    ]  # fmt: skip
    assert len({open_rows(source).fingerprint for source in sources}) == len(sources)


sizes = st.lists(
    st.tuples(st.integers(1, 9), st.sampled_from([0.01, 0.25, 0.5, 1.0, 1.5, 2.0, 3.3])),
    min_size=1,
    max_size=3,
)


@given(sizes, st.integers(0, 3), st.booleans(), st.integers(0, 60), st.integers(0, 30))
def test_a_weight_is_the_number_of_copies_per_epoch(weights, seed, shuffle, position, count):
    order = RowOrder(sum(n for n, _ in weights), seed, shuffle, tuple(weights))
    sizes = [0]
    for epoch in range(1, 5):  # a fraction of a row is taken when it adds up to a whole one
        sizes.append(sum(int(Fraction(str(w)) % 1 * n * epoch) + int(w) * n * epoch
                         for n, w in weights))  # fmt: skip
    whole = order.take(0, sizes[-1])
    assert order.take(position, count) == order.take(0, position + count)[position:]
    for begin, end in pairwise(sizes):
        counts = Counter(whole[begin:end])
        first = 0
        for n, weight in weights:
            copies = [counts[first + i] for i in range(n)]
            assert all(int(weight) <= c <= int(weight) + 2 for c in copies)
            assert abs(sum(copies) - weight * n) < 1
            first += n
    totals, first = Counter(whole), 0
    for n, _ in weights:  # each row once before any row twice
        of_file = [totals[first + i] for i in range(n)]
        assert max(of_file) - min(of_file) <= 1
        first += n


def test_weights_of_one_do_not_change_the_order(tmp_path):
    a, b = numbered(tmp_path / "a.jsonl", 5), numbered(tmp_path / "b.jsonl", 3)
    assert open_rows([a, b]).order(3) == RowOrder(8, 3)
    order = open_rows([{"path": a, "weight": 2}, b]).order(3)
    assert order.epoch_rows == 13 and sorted(order.take(0, 13)) == sorted([*range(8), *range(5)])
    assert order.take(0, 13) != RowOrder(13, 3).take(0, 13)
    unshuffled = open_rows([b, {"path": a, "weight": 0.4}]).order(3, shuffle=False)
    assert unshuffled.take(0, 3) == [0, 1, 2] and unshuffled.epoch_rows == 5


@pytest.mark.parametrize(
    "weights", [((5, 2.5), (40, 0.3)), ((1, 0.5), (10, 1)), ((2, 0.25), (3, 0.1)), ((1, 0.01),)]
)
def test_a_fraction_that_is_no_whole_number_of_rows_is_right_in_the_long_run(weights):
    order = RowOrder(sum(n for n, _ in weights), 1, True, weights)
    played = Counter(order.take(0, round(200 * sum(n * w for n, w in weights))))
    first = 0
    for n, weight in weights:
        assert sum(played[first + i] for i in range(n)) == pytest.approx(200 * n * weight, abs=1)
        first += n


def test_the_config_names_files_with_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    numbered(Path("a.jsonl"), 4, agent_name="single_turn", ground_truth="1")
    Path("b").mkdir()
    numbered(Path("b/c.jsonl"), 2, ground_truth="1")
    override = 'data.train=[{path: a.jsonl, weight: 2}, "b/*.jsonl"]'
    more = ["data.batch_size=3", "reward.function=gsm8k", "data.val=[a.jsonl]"]
    config = load_config(None, [override, *more])
    assert config.trainer.output == "runs/a"
    assert load_config(None, [f"data.train={config.data.model_dump()['train']}"]).data.train == (
        config.data.train
    )
    plan = make_plan(config)
    assert (len(plan.train), plan.epoch_rows, plan.total_steps) == (6, 10, 4)
    assert "       4 rows of a.jsonl, 2 times per epoch" in describe_run(plan)
    for wrong, message in (
        ("data.train=[{path: a, weight: 0}]", "mappings with path and weight > 0"),
        ("data.train=[{file: a}]", "mappings with path and weight > 0"),
        ("data.val=[{path: a, weight: 2}]", "so a must have no weight"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config(None, ["data.train=a.jsonl", wrong])


# -- checks of many rows --------------------------------------------------------------------------


def test_more_rows_than_are_read_whole(tmp_path, monkeypatch, no_tools):
    monkeypatch.setattr(dataset_module, "SAMPLED_ABOVE", 50)
    monkeypatch.setattr(dataset_module, "SAMPLED_ROWS", 5)

    @tool
    class Bag:
        def __init__(self, size: int):
            self.size = size

        def put(self) -> str:
            """Put."""
            return ""

    def row(i: int, kwargs: dict, **more) -> dict:
        return {
            "prompt": f"row {i}", "agent_name": "tool_agent", "ground_truth": str(i),
            "data_source": "openai/gsm8k", "tools_kwargs": {"bag": {"create_kwargs": kwargs}},
        } | more  # fmt: skip

    good = [row(i, {"size": 1}) for i in range(101)]
    path = jsonl(tmp_path / "a.jsonl", *good)
    rows = load_checked(path)
    assert sample_rows(rows).tolist() == [0, 25, 50, 75, 100]
    plan = make_plan(load_config(None, [f"data.train={path}", "model.path=mine"]))
    assert "leaks: 5 rows at equal distances, and the first of each kind" in describe_run(plan)
    # Between the sampled rows: structure and names are checked in all rows, arguments are not.
    good[60] = row(60, {"siz": 1})
    assert len(load_checked(jsonl(tmp_path / "b.jsonl", *good))) == 101
    good[50] = row(50, {"siz": 1})
    assert "row 50, tools_kwargs: tool 'bag'" in refused(jsonl(tmp_path / "c.jsonl", *good))
    good[50], good[61] = row(50, {"size": 1}), row(61, {"size": 1}, agent_name="tool_agnet")
    assert "row 61, agent_name: no agent loop" in refused(jsonl(tmp_path / "d.jsonl", *good))
    good[61] = row(61, {"size": 1}, prompt=5)
    assert "row 61, prompt: must be a string" in refused(jsonl(tmp_path / "e.jsonl", *good))


class CountingTemplate:
    """A template that counts the prompts that are tokenized."""

    def __init__(self, template):
        self._template, self.calls = template, 0

    def __getattr__(self, name):
        self.calls += name in ("prompt", "length")
        return getattr(self._template, name)


def test_only_prompts_that_may_be_too_long_are_tokenized(tmp_path, monkeypatch, tiny_tokenizer):
    from agentrl.chat import ChatTemplate

    template = CountingTemplate(ChatTemplate(tiny_tokenizer))
    rows = [{"prompt": f"How much is {i}+2?", "ground_truth": "4"} for i in range(40)]
    rows[17]["prompt"] = "How much is 2+2? " * 30
    rows[23]["prompt"] = "How much? " * 12
    path = jsonl(tmp_path / "a.jsonl", *rows)
    config = load_config(None, [f"data.train={path}", "reward.function=gsm8k", "model.path=tiny"])
    plan = make_plan(config)
    monkeypatch.setattr("agentrl.preflight.prompts.MAX_COMPARE_SECONDS", 0.0)
    longest = len(template.prompt([Message("user", rows[17]["prompt"])]))
    with pytest.raises(DataError, match=rf"a\.jsonl: row 17: the prompt has {longest} tokens"):
        check_prompts(plan, template, 200)
    assert template.calls <= 4  # the first row, the two long ones, and `longest` above
    check_prompts(plan, template, longest + 1)


def test_kinds_of_rows_in_a_list():
    samples = [Sample(str(i), (Message("user", "a"),), tools=("t",) * (i % 2)) for i in range(5)]
    assert [kind.rows.tolist() for kind in find_kinds(samples)] == [[0, 2, 4], [1, 3]]
    assert not isinstance(samples, Rows) and find_kinds([]) == []


def test_ignored_interactions_are_counted_for_each_file(tmp_path, caplog):
    row = {"prompt": "a", "extra_info": {"interaction_kwargs": {"query": "a"}}}
    files = [jsonl(tmp_path / f"{name}.jsonl", *[row] * n) for name, n in (("a", 2), ("b", 3))]
    with caplog.at_level(logging.WARNING), registry.interactions.isolated():
        assert open_rows(files)[4].interaction == ""
    assert [record.getMessage().rpartition("(")[2] for record in caplog.records] == [
        "rows: 2)", "rows: 3)",
    ]  # fmt: skip


def give_away(path: Path) -> None:
    """Give a file or a folder to another user."""
    if os.geteuid():
        pytest.skip("only root can give files to another user")
    os.chown(path, 12345, 12345)


@pytest.mark.parametrize("case", ["another user's folder", "link to a folder", "open folder"])
def test_a_cache_folder_of_another_user_is_not_trusted(tmp_path, cached, home, caplog, case):
    mine, theirs = numbered(tmp_path / "a.jsonl", 3), numbered(tmp_path / "b.jsonl", 3)
    before = list(open_rows(mine))
    folder = home / "rows"
    (own,) = folder.iterdir()
    open_rows(theirs)
    (other,) = (file for file in folder.iterdir() if file != own)
    key, content = own.name.partition("-")[0], other.name.partition("-")[2]
    own.unlink()
    other.rename(folder / f"{key}-{content}")  # valid, but the rows of another file
    assert open_rows(mine)[0].prompt[0].content == "b 0"
    if case == "another user's folder":
        give_away(folder)
    elif case == "link to a folder":
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.chmod(0o777)
    assert list(open_rows(mine)) == before
    assert "is not used" in caplog.text


@pytest.mark.parametrize("case", ["another user's file", "link to a file", "open file"])
def test_a_cache_file_of_another_user_is_not_trusted(tmp_path, cached, home, case):
    path = numbered(tmp_path / "a.jsonl", 3)
    before = list(open_rows(path))
    (file,) = (home / "rows").iterdir()
    if case == "another user's file":
        give_away(file)
    elif case == "link to a file":
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    else:
        file.chmod(0o666)
    assert list(open_rows(path)) == before
    (file,) = (home / "rows").iterdir()
    assert not file.is_symlink()
    assert file.stat().st_uid == os.geteuid() and file.stat().st_mode & 0o777 == 0o600
