"""A tool server of several processes: episodes stay with theirs, and those that die come back."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from agentrl import registry
from agentrl.agent_loops.attempt import Runtime
from agentrl.chat import ChatTemplate
from agentrl.config import Config, load_config
from agentrl.engine.base import Sampling
from agentrl.engine.scripted import Scripted
from agentrl.errors import RunStopped, SessionLost, ToolServerError, UserError
from agentrl.http import HttpClient, fetch, fetch_json
from agentrl.rewards import Scorer
from agentrl.rollout import Rollouts, open_rollouts
from agentrl.testing import byte_tokenizer, call
from agentrl.tools import HttpToolbox
from agentrl.tools.serving.background import RESTARTS, RunningServer, serve_in_background
from agentrl.tools.session import ShardInfo, worker_number
from agentrl.trajectory import Group, Message, Sample, ToolCall

TOOLS = '''
import os, time
from agentrl import tool

@tool
def pid() -> int:
    """Return the PID."""
    return os.getpid()

@tool
async def sleep(seconds: float) -> int:
    """Sleep."""
    import asyncio
    await asyncio.sleep(seconds)
    return os.getpid()

@tool
def note(file: str, line: str, seconds: float = 0.0) -> str:
    """Write a line to a file, and then sleep."""
    with open(file, "a") as f:
        f.write(line + "\\n")
    time.sleep(seconds)
    return "noted"

@tool
def leave_a_process() -> int:
    """Start a program that goes on."""
    import subprocess
    return subprocess.Popen(["sleep", "600"]).pid

@tool
class Diary:
    """Tells a file how it ended."""

    def __init__(self, file: str):
        self.file = file

    def write(self, line: str) -> str:
        """Write."""
        return line

    def reward(self) -> float:
        with open(self.file, "a") as f:
            f.write("reward\\n")
        return 1.0

    def close(self) -> None:
        with open(self.file, "a") as f:
            f.write("closed\\n")
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("tools") / "worker_tools.py"
    path.write_text(TOOLS)
    return str(path)


def until(true, seconds=20.0) -> bool:
    """Whether something becomes true in time."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def ask(box: HttpToolbox, name: str, episode: str, turn: int, **arguments) -> str:
    [result] = await box.run([ToolCall(name, arguments)], episode, turn)
    assert result.ok, result
    return result.content


def test_the_worker_of_an_episode():
    """Drivers in other languages work out the same."""
    assert [worker_number(e, 3) for e in ("a", "train-0-1", "ü")] == [0, 2, 1]
    assert {worker_number(f"e{i}", 1) for i in range(9)} == {0}
    shares = Counter(worker_number(f"train-1-{i}-0-abc-{i}", 4) for i in range(4000))
    assert all(900 < n < 1100 for n in shares.values())
    assert ShardInfo().other_port("a") == 0
    assert [ShardInfo((10, 11, 12), n).other_port("a") for n in range(3)] == [0, 10, 10]


@pytest.mark.parametrize("is_loaded_here", [True, False])
def test_warnings_about_a_file_are_printed_once(tmp_path, caplog, is_loaded_here):
    path = tmp_path / "undocumented.py"
    path.write_text("from agentrl import tool\n@tool\ndef bare(x: int) -> int:\n    return x\n")
    with registry.tools.isolated(keep=[]):
        if is_loaded_here:
            registry.load_file(str(path))
        with serve_in_background([str(path)], workers=2).handle:
            pass
    assert caplog.text.count("'bare' has no docstring") == 1


