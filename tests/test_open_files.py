"""Runs under the usual limit of 1,024 open files, and under lower ones."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.forked_python import run_agentrl, run_python

from agentrl import open_files, registry
from agentrl.config import Config
from agentrl.errors import ConfigError, ToolServerError
from agentrl.http import HttpClient
from agentrl.preflight import Plan, capacity
from agentrl.rewards import Scorer
from agentrl.tools import HttpToolbox, tool
from agentrl.tools.serving.listen import BoundedHttpProtocol, ToolServer
from agentrl.trajectory import Message, Sample, ToolCall

TESTS = Path(__file__).parent


def limited(
    soft: int, hard: int, *command: str, seconds: float, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a new Python that may have so many files open; its hard limit can be another one."""
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    return subprocess.run(
        ["prlimit", f"--nofile={soft}:{hard}", sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=seconds,
        env={**os.environ, "PYTHONPATH": paths, **environment},
    )


def over_http(
    folder: Path, limit: int, prompts: int, n: int, seconds: float, timeout: float
) -> dict:
    program = TESTS / "support" / "rollouts_over_http.py"
    env = {**os.environ, "PYTHONPATH": str(TESTS)}
    done = run_python([program, folder, prompts, n, seconds, timeout], env=env, open_files=limit)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.load
@pytest.mark.slow
def test_2048_rollouts_under_the_usual_limit(tmp_path):
    """Engine and tools over HTTP: all are played at the first try, and stored."""
    report = over_http(tmp_path, 1024, 256, 8, 0.2, timeout=60.0)
    print(report)
    assert report["rollouts"] == report["stored"] == report["rewards"] == 2048
    assert (report["dropped"], report["turns"]) == (0, 4096)
    assert report["stops"] == {"done": 2048} and report["tries"] == {"": 2048}
    assert report["open at most"] < 1024 == report["limit"]
    assert report["turns at once"] > 256


@pytest.mark.load
@pytest.mark.slow
@pytest.mark.timing
def test_waiting_for_a_connection_ends_no_episode(tmp_path):
    """128 episodes of two turns of 0.5 s share 14 connections. Each may take 8 s, without waits."""
    report = over_http(tmp_path, 142, 16, 8, 0.5, timeout=8.0)
    print(report)
    assert report["stops"] == {"done": 128} and report["tries"] == {"": 128}
    assert report["seconds"] > 8.0 and report["turns at once"] <= 14


SHARED_LIMIT = """
import asyncio
from agentrl.config import ToolsConfig
from agentrl.errors import Infrastructure
from agentrl.tools import open_toolbox
from agentrl.trajectory import Message, Sample, ToolCall

async def play(box, i, failures):
    sample = Sample(f"r{i}", (Message("user", "?"),), tools=("pause",))
    try:
        await box.open(f"e{i}", sample)
        for turn in range(3):
            [result] = await box.run([ToolCall("pause", {"seconds": 0.05})], f"e{i}", turn)
            assert result.content == "0.05", result
        await box.close(f"e{i}")
    except Infrastructure as e:
        failures.append(str(e))

async def main(box):
    failures = []
    await asyncio.gather(*(play(box, i, failures) for i in range(800)))
    await box.aclose()
    print(len(failures), *failures[:1])

with open_toolbox(ToolsConfig(), ["tools.py"]) as box:
    asyncio.run(main(box))
"""
PAUSE = '''
import asyncio
from agentrl import tool

@tool
async def pause(seconds: float) -> float:
    """Wait.

    Args:
        seconds: how long
    """
    await asyncio.sleep(seconds)
    return seconds
'''


@pytest.mark.slow
def test_a_client_opens_no_more_connections_than_its_tool_server_accepts(tmp_path, monkeypatch):
    """A tool server accepts fewer connections than a client with the same limit could open."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tools.py").write_text(PAUSE)
    done = limited(512, 512, "-c", SHARED_LIMIT, seconds=120)
    assert done.stdout.splitlines() == ["0"], done.stderr[-3000:]


ROW = {
    "prompt": [{"role": "user", "content": "How much is 3*4?"}],
    "data_source": "openai/gsm8k",
    "ground_truth": "12",
    "agent_name": "tool_agent",
    "tools": ["calculator"],
}


@pytest.mark.parametrize("command", [pytest.param("check", marks=pytest.mark.slow), "train"])
def test_a_limit_that_is_too_low_is_reported_before_the_model_is_loaded(tmp_path, command):
    rows = tmp_path / "rows.jsonl"
    rows.write_text((json.dumps(ROW) + "\n") * 256)
    options = ["--dataset", str(rows), "--model", "tiny", "--file", "shelf:calculator"]
    sizes = ["data.batch_size=256", "rollout.n=8", f"trainer.output={tmp_path / 'run'}"]
    arguments = [command, *options, *sizes[: 3 if command == "train" else 2]]
    done = run_agentrl(*arguments, open_files=256)
    assert done.returncode == 1
    assert "load the model" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "run").exists()
    assert (
        "lets a process open 256 files" in done.stderr and "2,048 rollouts at once" in done.stderr
    )
    assert "but the tool server needs" in done.stderr
    needed = parts_of(done.stderr)
    assert f"`ulimit -n {needed}`" in done.stderr and 256 < needed < 1024


def parts_of(message: str) -> int:
    """The number that a process needs, which its parts must add up to."""
    match = re.search(r"needs (\d+): (.*?) for everything else", message, re.DOTALL)
    assert match, message
    total, parts = match.groups()
    numbers = re.findall(r"(\d+)(?= for | *$)", re.sub(r"\(.*?\)", "", parts))
    assert sum(map(int, numbers)) == int(total), message
    return int(total)


def plan_of(sections: dict, *tools: str, val_rows: int = 0) -> Plan:
    config = Config.model_validate(sections)
    sample = Sample(
        "s", (Message("user", "?"),), data_source="openai/gsm8k", ground_truth="1", tools=tools
    )
    return Plan(config, [sample] * 9, [sample] * val_rows, Scorer(config.reward))


@pytest.fixture
def limit(monkeypatch):
    """A function that sets the limit of open files for this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_files.reserve(0)

    def set_limit(value: int) -> None:
        monkeypatch.setattr(open_files, "raise_limit", lambda: value)
        monkeypatch.setattr(open_files, "limit", lambda: value)

    yield set_limit
    open_files.reserve(0)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)


