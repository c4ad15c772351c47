"""One step as data: what its rollouts waited for, what was not trained on, its slowest calls."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.recorded import SAMPLE, play

from agentrl import load_run
from agentrl.store import TrajectoryStore
from agentrl.trajectory import Group, Span
from agentrl.view import step as step_module
from agentrl.view.step import describe_step


def timed(rollout, start, *spans, **kwargs):
    scored = play(1, 0, rollout, **kwargs)
    seconds = spans[-1].end
    changes = {"started": 1000.0 + start, "spans": spans, "seconds": seconds}
    return replace(scored, trajectory=replace(scored.trajectory, **changes))


@pytest.fixture
def store(tmp_path):
    return TrajectoryStore(tmp_path / "trajectories")


def test_the_time_of_a_step_is_that_of_its_rollouts(store, tmp_path):
    fast = timed(0, 0.0, Span("generate", 0.0, 2.0), Span("reward", 2.5, 3.0))
    slow = timed(1, 1.0, Span("queue", 0.0, 1.0), Span("generate", 1.0, 4.0), Span("tools", 4, 9))
    store.write(1, [Group(SAMPLE, (fast, slow))])
    store.write(1, [Group(SAMPLE, (timed(2, 500.0, Span("generate", 0, 99), name="v"),))], "val")
    described = describe_step(load_run(tmp_path), 1)
    time = described["time"]
    assert (time["seconds"], time["rollouts"], time["others_end"]) == (10.0, 2, 3.0)
    # The loop itself takes the half second between two spans of the first rollout.
    parts = {"generate": 5.0, "tools": 5.0, "queue": 1.0, "reward": 0.5, "loop": 0.5}
    assert time["parts"] == parts and [*time["parts"].values()] == [5.0, 5.0, 1.0, 0.5, 0.5]
    # When the first one had ended, the second one still generated for 2 s and called tools for 5 s.
    [last] = time["last"]
    assert last == {"episode": "e1-0-1", "end": 10.0, "parts": {"tools": 5.0, "generate": 2.0}}
    ends = {row["episode"]: (row["start"], row["end"]) for row in described["rollouts"]}
    assert ends == {"e1-0-0": (0.0, 3.0), "e1-0-1": (1.0, 10.0), "v": (None, None)}


def test_a_twentieth_of_the_rollouts_is_named_as_the_last(store, tmp_path):
    played = [timed(i, 0.0, Span("generate", 0.0, 1.0 + i)) for i in range(60)]
    store.write(1, [Group(SAMPLE, tuple(played))])
    time = describe_step(load_run(tmp_path), 1)["time"]
    assert [row["episode"] for row in time["last"]] == ["e1-0-59", "e1-0-58", "e1-0-57"]
    assert time["others_end"] == 57.0


def test_the_spans_of_the_first_rollouts_are_left_out_if_there_are_too_many(
    store, tmp_path, monkeypatch
):
    monkeypatch.setattr(step_module, "MAX_SPANS", 2)
    played = [timed(i, 0.0, Span("generate", 0.0, 1.0 + i)) for i in range(3)]
    store.write(1, [Group(SAMPLE, tuple(played))])
    rows = describe_step(load_run(tmp_path), 1)["rollouts"]
    assert [row["spans"] for row in rows] == [
        None,
        [["generate", 0.0, 2.0, 0]],
        [["generate", 0.0, 3.0, 0]],
    ]


def test_what_did_not_train_has_a_reason(store, tmp_path):
    causes = ("EngineError: is down", "EngineError: is down", "ToolServerError: 503")
    masked = play(1, 0, 0, masked=True, stop="time")
    first = Group(SAMPLE, (masked, play(1, 0, 1)), 2, None, causes[:2])
    second = Group(SAMPLE, (play(1, 1, 0),), 1, None, causes[2:])
    store.write(1, [first, second])
    store.write(1, [Group(SAMPLE, (play(1, 0, 0, name="x"), play(1, 0, 1, name="y")))], "evicted")
    found = describe_step(load_run(tmp_path), 1)["untrained"]
    assert [(part["what"], part["count"], part["why"], part["groups"]) for part in found] == [
        ("dropped after an error", 2, "EngineError: is down", [0]),
        ("dropped after an error", 1, "ToolServerError: 503", [1]),
        ("masked", 1, found[2]["why"], []),
        ("evicted", 2, "all advantages of the group are 0 (algorithm.filter_groups)", [0]),
    ]
    assert "the budget 'time' ended it" in found[2]["why"] and found[2]["episodes"] == ["e1-0-0"]


def test_the_slowest_calls_are_those_of_training(store, tmp_path):
    store.write(1, [Group(SAMPLE, (play(1, 0, 0, calls=(("search", "timeout"),)),))])
    store.write(1, [Group(SAMPLE, (play(1, 0, 0, calls=(("calc", ""),), name="v"),))], "val")
    call = {"episode": "e1-0-0", "turn": 0, "tool": "search", "error": "timeout", "seconds": 0.5}
    assert describe_step(load_run(tmp_path), 1)["slow_calls"] == [call]
    assert describe_step(load_run(tmp_path), 7)["rollouts"] == []
