"""The record of a run: each step once, whatever happened between two starts."""

from __future__ import annotations

import json
import resource
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from support.trajectories import make_trajectory, turn

from agentrl.config import load_config
from agentrl.errors import ConfigError, RunStopped
from agentrl.record import METRICS, read_metrics
from agentrl.trainer import tracking
from agentrl.trainer.traces import Operation, operations
from agentrl.trainer.tracking import Tracker, check_loggers
from agentrl.trajectory import Message, Scored, Span, ToolCall, ToolResult


def steps(folder) -> list[int]:
    return [step for step, _ in read_metrics(folder / METRICS)]


def log(folder, first: int, last: int, resumed_step: int = -1) -> None:
    tracker = Tracker(folder, resumed_step=resumed_step)
    for step in range(first, last + 1):
        tracker.log(step, {"critic/score/mean": step / 10})
    tracker.close()


def test_each_step_is_one_line_in_verls_format(tmp_path):
    tracker = Tracker(tmp_path / "run")
    tracker.log(0, {"val/reward/mean@1": 0.25})
    tracker.log(1, {"critic/score/mean": 0.5, "n": 3, "bad": float("nan")})
    lines = (tmp_path / "run" / METRICS).read_text().splitlines()
    assert lines == [
        '{"step":0,"data":{"val/reward/mean@1":0.25}}',
        '{"step":1,"data":{"critic/score/mean":0.5,"n":3,"bad":null}}',
    ]
    tracker.close()
    tracker.close()


def test_array_scalars_are_numbers(tmp_path):
    tracker = Tracker(tmp_path)
    tracker.log(1, {"a": np.float32(0.5), "b": np.int64(2), "c": np.array(1.5)})
    tracker.close()
    assert read_metrics(tmp_path / METRICS) == [(1, {"a": 0.5, "b": 2, "c": 1.5})]


@pytest.mark.parametrize("resumed", [-1, 0, 3, 5])
def test_a_resumed_run_has_each_step_once(tmp_path, resumed):
    log(tmp_path, 0, 5)
    log(tmp_path, resumed + 1, 8, resumed_step=resumed)
    assert steps(tmp_path) == list(range(9))
    log(tmp_path / "unbroken", 0, 8)
    assert (tmp_path / METRICS).read_bytes() == (tmp_path / "unbroken" / METRICS).read_bytes()


@pytest.mark.parametrize("torn", [b'{"step":6,"da', b'{"step":6,"data":{}}', b"\xff\n", b"[]\n"])
def test_an_incomplete_line_is_dropped(tmp_path, torn):
    log(tmp_path, 0, 5)
    with open(tmp_path / METRICS, "ab") as f:
        f.write(torn)
    assert steps(tmp_path) == list(range(6))
    log(tmp_path, 6, 7, resumed_step=5)
    assert steps(tmp_path) == list(range(8))
    assert torn not in (tmp_path / METRICS).read_bytes().splitlines(keepends=True)


def test_a_step_is_never_logged_twice(tmp_path):
    tracker = Tracker(tmp_path, resumed_step=3)
    tracker.log(4, {})
    with pytest.raises(ValueError, match="step 4 was logged after step 4"):
        tracker.log(4, {})
    tracker.close()