BIG = {"data": {"train": "t", "val": "v", "batch_size": 256}, "rollout": {"n": 8}}


def needed_by(plan: Plan, limit) -> int:
    """The lowest limit under which a plan is not refused."""
    low, high, needed = 1, 10**5, 0
    while low < high:
        middle = (low + high) // 2
        limit(middle)
        try:
            capacity.check_open_files(plan)
            high = middle
        except ConfigError as e:
            low = middle + 1
            needed = parts_of(str(e))
    assert needed == low, "it names another number than it needs"
    return low


def test_the_number_of_descriptors_that_a_run_needs(limit):
    registry.load_file("shelf:calculator")
    registry.load_file("shelf:python_session")
    here = 128 + 4 * 2  # two workers for rewards
    assert needed_by(plan_of(BIG), limit) == here, "a local engine, no tools: no connections"
    served = plan_of(BIG, "calculator")
    assert needed_by(served, limit) == 128 + 342, "the tool server's share"
    in_process = {**BIG, "tools": {"transport": "in_process"}}
    assert needed_by(plan_of(in_process, "calculator"), limit) == here
    remote = {**BIG, "rollout": {"name": "sglang", "n": 8}}
    assert needed_by(plan_of(remote), limit) == here + 256
    few = {**remote, "data": {"train": "t", "val": "v", "batch_size": 2}}
    assert needed_by(plan_of(few), limit) == here + 16
    assert needed_by(plan_of(few, val_rows=100), limit) == here + 100, (
        "validation plays more at once"
    )
    boxes = {**in_process, "data": few["data"], "sandbox": {"slots": 301}}
    needed = needed_by(plan_of(boxes, "python_session"), limit)
    assert needed == here + 12 * 301 + 6 * 16, "the section of the plan, not the settings until now"


