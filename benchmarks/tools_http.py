"""Measure tool calls over HTTP, compared with a minimal FastAPI route and the same client.

One JSON object a line: name, value, unit, context. `python benchmarks/tools_http.py`.

The tool is the shelf's calculator: each call is checked against its schema, runs in a thread with a
deadline, and its result is cached by its key. The route parses the same body into a pydantic model
and returns constants. Both servers run in their own processes (httptools and uvloop); this process
is the client. Figures are medians of rounds in which the contestants alternate; microseconds are
the CPU time per call of client and server. Then tools that wait: 300 async calls of one second
each, and 512 calls that block a thread for 0.2 s, with one worker and with two.
Last, 1,000 episodes at once with 8 calls, a class tool against an environment, which has one more
request: its reward.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import uvloop
from workload.timing import arguments, cpu_seconds, print_figure

from agentrl.http import HttpClient
from agentrl.tools import HttpToolbox
from agentrl.tools.serving.background import serve_in_background
from agentrl.trajectory import Sample, ToolCall

ROUNDS = 7
CALLS = 3000

BARE = """
import socket, uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

class Call(BaseModel):
    turn: int
    call_index: int
    name: str
    arguments: dict

app = FastAPI()

@app.post("/call")
async def call(c: Call):
    return {"content": "12", "ok": True, "reward": None, "error": "", "seconds": 0.0}

bound = socket.create_server(("127.0.0.1", 0), backlog=2048)
print(bound.getsockname()[1], flush=True)
config = uvicorn.Config(app, http="httptools", log_level="warning", access_log=False, ws="none")
uvicorn.Server(config).run([bound])
"""


WAITING = """
import asyncio, time
from agentrl import tool

@tool
async def wait(seconds: float) -> str:
    'Wait.'
    await asyncio.sleep(seconds)
    return "waited"

@tool
def hold(seconds: float) -> str:
    'Hold a thread.'
    time.sleep(seconds)
    return "held"
"""

WORLDS = """
from agentrl import Environment, environment, tool

class Room:
    def __init__(self, goal: int):
        self.goal, self.at = goal, 0

    async def move(self, steps: int) -> str:
        'Move some steps.'
        self.at += steps
        return f"at {self.at}"

    async def reward(self):
        return float(self.at == self.goal)

@tool(name="class_tool")
class ClassTool(Room):
    def opening(self):
        return "You are at 0."

@environment("environment")
class World(Room, Environment):
    async def start(self):
        return "You are at 0."
