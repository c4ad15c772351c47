"""Whatever ends an episode, its class tools are closed: an error, the clock, Ctrl-C, a kill."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.forked_python import ForkedPython

from agentrl import registry
from agentrl.chat import ChatTemplate
from agentrl.config import Config
from agentrl.engine.base import Sampling
from agentrl.engine.scripted import Scripted
from agentrl.errors import EngineError, RunStopped
from agentrl.rewards import Scorer
from agentrl.rollout import open_rollouts
from agentrl.testing import byte_tokenizer
from agentrl.trajectory import Message, Sample

ENV = """
import asyncio, os
from agentrl import ToolCall, agent_loop, reward, tool
from agentrl.tools import session

session.GRACE_SECONDS = 0.5  # the calls of `work` take longer than any grace

def mark(text):
    with open(os.environ["MARKS"], "a") as file:
        file.write(text + "\\n")

@tool(timeout=60)
class Lease:
    "Something that must be given back."

    def __init__(self):
        mark("made")

    async def work(self) -> str:
        "Work for long."
        mark("work")
        await asyncio.sleep(50)
        return "done"

    def reward(self):
        mark("reward")
        return 1.0

    def close(self):
        mark("close")

@agent_loop("works")
async def works(ep):
    await ep.generate(parse=lambda text: [ToolCall("work", {})])
    await ep.call_tools()

@agent_loop("fails")
async def fails(ep):
    await ep.generate()
    raise ValueError("a bug")

@agent_loop("ends")
async def ends(ep):
    await ep.generate()

@reward("none")
def none(trajectory):
    return 0.0
"""

TOKENIZER = byte_tokenizer()
ROW = {"prompt": "hi", "agent_name": "works", "tools": ["lease"], "ground_truth": "x"}


@pytest.fixture
def env(tmp_path, monkeypatch):
    """The file of tools; where its class tool leaves marks."""
    file, marks = tmp_path / "env.py", tmp_path / "marks"
    file.write_text(ENV)
    marks.touch()
    monkeypatch.setenv("MARKS", str(marks))
    return file, marks


def marks_of(marks: Path) -> list[str]:
    return marks.read_text().split()


def wait_for(marks: Path, word: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while word not in marks_of(marks):
        assert time.monotonic() < deadline, f"no {word!r} in {marks_of(marks)}"
        time.sleep(0.05)


class Failing(Scripted):
    """An engine that may be down."""

    down = False

    async def generate(self, *args, **kwargs):
        if self.down:
            raise EngineError("down")
        return await super().generate(*args, **kwargs)


@pytest.mark.parametrize("transport", ["in_process", "http"])
def test_an_object_is_closed_however_its_episode_ends(env, transport):
    file, marks = env
    registry.load_file(str(file))
    config = Config.model_validate(
        {
            "tools": {"transport": transport},
            "files": [str(file)],
            "reward": {"function": "none"},
            "rollout": {"timeout_s": 1.0},
        }
    )
    engine = Failing(["hello"], TOKENIZER)
    scorer = Scorer(config.reward)
    with open_rollouts(config, engine, ChatTemplate(TOKENIZER), scorer) as rollouts:

        def play(loop: str) -> list[str]:
            """The marks of one row's episodes."""
            marks.write_text("")
            sample = Sample("r", (Message("user", "hi"),), agent_name=loop, tools=("lease",))
            rollouts.collect([sample], n=1, sampling=Sampling(), step=0)
            return marks_of(marks)

        assert play("ends") == ["made", "reward", "close"]
        with pytest.raises(RunStopped, match="a bug"):
            play("fails")
        assert marks_of(marks) == ["made", "reward", "close"]
        # A budget: the episode ends with its reason, and is scored.
        assert play("works") == ["made", "work", "reward", "close"]
        engine.down = True
        with pytest.raises(RunStopped, match="down"):
            play("ends")
        assert marks_of(marks) == ["made", "reward", "close"] * 3


RUN = """
import sys
from agentrl.chat import ChatTemplate
from agentrl.config import Config
from agentrl.engine.base import Sampling
from agentrl.engine.scripted import Scripted
from agentrl.registry import load_file
from agentrl.rewards import Scorer
from agentrl.rollout import open_rollouts
from agentrl.testing import byte_tokenizer
from agentrl.trajectory import Message, Sample

file, transport = sys.argv[1:]
load_file(file)
config = Config.model_validate(
    {"tools": {"transport": transport}, "files": [file], "reward": {"function": "none"}}
)
tokenizer = byte_tokenizer()
engine, scorer = Scripted(["hello"], tokenizer), Scorer(config.reward)
sample = Sample("r", (Message("user", "hi"),), agent_name="works", tools=("lease",))
with open_rollouts(config, engine, ChatTemplate(tokenizer), scorer) as rollouts:
    rollouts.collect([sample], n=1, sampling=Sampling(), step=0)
"""


def start(env: tuple[Path, Path], *command: str) -> ForkedPython:
    """A run that is within a call of the tool."""
    process = ForkedPython(command, merge_outputs=True)
    try:
        wait_for(env[1], "work", 90)
    except AssertionError:
        process.kill()
        raise AssertionError(process.communicate()[0]) from None
    return process


@pytest.mark.parametrize("transport", ["in_process", "http"])
def test_ctrl_c_closes_what_is_open(env, transport):
    process = start(env, "-c", RUN, str(env[0]), transport)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert output.count("Traceback") == output.count("KeyboardInterrupt\n") == 1
    assert marks_of(env[1]) == ["made", "work", "reward", "close"]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["in_process", "http"])
def test_ctrl_c_on_the_command_line(env, transport):
    file = env[0]
    rows = file.with_name("rows.jsonl")
    rows.write_text(json.dumps(ROW) + "\n")
    options = ["--dataset", str(rows), "--model", "tiny", "-f", str(file), "reward.function=none"]
    process = start(env, "-m", "agentrl", "play", *options, f"tools.transport={transport}")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "Traceback" not in output
    assert marks_of(env[1]) == ["made", "work", "reward", "close"]


DEAF = """
import asyncio, sys, threading, time
from agentrl import tool
from agentrl.http import fetch_json
from agentrl.tools.serving import listen

listen.DRAIN_SECONDS, listen.END_SECONDS = 0.3, float(sys.argv[1])

@tool(timeout=60)
async def deaf() -> str:
    "Ignore that it is cancelled."
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass

def ask(path, body):
    fetch_json(server.url, path, body, token="t", timeout=60)

def call():
    ask("/sessions", {"episode_id": "e", "sample": {"tools": ["deaf"]}})
    print("called", flush=True)
    ask("/sessions/e/calls", {"turn": 0, "call_index": 0, "name": "deaf", "arguments": {}})

server = listen.ToolServer(
    "127.0.0.1", 0, "t", lambda: threading.Thread(target=call, daemon=True).start()
)
server.serve_forever()
"""


@pytest.mark.parametrize(
    "sent", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_tool_that_ignores_its_cancellation_does_not_keep_the_server(sent):
    process = subprocess.Popen(
        [sys.executable, "-c", DEAF, "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "called\n"
        time.sleep(0.5)
        process.send_signal(sent)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 128 + sent
    assert "the tool server exits now" in errors


def test_the_runs_own_server_closes_what_a_killed_run_left_open(env):
    process = start(env, "-c", RUN, str(env[0]), "http")
    process.kill()
    process.communicate(timeout=30)
    wait_for(env[1], "close", 30)
    assert marks_of(env[1]) == ["made", "work", "close"]