async def test_episodes_stay_with_their_worker_and_a_killed_worker_is_restarted(file, caplog):
    url, token, server = serve_in_background([file], workers=2)
    with server:
        box, ids = HttpToolbox(url, token), [f"e{i}" for i in range(8)]
        for e in ids:
            await box.open(e, Sample(e, (), tools=("pid",)))
        played = {e: int(await ask(box, "pid", e, 0)) for e in ids}
        before = server.pids
        assert played == {e: before[worker_number(e, 2)] for e in ids}
        assert played == {e: int(await ask(box, "pid", e, 1)) for e in ids}
        mine = [e for e in ids if worker_number(e, 2) == 1]
        assert 0 < len(mine) < 8

        # A driver that goes to the wrong door is told the right one.
        _, answer = fetch_json(url, "/tools", token=token, timeout=5)
        ports = answer["workers"]
        assert url.endswith(f":{ports[0]}") and len(ports) == 2
        status, answer = fetch_json(
            url, "/sessions", {"episode_id": mine[0], "sample": {}}, token=token, timeout=5
        )
        assert (status, answer["error"]) == (421, "WrongWorker")
        assert f"the worker at port {ports[1]}" in answer["message"]

        # Whichever worker the URL names, all of them are found.
        other = HttpToolbox(url.replace(str(ports[0]), str(ports[1])), token)
        for e in ("x0", "x1", "x2", "x3"):
            await other.open(e, Sample(e, (), tools=("pid",)))
            assert int(await ask(other, "pid", e, 0)) == before[worker_number(e, 2)]
        await other.aclose()

        os.kill(before[1], signal.SIGKILL)
        for e in ids:
            if e in mine:  # it waits for the new process, which does not know it
                with pytest.raises(ToolServerError, match=f"episode {e} is not open"):
                    await ask(box, "pid", e, 2)
                await box.open(f"{e}+", Sample(e, (), tools=("pid",)))
            else:
                assert int(await ask(box, "pid", e, 2)) == before[0]
        assert server.pids[0] == before[0] and server.pids[1] != before[1]
        assert server.running
        again = [e for e in ids if worker_number(f"{e}+", 2) == 1 and e in mine]
        for e in again:
            assert int(await ask(box, "pid", f"{e}+", 0)) == server.pids[1]
        assert "the tool server ended by itself, code -9, and is restarted" in caplog.text
        await box.aclose()
    assert not any(map(alive, server.pids))


def test_the_config_sets_the_number_of_workers(file):
    config = load_config(None, ["tools.workers=2", f"files=[{file}]"])
    tokenizer = byte_tokenizer()
    engine = Scripted([call("pid"), "done"], tokenizer)
    with open_rollouts(config, engine, ChatTemplate(tokenizer), _scorer(config)) as rollouts:
        groups = rollouts.collect(_rows(4, "pid"), n=4, sampling=Sampling(), step=0)
    pids = results(groups)
    assert len(pids) == 2 and all(s.isdigit() for s in pids)


def _scorer(config: Config):
    return Scorer(config.reward)


def _rows(n: int, tool: str, **fields) -> list[Sample]:
    return [
        Sample(
            f"r{i}",
            (Message("user", "Go."),),
            agent_name="tool_agent",
            data_source="openai/gsm8k",
            ground_truth="12",
            tools=(tool,),
            row=i,
            **fields,
        )
        for i in range(n)
    ]


def results(groups: list[Group]) -> set[str]:
    """Return the results of the tools."""
    scored = [s for g in groups for s in g.scored]
    return {m.content for s in scored for m in s.trajectory.messages if m.role == "tool"}


def _rollouts(served: RunningServer, script) -> Rollouts:
    tokenizer, box = byte_tokenizer(), HttpToolbox(served.url, served.token)
    box.connect()  # as a run does, before its first step
    runtime = Runtime(Scripted(script, tokenizer), ChatTemplate(tokenizer), box, Config())
    return Rollouts(runtime, _scorer(runtime.config), seed=0)