def test_a_disk_that_refuses_names_the_file_and_leaves_whole_lines(tmp_path):
    tracker = Tracker(tmp_path)
    tracker.log(0, {"x": 1.0})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, hard))
    try:
        with pytest.raises(RunStopped, match=rf"{METRICS}: File too large"):
            tracker.log(1, {"x": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    tracker.close()
    assert (tmp_path / METRICS).stat().st_size == 40  # half of a second line
    log(tmp_path, 1, 2, resumed_step=0)
    assert steps(tmp_path) == [0, 1, 2]


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunStopped, match="file/run"):
        Tracker(tmp_path / "file" / "run")


class Failing:
    def __init__(self, *_):
        self.calls = 0

    def log(self, step, data):
        self.calls += 1
        raise ConnectionError("no server")

    def close(self):
        raise AssertionError("a tracker that failed is not asked again")


class Stillborn:
    def __init__(self, *_):
        raise PermissionError("no key")


def install(monkeypatch, **sinks) -> None:
    """Let installed packages have these trackers."""
    found = {name: SimpleNamespace(load=lambda s=sink: s) for name, sink in sinks.items()}
    monkeypatch.setattr(tracking, "other_trackers", lambda: found)


@pytest.mark.parametrize(("sink", "message"), [(Failing, "no server"), (Stillborn, "no key")])
def test_a_failing_tracker_warns_once_and_training_goes_on(tmp_path, monkeypatch, sink, message):
    install(monkeypatch, other=sink)
    warnings: list[str] = []
    tracker = Tracker(tmp_path, ["other"], warn=warnings.append)
    for step in range(3):
        tracker.log(step, {"x": 1.0})
    tracker.close()
    assert steps(tmp_path) == [0, 1, 2]
    assert len(warnings) == 1
    assert warnings[0].startswith("other failed") and message in warnings[0]


def test_wrong_trackers_are_refused_with_the_fix(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"'tensorbord'.*Did you mean 'tensorboard'.*wandb"):
        check_loggers(["tensorbord"])
    # A folder called wandb, as wandb leaves behind, is no installed package.
    (tmp_path / "absent_tracker").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(tracking, "TRACKERS", ("absent_tracker", "absent_tracker_2"))
    for name in tracking.TRACKERS:
        with pytest.raises(ConfigError, match=rf"pip install .*\[{name}\]"):
            Tracker(tmp_path, [name])


def test_tensorboard_events(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = Tracker(tmp_path, ["tensorboard"])
    for step in range(4):
        tracker.log(step, {"critic/score/mean": step / 4})
    tracker.close()
    tracker = Tracker(tmp_path, ["tensorboard"], resumed_step=2)
    tracker.log(3, {"critic/score/mean": 1.0})
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    scalars = [(e.step, e.value) for e in events.Scalars("critic/score/mean")]
    assert scalars == [(0, 0.0), (1, 0.25), (2, 0.5), (3, 1.0)]


NAMES = {"trainer": {"project_name": "my-project", "experiment_name": "first", "tags": ["a", "b"]}}


def run_in_two_parts(folder, name):
    """A run that is stopped after step 2 and resumed from the checkpoint of step 1."""
    warnings: list[str] = []
    for resumed, steps, offset in ((-1, (0, 1, 2), 0), (1, (2, 3), 10)):
        tracker = Tracker(folder, [name], config=NAMES, resumed_step=resumed, warn=warnings.append)
        for step in steps:
            tracker.log(step, {"val/reward/mean@1": step + offset, "loss:x": 0.5})
        tracker.close()
    assert not warnings


@pytest.mark.trackers
def test_mlflow_has_one_run_with_names_tags_and_params(tmp_path, monkeypatch):
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    run_in_two_parts(tmp_path / "run", "mlflow")
    client = MlflowClient()
    experiment = client.get_experiment_by_name("my-project")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert {"a", "b"} <= run.data.tags.keys()
    assert run.data.params["trainer.experiment_name"] == "first"
    history = client.get_metric_history(run.info.run_id, "val/reward/mean_at_1")
    assert [(m.step, m.value) for m in history] == [(0, 0), (1, 1), (2, 12), (3, 13)]
    assert run.data.metrics["loss_x"] == 0.5


@pytest.mark.trackers
def test_trackio_has_one_run_with_names_and_config(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read at the import
    import trackio

    run_in_two_parts(tmp_path / "run", "trackio")
    (run,) = trackio.Api().runs("my-project")
    assert run.name == "first"


@pytest.mark.trackers
@pytest.mark.parametrize("name", ["aim", "swanlab", "comet_ml"])
def test_the_other_trackers_continue_one_run(tmp_path, monkeypatch, name):
    offline = {"SWANLAB_MODE": "offline", "COMET_START_ONLINE": "0", "COMET_API_KEY": "none"}
    for variable, value in offline.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.chdir(tmp_path)
    run_in_two_parts(tmp_path / "run", name)
    run_id = (tmp_path / "run" / f"{name}_run_id.txt").read_text()
    assert run_id.isalnum()
    if name == "aim":
        from aim import Run

        run = Run(run_id, repo=str(tmp_path / "run"), system_tracking_interval=None)
        run.track(0, name="loads the index", step=0)
        (values,) = (m.values for m in run.metrics() if m.name == "val/reward/mean@1")
        assert sorted(values.sparse_list()[1]) == [0, 1, 12, 13]
        assert (run.name, run.experiment) == ("first", "my-project")
        run.close()


def played(rollout=0, reward=0.5) -> Scored:
    """An episode of two turns: a tool call that fails, and an answer."""
    calls = (ToolCall("calculator", {"expression": "3*"}, id="c1"),)
    results = (ToolResult("Error: not an expression", ok=False, error="tool_error", seconds=0.5),)
    trajectory = make_trajectory(
        Message("assistant", "<call>", calls),
        Message("tool", "Error: not an expression", tool_call_id="c1"),
        Message("assistant", "12"),
        turns=(
            turn(tool_calls=calls, tool_results=results, message_index=2),
            turn(message_index=4),
        ),
    )
    spans = (Span("generate", 0.0, 1.0), Span("tools", 1.0, 1.5), Span("generate", 2.0, 2.5))
    times = {"started": 1_700_000_000.0, "spans": spans, "seconds": 2.5, "rollout": rollout}
    return Scored(replace(trajectory, **times), {"outcome": reward}, reward)


def test_the_operations_of_an_episode():
    assert operations(played().trajectory) == [
        Operation("generation", "generate", None, "<call>", 1.7e9, 1.7e9 + 1),
        Operation("tool", "calculator", {"expression": "3*"}, "Error: not an expression",
                  1.7e9 + 1, 1.7e9 + 1.5, "tool_error"),
        Operation("generation", "generate", None, "12", 1.7e9 + 2, 1.7e9 + 2.5),
    ]  # fmt: skip


def test_a_tracker_without_traces_gets_none(tmp_path, monkeypatch):
    shown = []

    class Metrics:
        def __init__(self, *_): ...
        def log(self, step, data): ...
        def close(self): ...

    class Traces(Metrics):
        def trace(self, step, episodes):
            shown.append((step, len(episodes)))

    install(monkeypatch, metrics=Metrics, traces=Traces)
    warnings: list[str] = []
    tracker = Tracker(tmp_path, ["metrics", "traces"], warn=warnings.append)
    tracker.trace(1, [played()] * 20)
    tracker.trace(2, [])
    tracker.close()
    assert shown == [(1, 8)] and not warnings


def trace_episodes(folder, name):
    warnings: list[str] = []
    tracker = Tracker(folder, [name], config=NAMES, warn=warnings.append)
    for step in (1, 2):
        tracker.log(step, {"loss": 0.5})
        tracker.trace(step, [played(rollout, rollout / 2) for rollout in range(2)])
    tracker.close()
    assert not warnings


@pytest.mark.trackers
def test_mlflow_shows_messages_and_tool_calls(tmp_path, monkeypatch):
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)  # MLflow makes `mlruns/` where it runs
    trace_episodes(tmp_path / "run", "mlflow")
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("my-project").experiment_id
    (run,) = client.search_runs([experiment])
    traces = mlflow.search_traces(
        locations=[experiment], run_id=run.info.run_id, return_type="list"
    )
    assert sorted(trace.info.tags["step"] for trace in traces) == ["1", "1", "2", "2"]
    root, first, tool, last = traces[0].data.spans
    assert [m["role"] for m in root.inputs["messages"]] == ["system", "user"]
    assert root.outputs["messages"][0]["tool_calls"][0]["function"]["name"] == "calculator"
    assert (root.attributes["stop_reason"], root.attributes["sample_id"]) == ("done", "r7")
    assert (first.outputs, tool.inputs, tool.outputs, last.outputs) == (
        "<call>", {"expression": "3*"}, "Error: not an expression", "12",
    )  # fmt: skip
    assert tool.status.status_code == "ERROR" and first.status.status_code == "OK"
    assert tool.end_time_ns - tool.start_time_ns == pytest.approx(0.5e9, abs=1000)


@pytest.mark.trackers
def test_trackio_shows_messages_and_tool_calls(tmp_path, monkeypatch):
    from trackio import sqlite_storage

    for module in [m for name, m in sys.modules.items() if name.startswith("trackio")]:
        for name in ("TRACKIO_DIR", "MEDIA_DIR"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, tmp_path / "trackio" / name)
    trace_episodes(tmp_path / "run", "trackio")
    traces = sqlite_storage.SQLiteStorage.get_traces("my-project", "first")
    assert sorted(trace["metadata"]["step"] for trace in traces) == [1, 1, 2, 2]
    roles = ["system", "user", "assistant", "tool", "assistant"]
    assert [message["role"] for message in traces[0]["messages"]] == roles
    assert [span["name"] for span in traces[0]["spans"]] == ["generate", "calculator", "generate"]


@pytest.mark.trackers
def test_wandb_has_the_names_and_tags(tmp_path, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    made = []
    real = wandb.init
    monkeypatch.setattr(wandb, "init", lambda **kw: made.append(real(**kw)) or made[-1])
    run_in_two_parts(tmp_path / "run", "wandb")
    for run in made:
        assert (run.project, run.name, set(run.tags)) == ("my-project", "first", {"a", "b"})
    assert len({run.id for run in made}) == 1


def test_the_tracker_of_another_package(tmp_path, monkeypatch):
    """An installed package with an entry point, as pip writes one."""
    (tmp_path / "other.py").write_text(
        "class Sink:\n"
        "    def __init__(self, folder, config, resumed_step):\n"
        "        self.file = open(folder / 'other.txt', 'a')\n"
        "        names = ('project_name', 'experiment_name', 'tags')\n"
        "        print(resumed_step, *map(config['trainer'].get, names), file=self.file)\n"
        "    def log(self, step, data): print(step, dict(data), file=self.file)\n"
        "    def close(self): self.file.close()\n"
    )
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[agentrl.trackers]\nother = other:Sink\n")
    with pytest.raises(ConfigError, match="aim, comet_ml and installed trackers"):
        load_config(None, ["trainer.logger=other"])
    monkeypatch.syspath_prepend(tmp_path)
    named = ["trainer.project_name=p", "trainer.experiment_name=e", "trainer.tags=t"]
    config = load_config(None, ["trainer.logger=other", *named])
    tracker = Tracker(tmp_path / "run", config.trainer.logger, config=config.model_dump())
    tracker.log(1, {"a": 1.0})
    tracker.close()
    assert (tmp_path / "run/other.txt").read_text() == "-1 p e ['t']\n1 {'a': 1.0}\n"


def test_metrics_are_selected_by_name(tmp_path):
    tracker = Tracker(tmp_path)
    for step in range(3):
        tracker.log(step, {"a": step, "b": 1.0})
    tracker.close()
    assert read_metrics(tmp_path / METRICS, "a".__eq__) == [
        (0, {"a": 0}),
        (1, {"a": 1}),
        (2, {"a": 2}),
    ]


def test_lines_are_json(tmp_path):
    log(tmp_path, 0, 2)
    for line in (tmp_path / METRICS).read_text().splitlines():
        assert set(json.loads(line)) == {"step", "data"}
