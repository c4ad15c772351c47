"""Queries, with the answers known episode by episode; `agentrl show` prints them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image as PIL
from support.recorded import HOSTILE, play_with_images, write_run

from agentrl import load_run
from agentrl.cli import main
from agentrl.errors import DataError, UserError
from agentrl.images import Image
from agentrl.store import TrajectoryStore
from agentrl.trajectory import Group
from agentrl.view.episode import EpisodeView, largest_gaps
from agentrl.view.query import FOUND_SCHEMA, find_episodes, parse_query

OLD = Path(__file__).parent.parent / "fixtures/old_run/run"
ALL = ["e1-0-0", "e1-0-1", "e1-1-0", "e1-1-1", "../../x", "e2-0-1", "v2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"))


def find(folder: Path, text: str, **kwargs) -> list[str]:
    found = find_episodes(load_run(folder), parse_query(text), **kwargs)
    assert found.rows.schema.equals(FOUND_SCHEMA)
    return found.rows["episode"].to_pylist()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ALL),
        ("step=1", ALL[:4]),
        ("step>=2 split=train", ["../../x", "e2-0-1"]),
        ("split!=train", ["v2"]),
        ("group=0 step=1", ["e1-0-0", "e1-0-1"]),
        ("reward<0.5", ["e1-0-0", "e1-1-1"]),
        ("reward<=0.5", ["e1-0-0", "e1-0-1", "e1-1-1"]),
        ("reward<0.5 reward>-1", ["e1-0-0"]),
        ("stop=turns", ["e1-0-1"]),
        ("source=other", ["e1-1-0"]),
        ("tool=search", ["e1-0-0", "e1-0-1"]),
        ("error=timeout", ["e1-0-0", "e1-0-1"]),
        # An error is one of the tools that are asked for.
        ("tool=search error=timeout", ["e1-0-0"]),
        ("tool=decoy", []),
        ("tool!=search calls>0", ["e2-0-1"]),
        ("calls=0 step=1", ["e1-1-0", "e1-1-1"]),
        ("failed>0 turns=1 tokens=2", ["e1-0-0", "e1-0-1"]),
        ("word", ["e1-1-0"]),
        ("quoted four", []),
        ("content", []),
        ("evil ../../x", ["../../x"]),
        ('"2+2?" masked=false seconds>1', ALL),
        ("masked=true", []),
    ],
)
def test_a_query_finds_exactly(folder, text, expected):
    assert find(folder, text) == expected


def test_some_of_the_found_episodes(folder):
    pages = [find(folder, "step<=2", after=n, limit=3) for n in (0, 3, 6, 9)]
    assert pages == [ALL[:3], ALL[3:6], ALL[6:], []]
    assert find_episodes(load_run(folder), parse_query(""), 5, 1).total == 7
    assert find_episodes(load_run(folder, [1]), parse_query("")).total == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stop_reason=done", "unknown field 'stop_reason' in 'stop_reason=done'. Did you mean"),
        ("rewrd<1", "Did you mean 'reward'"),
        ("x=1", "Fields: step, split, group.*write it in quotes: '\"x=1\"'"),
        ("reward<much", "reward is a number, and 'much' is none: reward<1"),
        ("reward<nan", "reward is a number"),
        ("stop<done", "stop is text, so < cannot be used: = or !="),
        ("masked=1", "masked=true or masked=false"),
        ('"open', "quote without its end"),
    ],
)
def test_a_mistake_is_named_with_its_fix(text, message):
    with pytest.raises(UserError, match=message):
        parse_query(text)


def test_a_value_that_no_episode_has(folder):
    found = find_episodes(load_run(folder), parse_query("tool=serch stop=done"))
    # The most frequent value is the first.
    assert found.total == 0 and found.choices == {"tool": ["search", "calc"]}


@pytest.mark.parametrize(
    ("text", "choices"),
    [
        ("split=training", {"split": ["train", "val"]}),
        ("split=training tool=decoy", {"split": ["train", "val"], "tool": ["search", "calc"]}),
        ("step=99", {"step": ["1 to 2"]}),
        ("step>7 tool=search", {"step": ["1 to 2"]}),
    ],
)
def test_what_a_query_that_finds_nothing_could_ask_for(folder, text, choices):
    assert find_episodes(load_run(folder), parse_query(text)).choices == choices


def test_a_run_without_episodes_says_so(tmp_path, capsys):
    folder = write_run(tmp_path)
    shutil.rmtree(folder / "trajectories")
    with pytest.raises(SystemExit) as end:
        main(["show", str(folder)])
    assert not end.value.code and "has no recorded episodes" in capsys.readouterr().out


def test_the_episodes_of_a_stored_run_are_found():
    run = load_run(OLD)
    every = find_episodes(run, parse_query(""))
    assert every.total == len(run.episodes) == 24
    assert len(find(OLD, "group=0")) == 8 and len(find(OLD, "group=0 split=train")) == 4
    validated = EpisodeView(run, every.rows["episode"][-1].as_py()).describe()
    assert {turn["advantage"] for turn in validated["turns"]} == {None}
    assert [m["turn"] for m in validated["messages"] if m["role"] == "assistant"] == [
        *range(len(validated["turns"]))
    ]
    trained = EpisodeView(run, find(OLD, "split=train")[0]).describe()
    assert None not in {turn["advantage"] for turn in trained["turns"]}


def test_numbers_of_an_episode_are_those_of_the_tables(folder):
    run = load_run(folder)
    view = EpisodeView(run, "e2-0-1")
    columns = view.tokens(0, 0, 99)
    table = [row for row in run.tokens.to_pylist() if row["episode_id"] == "e2-0-1"]
    shared = ("token_id", "mask", "logprob", "old_logprob", "advantage", "clipped")
    assert {n: columns[n] for n in shared} == {n: [row[n] for row in table] for n in shared}
    assert columns["gap"] == [0.0, -1.0, None]
    assert view.tokens(0, 1, 2) == {name: values[1:2] for name, values in columns.items()}
    [segment] = view.describe()["segments"]
    assert segment["ranges"]["gap"] == [-1.0, 0.0] and segment["ranges"]["entropy"] is None
    [turn] = view.describe()["turns"]
    assert (turn["advantage"], turn["largest_gap"], turn["largest_gap_at"]) == (1.0, -1.0, 1)
    assert turn["clipped"] == 1
    with pytest.raises(DataError, match="has no segment 3; it has 1"):
        view.tokens(3, 0, 1)
    unknown = EpisodeView(run, "e1-0-0").describe()["turns"][0]
    assert unknown["largest_gap"] is unknown["clipped"] is unknown["advantage"] is None


def test_the_largest_gap_of_a_step(folder):
    [gap] = largest_gaps(load_run(folder), 2)
    place = {"episode": "e2-0-1", "segment": 0, "position": 1, "token_id": 2, "text": None}
    assert gap == place | {"gap": -1.0}
    assert largest_gaps(load_run(folder), 1) == []


@pytest.mark.parametrize(
    ("column", "cell", "reason"),
    [
        ("turns", '[{"segment": 0', "Expecting ',' delimiter"),
        ("turns", '{"a": 1}', "Input should be a valid tuple"),
        ("turns", "[{}]", "0.segment: Field required"),
        ("messages", "[3]", "0: Input should be a dictionary"),
        ("messages", "", "Expecting value"),
        ("sample", "[]", "Input should be a valid dictionary"),
        ("spans", '[{"name": "queue"}]', "0.start: Field required"),
        ("ground_truth", "{", "Expecting property name"),
    ],
)
def test_a_damaged_cell_is_one_error_with_its_place(tmp_path, capsys, column, cell, reason):
    run = load_run(write_run(tmp_path))
    [(path, _, _)] = [f for f in run.store.files() if f[1:] == (2, "train")]
    table = pq.read_table(path)
    cells = table[column].to_pylist()
    cells[1] = cell
    at = table.schema.get_field_index(column)
    pq.write_table(table.set_column(at, column, pa.array(cells)), path)
    place = f"{path}: row 1 (counted from 0) has a damaged cell in column {column!r}: {reason}"
    readers = [
        lambda: run.behaviour,
        lambda: run.findings,
        lambda: [*run.rollouts()],
        lambda: EpisodeView(run, "e2-0-1", 2),
    ]
    if column == "turns":
        readers.append(lambda: find_episodes(run, parse_query("calls>0")))
    if column == "messages" and cell:  # an empty cell contains no word
        readers.append(lambda: find_episodes(run, parse_query("3")))
    for read in readers:
        with pytest.raises(DataError) as error:
            read()
        assert str(error.value).startswith(place)
        assert "\n" not in str(error.value)
    with pytest.raises(SystemExit) as end:
        main(["report", str(tmp_path)])
    assert end.value.code == 1 and capsys.readouterr().err.count(place) == 1


def test_show(folder, capsys):
    main_ends(["show", str(folder), "tool=search reward<0.5", "--step", "1"])
    out = capsys.readouterr().out
    assert out.splitlines()[0].split()[:3] == ["step", "split", "group"]
    assert "e1-0-0" in out and "1 episode\n" in out and "no logprobs of the trainer" in out
    main_ends(["show", str(folder), "--step", "2", "-n", "1"])
    assert "-1 nats, token 1 of segment 0 of e2-0-1" in capsys.readouterr().out
    main_ends(["show", str(folder), "tool=serch"])
    assert capsys.readouterr().out == "no episode matches\ntool is one of: 'search', 'calc'\n"
    main_ends(["show", str(folder), "--episode", "e1-0-0"])
    out = capsys.readouterr().out
    assert "advantage ? · clipped ? · largest gap ?" in out
    assert 'call search {"q": "four", "name": "decoy"}: timeout, 500.0 ms' in out


def test_show_describes_images(tmp_path, capsys):
    wide, other = Image.of(PIL.new("RGB", (84, 28))), Image(b"no picture")
    scored = play_with_images(wide, other)
    TrajectoryStore(tmp_path / "trajectories").write(
        1, [Group(scored.trajectory.sample, (scored,))]
    )
    main_ends(["show", str(tmp_path), "--episode", "seen"])
    out = capsys.readouterr().out
    assert f"How many in [image 84x28 {wide.key[:8]}]?\n" in out
    assert f"cut: [image {other.key[:8]}]\n" in out


def test_show_prints_no_control_character_of_a_model(folder, capsys):
    main_ends(["show", str(folder), "evil"])
    main_ends(["show", str(folder), "--episode", "../../x"])
    out = capsys.readouterr().out
    assert all(c.isprintable() or c in "\n\t" for c in out)
    assert re.search(r"\\x1b\[31mred.*\\u202eevil.*\\x00 \\x9b2J \\r", out) and "<script>" in out
    assert len(HOSTILE) > 50


def main_ends(words: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 0
