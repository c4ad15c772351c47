"""Diagnoses of users, and the numbers that diagnoses get from stored episodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl import load_run
from agentrl.report import Finding, diagnose, diagnosis
from agentrl.report.diagnosis import diagnoses, findings_table

OLD = Path(__file__).parent.parent / "fixtures/old_run/run"


def test_a_diagnosis_that_raises_is_a_warning_and_the_others_go_on():
    with diagnoses.isolated():

        @diagnosis("broken")
        def broken(run):
            yield Finding(1, "kept?")
            raise ValueError("no such column")

        @diagnosis("grave")
        def grave(run):
            yield Finding(
                7, "it burns", {"heat": 0.5}, ["e1"], ["fire"], ["water"], gravity="error"
            )

        findings = diagnose(load_run(OLD))
        assert [(f.name, f.gravity) for f in findings[:2]] == [
            ("grave", "error"),
            ("broken", "warning"),
        ]
        assert findings[1].text == "the diagnosis 'broken' failed: ValueError: no such column"
        row = findings_table(findings).slice(0, 1).to_pylist()[0]
        assert row == {
            "step": 7,
            "name": "grave",
            "gravity": "error",
            "subject": "",
            "text": "it burns",
            "evidence": '{"heat": 0.5}',
            "episodes": ["e1"],
            "causes": ["fire"],
            "tries": ["water"],
        }


def test_an_unknown_gravity_is_refused():
    with pytest.raises(ValueError, match="unknown gravity 'grave'"):
        Finding(1, "x", gravity="grave")  # type: ignore[arg-type]


def test_findings_of_an_old_run_are_a_table():
    assert set(load_run(OLD).findings.column_names) >= {"step", "name", "gravity", "text"}


def test_the_behaviour_of_an_old_run_agrees_with_its_rollouts():
    run = load_run(OLD)
    rows = run.behaviour.to_pylist()
    stored = list(run.rollouts())
    assert len(rows) == len(stored) > 0
    for row, rollout in zip(rows, stored, strict=True):
        trajectory = rollout.scored.trajectory
        assert row["episode_id"] == trajectory.episode_id
        assert row["answer"] == trajectory.final_text
        assert row["turns"] == len(trajectory.turns)
        assert row["sampled_tokens"] == trajectory.sampled_tokens
        assert row["prompt"] == trajectory.sample.prompt[-1].content
        results = [r for turn in trajectory.turns for r in turn.tool_results]
        assert row["tool_calls"] == len(results)
        assert row["failed_calls"] == sum(not r.ok for r in results)


def test_repeated_calls_have_equal_arguments_and_results():
    from agentrl.report.behaviour import _count_repeated

    def turn(*calls, thread=0):
        return {
            "thread": thread,
            "tool_calls": [{"name": n, "arguments": a} for n, a, _ in calls],
            "tool_results": [{"content": c} for _, _, c in calls],
        }

    same = ("f", {"a": 1, "b": 2}, "3")
    swapped = ("f", {"b": 2, "a": 1}, "3")
    assert _count_repeated([turn(same), turn(swapped), turn(same)]) == 2
    assert _count_repeated([turn(same, same)]) == 1
    assert _count_repeated([turn(same), turn(("f", {"a": 1, "b": 2}, "4"))]) == 0
    assert _count_repeated([turn(same), turn(same, thread=1)]) == 0
    assert _count_repeated([turn(same), turn(("g", *same[1:]))]) == 0


def test_evidence_is_json():
    table = findings_table([Finding(1, "x", {"a": 1.0})])
    assert json.loads(table.column("evidence")[0].as_py()) == {"a": 1.0}
