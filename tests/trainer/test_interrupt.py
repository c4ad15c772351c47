"""Signals and outages at the worst moments: what is saved is whole, and nothing is lost."""

import hashlib
import json
import os
import signal
import time

import pytest

from agentrl.config import load_config
from agentrl.engine.local import LocalEngine
from agentrl.errors import ConfigError, EngineError, RunStopped
from agentrl.learner.learner import Learner
from agentrl.trainer import Trainer
from agentrl.trainer import run as run_module

ENV = """
from agentrl import reward

@reward("letters_interrupt")
def letters(trajectory) -> float:
    return len(set(trajectory.assistant_text)) / 10
"""


@pytest.fixture(scope="module")
def start(tmp_path_factory, random_model):
    folder = tmp_path_factory.mktemp("interrupt")
    (folder / "env.py").write_text(ENV)
    rows = [{"prompt": f"Say {i}.", "ground_truth": "1"} for i in range(4)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def run(output, *overrides, dataset=folder / "rows.jsonl"):
        base = [
            "trainer.total_steps=4", "trainer.test_freq=2", "trainer.save_freq=2",
            "data.batch_size=2", "rollout.n=4", "rollout.max_turn_tokens=8", "optim.lr=0.01",
            "algorithm.mini_batch_size=4", "tools.transport=in_process", "trainer.device=cpu",
            "reward.function=letters_interrupt",
        ]  # fmt: skip
        flags = {
            "data.train": str(dataset),
            "data.val": str(folder / "rows.jsonl"),
            "model.path": str(random_model),
            "trainer.output": str(output),
            "files": [str(folder / "env.py")],
        }
        Trainer(load_config(None, [*base, *overrides], flags)).run()

    return run


@pytest.fixture(scope="module")
def straight(start, tmp_path_factory):
    output = tmp_path_factory.mktemp("straight") / "run"
    start(output)
    return record(output)


def record(output):
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    numbers = [
        (
            line["step"],
            {k: v for k, v in line["data"].items() if not k.startswith(("timing_s/", "perf/"))},
        )
        for line in lines
    ]
    weights = (output / "model/model.safetensors").read_bytes()
    return numbers, hashlib.sha256(weights).hexdigest()


def interrupt(times=1):
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)


@pytest.mark.parametrize("call", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_one_signal_during_validation_loses_no_step(
    start, straight, tmp_path, curves, monkeypatch, call
):
    real, calls = run_module.evaluate, []

    def evaluate(*args):
        # The curve is drawn after each validation.
        assert (tmp_path / "curve.svg").exists() == bool(calls)
        calls.append(1)
        if len(calls) == 1 + call:
            interrupt()
        return real(*args)

    monkeypatch.setattr(run_module, "evaluate", evaluate)
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path)
    start(tmp_path)
    assert record(tmp_path) == straight


def test_one_signal_during_an_update_waits_for_its_end(
    start, straight, tmp_path, curves, monkeypatch
):
    real, calls = Learner.update, []

    def update(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            interrupt()
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Learner, "update", update)
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path)
    assert sorted(f.name for f in tmp_path.glob("global_step_*"))[-1].endswith("3")
    curve = (tmp_path / "curve.svg").read_text()
    assert f">{tmp_path.name}<" in curve and "training (thick: mean of 3 steps)" in curve
    start(tmp_path)
    assert record(tmp_path) == straight


def test_two_signals_during_an_update_save_nothing_of_it(start, straight, tmp_path, monkeypatch):
    real, calls = Learner.update, []

    def update(self, *args, **kwargs):
        metrics = real(self, *args, **kwargs)
        calls.append(1)
        if len(calls) == 3:
            interrupt(2)
        return metrics

    monkeypatch.setattr(Learner, "update", update)
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path)
    assert sorted(f.name for f in tmp_path.glob("global_step_*"))[-1].endswith("2")
    start(tmp_path)
    assert record(tmp_path) == straight


def test_an_infrastructure_failure_saves_the_last_step(start, straight, tmp_path, monkeypatch):
    real, begun = LocalEngine.generate, []

    async def generate(self, *args, **kwargs):
        if kwargs["episode_id"].startswith("train-3-"):
            begun.append(1)
            raise EngineError("the engine is down")
        return await real(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(LocalEngine, "generate", generate)
        with pytest.raises(RunStopped, match=r"is down[^$]*saved after step 3"):
            start(tmp_path, "trainer.save_freq=0")
        with pytest.raises(RunStopped, match=r"is down[^$]*nothing was saved; the same command"):
            start(tmp_path / "never", "trainer.save_freq=never")
    start(tmp_path, "trainer.save_freq=0")
    assert begun and record(tmp_path) == straight


SHORT = ("trainer.total_steps=1", "trainer.save_freq=1", "trainer.test_freq=0")


def test_other_rows_under_the_same_name_are_refused(start, tmp_path):
    rows = tmp_path / "rows.jsonl"
    for text in ("a", "b"):
        rows.write_text("\n".join(json.dumps({"prompt": text, "ground_truth": "1"}) for _ in "12"))
        if text == "a":
            start(tmp_path / "run", *SHORT, dataset=rows)
    with pytest.raises(ConfigError, match="other rows"):
        start(tmp_path / "run", *SHORT, dataset=rows)


def test_another_runs_checkpoint_is_not_stitched_to_a_record(start, tmp_path):
    start(tmp_path / "a", *SHORT)
    start(tmp_path / "b", *SHORT)
    with pytest.raises(ConfigError, match="of another run"):
        start(tmp_path / "b", *SHORT, f"trainer.resume={tmp_path / 'a'}")