def refusal(plan: Plan) -> str:
    with pytest.raises(ConfigError) as raised:
        capacity.check_open_files(plan)
    return str(raised.value)


def test_the_refusal_names_the_keys_to_lower(limit):
    remote = {**BIG, "rollout": {"name": "sglang", "n": 8}}
    here = 128 + 4 * 2
    limit(here + 100)
    message = refusal(plan_of(remote))
    assert "the run needs 392: 256 for connections (2,048 rollouts at once:" in message
    assert "data.batch_size=256 x rollout.n=8" in message and "`ulimit -n 392`" in message
    few = {**remote, "rollout": {"name": "sglang", "n": 2}}
    capacity.check_open_files(plan_of({**few, "data": {**BIG["data"], "batch_size": 50}}))
    refusal(plan_of({**few, "data": {**BIG["data"], "batch_size": 51}}))
    registry.load_file("shelf:python_session")
    programs = {"data": {**BIG["data"], "batch_size": 1}, "rollout": {"n": 2},
        "sandbox": {"slots": 100}, "tools": {"transport": "in_process"}}  # fmt: skip
    limit(here + 12 + 6 * 2)
    assert "(sandbox.slots, reward.workers)" in refusal(plan_of(programs, "python_session"))
    capacity.check_open_files(plan_of({**programs, "sandbox": {"slots": 1}}, "python_session"))


def test_the_soft_limit_is_raised():
    raised = "from agentrl.open_files import *; print(raise_limit(), limit()); import resource;"
    raised += "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    done = limited(256, 4096, "-c", raised, seconds=30)
    assert done.stdout.split() == ["4096"] * 4
    program = "from agentrl.config import *; from agentrl.tools import open_toolbox\n\
import os\nwith open_toolbox(ToolsConfig(), ['shelf:calculator']) as box:\n\
    [pid] = [p for p in open(f'/proc/self/task/{os.getpid()}/children').read().split()]\n\
    print(open(f'/proc/{pid}/limits').read())"
    done = limited(256, 4096, "-c", program, seconds=60)
    [line] = [line for line in done.stdout.splitlines() if line.startswith("Max open files")]
    assert line.split()[3:5] == ["4096", "4096"], "the tool server raises its own"


def test_an_error_without_descriptors_names_the_limit_that_was_reached(limit):
    limit(300)
    process, machine = (open_files.advice(OSError(n, "x")) for n in (errno.EMFILE, errno.ENFILE))
    assert "all 300 files that `ulimit -n` allows" in process and "fs.file-max" not in process
    assert "fs.file-max" in machine and "ulimit" not in machine
    assert open_files.advice(OSError(errno.ENOENT, "x")) == open_files.advice(ValueError()) == ""


# -- a run that has used up all descriptors -------------------------------------------------------

LEAKS = '''
import os, threading, time
from agentrl import reward

held, steps = [], 0

@reward("leaks")
def leaks(trajectory):
    """Leave files open from the second step on."""
    global steps
    steps += 1
    if steps > 8:
        take_all()
    if steps == 9 and os.environ.get("TAKE_WITHOUT_END"):
        threading.Thread(target=take_without_end, daemon=True).start()
    return float(len(trajectory.final_text) % 2)

def take_all():
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass

def take_without_end():
    while True:
        take_all()
        time.sleep(1e-5)
'''


def run_that_leaks(folder: Path, model: Path, **environment: str):
    (folder / "leaks.py").write_text(LEAKS)
    rows = folder / "rows.jsonl"
    row = {**ROW, "agent_name": "single_turn", "tools": []}
    rows.write_text((json.dumps(row) + "\n") * 4)
    done = run_agentrl(
        "train", "--dataset", str(rows), "--model", str(model),
        "--file", str(folder / "leaks.py"), "reward.function=leaks", "data.batch_size=2",
        "rollout.n=4", "trainer.total_steps=3", "trainer.save_freq=0",
        "rollout.max_turn_tokens=8", "trainer.logger=[]", f"trainer.output={folder / 'run'}",
        env={**os.environ, **environment}, open_files=220,
    )  # fmt: skip
    print(done.stdout[-3000:], done.stderr[-3000:])
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "cannot write the trajectories" in done.stderr and "Too many open files" in done.stderr
    assert "opened all 220 files that `ulimit -n` allows" in done.stderr
    return done.stderr


