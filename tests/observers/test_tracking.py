"""Trackers: they show each step once, whatever happened between two starts."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.trajectories import make_trajectory, turn

from agentrl.callbacks import Notifier
from agentrl.config import Config, load_config
from agentrl.errors import ConfigError
from agentrl.observers import tracking
from agentrl.observers.traces import Operation, operations
from agentrl.observers.tracking import Tracker
from agentrl.record import METRICS, Record, read_metrics
from agentrl.trajectory import Message, Scored, Span, ToolCall, ToolResult


def follow(folder, name, steps, *, recorded=-1, config=None, episodes=()) -> None:
    """Let a tracker follow a run that makes these steps, with the same metrics or with others."""
    record = Record(folder, recorded)
    observers = Notifier([Tracker(name, config or Config())], folder, 9)
    observers.notify("on_begin", 0, recorded=recorded, is_rewound=record.is_rewound)
    for step, metrics in steps.items():
        record.write(step, metrics)
        observers.notify("on_step", step, metrics, episodes=episodes)
    record.close()
    observers.notify("on_end", max(steps))


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
def test_a_failing_tracker_warns_once_and_training_goes_on(
    tmp_path, monkeypatch, caplog, sink, message
):
    install(monkeypatch, other=sink)
    follow(tmp_path, "other", {step: {"x": 1.0} for step in range(3)})
    assert len(read_metrics(tmp_path / METRICS)) == 3
    (warning,) = caplog.messages
    assert warning.startswith("the tracker other raised") and message in warning
    assert f"It gets no more metrics; {METRICS} has them all" in warning


def test_a_tracker_that_is_not_installed_is_refused_with_the_fix(tmp_path, monkeypatch):
    # A folder called wandb, as wandb leaves behind, is no installed package.
    (tmp_path / "absent_tracker").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(tracking, "TRACKERS", ("absent_tracker", "absent_tracker_2"))
    for name in tracking.TRACKERS:
        with pytest.raises(ConfigError, match=rf"pip install .*\[{name}\]"):
            Tracker(name, Config())


def test_tensorboard_events(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    follow(tmp_path, "tensorboard", {step: {"critic/score/mean": step / 4} for step in range(4)})
    follow(tmp_path, "tensorboard", {3: {"critic/score/mean": 1.0}}, recorded=2)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    scalars = [(e.step, e.value) for e in events.Scalars("critic/score/mean")]
    assert scalars == [(0, 0.0), (1, 0.25), (2, 0.5), (3, 1.0)]


NAMES = Config.model_validate(
    {"trainer": {"project_name": "my-project", "experiment_name": "first", "tags": ["a", "b"]}}
)


def run_in_two_parts(folder, name, caplog):
    """A run that is stopped after step 2 and resumed from the checkpoint of step 1."""
    for recorded, steps, offset in ((-1, (0, 1, 2), 0), (1, (2, 3), 10)):
        metrics = {step: {"val/reward/mean@1": step + offset, "loss:x": 0.5} for step in steps}
        follow(folder, name, metrics, recorded=recorded, config=NAMES)
    assert not [message for message in caplog.messages if "no more metrics" in message]


@pytest.mark.trackers
def test_mlflow_has_one_run_with_names_tags_and_params(tmp_path, monkeypatch, caplog):
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    run_in_two_parts(tmp_path / "run", "mlflow", caplog)
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
def test_trackio_has_one_run_with_names_and_config(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read at the import
    import trackio

    run_in_two_parts(tmp_path / "run", "trackio", caplog)
    (run,) = trackio.Api().runs("my-project")
    assert run.name == "first"


@pytest.mark.trackers
@pytest.mark.parametrize("name", ["aim", "swanlab", "comet_ml"])
def test_the_other_trackers_continue_one_run(tmp_path, monkeypatch, caplog, name):
    offline = {"SWANLAB_MODE": "offline", "COMET_START_ONLINE": "0", "COMET_API_KEY": "none"}
    for variable, value in offline.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.chdir(tmp_path)
    run_in_two_parts(tmp_path / "run", name, caplog)
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


def test_a_tracker_without_traces_gets_none(tmp_path, monkeypatch, caplog):
    shown = []

    class Metrics:
        def __init__(self, *_): ...
        def log(self, step, data): ...
        def close(self): ...

    class Traces(Metrics):
        def trace(self, step, episodes):
            shown.append((step, len(episodes)))

    install(monkeypatch, metrics=Metrics, traces=Traces)
    for name in ("metrics", "traces"):
        follow(tmp_path, name, {1: {}}, episodes=[played()] * 20)
        follow(tmp_path, name, {2: {}}, recorded=1)
    assert shown == [(1, 8)] and not caplog.messages


def trace_episodes(folder, name, caplog):
    episodes = [played(rollout, rollout / 2) for rollout in range(2)]
    follow(folder, name, {1: {"loss": 0.5}, 2: {"loss": 0.5}}, config=NAMES, episodes=episodes)
    assert not [message for message in caplog.messages if "no more metrics" in message]


@pytest.mark.trackers
def test_mlflow_shows_messages_and_tool_calls(tmp_path, monkeypatch, caplog):
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)  # MLflow makes `mlruns/` where it runs
    trace_episodes(tmp_path / "run", "mlflow", caplog)
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
def test_trackio_shows_messages_and_tool_calls(tmp_path, monkeypatch, caplog):
    from trackio import sqlite_storage

    for module in [m for name, m in sys.modules.items() if name.startswith("trackio")]:
        for name in ("TRACKIO_DIR", "MEDIA_DIR"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, tmp_path / "trackio" / name)
    trace_episodes(tmp_path / "run", "trackio", caplog)
    traces = sqlite_storage.SQLiteStorage.get_traces("my-project", "first")
    assert sorted(trace["metadata"]["step"] for trace in traces) == [1, 1, 2, 2]
    roles = ["system", "user", "assistant", "tool", "assistant"]
    assert [message["role"] for message in traces[0]["messages"]] == roles
    assert [span["name"] for span in traces[0]["spans"]] == ["generate", "calculator", "generate"]


@pytest.mark.trackers
def test_wandb_has_the_names_and_tags(tmp_path, monkeypatch, caplog):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    made = []
    real = wandb.init
    monkeypatch.setattr(wandb, "init", lambda **kw: made.append(real(**kw)) or made[-1])
    run_in_two_parts(tmp_path / "run", "wandb", caplog)
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
    follow(tmp_path / "run", "other", {1: {"a": 1.0}}, config=config)
    assert (tmp_path / "run/other.txt").read_text() == "-1 p e ['t']\n1 {'a': 1.0}\n"
