"""The tables of a recorded run, against its rollouts, read one token after the other."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from support.recorded import play
from support.trajectories import make_trajectory, row

from agentrl import load_run
from agentrl.errors import DataError
from agentrl.images import Image
from agentrl.store import LEARNED, TOKENS_SCHEMA, TrajectoryStore
from agentrl.trajectory import (
    Group,
    Message,
    Sample,
    Scored,
    Segment,
    ToolResult,
    Trajectory,
    float_array,
    token_array,
)

OLD = Path(__file__).parent.parent / "fixtures/old_run/run"
SAMPLE = Sample("s", (Message("user", "Hi"),))


def random_group(rng: random.Random, step: int, split: str, index: int) -> Group:
    scored = []
    for rollout in range(3):
        segments = []
        for _ in range(rng.randrange(3)):
            mask = [rng.randrange(2) for _ in range(rng.randrange(6))]
            segments.append(
                Segment(
                    token_array([1]),
                    token_array([rng.randrange(99) for _ in mask]),
                    token_array(mask),
                    float_array([-rng.random() * m for m in mask]),
                    token_array([step - 1 if m else -1 for m in mask]),
                )
            )
        episode_id = f"{split}-{step}-{index}-{rollout}"
        trajectory = Trajectory(SAMPLE, episode_id, rollout, tuple(segments), (), (), {}, "done")
        scored.append(Scored(trajectory, {}, 1.0))
    return Group(SAMPLE, tuple(scored))


def learned_rows(rng: random.Random, groups: list[Group]) -> pa.Table:
    """Numbers of every token, some of them unknown; the last episode has none."""
    rows = []
    for scored in [s for group in groups for s in group.scored][:-1]:
        for i, segment in enumerate(scored.trajectory.segments):
            row = {"episode_id": scored.trajectory.episode_id, "segment": i}
            for name in LEARNED:
                row[name] = [
                    rng.choice([None, rng.randrange(9)]) for _ in range(len(segment.response_ids))
                ]
            rows.append(row)
    rng.shuffle(rows)  # rows are found by their keys
    kinds = {name: pa.list_(kind) for name, kind in LEARNED.items()}
    columns = {"episode_id": pa.string(), "segment": pa.int32(), **kinds}
    return pa.Table.from_pylist(rows, schema=pa.schema(columns.items()))


@pytest.fixture
def folder(tmp_path) -> Path:
    """A run of three steps. What it learned is recorded for the last two."""
    rng, store = random.Random(0), TrajectoryStore(tmp_path / "trajectories")
    for step in (1, 2, 3):
        groups = [random_group(rng, step, "train", i) for i in range(7)]
        store.write(step, groups)
        store.write(step, [random_group(rng, step, "val", 0)], split="val")
        if step > 1:
            store.write_learned(step, learned_rows(rng, groups))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "data": {"critic/score/mean": 0.5}}\n')
    return tmp_path


def expected_tokens(folder: Path) -> list[dict]:
    rows = []
    store = TrajectoryStore(folder / "trajectories")
    for stored in store.read():
        learned = {
            (row["episode_id"], row["segment"]): row
            for row in store.read_learned(stored.step).to_pylist()
        }
        trajectory = stored.scored.trajectory
        for i, segment in enumerate(trajectory.segments):
            of_segment = learned.get((trajectory.episode_id, i))
            for t, (token, mask) in enumerate(
                zip(segment.response_ids, segment.response_mask, strict=True)
            ):
                rows.append(
                    {
                        "step": stored.step,
                        "split": stored.split,
                        "episode_id": trajectory.episode_id,
                        "segment": i,
                        "position": t,
                        "token_id": token,
                        "mask": bool(mask),
                        "logprob": segment.logprobs[t] if mask else None,
                        "version": segment.versions[t] if mask else None,
                        "old_logprob": of_segment and of_segment["old_logprobs"][t],
                        "reference_logprob": of_segment and of_segment["reference_logprobs"][t],
                        "teacher_logprob": of_segment and of_segment["teacher_logprobs"][t],
                        "value": of_segment and of_segment["values"][t],
                        "advantage": of_segment and of_segment["advantages"][t],
                        "return": of_segment and of_segment["returns"][t],
                        "importance_weight": of_segment and of_segment["importance_weights"][t],
                        "entropy": of_segment and of_segment["entropy"][t],
                        "clipped": of_segment and of_segment["clipped"][t],
                    }
                )
    return rows


def test_each_token_is_a_row_with_what_is_known_of_it(folder):
    run = load_run(folder)
    assert run.tokens.schema.equals(TOKENS_SCHEMA)
    rows = run.tokens.to_pylist()
    assert rows == expected_tokens(folder)
    known = [row["advantage"] is not None for row in rows]
    assert 30 < sum(known) < len(rows)
    assert {row["step"] for row, is_known in zip(rows, known, strict=True) if is_known} == {2, 3}


def test_a_run_of_some_steps(folder):
    rows = [row for row in expected_tokens(folder) if row["step"] == 2]
    run = load_run(folder, steps=[2])
    assert run.tokens.to_pylist() == rows
    assert set(run.episodes["step"].to_pylist()) == {2}
    assert load_run(folder, steps=[9]).tokens.schema.equals(TOKENS_SCHEMA)
    assert len(load_run(folder, steps=[9]).tokens) == 0


def test_the_record_of_other_tokens_is_refused(folder):
    store = TrajectoryStore(folder / "trajectories")
    groups = [random_group(random.Random(8), 2, "train", i) for i in range(7)]
    store.write_learned(2, learned_rows(random.Random(0), groups))
    with pytest.raises(DataError, match=r"train-00000002\.parquet has other tokens"):
        load_run(folder).tokens  # noqa: B018


def test_a_stored_run_is_read(tmp_path):
    tokens, episodes = load_run(OLD).tokens, load_run(OLD).episodes
    assert len(tokens) == 411 and not tokens["logprob"].filter(tokens["mask"]).null_count
    trained = [row["mask"] and row["split"] == "train" for row in tokens.to_pylist()]
    assert tokens["advantage"].is_valid().to_pylist() == trained
    assert set(tokens["episode_id"].to_pylist()) == set(episodes["episode_id"].to_pylist())
    assert not episodes["group"].null_count
    assert load_run(OLD).tokenizer.encode("hi") == [71, 72]
    without = shutil.copytree(OLD, tmp_path / "run", ignore=lambda *_: ["tokenizer"])
    with pytest.raises(DataError, match=r"tokenizer does not exist.* of policy instead"):
        load_run(without).tokenizer  # noqa: B018


def test_an_answer_is_right_if_it_ends_with_the_ground_truth(tmp_path):
    answers = {"It is 12.": "12", "1,200.0": 1200, "12 or 13": "12", "In Paris!": "paris"}
    cases = [*answers.items(), ("12", ""), ("12", None), ("12", ["12"])]
    groups = []
    for i, (answer, truth) in enumerate(cases):
        sample = row(id=f"r{i}", ground_truth=truth)
        groups.append(
            Group(sample, (Scored(make_trajectory(("assistant", answer), sample=sample), {}, 0.0),))
        )
    TrajectoryStore(tmp_path / "trajectories").write(1, groups)
    rows = load_run(tmp_path).behaviour
    assert rows["right"].to_pylist() == [True, True, False, True, None, None, None]


@pytest.mark.parametrize(("second", "repeated"), [(b"one", 1), (b"other", 0)])
def test_a_call_that_returns_another_image_is_no_repetition(tmp_path, second, repeated):
    played = play(1, 0, 0, calls=(("look", ""), ("look", "")))
    [turn] = played.trajectory.turns
    seen = [Message.of("tool", Image(data)) for data in (b"one", second)]
    results = tuple(ToolResult(m.content, images=m.images) for m in seen)
    trajectory = replace(played.trajectory, turns=(replace(turn, tool_results=results),))
    scored = replace(played, trajectory=trajectory)
    TrajectoryStore(tmp_path / "trajectories").write(1, [Group(trajectory.sample, (scored,))])
    assert load_run(tmp_path).behaviour["repeated_calls"].to_pylist() == [repeated]