def test_a_run_without_descriptors_saves_and_says_why(tmp_path, random_model):
    """The second step's trajectories cannot be written; the step is not lost."""
    output = run_that_leaks(tmp_path, random_model)
    assert "saved after step 2; the same command resumes from there" in output
    assert (tmp_path / "run" / "global_step_00000002" / "meta.json").exists()


def test_if_nothing_can_be_saved_the_cause_is_reported(tmp_path, random_model):
    """A thread takes the descriptors that become free, unless the checkpoint is quicker."""
    output = run_that_leaks(tmp_path, random_model, TAKE_WITHOUT_END="1")
    outcomes = ("saved after step 2", "could not be saved", "cannot be read", "nothing was saved")
    at = [output.rindex(outcome) for outcome in outcomes if outcome in output]
    assert at and output.index("cannot write the trajectories") < min(at)


# -- the tool server ------------------------------------------------------------------------------


@pytest.fixture
def small_server(no_tools, monkeypatch):
    """A tool server that accepts four connections."""
    open_files.reserve(0)

    @tool
    async def wait(seconds: float) -> str:
        """Wait."""
        await asyncio.sleep(seconds)
        return "waited"

    ready = threading.Event()
    server = ToolServer("127.0.0.1", 0, "", ready.set)
    monkeypatch.setattr(BoundedHttpProtocol, "max_connections", 4)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    assert ready.wait(20)
    yield server
    server.should_exit = True
    thread.join(20)
    open_files.reserve(0)


def test_the_tool_server_accepts_the_connections_of_the_run(no_tools, monkeypatch, limit, tmp_path):
    """Under the limit that a run needs, each process of its tool server accepts enough."""
    monkeypatch.setattr(open_files, "_open_at_start", 1)
    monkeypatch.setattr(BoundedHttpProtocol, "max_connections", 0)

    (tmp_path / "counter.py").write_text(
        "from agentrl.tools import tool\n"
        "@tool(process=True)\n"
        "def count(n: int) -> int:\n"
        "    'Count.'\n"
        "    return n\n"
    )
    registry.load_file(str(tmp_path / "counter.py"))
    limit(needed_by(plan_of(BIG, "count"), limit))
    ToolServer("127.0.0.1", 0, "", print)._socket.close()
    assert BoundedHttpProtocol.max_connections == 256
    assert open_files.left_for_connections() == 342 - 256


async def test_the_tool_server_closes_idle_connections_first(small_server):
    async def one():
        reader, writer = await asyncio.open_connection(*small_server.url[7:].split(":"))
        writer.write(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        return writer

    connections = [await one() for _ in range(20)]
    await asyncio.sleep(0.1)
    assert len(small_server.server_state.connections) <= 5
    for writer in connections:
        writer.close()


async def test_the_tool_server_asks_clients_above_its_limit_to_retry(small_server):
    box = HttpToolbox(small_server.url)
    sample = Sample("s", (), tools=("wait",))
    await box.open("e", sample)
    slow, quick = (ToolCall("wait", {"seconds": s}) for s in (1.0, 0.0))
    running = [asyncio.create_task(box.run([slow], "e", turn)) for turn in range(4)]
    await asyncio.sleep(0.2)
    async with HttpClient(small_server.url, error=ToolServerError) as client:
        deadline = time.monotonic() + 5
        status, answer = await client.request_json("GET", "/tools", deadline=deadline)
    assert (status, answer["error"]) == (503, "Busy")
    [result] = await box.run([quick], "e", 9)  # it comes again as it is told
    assert result.ok and all(r.ok for [r] in await asyncio.gather(*running))
    await box.aclose()
