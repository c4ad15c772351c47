"""`trainer.max_restarts`: a run that crashes is started again from its newest checkpoint."""

import json
import os
import random
import re
import signal
import time
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path

import pytest
from support.forked_python import ForkedPython, run_agentrl

from agentrl import load_config
from agentrl.cli import restarts
from agentrl.errors import ConfigError
from agentrl.record import read_metrics

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
        assert process.poll() is None and time.monotonic() < deadline, process.read()[1][-2000:]
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
        "import agentrl.errors, agentrl.trainer.run\n"
        "from agentrl.errors import *\n"
        "def fail(*_): raise " + kind + "('raised by the test')\n"
        "agentrl.trainer.run.train_step = fail\n"
    )
    files = "--file", "shelf:calculator", "--file", code
    done = run_agentrl(*command(tmp_path / "run", "trainer.max_restarts=2", *files)[2:])
    assert done.returncode == 1 and "raised by the test" in done.stderr
    assert done.stderr.count("it is started again") == times


def processes_below(pid: int) -> dict[int, str]:
    """Return the processes that a process has started, at any depth, and their commands."""
    children: dict[int, list[int]] = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            children[int(stat.read_text().rpartition(")")[2].split()[1])].append(
                int(stat.parent.name)
            )
    found, left = {}, [pid]
    while left:
        for child in children[left.pop()]:
            with suppress(OSError):
                found[child] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
            left.append(child)
    return found


VICTIMS = {
    "controller": lambda command: "from agentrl.cli import main" in command,
    "tool server": lambda command: "agentrl.tools.serving.background" in command,
    "rank": lambda command: command.startswith("ray::RankActor"),
}


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(1800)
def test_200_steps_with_20_kills(tiny_model, tmp_path):
    """Each step is made once, nobody is rewarded with 0 for a kill, and nothing is left."""
    more = [
        "trainer.device=cpu", "trainer.n_gpus_per_node=2", "tools.transport=http",
        "trainer.total_steps=200", "trainer.save_freq=5",
    ]  # fmt: skip
    rng, output, killed = random.Random(0), tmp_path / "run", Counter()
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    arguments = command(output, *more, "trainer.max_restarts=40")
    with ForkedPython(arguments, env=environment) as process:
        seen: dict[int, str] = {}
        for number in range(20):
            until_step(process, output, max(steps(output), default=0) + rng.randrange(1, 6))
            seen |= (running := processes_below(process.pid))
            victim = [*VICTIMS][number % 3]
            pids = [pid for pid, command in running.items() if VICTIMS[victim](command)]
            with suppress(ProcessLookupError):
                os.kill(rng.choice(pids), signal.SIGKILL)
                killed[victim] += 1
        assert process.wait(1200) == 0, process.read()
    assert killed["controller"] + killed["tool server"] + killed["rank"] == 20
    assert [s for s in steps(output) if s] == [*range(1, 201)]
    straight = tmp_path / "straight"
    assert run_agentrl(*command(straight, *more)[2:], timeout=900).returncode == 0
    metrics = [dict(read_metrics(run / "metrics.jsonl")) for run in (output, straight)]
    for step in range(1, 201):
        killed_run, other = metrics[0][step], metrics[1][step]
        assert killed_run["rollout/dropped"] == 0
        assert killed_run["critic/score/mean"] == other["critic/score/mean"], step
    assert not [pid for pid in seen if Path(f"/proc/{pid}").exists()]
    folders = {
        folder for line in seen.values() for folder in re.findall(r"/tmp/agentrl-[^/ ]+", line)
    }
    assert folders and not [folder for folder in folders if Path(folder).exists()]
    assert not [path for path in temporary.iterdir() if "agentrl" in path.name]


def test_without_checkpoints_it_is_refused():
    with pytest.raises(ConfigError, match=r"trainer\.max_restarts=1.*trainer\.save_freq=0"):
        load_config(flags={"trainer.max_restarts": 1, "trainer.save_freq": 0})
    with pytest.raises(
        ConfigError, match=r"keep_best=val/reward/mean@1 with trainer.save_freq=nev"
    ):
        load_config(flags={"trainer.keep_best": "val/reward/mean@1", "trainer.save_freq": "never"})


def test_a_process_is_supervised_by_its_own_parent_only(monkeypatch):
    monkeypatch.setenv(restarts.PARENT, "1")
    assert not restarts.is_supervised()
    monkeypatch.setenv(restarts.PARENT, str(os.getppid()))
    assert restarts.is_supervised()
