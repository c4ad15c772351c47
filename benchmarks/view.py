"""How long `agentrl view` takes until content is visible, in a cold server and a headless Chromium.

    python benchmarks/view.py

It makes a run of 20,000 episodes with a few turns and tool calls each, and one with an episode of
128k tokens. For each page it starts the command and a new browser, so that nothing is cached but
what the operating system has in memory. Every line is a JSON object: the page, the seconds from
its request until its rows, curves or tokens are in it, and as context those until the page is
complete and those that the command took to start.
"""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import quote

from workload.timing import arguments, print_figure

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.browser import Browser

from agentrl.record import METRICS
from agentrl.store import TrajectoryStore
from agentrl.trajectory import (
    Group,
    Message,
    Sample,
    Scored,
    Segment,
    Span,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    float_array,
    token_array,
)

EPISODES, GROUPS, ROLLOUTS = 20_000, 25, 8
LONG = 128_000
RANDOM = random.Random(0)


def play(step: int, group: int, rollout: int, turns: int, tokens: int) -> Scored:
    """Return an episode of `turns` turns with a tool call each."""
    n = tokens // turns
    messages, made, spans = [Message("user", "How many? " * 20)], [], []
    for i in range(turns):
        call = ToolCall("search", {"query": f"what is {RANDOM.random()}"})
        result = ToolResult("a result " * 10, ok=RANDOM.random() > 0.1, seconds=RANDOM.random())
        at = (0, i * n, i * n + n // 2)
        made.append(Turn(*at, "stop", (call,), (result,), message_index=len(messages)))
        text = f"I search for {RANDOM.randrange(10**4)}. " * 10
        messages += [Message("assistant", text), Message("tool", result.content)]
        spans += [Span("generate", i, i + 0.5), Span("tools", i + 0.5, i + 1.0)]
    mask = ([1] * (n // 2) + [0] * (n - n // 2)) * turns
    row = token_array([RANDOM.randrange(1000) for _ in mask])
    segment = Segment(
        token_array([1] * 50),
        row,
        token_array(mask),
        float_array([-RANDOM.random() if m else 0.0 for m in mask]),
        token_array([step - 1 if m else -1 for m in mask]),
    )
    sample = Sample(f"row{step}-{group}", (messages[0],), "tool_agent", "quiz", "4")
    return Scored(
        Trajectory(
            sample,
            f"e{step}-{group}-{rollout}",
            rollout,
            (segment,),
            tuple(made),
            tuple(messages),
            {},
            "done",
            seconds=float(turns),
            started=1e9 + RANDOM.random(),
            spans=tuple(spans),
        ),
        {"outcome": RANDOM.random()},
        RANDOM.random(),
    )


def write_runs(folder: Path) -> tuple[Path, Path]:
    """Write the run with many episodes and the one with a long episode."""
    many = TrajectoryStore(folder / "many" / "trajectories")
    for step in range(1, EPISODES // (GROUPS * ROLLOUTS) + 1):
        groups = []
        for g in range(GROUPS):
            scored = tuple(play(step, g, r, turns=3, tokens=60) for r in range(ROLLOUTS))
            groups.append(Group(scored[0].trajectory.sample, scored))
        many.write(step, groups)
        with (folder / "many" / METRICS).open("a") as metrics:
            data = {"critic/score/mean": RANDOM.random(), "actor/entropy": RANDOM.random()}
            metrics.write(json.dumps({"step": step, "data": data}) + "\n")
    long = play(1, 0, 0, turns=100, tokens=LONG)
    TrajectoryStore(folder / "long" / "trajectories").write(
        1, [Group(long.trajectory.sample, (long,))]
    )
    return folder / "many", folder / "long"


def measure(run: Path, page: str, is_visible: str) -> None:
    """Print the seconds from the navigation until a JavaScript expression is true."""
    command = [sys.executable, "-m", "agentrl", "view", str(run)]
    started = time.perf_counter()
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
        contextlib.ExitStack() as stack,
    ):
        assert server.stdout
        address = server.stdout.readline().split()[-1]
        ready = time.perf_counter() - started
        browser = Browser(Path(profile))
        stack.callback(server.terminate)
        stack.callback(browser.close)
        url, _, token = address.partition("#token=")
        browser.send("Page.navigate", url=f"{url}view.css")  # an origin for the token
        browser.run(f"localStorage.setItem('token', '{token}')")
        begin = time.perf_counter()
        browser.send("Page.navigate", url=f"{url}#{page}")
        browser.wait(is_visible, 60.0)
        seconds = time.perf_counter() - begin
        browser.wait("document.body.dataset.ready === 'yes'", 60.0)
        complete = time.perf_counter() - begin
        print_figure(page, seconds, "s", complete=round(complete, 2), start=round(ready, 1))


def main() -> None:
    """Write the runs and measure each page."""
    arguments(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as name:
        many, long = write_runs(Path(name))
        rows = "document.querySelectorAll('tbody tr').length >= 100"
        measure(many, "/run/0", rows)
        measure(many, f"/run/0?q={quote('reward<0.5 step>10')}", rows)
        measure(many, f"/run/0?q={quote('tool=search failed>1')}", rows)
        measure(many, f"/run/0?q={quote('1234.')}", "!!document.querySelector('tbody tr')")
        measure(many, "/", "document.querySelectorAll('figure').length > 0")
        measure(many, "/run/0/step/50", "document.querySelectorAll('.track').length > 10")
        tokens = "document.querySelectorAll('#tokens .token').length >= 500"
        both = f"{tokens} && !!document.querySelector('article')"
        measure(long, "/run/0/episode?id=e1-0-0", both)
        end = "/run/0/episode?id=e1-0-0&layout=table&token=127999"
        measure(long, end, "!!document.querySelector('#tokens .chosen')")


if __name__ == "__main__":
    main()
