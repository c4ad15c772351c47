"""Callbacks of a user's file in real runs: what they see, and what an error in one does."""

from __future__ import annotations

import json

import pytest

from agentrl import callback, registry
from agentrl.callbacks import Observer
from agentrl.config import load_config
from agentrl.errors import RegistryError, RunStopped
from agentrl.record import METRICS, read_metrics
from agentrl.trainer import Trainer

FILE = """
import json
from agentrl import callback, reward
from agentrl.errors import RunStopped

@reward("length_callbacks")
def length(trajectory) -> float:
    return len(trajectory.assistant_text) / 10

def write(name, event):
    event.folder.mkdir(exist_ok=True)
    with open(event.folder / "events.jsonl", "a") as f:
        fields = {
            "name": name, "step": event.step, "total": event.total_steps,
            "metrics": dict(event.metrics), "error": type(event.error).__name__,
            "complete": bool(event.checkpoint) and (event.checkpoint / "meta.json").is_file(),
        }
        f.write(json.dumps(fields) + "\\n")

@callback
def on_step(event):
    write("on_step", event)
    event.metrics["critic/score/mean"] = 7.0

@callback
def on_validation(event):
    write("on_validation", event)

@callback
def on_checkpoint(event):
    write("on_checkpoint", event)
    if STOP and event.step == 1:
        raise RunStopped("the cluster closes")

@callback
def on_end(event):
    write("on_end", event)
    exit(3)
"""


@pytest.fixture
def run(tmp_path, random_model):
    rows = [{"prompt": f"Say {i}.", "ground_truth": "1"} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def run(stop: bool, **options):
        file = tmp_path / f"mine_{stop}.py"
        file.write_text(f"STOP = {stop}\n{FILE}")
        overrides = [
            "trainer.total_steps=2", "trainer.save_freq=1", "trainer.test_freq=2",
            "data.batch_size=2", "rollout.n=2", "rollout.max_turn_tokens=4", "trainer.device=cpu",
            "tools.transport=in_process", "reward.function=length_callbacks",
        ]  # fmt: skip
        flags = {
            "data.train": str(tmp_path / "rows.jsonl"),
            "data.val": str(tmp_path / "rows.jsonl"),
            "model.path": str(random_model),
            "trainer.output": str(tmp_path / "run"),
            "files": [str(file)],
        }
        Trainer(load_config(None, overrides, flags), **options).run()

    return run


def events(folder):
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_each_event_has_the_recorded_metrics_and_errors_are_one_warning(run, tmp_path, caplog):
    run(stop=False)
    seen = events(tmp_path / "run")
    assert [(e["name"], e["step"]) for e in seen] == [
        ("on_validation", 0), ("on_step", 1), ("on_checkpoint", 1), ("on_step", 2),
        ("on_validation", 2), ("on_checkpoint", 2), ("on_end", 2),
    ]  # fmt: skip
    record = dict(read_metrics(tmp_path / "run" / METRICS))
    for event in seen:
        assert event["metrics"] == record[event["step"]]
        assert event["total"] == 2 and event["error"] == "NoneType"
        assert event["complete"] == (event["name"] == "on_checkpoint")
    warnings = [r.getMessage() for r in caplog.records if "callback" in r.getMessage()]
    on_step, on_end = warnings
    assert "callback mine_False.on_step raised TypeError" in on_step
    assert "mine_False.py:" in on_step and "later errors of it are not printed" in on_step
    assert "on_end raised SystemExit: 3" in on_end


def test_a_callback_stops_the_run_after_its_checkpoint_and_it_resumes(run, tmp_path):
    reason = r"mine_True.on_checkpoint stops the run: the cluster closes\nsaved after step 1;"
    with pytest.raises(RunStopped, match=reason):
        run(stop=True)
    seen = events(tmp_path / "run")
    assert [(e["name"], e["step"]) for e in seen[1:]] == [
        ("on_step", 1), ("on_checkpoint", 1), ("on_end", 1)
    ]  # fmt: skip
    assert seen[-1]["error"] == "RunStopped"
    run(stop=True)  # the same command
    seen = events(tmp_path / "run")[4:]
    assert [(e["name"], e["step"]) for e in seen] == [
        ("on_step", 2), ("on_validation", 2), ("on_checkpoint", 2), ("on_end", 2)
    ]  # fmt: skip


class Mine(Observer):
    """Notes the calls, and fails at each step."""

    name = "mine"

    def __init__(self):
        self.seen: list[tuple] = []

    def on_begin(self, event):
        self.seen.append(("on_begin", event.step, event.recorded, event.is_rewound))

    def on_step(self, event):
        self.seen.append(("on_step", event.step, len(event.episodes)))
        raise ValueError("no server")

    def on_end(self, event):
        self.seen.append(("on_end", event.step, event.error))


def test_a_caller_chooses_the_observers(run, tmp_path, capsys, caplog):
    mine = Mine()
    run(stop=False, observers=[mine])
    assert mine.seen == [
        ("on_begin", 0, -1, False), ("on_step", 1, 2), ("on_step", 2, 2), ("on_end", 2, None),
    ]  # fmt: skip
    (warning,) = [message for message in caplog.messages if "no server" in message]
    assert warning.startswith("mine raised ValueError: no server")
    assert "later errors of it are not printed" in warning
    # Neither the console nor the curve nor the callbacks of the user's file follow the run.
    assert "step 1/2" not in (printed := capsys.readouterr().out) and "4 rows" in printed
    assert not {"curve.svg", "events.jsonl"} & {f.name for f in (tmp_path / "run").iterdir()}
    assert len(read_metrics(tmp_path / "run" / METRICS)) == 3


def test_wrong_callbacks_are_refused_where_they_are_defined():
    def on_steps(event): ...

    def on_step(): ...

    async def on_end(event): ...

    with pytest.raises(RegistryError, match=r"no event named 'on_steps'\. Did you mean 'on_step'"):
        callback(on_steps)
    with pytest.raises(RegistryError, match=r"must take one argument, `def on_step\(event\)`"):
        callback(on_step)
    with pytest.raises(RegistryError, match="on_end is async"):
        callback(on_end)
    assert not registry.callbacks.user_names()
