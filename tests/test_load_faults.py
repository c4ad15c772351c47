"""Faults while 512 episodes are in flight: none is dropped, and none gets a reward for a fault."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from support.forked_python import ForkedPython

from agentrl.agent_loops.attempt import Runtime
from agentrl.chat import ChatTemplate
from agentrl.config import Config
from agentrl.engine.base import Sampling
from agentrl.engine.scripted import Scripted
from agentrl.errors import EngineError
from agentrl.registry import load_file
from agentrl.rewards import Scorer
from agentrl.rollout import Rollouts
from agentrl.testing import byte_tokenizer, call
from agentrl.tools import HttpToolbox
from agentrl.tools.serving.background import serve_in_background
from agentrl.trajectory import Message, Sample

pytestmark = [pytest.mark.load, pytest.mark.timeout(240)]
ROWS, N = 64, 8
TOOLS = """
import random, time
from agentrl import tool

@tool(timeout=1.0)
def lookup(word: str) -> str:
    "Look up a word."
    if random.random() < 0.05:
        time.sleep(3600)
    return "found"

@tool
async def add(a: int, b: int) -> str:
    "Add."
    return str(a + b)
"""


class SlowEngine(Scripted):
    """Each turn takes some time; in an outage, requests fail."""

    def __init__(self, answers, tokenizer, seconds: float, outage: tuple[float, float] = (0, 0)):
        super().__init__(answers, tokenizer)
        self._seconds, self._outage, self._start = seconds, outage, time.monotonic()

    async def generate(self, prompt_ids, sampling, **kwargs):
        await asyncio.sleep(self._seconds)
        begin, end = self._outage
        if begin <= time.monotonic() - self._start < end:
            raise EngineError("http://engine: 500 Internal Server Error")
        return await super().generate(prompt_ids, sampling, **kwargs)


def play(tmp_path, script, *, tool="", seconds=0.3, outage=(0, 0), disturb=lambda pids: None):
    """Play 512 episodes with tools over HTTP while `disturb` runs; return their groups."""
    file = tmp_path / "tools.py"
    file.write_text(TOOLS)
    load_file(str(file))
    tokenizer = byte_tokenizer()
    served = serve_in_background([str(file)])
    with served.handle as server:
        box = HttpToolbox(served.url, served.token)
        box.connect()
        engine = SlowEngine(script, tokenizer, seconds, outage)
        config = Config()
        runtime = Runtime(engine, ChatTemplate(tokenizer), box, config)
        rollouts = Rollouts(runtime, Scorer(config.reward), seed=0)
        rows = [
            Sample(
                f"r{i}",
                (Message("user", "Go."),),
                agent_name="tool_agent",
                data_source="openai/gsm8k",
                ground_truth="12",
                tools=(tool,),
                row=i,
            )
            for i in range(ROWS)
        ]
        thread = threading.Thread(target=disturb, args=(lambda: server.pids,), daemon=True)
        thread.start()
        try:
            groups = rollouts.collect(rows, n=N, sampling=Sampling(), step=0)
        finally:
            rollouts.close()
    thread.join(30)
    assert not thread.is_alive()
    assert [(len(g.scored), g.dropped) for g in groups] == [(N, 0)] * ROWS
    return [s for group in groups for s in group.scored]


@pytest.mark.slow
def test_a_tool_server_that_is_killed_three_times(tmp_path):
    killed = []

    def kill(pids) -> None:
        for pause in (1.0, 4.0, 4.0):
            time.sleep(pause)
            killed.extend(pids())
            os.kill(killed[-1], signal.SIGKILL)

    script = [call("add", a=i, b=i) for i in range(5)] + ["#### 12"]
    scored = play(tmp_path, script, tool="add", seconds=0.8, disturb=kill)
    assert len({*killed}) == 3 and {s.reward for s in scored} == {1.0}
    tries = Counter(s.trajectory.episode_id.partition("+")[2] for s in scored)
    assert "" not in tries, "each was in flight when the server was killed"


@pytest.mark.slow
def test_calls_that_hang_for_ever(tmp_path):
    script = [call("lookup", word="x")] * 4 + ["#### 12"]
    scored = play(tmp_path, script, tool="lookup")
    assert {s.reward for s in scored} == {1.0}
    turns = [turn for s in scored for turn in s.trajectory.turns]
    results = Counter(result.error or "" for turn in turns for result in turn.tool_results)
    assert 20 < results["timeout"] < 250, results  # 102 on average
    assert sum(results.values()) == results["timeout"] + results[""] == 4 * ROWS * N


@pytest.mark.slow
def test_an_engine_that_fails_for_20_seconds(tmp_path, monkeypatch):
    monkeypatch.setattr("agentrl.player.RETRY_SECONDS", (2.0, 20.0))
    script = [call("add", a=1, b=1)] * 3 + ["#### 12"]
    scored = play(tmp_path, script, tool="add", outage=(0.5, 20.5))
    assert {s.reward for s in scored} == {1.0}
    tries = Counter(s.trajectory.episode_id.partition("+")[2] for s in scored)
    assert tries == {"2": ROWS * N}


@pytest.mark.parametrize("jump", [-7200.0, pytest.param(7200.0, marks=pytest.mark.slow)])
def test_a_clock_that_is_set_while_episodes_are_played(tmp_path, monkeypatch, jump):
    real, offset = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + offset[0])

    def set_clock(pids) -> None:
        for i in range(40):
            offset[0] = jump * (i % 2)
            time.sleep(0.03)

    script = [call("add", a=1, b=1)] * 3 + ["#### 12"]
    begin = time.monotonic()
    scored = play(tmp_path, script, tool="add", disturb=set_clock)
    took = time.monotonic() - begin
    assert {s.reward for s in scored} == {1.0}
    for s in scored:
        for span in s.trajectory.spans:
            assert 0 <= span.start <= span.end <= took, (span, took)
        assert "+" not in s.trajectory.episode_id


def descendants(pid: int) -> set[int]:
    found = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            child = int(status.parent.name)
            found |= {child} | descendants(child)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_512_episodes_are_in_flight(tmp_path, number):
    rows = tmp_path / "rows.jsonl"
    row = '{"prompt": [{"role": "user", "content": "%d+1"}], "agent_name": "tool_agent", '
    row += '"data_source": "openai/gsm8k", "ground_truth": "12", "tools": ["lookup"]}\n'
    rows.write_text("".join(row % i for i in range(ROWS)))
    (tmp_path / "tools.py").write_text(TOOLS)
    command = [
        "-m", "agentrl", "train", "--dataset", rows, "--model", "tiny", "--output",
        tmp_path / "run", "--file", tmp_path / "tools.py", "tools.transport=http",
        f"data.batch_size={ROWS}", f"rollout.n={N}", "trainer.total_steps=3",
        "rollout.max_turn_tokens=64", "reward.function=gsm8k", "trainer.save_freq=1",
    ]  # fmt: skip
    record = tmp_path / "run" / "metrics.jsonl"
    with ForkedPython(command, start_new_session=True) as process:
        deadline = time.monotonic() + 120
        while not record.exists() or record.read_bytes().count(b"\n") < 1:
            assert process.poll() is None and time.monotonic() < deadline, process.read()
            time.sleep(0.02)
        time.sleep(0.5)  # Step 2 is played: 512 episodes.
        children = descendants(process.pid)
        assert children, "a tool server at least"
        process.send_signal(number)
        code = process.wait(60)
        assert code == 128 + number, process.read()
    time.sleep(1.0)
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
    with ForkedPython([*command, "trainer.resume=auto"]) as process:
        assert process.wait(200) == 0, process.read()
    assert record.read_bytes().count(b"\n") == 3