"""


@dataclass
class Round:
    """The figures of one contestant in one round."""

    rate: float
    p99_ms: float
    client_us: float
    server_us: float


def cpu_seconds_of(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(one: Callable[[int, int], Awaitable[None]], in_flight: int, pid: int) -> Round:
    """Run `CALLS` calls, `in_flight` at a time; `one(worker, n)` runs the nth."""
    numbers = iter(range(CALLS))
    seconds: list[float] = []

    async def work(worker: int) -> None:
        for n in numbers:
            began = time.perf_counter()
            await one(worker, n)
            seconds.append(time.perf_counter() - began)

    used, served, began = cpu_seconds(), cpu_seconds_of(pid), time.time()
    await asyncio.gather(*(work(i) for i in range(in_flight)))
    wall = time.time() - began
    return Round(
        CALLS / wall,
        1e3 * statistics.quantiles(seconds, n=100)[98],
        1e6 * (cpu_seconds() - used) / CALLS,
        1e6 * (cpu_seconds_of(pid) - served) / CALLS,
    )


async def compare(in_flight: int, tools: tuple[str, str, int], bare: tuple[str, int]) -> None:
    url, token, tools_pid = tools
    bare_url, bare_pid = bare
    rounds: dict[str, list[Round]] = {"toolbox": [], "bare_route": []}
    body = {"turn": 0, "call_index": 0, "name": "calculator", "arguments": {"expression": "3*4"}}
    call = ToolCall("calculator", {"expression": "3*4"})
    sample = Sample("row", (), tools=("calculator",))
    for number in range(ROUNDS + 1):
        async with HttpClient(bare_url) as client:

            async def ask(worker: int, n: int, client: HttpClient = client) -> None:
                deadline = time.monotonic() + 60
                status, answer = await client.request_json("POST", "/call", body, deadline=deadline)
                assert (status, answer["content"]) == (200, "12")

            plain = await measure(ask, in_flight, bare_pid)
        box = HttpToolbox(url, token)
        ids = [f"{in_flight}-{number}-{i}" for i in range(in_flight)]
        await asyncio.gather(*(box.open(i, sample) for i in ids))

        async def run(worker: int, n: int, box: HttpToolbox = box, ids: list[str] = ids) -> None:
            [result] = await box.run([call], ids[worker], n)
            assert result.content == "12"

        ours = await measure(run, in_flight, tools_pid)
        await box.aclose()
        if number:  # the first round warms up
            rounds["bare_route"].append(plain)
            rounds["toolbox"].append(ours)
    context = {"in_flight": in_flight, "calls": CALLS, "rounds": ROUNDS}
    for name, played in rounds.items():
        for field, unit in (
            ("rate", "1/s"),
            ("p99_ms", "ms"),
            ("client_us", "us"),
            ("server_us", "us"),
        ):
            value = statistics.median(getattr(r, field) for r in played)
            print_figure(f"tools_http/{name}/{field}", value, unit, **context)
    ratios = [t.rate / b.rate for t, b in zip(rounds["toolbox"], rounds["bare_route"], strict=True)]
    print_figure("tools_http/toolbox_of_bare_route", statistics.median(ratios), "ratio", **context)


async def at_once(url: str, token: str, name: str, calls: int, seconds: float) -> float:
    """Return the seconds until all of some simultaneous calls have returned."""
    box, sample = HttpToolbox(url, token), Sample("row", (), tools=(name,))
    ids = [f"{name}-{i}" for i in range(calls)]
    await asyncio.gather(*(box.open(i, sample) for i in ids))
    call = ToolCall(name, {"seconds": seconds})
    began = time.perf_counter()
    results = await asyncio.gather(*(box.run([call], i, 0) for i in ids))
    took = time.perf_counter() - began
    assert all(r.ok for [r] in results)
    await box.aclose()
    return took


def waiting(loop: asyncio.Runner) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "waiting.py"
        file.write_text(WAITING)
        for name, calls, seconds, workers in (
            ("wait", 300, 1.0, 1),
            ("hold", 512, 0.2, 1),
            ("hold", 512, 0.2, 2),
        ):
            url, token, server = serve_in_background([str(file)], workers=workers)
            with server:
                took = loop.run(at_once(url, token, name, calls, seconds))
            context = {"calls": calls, "seconds": seconds, "workers": workers}
            print_figure(f"tools_http/{name}/all_answered", took, "s", **context)


async def play_worlds(url: str, token: str, name: str, episodes: int, calls: int) -> float:
    """Return the seconds that some simultaneous episodes take: open, calls, reward and close."""
    box = HttpToolbox(url, token)
    sample = Sample(
        "row",
        (),
        tools=(name,),
        tools_kwargs={name: {"create_kwargs": {"goal": calls}}},
        environment=name if name == "environment" else "",
    )

    async def play(episode: str) -> float:
        opened = await box.open(episode, sample)
        assert opened.messages[0].content == "You are at 0."
        for turn in range(calls):
            [result] = await box.run([ToolCall("move", {"steps": 1})], episode, turn)
            assert result.content == f"at {turn + 1}"
        asked = (await box.score(episode, opened.messages)).outcome if opened.hooks else 0.0
        return asked + await box.close(episode)

    began = time.perf_counter()
    rewards = await asyncio.gather(*(play(f"{name}-{began}-{i}") for i in range(episodes)))
    took = time.perf_counter() - began
    assert rewards == [1.0] * episodes
    await box.aclose()
    return took


def worlds(loop: asyncio.Runner, episodes: int = 1000, calls: int = 8) -> None:
    """Compare environments with class tools, in rounds in which they alternate."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "worlds.py"
        file.write_text(WORLDS)
        url, token, server = serve_in_background([str(file)])
        seconds: dict[str, list[float]] = {"class_tool": [], "environment": []}
        with server:
            for number in range(ROUNDS + 1):
                for name, taken in seconds.items():
                    took = loop.run(play_worlds(url, token, name, episodes, calls))
                    taken += [took] if number else []  # the first round warms up
    context = {"episodes": episodes, "calls": calls, "rounds": ROUNDS}
    for name, taken in seconds.items():
        print_figure(f"tools_http/{name}/episodes", statistics.median(taken), "s", **context)
    ratios = [e / c for e, c in zip(seconds["environment"], seconds["class_tool"], strict=True)]
    print_figure("tools_http/environment_of_class_tool", statistics.median(ratios), "", **context)


def main() -> None:
    arguments(__doc__).parse_args()
    bare = subprocess.Popen([sys.executable, "-c", BARE], stdout=subprocess.PIPE, text=True)
    try:
        assert bare.stdout is not None
        bare_url = f"http://127.0.0.1:{int(bare.stdout.readline())}"
        url, token, server = serve_in_background(["shelf:calculator"])
        with server, asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
            for in_flight in (64, 512):
                loop.run(compare(in_flight, (url, token, server.pids[0]), (bare_url, bare.pid)))
            waiting(loop)
            worlds(loop)
    finally:
        bare.terminate()
        bare.wait()


if __name__ == "__main__":
    main()
