"""Curves of rollouts: mean, standard error and n of each part, with exact answers."""

from __future__ import annotations

import math

import pytest
from support.recorded import play

from agentrl import load_run
from agentrl.store import TrajectoryStore
from agentrl.trajectory import Group
from agentrl.view import curves
from agentrl.view.curves import rollout_curves


@pytest.fixture
def run(tmp_path):
    """Step 1 has two rows with rewards (0, 1) and (1, 1); step 2 has one row."""
    store = TrajectoryStore(tmp_path / "trajectories")
    calls = (("search", ""), ("search", "timeout"), ("serch", "unknown_tool"))
    first = [play(1, 0, 0, reward=0.0, calls=calls), play(1, 0, 1, source="other")]
    second = [play(1, 1, 0, calls=(("search", ""),)), play(1, 1, 1)]
    store.write(1, [Group(g[0].trajectory.sample, tuple(g)) for g in (first, second)])
    store.write(2, [Group(first[0].trajectory.sample, (play(2, 0, 0, reward=0.5),))], "evicted")
    store.write(2, [Group(first[0].trajectory.sample, (play(2, 0, 1, reward=9.0),))], "val")
    return load_run(tmp_path)


def lines(run, by, name):
    found = {c["name"]: c["lines"] for c in rollout_curves(run, by)["curves"]}
    return {line["part"]: line["points"] for line in found[name]}


def test_a_point_is_mean_error_n_and_rows(run):
    # The mean is 3/4. By row, the deviations sum to -1/2 and 1/2: sqrt(2/1 * 1/2) / 4.
    points = lines(run, "all", "reward")["all rollouts"]
    assert points == [[1, 0.75, pytest.approx(math.sqrt(1.0) / 4), 4, 2], [2, 0.5, None, 1, 1]]
    by_source = lines(run, "source", "reward")
    assert by_source["other"] == [[1, 1.0, None, 1, 1]]
    # Of (0) and (1, 1) the mean is 2/3, and the deviations sum to -2/3 and 2/3.
    assert by_source["quiz"] == [
        [1, *map(pytest.approx, (2 / 3, 4 / 9)), 3, 2],
        [2, 0.5, None, 1, 1],
    ]


def test_tools_that_the_policy_invents_are_one_part(run):
    by_tool = lines(run, "tool", "share of rollouts that call it")
    assert {tool: [p[1] for p in points] for tool, points in by_tool.items()} == {
        "search": [0.5, 0.0],
        "(unknown tools)": [0.25, 0.0],
    }
    failing = lines(run, "tool", "share of calls that fail")["search"]
    assert [(p[0], p[1], p[3]) for p in failing] == [(1, pytest.approx(1 / 3), 3)]
    assert lines(run, "tool", "seconds of a call")["search"][0][1] == 0.5


def test_of_a_long_run_some_steps_are_read(run, monkeypatch):
    monkeypatch.setattr(curves, "MAX_EPISODES", 1)
    found = rollout_curves(run, "all")
    assert found["every"] == 2
    assert [p[0] for p in found["curves"][0]["lines"][0]["points"]] == [1]
