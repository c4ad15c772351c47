"""`trainer.max_restarts`: a run that crashes is started again from its newest checkpoint."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from support.forked_python import ForkedPython, run_agentrl

from agentrl import load_config
from agentrl.cli import restarts
from agentrl.errors import ConfigError

ROWS = Path(__file__).parents[2] / "datasets" / "arithmetic_train.parquet"


def command(output, *more):
    return [
        *("-m", "agentrl", "train", "--dataset", ROWS, "--model", "tiny", "--output", output),
        *("trainer.total_steps=4", "trainer.save_freq=1"),
        *("data.batch_size=2", "rollout.n=2", *more),
    ]


def steps(output):
    if not (output / "metrics.jsonl").exists():
        return []
    return [json.loads(line)["step"] for line in (output / "metrics.jsonl").open()]


def until_step(process, output, step):
    deadline = time.monotonic() + 120
    while step not in steps(output):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


def child_of(process):
    [pid] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(pid)


@pytest.mark.slow
def test_a_killed_run_makes_every_step_once(tiny_model, tmp_path):
    output = tmp_path / "run"
    process = ForkedPython(command(output, "trainer.max_restarts=2"))
    until_step(process, output, 2)
    os.kill(child_of(process), signal.SIGKILL)
    assert process.wait() == 0
    assert [s for s in steps(output) if s] == [1, 2, 3, 4]
    assert "the run ended with signal SIGKILL; it is started again (1 of 2" in process.read()[1]


@pytest.mark.slow
def test_a_signal_to_the_parent_ends_the_run_as_without_it(tiny_model, tmp_path):
    output = tmp_path / "run"
    process = ForkedPython(command(output, "trainer.max_restarts=2", "trainer.total_steps=400"))
    until_step(process, output, 1)
    child = child_of(process)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 143
    assert not Path(f"/proc/{child}").exists()
    assert "started again" not in process.read()[1]
    assert any(output.glob("global_step_*"))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "times"), [("RuntimeError", 2), ("UserCodeError", 0)])
def test_crashes_are_repeated_and_mistakes_are_not(tiny_model, tmp_path, kind, times):
    code = tmp_path / "loop.py"
    code.write_text(
        "import agentrl.errors, agentrl.trainer\n"
        "from agentrl.errors import *\n"
        "def fail(*_): raise " + kind + "('raised by the test')\n"
        "agentrl.trainer.Trainer.step = fail\n"
    )
    files = "--file", "shelf:calculator", "--file", code
    done = run_agentrl(*command(tmp_path / "run", "trainer.max_restarts=2", *files)[2:])
    assert done.returncode == 1 and "raised by the test" in done.stderr
    assert done.stderr.count("it is started again") == times


def test_without_checkpoints_it_is_refused():
    with pytest.raises(ConfigError, match=r"trainer\.max_restarts=1.*trainer\.save_freq=0"):
        load_config(flags={"trainer.max_restarts": 1, "trainer.save_freq": 0})


def test_a_process_is_supervised_by_its_own_parent_only(monkeypatch):
    monkeypatch.setenv(restarts.PARENT, "1")
    assert not restarts.is_supervised()
    monkeypatch.setenv(restarts.PARENT, str(os.getppid()))
    assert restarts.is_supervised()