def test_a_server_killed_in_the_middle_of_a_call_costs_no_reward(file):
    """F1: nobody is rewarded with 0 for it; the server is back, and the step completes."""
    served = serve_in_background([file])
    with served.handle as server:
        rollouts = _rollouts(served, [call("sleep", seconds=0.6), "#### 12"])
        [first] = server.pids
        killer = threading.Timer(0.4, os.kill, (first, signal.SIGKILL))
        killer.start()
        try:
            groups = rollouts.collect(_rows(3, "sleep"), n=4, sampling=Sampling(), step=0)
        finally:
            killer.join()
            rollouts.close()
        [second] = server.pids
        assert second != first
        assert [[s.reward for s in g.scored] for g in groups] == [[1.0] * 4] * 3
        assert [g.dropped for g in groups] == [0, 0, 0]
        # All were in that call, so all were played a second time, under ids of their own.
        ids = [s.trajectory.episode_id for g in groups for s in g.scored]
        assert all(i.endswith("+1") for i in ids)
        assert results(groups) == {str(second)}


@pytest.mark.slow
def test_a_server_killed_again_and_again_drops_no_episode(file, caplog):
    """An outage of the server does not use up the attempts of an episode."""
    served = serve_in_background([file])
    with served.handle as server:
        rollouts = _rollouts(served, [call("sleep", seconds=0.4), "#### 12"])
        killed = []

        def kill_each() -> None:
            while len(killed) < 4:  # One more death within a minute would be the last.
                [pid] = server.pids
                if pid not in killed:
                    fetch(served.url, "/health", error=ToolServerError, timeout=20.0)
                    time.sleep(0.3)  # Sessions are open, and no call has ended.
                    killed.append(pid)
                    os.kill(pid, signal.SIGKILL)
                time.sleep(0.02)

        killer = threading.Thread(target=kill_each)
        killer.start()
        try:
            groups = rollouts.collect(_rows(4, "sleep"), n=4, sampling=Sampling(), step=0)
        finally:
            killer.join()
            rollouts.close()
        assert [[s.reward for s in g.scored] for g in groups] == [[1.0] * 4] * 4
        assert [g.dropped for g in groups] == [0] * 4
        assert len(killed) == 4
        tries = {int(s.trajectory.episode_id.rpartition("+")[2]) for g in groups for s in g.scored}
        assert max(tries) > 2, "more often than after failures of an episode's own"
        assert sum("is not open" in r.getMessage() for r in caplog.records) <= 2 * len(killed)


HANGING = """
import threading, time
import agentrl.tools.runner
from agentrl import tool

agentrl.tools.runner.MAX_REPLACED = 100

@tool(timeout=0.2)
def hang(seconds: float = 1000.0) -> str:
    "Hang."
    time.sleep(seconds)
    return "late"

@tool
def quick() -> str:
    "Answer with the number of threads."
    return str(threading.active_count())
"""


@pytest.mark.timing
async def test_threads_of_calls_that_hang_are_replaced(tmp_path):
    """With 64 threads, 80 calls hang, and the next ones start at once; late threads end."""
    (tmp_path / "hanging.py").write_text(HANGING)
    served = serve_in_background([str(tmp_path / "hanging.py")])
    with served.handle as server:
        box = HttpToolbox(served.url, served.token)
        await box.open("e", Sample("s", (), tools=("hang", "quick")))
        late = [ToolCall("hang", {"seconds": 0.6})] * 40
        forever = [ToolCall("hang", {})] * 40
        for turn, calls in enumerate((late, forever)):
            hung = await box.run(calls, "e", turn)
            assert {r.error for r in hung} == {"timeout"}
        start = time.monotonic()
        [result] = await box.run([ToolCall("quick", {})], "e", 2)
        assert time.monotonic() - start < 1.0 and int(result.content) > 40
        await asyncio.sleep(0.6)
        [result] = await box.run([ToolCall("quick", {})], "e", 3)
        assert 40 < int(result.content) < 40 + 64, "the late ones ended"
        # At the limit of calls that hang, the server starts again.
        [first] = server.pids
        for turn in (4, 5):
            await box.run([ToolCall("hang", {})] * 40, "e", turn)
        assert await asyncio.to_thread(until, lambda: server.pids != [first], 10.0)
        with pytest.raises(SessionLost):
            await box.run([ToolCall("quick", {})], "e", 6)
        await box.open("f", Sample("s", (), tools=("quick",)))
        [result] = await box.run([ToolCall("quick", {})], "f", 0)
        assert result.ok
        await box.aclose()


