"""Diagnoses of users, and the numbers that diagnoses get from stored episodes."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import numpy as np
import pytest

from agentrl import load_run
from agentrl.callbacks import Notifier
from agentrl.record import read_metrics
from agentrl.report import Finding, diagnose, diagnosis
from agentrl.report.finding import describe, findings_table
from agentrl.report.live import LiveDiagnosis
from agentrl.report.run import diagnoses

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
                7, "it burns", {"heat": 0.5}, ["e1"], ["fire"], ["water"], severity="error"
            )

        findings = diagnose(load_run(OLD))
        assert [(f.name, f.severity) for f in findings[:2]] == [
            ("grave", "error"),
            ("broken", "warning"),
        ]
        assert findings[1].text == "the diagnosis 'broken' failed: ValueError: no such column"
        row = findings_table(findings).slice(0, 1).to_pylist()[0]
        assert row == {
            "step": 7,
            "name": "grave",
            "severity": "error",
            "subject": "",
            "turns": [],
            "text": "it burns",
            "evidence": '{"heat": 0.5}',
            "episodes": ["e1"],
            "causes": ["fire"],
            "tries": ["water"],
        }


def test_an_unknown_severity_is_refused():
    with pytest.raises(ValueError, match="unknown severity 'grave'"):
        Finding(1, "x", severity="grave")  # type: ignore[arg-type]


def test_findings_of_a_stored_run_are_a_table():
    assert set(load_run(OLD).findings.column_names) >= {"step", "name", "severity", "text"}


def test_the_behaviour_of_a_stored_run_agrees_with_its_rollouts():
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
    from agentrl.report.behaviour import _find_repeated

    def turn(*calls, thread=0):
        return {
            "thread": thread,
            "tool_calls": [{"name": n, "arguments": a} for n, a, _ in calls],
            "tool_results": [{"content": c, "ok": not c.startswith("Error")} for _, _, c in calls],
        }

    same = ("f", {"a": 1, "b": 2}, "3")
    swapped = ("f", {"b": 2, "a": 1}, "3")
    assert _find_repeated([turn(same), turn(swapped), turn(same)]) == [1, 2]
    assert _find_repeated([turn(same, same)]) == [0]
    assert _find_repeated([turn(same), turn(("f", {"a": 1, "b": 2}, "4"))]) == []
    assert _find_repeated([turn(same), turn(same, thread=1)]) == []
    assert _find_repeated([turn(same), turn(("g", *same[1:]))]) == []
    # The text of an error may contain a time or an id.
    errors = [turn(("f", {"a": 1}, f"Error: request {i} failed")) for i in range(3)]
    assert _find_repeated(errors) == [1, 2]
    assert _find_repeated([turn(same), turn((*same[:2], "Error: 3"))]) == []


def test_a_finding_cites_turns_of_its_episodes():
    finding = Finding(1, "x", episodes=("a", "b"), turns=(2, None))
    assert findings_table([finding])["turns"].to_pylist() == [[2, None]]
    with pytest.raises(ValueError, match="1 turns for 2 episodes"):
        Finding(1, "x", episodes=("a", "b"), turns=(2,))


def test_numbers_of_numpy_are_recorded(tmp_path):
    numbers = {"a": 1.0, "b": np.float64(0.5), "c": np.int64(3), "d": np.float32(2)}
    finding = Finding(np.int64(4), "x", numbers)  # type: ignore[arg-type]
    plain = {"a": 1.0, "b": 0.5, "c": 3, "d": 2.0}
    assert json.loads(findings_table([finding]).column("evidence")[0].as_py()) == plain
    with diagnoses.isolated(keep=[]):
        diagnosis("numbers")(lambda run: [finding])
        watch, printed = live(tmp_path)
        watch.add(1, {})
        watch.finish()
    assert printed == ["warning: x [numbers]"]
    assert json.loads((tmp_path / "findings.jsonl").read_text())["evidence"] == plain


# --- while a run trains --------------------------------------------------------------------------


def write_record(folder: Path, steps: int) -> None:
    lines = [json.dumps({"step": s, "data": {"x": float(s)}}) + "\n" for s in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(lines))


@pytest.fixture
def fifth():
    """A diagnosis that finds something from step 5 on, and a note at each step."""
    with diagnoses.isolated(keep=[]):

        @diagnosis("fifth")
        def fifth(run):
            steps = run.metrics.column("step").to_pylist()
            yield Finding(1, "a note", severity="note")
            if steps[-1] >= 5:
                yield Finding(5, f"seen at {steps[-1]}", causes=["c1", "c2"], tries=["t1"])

        yield


class Watch:
    """Follows a run with the diagnoses; `printed` has their warnings."""

    def __init__(self, folder: Path, clock=time.perf_counter):
        self.printed: list[str] = []
        diagnosis = LiveDiagnosis(lambda finding: self.printed.append(describe(finding)), clock)
        self.observers = Notifier([diagnosis], folder, 9)
        record = read_metrics(folder / "metrics.jsonl")
        self.last = record[-1][0] if record else -1
        self.observers.notify("on_begin", 0, recorded=self.last)

    def add(self, step, metrics):
        self.last = step
        self.observers.notify("on_step", step, metrics)

    def finish(self):
        self.observers.notify("on_end", self.last)


def live(folder: Path, **options) -> tuple[Watch, list[str]]:
    watch = Watch(folder, **options)
    return watch, watch.printed


def test_a_finding_is_printed_once(fifth, tmp_path):
    ticks = iter(range(10**6))  # each diagnosis takes no time, as far as this clock tells
    watch, printed = live(tmp_path, clock=lambda: next(ticks) * 0.0)
    for step in range(1, 9):
        watch.add(step, {"x": 1.0})
    watch.finish()
    assert printed == ["warning: seen at 5 [fifth]\n  likely cause: c1\n  try: t1"]


@pytest.mark.parametrize(("resumed_after", "repeats"), [(4, True), (6, False)])
def test_a_resumed_run_repeats_no_warning(fifth, tmp_path, resumed_after, repeats):
    watch, printed = live(tmp_path, clock=lambda: 0.0)
    for step in range(1, 9):
        watch.add(step, {"x": 1.0})
    write_record(tmp_path, resumed_after)
    watch, again = live(tmp_path, clock=lambda: 0.0)
    for step in range(resumed_after + 1, 9):
        watch.add(step, {"x": 1.0})
    watch.finish()
    assert bool(again) == repeats and len(printed) == 1


def test_diagnoses_take_a_hundredth_of_the_time(tmp_path):
    now, runs = [0.0], []
    with diagnoses.isolated(keep=[]):

        @diagnosis("slow")
        def slow(run):
            runs.append(now[0])
            now[0] += 2.0
            return ()

        watch, _ = live(tmp_path, clock=lambda: now[0])
        for step in range(1, 1001):
            now[0] += 1.0
            watch.add(step, {})
        watch.finish()
    assert runs[0] == 3.0
    assert all(later - earlier >= 200 for earlier, later in itertools.pairwise(runs[:-1]))
    assert 4 <= len(runs) <= 7  # the last one at the end


def test_a_diagnosis_of_a_file_that_is_damaged_does_not_stop_the_run(fifth, tmp_path, caplog):
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "trajectories" / "train-00000001.parquet").write_bytes(b"PAR1")
    watch, printed = live(tmp_path, clock=lambda: 0.0)
    watch.add(1, {})
    watch.finish()
    assert not printed
    (warning,) = caplog.messages
    assert warning.startswith("the diagnosis of the run raised")
    assert "train-00000001.parquet" in warning
