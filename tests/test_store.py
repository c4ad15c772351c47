"""Records are read back as they were written. Each is stored completely or not at all."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from array import array
from datetime import date
from hashlib import sha256
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as PIL
from support.examples import examples

import agentrl.store
from agentrl.errors import DataError, RunStopped
from agentrl.images import Image, RowImage
from agentrl.store import (
    LEARNED,
    LEARNED_SCHEMA,
    SCHEMA,
    TrajectoryStore,
    TrajectoryWriter,
    load_trajectories,
    parse_json,
)
from agentrl.trajectory import (
    Group,
    Message,
    Sample,
    Scored,
    Segment,
    Span,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    float_array,
    short_array,
    token_array,
)

PROMPT = (Message("user", "What is 3*4?"),)


def scored(rollout: int = 0, **kwargs) -> Scored:
    call = ToolCall("calculator", {"expression": "3*4"}, id="c1")
    answer = '<tool_call>{"name": "calculator"}</tool_call>'
    trajectory = Trajectory(
        sample=Sample("row-1", PROMPT, "tool_agent", "gsm8k", "12", tools=("calculator",), row=1),
        episode_id=f"e{rollout}",
        rollout=rollout,
        segments=(
            Segment(
                token_array([1, 2, 3]),
                token_array([4, 5, 6, 7]),
                token_array([1, 1, 0, 1]),
                float_array([-0.1, -2.5, 0, -1e-9]),
                token_array([0, 0, -1, 1]),
            ),
        ),
        turns=(
            Turn(0, 0, 2, "stop", (call,), (ToolResult("12", reward=0.5, seconds=0.1),)),
            Turn(
                *(0, 3, 4, "length"),
                rewards={"turn": 1.0},
                generate_seconds=0.25,
                prompt_tokens=6,
                cached_tokens=5,
            ),
        ),
        messages=(
            *PROMPT,
            Message("assistant", answer, (call,)),
            Message("tool", "12", tool_call_id="c1"),
            Message("assistant", "#### 12"),
        ),
        sampling={"temperature": 1.0, "stop": ("Observation:",), "stop_ids": ()},
        stop_reason="done",
        seconds=1.5,
        started=1.7e9,
        spans=(Span("open", 0.0, 0.125), Span("generate", 0.125, 0.375, thread=1)),
    )
    made = Scored(trajectory, {"outcome": 1.0, "tool": 0.5}, 1.0, {"acc": 1.0})
    return dataclasses.replace(made, **kwargs)


def group(*rollouts: Scored, dropped: int = 0, causes: tuple[str, ...] = ()) -> Group:
    return Group(rollouts[0].trajectory.sample, rollouts, dropped, drop_causes=causes)


def test_a_step_comes_back_as_it_was(tmp_path):
    store = TrajectoryStore(tmp_path / "trajectories")
    causes = ("EngineError: is down", "UserCodeError: x")
    groups = [group(scored(0), scored(1), dropped=2, causes=causes), group(scored(2))]
    path = store.write(7, groups)
    assert path.name == "train-00000007.parquet"
    stored = list(store.read())
    assert [s.scored for s in stored] == [scored(0), scored(1), scored(2)]
    assert [(s.step, s.split, s.dropped) for s in stored] == [
        (7, "train", 2),
        (7, "train", 2),
        (7, "train", 0),
    ]
    assert [tuple(s.drop_causes) for s in stored] == [causes, causes, ()]
    segment = stored[0].scored.trajectory.segments[0]
    assert (segment.logprobs.typecode, segment.response_ids.typecode) == ("f", "i")


def test_any_parquet_reader_can_read_the_store(tmp_path):
    path = TrajectoryStore(tmp_path).write(1, [group(scored())])
    table = pq.read_table(path)
    assert table.schema.equals(SCHEMA)
    row = table.to_pylist()[0]
    assert row["response_ids"] == [[4, 5, 6, 7]]
    assert row["response_mask"] == [[1, 1, 0, 1]]
    assert row["logprobs"][0] == pytest.approx([-0.1, -2.5, 0, -1e-9])
    assert json.loads(row["messages"])[1]["tool_calls"][0]["arguments"] == {"expression": "3*4"}
    assert json.loads(row["ground_truth"]) == "12"
    assert (row["agent_name"], row["reward"], row["stop_reason"]) == ("tool_agent", 1.0, "done")


def test_a_rollout_knows_its_group(tmp_path):
    store = TrajectoryStore(tmp_path)
    empty = Group(Sample("x", PROMPT), (), 8)
    store.write(1, [group(scored(0), scored(1)), empty, group(scored(2))])
    assert [s.group for s in store.read()] == [0, 0, 2]
    assert store.read_episodes().column("group").to_pylist() == [0, 0, 2]


def test_one_episode_is_read_without_decoding_the_others(tmp_path):
    store = TrajectoryStore(tmp_path)
    rollouts = [scored(i) for i in range(40)]
    of_group = [group(*rollouts[:9]), group(*rollouts[9:])]
    store.write(2, [group(scored(99))])
    path = store.write(1, of_group)
    store.write(1, [group(scored(41))], split="val")
    for i in (0, 8, 15, 16, 31, 32, 39):
        stored = store.read_episode(f"e{i}")
        assert (stored.scored, stored.group, stored.step) == (rollouts[i], int(i >= 9), 1)
    assert store.read_episode("e41", step=1).split == "val"
    with pytest.raises(DataError, match="no episode 'e99' in the files of step 1"):
        store.read_episode("e99", step=1)
    with pytest.raises(DataError, match="no episode 'e40' in"):
        store.read_episode("e40")
    file = pq.ParquetFile(path)
    assert [file.metadata.row_group(i).num_rows for i in range(3)] == [16, 16, 8]
    # The row groups of other episodes are not decoded: damage to the first one does no harm.
    damaged = bytearray(path.read_bytes())
    damaged[4:20] = bytes(16)
    path.write_bytes(damaged)
    assert store.read_episode("e19").scored == rollouts[19]
    with pytest.raises(DataError, match="train-00000001"):
        store.read_episode("e3")
    # A file that pyarrow wrote again is one row group.
    store.write(1, of_group)
    pq.write_table(pq.read_table(path), path)
    assert store.read_episode("e12").scored == rollouts[12]


def test_reading_by_step_and_split(tmp_path):
    store = TrajectoryStore(tmp_path)
    for step in (1, 2, 10):
        store.write(step, [group(scored(step))])
    store.write(2, [group(scored(20))], split="val")
    store.write(2, [group(scored(21))], split="greedy")

    def rollouts(**kwargs) -> list[int]:
        return [s.trajectory.rollout for s in load_trajectories(tmp_path, **kwargs)]

    assert rollouts() == [1, 21, 2, 20, 10]
    assert rollouts(step=2) == [21, 2, 20]
    assert rollouts(split="train") == [1, 2, 10]
    assert rollouts(step=2, split="val") == [20]
    assert rollouts(step=3) == []


def test_a_step_written_again_replaces_the_first(tmp_path):
    store = TrajectoryStore(tmp_path)
    store.write(1, [group(scored(0), scored(1))])
    store.write(1, [group(scored(2))])
    assert [s.trajectory.rollout for s in load_trajectories(tmp_path)] == [2]
    assert [f.name for f in tmp_path.iterdir()] == ["train-00000001.parquet"]


def test_resuming_removes_later_steps(tmp_path):
    store = TrajectoryStore(tmp_path)
    store.truncate_after(-1)
    store.write(0, [group(scored())], split="val")
    for step in (1, 2, 3):
        store.write(step, [group(scored())])
    (tmp_path / ".tmp-0123456789abcdef-99").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("the user's")
    store.truncate_after(1)
    assert sorted(f.name for f in tmp_path.iterdir()) == [
        "notes.txt",
        "train-00000001.parquet",
        "val-00000000.parquet",
    ]
    store.truncate_after(-1)
    assert [f.name for f in tmp_path.iterdir()] == ["notes.txt"]


LEARNED_ROWS = pa.table(
    {
        "episode_id": ["e0", "e1", "e1"],
        "segment": pa.array([0, 0, 1], pa.int32()),
        **{
            name: pa.array([[0.5, None], [], [None, -1.0, 0.0]], pa.list_(pa.float64()))
            for name in LEARNED
            if name != "clipped"
        },
        "clipped": pa.array([[2, None], [], [None, 0, 1]], pa.list_(pa.int64())),
    }
)


def test_what_a_step_learned_comes_back_as_it_was(tmp_path):
    store = TrajectoryStore(tmp_path / "trajectories")
    assert store.read_learned(3).equals(LEARNED_SCHEMA.empty_table())
    path = store.write_learned(3, LEARNED_ROWS)
    assert path == tmp_path / "learned/learned-00000003.parquet"
    assert store.read_learned(3).equals(LEARNED_ROWS.cast(LEARNED_SCHEMA))
    assert list(store.read()) == [] and store.all_steps() == []
    pq.write_table(pq.read_table(path).drop_columns(["entropy"]), path)
    with pytest.raises(DataError, match=r"learned-00000003.* no column 'entropy'"):
        store.read_learned(3)
    path.write_bytes(b"half")
    with pytest.raises(DataError, match="learned-00000003"):
        store.read_learned(3)


def test_resuming_removes_what_later_steps_learned(tmp_path):
    store = TrajectoryStore(tmp_path / "trajectories")
    for step in (1, 2, 3):
        store.write_learned(step, LEARNED_ROWS)
    (store.learned / ".tmp-0123456789abcdef-99").write_bytes(b"half")
    (store.learned / "notes.txt").write_text("the user's")
    store.truncate_after(2)
    names = ["learned-00000001.parquet", "learned-00000002.parquet", "notes.txt"]
    assert sorted(f.name for f in store.learned.iterdir()) == names
    store.remove_learned(1)
    assert sorted(f.name for f in store.learned.iterdir()) == names[1:]


@pytest.mark.parametrize(
    ("keep", "kept"),
    [("all", range(21, 71)), ("last:3", [68, 69, 70]), ("every:10", [30, 40, 50, 60, 70])],
)
def test_the_last_steps_are_kept_of_what_was_learned(tmp_path, monkeypatch, keep, kept):
    monkeypatch.setattr(os, "fsync", lambda file: None)
    store = TrajectoryStore(tmp_path / "trajectories")
    writer = TrajectoryWriter(store, keep)
    for step in range(1, 71):
        writer.write_learned(step, lambda: LEARNED_ROWS.slice(0, 1))
    writer.wait()
    writer.close()
    names = [f"learned-{step:08d}.parquet" for step in kept]
    assert sorted(f.name for f in store.learned.iterdir()) == names


def test_what_was_learned_may_fail_to_be_written(tmp_path):
    """It is one warning. Trajectories are written as before."""
    (tmp_path / "learned").write_text("a file")
    store, warnings = TrajectoryStore(tmp_path / "trajectories"), []
    writer = TrajectoryWriter(store, warn=warnings.append)
    for step in (1, 2):
        writer.write(step, [group(scored())])
        writer.write_learned(step, lambda: LEARNED_ROWS)
    writer.write_learned(2, lambda: LEARNED_ROWS.drop_columns(["entropy"]))
    writer.wait()
    writer.close()
    [warning] = warnings
    assert f"cannot write {tmp_path / 'learned'}" in warning and "Training goes on" in warning
    assert store.steps("train") == [1, 2]


@pytest.mark.parametrize("groups", [[], [Group(Sample("x", PROMPT), (), 8)]])
def test_a_step_without_rollouts(tmp_path, groups):
    TrajectoryStore(tmp_path).write(1, groups)
    assert list(load_trajectories(tmp_path)) == []


def test_more_rows_than_one_batch_and_several_segments(tmp_path):
    base = scored()
    segment = base.trajectory.segments[0]
    empty = Segment(token_array([1]), token_array(), token_array(), float_array(), token_array())
    many = [
        dataclasses.replace(
            base,
            trajectory=dataclasses.replace(
                base.trajectory, rollout=i, segments=(segment,) * (i % 3) + (empty,) * (i % 2)
            ),
        )
        for i in range(200)
    ]
    TrajectoryStore(tmp_path).write(1, [group(*many)])
    assert list(load_trajectories(tmp_path)) == many


def test_a_lone_surrogate_does_not_stop_a_run(tmp_path):
    trajectory = dataclasses.replace(
        scored().trajectory,
        messages=(Message("user", "a\ud800b\x00ü😀"),),
        episode_id="e\udfff",
    )
    TrajectoryStore(tmp_path).write(1, [group(scored(trajectory=trajectory))])
    (back,) = load_trajectories(tmp_path)
    assert back.trajectory.messages[0].content == "a?b\x00ü😀"
    assert back.trajectory.episode_id == "e?"


def test_numbers_that_are_not_finite_come_back(tmp_path):
    made = scored(metrics={"perplexity": float("inf")})
    TrajectoryStore(tmp_path).write(1, [group(made)])
    assert list(load_trajectories(tmp_path)) == [made]


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "folder").write_text("a file")
    with pytest.raises(RunStopped, match=r"folder/train-00000001\.parquet"):
        TrajectoryStore(tmp_path / "folder").write(1, [group(scored())])


def test_damage_is_named(tmp_path):
    with pytest.raises(DataError, match="not a folder"):
        list(load_trajectories(tmp_path / "missing"))
    path = TrajectoryStore(tmp_path).write(1, [group(scored())])
    whole = path.read_bytes()
    for damaged in (b"", whole[:-20], whole[: len(whole) // 2]):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="train-00000001"):
            list(load_trajectories(tmp_path))
    pq.write_table(pa.table({"x": [1]}), path)
    with pytest.raises(DataError, match="train-00000001"):
        list(load_trajectories(tmp_path))


def as_64_bits(table: pa.Table) -> pa.Table:
    """Return a table as filtering rows in Python writes it."""
    return pa.Table.from_pylist(table.to_pylist())


def as_large_lists(table: pa.Table) -> pa.Table:
    def large(kind: pa.DataType) -> pa.DataType:
        if pa.types.is_list(kind):
            return pa.large_list(large(kind.value_type))
        return pa.large_string() if pa.types.is_string(kind) else kind

    return table.cast(pa.schema([(field.name, large(field.type)) for field in table.schema]))


@pytest.mark.parametrize("change", [as_64_bits, as_large_lists])
def test_a_file_that_another_program_wrote_has_the_same_tokens(tmp_path, change):
    store = TrajectoryStore(tmp_path / "trajectories")
    path = store.write(1, [group(scored(0), scored(1))])
    learned = pa.Table.from_pylist(
        [
            dict.fromkeys(LEARNED, [0.5] * len(s.response_ids))
            | {"episode_id": f"e{i}", "segment": j}
            | {"clipped": [None] + [1] * (len(s.response_ids) - 1)}
            for i in (0, 1)
            for j, s in enumerate(scored(i).trajectory.segments)
        ],
        LEARNED_SCHEMA,
    )  # fmt: skip
    learned_path = store.write_learned(1, learned)
    read = store.read_episodes(), store.read_tokens(), store.read_learned(1)
    for file in (path, learned_path):
        pq.write_table(change(pq.read_table(file)), file)
    assert [r.scored for r in store.read()] == [scored(0), scored(1)]
    assert store.read_episode("e1").scored == scored(1)
    assert (store.read_episodes(), store.read_tokens(), store.read_learned(1)) == read


@pytest.mark.parametrize("value", [2**31, 1.5, None, "x"])
@pytest.mark.parametrize("column", ["prompt_ids", "response_ids", "versions"])
def test_tokens_that_are_no_32_bit_integers_are_refused(tmp_path, column, value):
    store = TrajectoryStore(tmp_path)
    path = store.write(1, [group(scored())])
    table = pq.read_table(path)
    changed = [[[value] * len(segment) for segment in row] for row in table[column].to_pylist()]
    index = table.schema.get_field_index(column)
    pq.write_table(table.set_column(index, column, pa.array(changed)), path)
    for read in (lambda: list(store.read()), lambda: store.read_episode("e0")):
        with pytest.raises(DataError, match="train-00000001"):
            read()
    if column != "prompt_ids":  # the table of response tokens has none
        with pytest.raises(DataError, match="train-00000001"):
            store.read_tokens()


def test_integers_beyond_64_bits_in_cells_are_exact():
    assert parse_json('{"a": [123456789012345678901234567890, -9223372036854775809]}') == {
        "a": [123456789012345678901234567890, -(2**63) - 1]
    }


@pytest.mark.parametrize("name", ["stop_reason", "group", "spans", "versions"])
def test_a_missing_column_is_named(tmp_path, name):
    store = TrajectoryStore(tmp_path)
    path = store.write(1, [group(scored(0), scored(1))])
    pq.write_table(pq.read_table(path).drop_columns([name]), path)
    for read in (store.read, store.read_tokens if name == "versions" else store.read_episodes):
        with pytest.raises(DataError, match=rf"train-00000001\.parquet .* no column '{name}'"):
            list(read())


def test_kept_tokens_are_restored_and_earlier_versions_have_none(tmp_path):
    """One row was sampled from kept tokens, the other from all."""
    plain = scored(0)
    first, *others = plain.trajectory.segments
    counts = [3 * m for m in first.response_mask]
    cut = dataclasses.replace(
        first, kept_ids=token_array(range(sum(counts))), kept_counts=token_array(counts)
    )
    trajectory = dataclasses.replace(plain.trajectory, segments=(cut, *others))
    written = [dataclasses.replace(plain, trajectory=trajectory), scored(1)]
    store = TrajectoryStore(tmp_path)
    path = store.write(1, [group(*written)])
    assert sum(counts) > 0 and [s.scored for s in store.read(1)] == written
    id = written[1].trajectory.episode_id
    assert store.read_episode(id).scored == written[1]
    pq.write_table(pq.read_table(path).drop_columns(["kept_ids", "kept_counts"]), path)
    assert [s.scored for s in store.read(1)] == [plain, written[1]]
    assert store.read_episode(id).scored == written[1]
    assert len(store.read_tokens()) == 8


def test_values_that_json_cannot_hold_are_named(tmp_path):
    extra = {"when": date(2026, 1, 2), "deep": [{"image": b"x"}, 1.5], "fine": [None, True, "a"]}
    extra["no_fields"] = dataclasses.make_dataclass("NoFields", ())()
    sample = Sample("row-1", PROMPT, ground_truth={1: "one"}, extra=extra)
    lossy = scored(trajectory=dataclasses.replace(scored().trajectory, sample=sample))
    store = TrajectoryStore(tmp_path)
    store.write(1, [Group(sample, (lossy,)), group(scored(0))])
    named, plain = store.read(1)
    changed = ["extra.when", "extra.deep[0].image", "extra.no_fields"]
    assert named.as_text == ["ground_truth.1", *changed]
    assert named.scored.trajectory.sample.extra["when"] == "2026-01-02"
    assert named.scored.trajectory.sample.extra["no_fields"] == {}
    assert plain.as_text == []


def test_experts_are_restored_and_earlier_versions_have_none(tmp_path):
    plain = scored(0)
    first, *others = plain.trajectory.segments
    inputs = len(first.prompt_ids) + len(first.response_ids) - 1
    with_experts = dataclasses.replace(first, experts=short_array(range(-1, 3 * inputs - 1)))
    trajectory = dataclasses.replace(plain.trajectory, segments=(with_experts, *others))
    written = [dataclasses.replace(plain, trajectory=trajectory), scored(1)]
    store = TrajectoryStore(tmp_path)
    path = store.write(1, [group(*written)])
    assert [s.scored for s in store.read(1)] == written
    assert next(store.read(1)).scored.trajectory.segments[0].experts.typecode == "h"
    table = pq.read_table(path)
    pq.write_table(table.drop_columns(["kept_ids", "kept_counts"]), path)
    assert [s.scored for s in store.read(1)] == written
    pq.write_table(table.drop_columns(["experts"]), path)
    assert [s.scored for s in store.read(1)] == [plain, written[1]]


def test_the_numbers_of_a_step_are_not_in_one_list(tmp_path, monkeypatch):
    """Arrow counts those of a list in 32 bits, which are too few for the experts of a step."""
    many = [scored(i) for i in range(50)]
    numbers = [len(s.prompt_ids) for x in many for s in x.trajectory.segments]
    offsets = agentrl.store._offsets

    def few(lists):
        assert sum(map(len, lists)) < sum(numbers) / 2
        return offsets(lists)

    monkeypatch.setattr("agentrl.store._offsets", few)
    store = TrajectoryStore(tmp_path)
    store.write(1, [group(*many)])
    assert [r.scored for r in store.read(1)] == many


def test_no_field_is_forgotten():
    """A new field of a stored type must be written and read: then name it here."""
    known = {
        # Its scores are stored in the rewards, its counts in the metrics.
        Trajectory: 16,
        Span: 4,
        Turn: 14,
        ToolCall: 5,
        Scored: 6,  # its answer is stored in the metrics
        Sample: 12,
        Segment: 9,
        Message: 5,
        ToolResult: 6,
        RowImage: 6,
        Group: 5,  # its greedy rollout is stored as a group of its own
    }
    assert {kind: len(dataclasses.fields(kind)) for kind in known} == known


def test_only_what_the_policy_wrote_is_an_answer(tmp_path):
    """An environment may add assistant messages of its own, also behind the last turn."""
    played = scored().trajectory
    first, last = played.turns
    trajectory = dataclasses.replace(
        played,
        messages=(*played.messages, Message("assistant", "#### 13"), Message("user", "Bye.")),
        turns=(
            dataclasses.replace(first, message_index=1),
            dataclasses.replace(last, message_index=3),
        ),
    )
    assert trajectory.final_text == "#### 12"
    assert [m.content for m in trajectory.answers] == [played.messages[1].content, "#### 12"]
    store = TrajectoryStore(tmp_path)
    kept = dataclasses.replace(scored(), trajectory=trajectory)
    store.write(1, [Group(trajectory.sample, (kept,))])
    (stored,) = store.read()
    assert stored.scored.trajectory.final_text == "#### 12"


# -- images ---------------------------------------------------------------------------------------


def picture(color: int) -> Image:
    return Image.of(PIL.new("RGB", (84, 56), (color, 0, 0)))


def with_images(rollout: int, *zooms: int) -> Scored:
    """Return a rollout with an image in its prompt, and one in a result for each zoom."""
    plain = scored(rollout)
    shared, returned = picture(0), [picture(zoom) for zoom in zooms]
    prompt = (Message.of("user", "How many? ", shared),)
    tool = Message.of("tool", *returned, tool_call_id="c1")
    result = ToolResult(tool.content, images=tool.images)
    row = tuple(RowImage(b"pixels" + i.data, 84, 56, 6, 9, i.key) for i in (shared, *returned))
    played = plain.trajectory
    trajectory = dataclasses.replace(
        played,
        sample=dataclasses.replace(played.sample, prompt=prompt),
        segments=(dataclasses.replace(played.segments[0], images=row), *played.segments),
        turns=(dataclasses.replace(played.turns[0], tool_results=(result,)), played.turns[1]),
        messages=(*prompt, played.messages[1], tool, played.messages[3]),
    )
    return dataclasses.replace(plain, trajectory=trajectory)


def names(store: TrajectoryStore) -> set[str]:
    return {image.name for image in store.images.iterdir()}


def files_of(*images: Image) -> set[str]:
    return {i.key for i in images} | {sha256(b"pixels" + i.data).hexdigest() for i in images}


def test_images_come_back_and_each_is_one_file(tmp_path):
    store = TrajectoryStore(tmp_path)
    rollouts = [with_images(0, 10, 20), with_images(1, 10), scored(2)]
    path = store.write(1, [group(*rollouts[:2]), group(rollouts[2])])
    assert names(store) == files_of(picture(0), picture(10), picture(20))
    modified = {image: image.stat().st_mtime_ns for image in store.images.iterdir()}
    store.write(2, [group(with_images(3, 10))])
    assert {image: image.stat().st_mtime_ns for image in store.images.iterdir()} == modified
    assert [s.scored for s in store.read(step=1)] == rollouts
    assert store.read_episode("e1").scored == rollouts[1]
    assert store.read_image(picture(10).key) == picture(10)
    # Any parquet reader sees which files the images are.
    row = pq.read_table(path).to_pylist()[1]
    assert json.loads(row["messages"])[2]["images"] == [picture(10).key]
    assert [i["width"] for i in json.loads(row["images"])[0]] == [84, 84]
    assert [s["data"] in names(store) for s in json.loads(row["images"])[0]] == [True, True]


def test_a_run_without_images_has_none_in_its_files(tmp_path):
    store = TrajectoryStore(tmp_path)
    path = store.write(1, [group(scored())])
    assert pq.read_schema(path).metadata is None and not store.images.exists()
    row = pq.read_table(path).to_pylist()[0]
    assert not any("images" in str(cell) for cell in row.values())


def test_images_stay_as_long_as_a_file_names_them(tmp_path):
    store = TrajectoryStore(tmp_path)
    for step, zoom in enumerate((10, 20, 10), 1):
        store.write(step, [group(with_images(step, zoom))])
    store.write(1, [group(with_images(0, 40))], split="val")
    store.remove_training(2)
    assert names(store) == files_of(picture(0), picture(10), picture(40))
    (store.images / ".tmp-1234-5").write_bytes(b"of a killed process")
    store.truncate_after(2)
    assert names(store) == files_of(picture(0), picture(40))
    assert [s.scored for s in store.read()] == [with_images(0, 40)]
    # If a file cannot be read, nobody knows what it names: everything stays.
    (tmp_path / "val-00000000.parquet").write_bytes(b"")
    store.truncate_after(0)
    assert names(store) == files_of(picture(0), picture(40))


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read: No such file"), (b"other", "is damaged: its SHA-256 is d9298a10")],
)
def test_a_damaged_image_is_named(tmp_path, content, message):
    store = TrajectoryStore(tmp_path)
    store.write(1, [group(scored(0), with_images(1, 30))])
    image = store.images / picture(30).key
    image.unlink() if content is None else image.write_bytes(content)
    with pytest.raises(
        DataError, match=rf"row 1 .*column '(messages|turns)': the image .*{message}"
    ):
        list(store.read())
    with pytest.raises(DataError, match=message):
        store.read_image(image.name)
    with pytest.raises(DataError, match=r"'\.\./x' is not the name of an image"):
        store.read_image("../x")


def test_images_that_do_not_fit_on_the_disk_stop_the_run(tmp_path):
    store = TrajectoryStore(tmp_path)
    store.images.write_bytes(b"a file, so it is no folder")
    with pytest.raises(RunStopped, match="cannot write the trajectories"):
        store.write(1, [group(with_images(0, 10))])
    assert not list(tmp_path.glob("*.parquet"))


# -- any trajectory at all ------------------------------------------------------------------------

text = st.text(st.characters(codec="utf-8"), max_size=20)
number = st.floats(allow_nan=False, width=64)
numbers = st.dictionaries(text, number, max_size=3)
json_value = st.recursive(
    st.none() | st.booleans() | st.integers() | number | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
json_object = st.dictionaries(text, json_value, max_size=3)
calls = st.lists(
    st.builds(ToolCall, text, json_object | text, error=text, id=text), max_size=2
).map(tuple)
images = st.builds(Image, st.binary(min_size=1, max_size=3))
with_parts = st.builds(
    lambda role, parts: Message.of(role, *parts),
    st.sampled_from(["system", "user", "tool"]),
    st.lists(text | images, max_size=4),
)
results = st.lists(
    st.builds(ToolResult, text, st.booleans(), st.none() | number, text, number)
    | with_parts.map(lambda message: ToolResult(message.content, images=message.images)),
    max_size=2,
).map(tuple)
messages = st.lists(
    st.builds(Message, st.sampled_from(["system", "user", "assistant", "tool"]), text, calls, text)
    | with_parts,
    max_size=3,
).map(tuple)
ids = st.integers(-(2**31), 2**31 - 1)


@st.composite
def segments(draw) -> Segment:
    n = draw(st.integers(0, 5))

    def of(items, code: str) -> array:
        return array(code, draw(st.lists(items, min_size=n, max_size=n)))

    prompt = array("i", draw(st.lists(ids, max_size=5)))
    logprobs = of(st.floats(allow_nan=False, width=32), "f")
    row_images = draw(
        st.lists(st.builds(RowImage, st.binary(min_size=1), ids, ids, ids, ids, text), max_size=2)
    )
    return Segment(
        prompt, of(ids, "i"), of(st.integers(0, 1), "i"), logprobs, of(ids, "i"),
        images=tuple(row_images),
    )  # fmt: skip


turns = st.builds(
    Turn,
    st.integers(0, 3),
    st.integers(0, 100),
    st.integers(0, 100),
    text,
    calls,
    results,
    numbers,
    number,
    number,
    st.integers(0, 9),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    message_index=st.integers(-1, 100),
)
samples = st.builds(
    Sample,
    text,
    messages,
    text,
    text,
    json_value,
    st.lists(text, max_size=2).map(tuple),
    st.dictionaries(text, json_object, max_size=2),
    text,
    json_object,
    json_object,
    st.integers(0, 10**9),
    text,
)
trajectories = st.builds(
    Trajectory,
    samples,
    text,
    st.integers(0, 100),
    st.lists(segments(), max_size=3).map(tuple),
    st.lists(turns, max_size=3).map(tuple),
    messages,
    st.dictionaries(text, number | text | st.lists(text | ids).map(tuple), max_size=3),
    text,
    number,
    number,
    st.integers(0, 100),
    error=text,
)
groups = st.builds(
    Group,
    samples,
    st.lists(
        st.builds(Scored, trajectories, numbers, number, numbers, st.booleans()), max_size=3
    ).map(tuple),
    st.integers(0, 8),
)


@examples(60)
@given(st.lists(groups, max_size=2))
def test_any_trajectory_is_read_back_as_written(written):
    with tempfile.TemporaryDirectory() as folder:
        TrajectoryStore(Path(folder)).write(3, written, split="val")
        stored = list(TrajectoryStore(Path(folder)).read())
    assert [s.scored for s in stored] == [s for g in written for s in g.scored]
    assert [s.dropped for s in stored] == [g.dropped for g in written for _ in g.scored]