async def test_a_call_whose_server_died_is_not_run_again(file, tmp_path):
    notes = tmp_path / "notes"
    served = serve_in_background([file])
    with served.handle as server:
        box = HttpToolbox(served.url, served.token)
        await box.open("e", Sample("s", (), tools=("note",)))
        arguments = {"file": str(notes), "line": "x", "seconds": 30.0}
        running = asyncio.create_task(box.run([ToolCall("note", arguments)], "e", 0))
        assert await asyncio.to_thread(until, notes.exists)
        os.kill(server.pids[0], signal.SIGKILL)
        with pytest.raises(ToolServerError):
            await running
        assert notes.read_text() == "x\n"
        await box.aclose()


async def test_processes_that_a_tool_left_end_with_its_worker_and_delay_no_other(file):
    """It holds the output of the worker that died."""
    served = serve_in_background([file])
    with served.handle as server:
        box = HttpToolbox(served.url, served.token)
        await box.open("e", Sample("s", (), tools=("leave_a_process",)))
        left, [first] = int(await ask(box, "leave_a_process", "e", 0)), server.pids
        assert alive(left)
        os.kill(first, signal.SIGKILL)
        assert await asyncio.to_thread(until, lambda: server.pids != [first], 5.0)
        assert await asyncio.to_thread(until, lambda: not alive(left), 5.0)
        await box.aclose()


@pytest.mark.timing
async def test_a_worker_that_keeps_dying_is_given_up(file, caplog):
    """Calls are refused at once instead of waiting for the server process."""
    url, _, server = serve_in_background([file])
    with server:
        for _ in range(RESTARTS):
            pid = server.pids[0]
            os.kill(pid, signal.SIGKILL)
            await asyncio.to_thread(until, lambda pid=pid: server.pids[0] != pid, 1.0)
        await asyncio.to_thread(server.wait)
        assert "ended by itself, code -9, too often to be restarted" in caplog.text
        began = time.monotonic()
        with pytest.raises(ToolServerError):
            async with HttpClient(url, error=ToolServerError) as client:
                await client.request_json("GET", "/health", deadline=began + 10)
        assert time.monotonic() - began < 1.0


def test_a_step_without_a_server_stops_the_run_with_the_cause(file):
    served = serve_in_background([file])
    rollouts = _rollouts(served, [call("pid"), "#### 12"])
    served.handle.stop()
    with pytest.raises(RunStopped, match=r"12 of 12 rollouts were dropped[^$]*ToolServerError"):
        rollouts.collect(_rows(3, "pid"), n=4, sampling=Sampling(), step=0)
    rollouts.close()


def listener(port: int) -> socket.socket:
    return socket.create_server(("127.0.0.1", port))


def free_pair() -> int:
    """The first of two free ports in a row, below those that the system gives out by itself."""
    for port in random.sample(range(20_000, 30_000, 2), 50):
        with suppress(OSError), listener(port), listener(port + 1):
            return port
    raise AssertionError("no two free ports in a row")


def test_ports_are_numbered_from_the_first(file):
    """If one of the ports is in use, no process is left."""
    port = free_pair() + 1
    cannot = pytest.raises(UserError, match=f"cannot serve on 127.0.0.1:{port}")
    with listener(port), cannot:
        serve_in_background([file], workers=2, port=port - 1)
    url, token, server = serve_in_background([file], workers=2, port=port - 1)
    with server:
        assert url == f"http://127.0.0.1:{port - 1}"
        _, answer = fetch_json(url, "/tools", token=token, timeout=5)
        assert answer["workers"] == [port - 1, port]


# Ends.


def serve(file: str, *options: str) -> tuple[subprocess.Popen[str], str]:
    """`agentrl tools serve` and its URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "agentrl", "tools", "serve", file, "--port", "0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "AGENTRL_TOOLS_TOKEN": "t"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("5 tools at http://"), line
    return process, line.split()[3].rstrip(":")


ONE_OR_TWO = [
    pytest.param((), id="one", marks=pytest.mark.slow),
    pytest.param(("--workers", "2"), id="two"),
]
"""Options of a server with one process or two; two have the harder shutdown."""


@pytest.mark.parametrize("options", ONE_OR_TWO)
async def test_a_server_that_is_stopped_ends_running_calls(file, tmp_path, options):
    """SIGTERM: no new sessions or calls, the one that runs is answered, objects are closed."""
    end, notes = tmp_path / "end", tmp_path / "notes"
    process, url = serve(file, *options)
    try:
        box = HttpToolbox(url, "t")
        kwargs = {"diary": {"create_kwargs": {"file": str(end)}}}
        await box.open("e", Sample("s", (), tools=("note", "diary"), tools_kwargs=kwargs))
        arguments = {"file": str(notes), "line": "x", "seconds": 1.5}
        running = asyncio.create_task(box.run([ToolCall("note", arguments)], "e", 0))
        assert await asyncio.to_thread(until, notes.exists)
        process.send_signal(signal.SIGTERM)
        worker = box._clients[worker_number("e", len(box._clients))]

        async def status() -> str:
            _, answer = await worker.request_json("GET", "/health", deadline=time.monotonic() + 5)
            return answer["status"]

        while await status() != "draining":
            await asyncio.sleep(0.02)
        for work in (
            box.run([ToolCall("write", {"line": "x"})], "e", 1),
            box.open("e", Sample("s", ())),
        ):
            with pytest.raises(ToolServerError, match="is stopping"):
                await work
        [result] = await running
        assert result.content == "noted"
        _, errors = await asyncio.to_thread(process.communicate, timeout=20)
        assert (process.returncode, "Traceback" in errors) == (143, False), errors
        assert end.read_text() == "closed\n"  # nobody asked for the reward
        await box.aclose()
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("options", ONE_OR_TWO)
@pytest.mark.parametrize(
    "first", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
async def test_a_second_signal_ends_the_server_at_once(file, tmp_path, options, first):
    notes = tmp_path / "notes"
    process, url = serve(file, *options)
    try:
        box = HttpToolbox(url, "t")
        await box.open("e", Sample("s", (), tools=("note",)))
        arguments = {"file": str(notes), "line": "x", "seconds": 25.0}
        running = asyncio.create_task(box.run([ToolCall("note", arguments)], "e", 0))
        assert await asyncio.to_thread(until, notes.exists)
        process.send_signal(first)
        with pytest.raises(subprocess.TimeoutExpired):
            await asyncio.to_thread(process.wait, 0.7)
        began = time.monotonic()
        process.send_signal(first)
        _, errors = await asyncio.to_thread(process.communicate, timeout=20)
        assert time.monotonic() - began < 2.0
        assert "Traceback" not in errors
        with pytest.raises(ToolServerError):
            await running
        await box.aclose()
    finally:
        process.kill()
        process.wait()


def test_workers_end_with_their_parent(file):
    process, url = serve(file, "--workers", "2")
    _, answer = fetch_json(url, "/tools", token="t", timeout=5)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(answer["workers"]) == len(children) == 2
    process.kill()
    process.communicate()
    assert until(lambda: not any(alive(int(c)) for c in children), 5.0)


def test_no_tools_at_all(tmp_path):
    empty = tmp_path / "empty.py"
    empty.write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "agentrl", "tools", "serve", str(empty), "--workers", "2",
         "--port", "0"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert "no @tool in" in done.stderr and "Traceback" not in done.stderr
