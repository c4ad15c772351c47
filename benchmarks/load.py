"""Measure what one process costs that plays many episodes at once.

    python benchmarks/load.py                                   # 64 to 8,192 episodes: minutes
    python benchmarks/load.py --episodes 512 2048 --tools http  # some of them
    python benchmarks/load.py --context 32000 128000 --episodes 64
    python benchmarks/load.py --workers 1 2 4 --episodes 2048 --tools local --engine-s 0

With `--workers`, the engine is a server in a process of its own, and `cpu` is that of the run's
process. Otherwise the engine is in this process. It returns prepared turns after 250 ms; an episode
has eight turns with a tool call, and one without. Everything else is as in a run:
`Rollouts.collect` with the template, parser, schemas, checks, retries, rewards and the watchdog.
Tools run in this process (`local`), or over HTTP on a server with one worker (`http`). With
`--context`, the question has so many tokens.

turns   turns in a second
cpu     CPU microseconds of this process for each turn
wall    the time, as a multiple of 9 x 250 ms
stall   the 99th percentile of the delay of a timer on the event loop that plays the episodes
rss     the memory of this process for each episode, at most; with its rows
files   the open descriptors for each episode, at most
after   CPU microseconds of this process for each rollout between its end and the update: receive
        (from a worker), store, metrics, collate and targets (GRPO)

Each case runs in a process of its own. Values are of the best of the rounds by CPU time. Every line
is a JSON object: name, value, unit, context.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from workload.conversations import TOOLS, Talk, narrow
from workload.prepared import Prepared
from workload.timing import cpu_seconds, print_figure
from workload.tokenizer import workload_tokenizer

from agentrl import registry
from agentrl.chat import ChatTemplate
from agentrl.config import Config
from agentrl.engine.base import Sampler, Sampling
from agentrl.learner.algorithms import make_targets
from agentrl.learner.batch import collate
from agentrl.metrics import rollout_metrics
from agentrl.rewards import Scorer
from agentrl.rollout import Rollouts, open_rollouts
from agentrl.rollout_workers.channel import ANSWER, pack, unpack
from agentrl.store import TrajectoryStore
from agentrl.trajectory import Group, Message, Sample

ENGINE_S, CALLS, TOOL_WORDS = 0.25, 8, 90
ROUNDS = 2
SIZES = (64, 512, 1024, 2048, 8192)
TOOL_FILE = '''
from agentrl import reward, tool

@reward("constant")
def constant(trajectory) -> float:
    """Return 1."""
    return 1.0

@tool
async def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: the expression.
    """
    return RESULT

@tool
async def search(query: str) -> str:
    """Search for a text.

    Args:
        query: what to search for.
    """
    return RESULT

@tool
async def python(code: str) -> str:
    """Run Python code.

    Args:
        code: the code.
    """
    return RESULT
'''


@dataclass
class Watch:
    """The largest memory and number of descriptors while a block runs, and stalls of a loop."""

    rss: float = 0.0
    files: int = 0
    stalls: list[float] = field(default_factory=list)

    async def tick(self) -> None:
        """Sleep 1 ms again and again on the loop of the episodes."""
        while True:
            start = time.perf_counter()
            await asyncio.sleep(0.001)
            self.stalls.append(time.perf_counter() - start - 0.001)

    def sample(self) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.rss = max(self.rss, pages * os.sysconf("SC_PAGE_SIZE"))
        self.files = max(self.files, len(os.listdir("/proc/self/fd")))


def play(rollouts: Rollouts, samples: list[Sample]) -> tuple[float, float, Watch, list[Group]]:
    """Play each sample once. Return CPU and wall seconds, what was seen, and the groups."""
    watch, over = Watch(), threading.Event()

    def sample() -> None:
        while not over.wait(0.1):
            watch.sample()

    thread = threading.Thread(target=sample)
    thread.start()
    ticking = rollouts._loop.submit(watch.tick())
    cpu, start = cpu_seconds(), time.perf_counter()
    groups = rollouts.collect(samples, n=1, sampling=Sampling(), step=0)
    wall, cpu = time.perf_counter() - start, cpu_seconds() - cpu
    ticking.cancel()
    over.set()
    thread.join()
    turns = [len(s.trajectory.turns) for group in groups for s in group.scored]
    assert turns == [CALLS + 1] * len(samples), "an episode was dropped or ended early"
    return cpu, wall, watch, groups


def after(groups: list[Group], config: Config, folder: Path) -> dict[str, float]:
    """Return the CPU seconds of what the run's process does with rollouts before the update."""
    store, batch, messages = TrajectoryStore(folder), None, [pack(ANSWER, 0, g) for g in groups]
    bodies = [message[4:] for message in messages]

    def make_batch() -> None:
        nonlocal batch
        batch = collate(groups, 0, config.reward)

    parts = {
        "receive": lambda: [unpack(body) for body in bodies],
        "store": lambda: store.write(1, groups),
        "metrics": lambda: rollout_metrics(groups),
        "collate": make_batch,
        "targets": lambda: make_targets(batch, config, batch.rollout_logprobs, None, None),
    }
    seconds = {}
    for name, part in parts.items():
        times = []
        for _ in range(3):
            start = cpu_seconds()
            part()
            times.append(cpu_seconds() - start)
        seconds[name] = min(times)
    return seconds


def run_case(episodes: int, tools: str, context: int, workers: int, engine_s: float) -> None:
    tokenizer = workload_tokenizer()
    talks = narrow(tokenizer, CALLS, TOOL_WORDS)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tools.py"
        file.write_text(TOOL_FILE.replace("RESULT", repr(talks[0].results[0])))
        registry.load_file(str(file))
        config = Config.model_validate(
            {
                "files": [str(file)],
                "tools": {"transport": {"local": "in_process", "http": "http"}[tools]},
                "rollout": {
                    "max_turns": CALLS + 1,
                    "max_tool_calls": CALLS + 1,
                    "max_trajectory_tokens": 1 << 20,
                    "timeout_s": 3600.0,
                    "workers": workers or 1,
                },
                "reward": {"function": "constant"},
            }
        )
        template = ChatTemplate(tokenizer)
        words = " ".join(["value"] * context)
        samples = [
            Sample(
                f"r{i}",
                (*talks[i % len(talks)].prompt[:1], Message("user", f"{words} question {i}"))
                if context
                else talks[i % len(talks)].prompt,
                agent_name="tool_agent",
                tools=TOOLS,
                row=i,
            )
            for i in range(episodes)
        ]
        before = Watch()
        with (
            make_engine(talks, tokenizer, engine_s, workers) as engine,
            open_rollouts(config, engine, template, Scorer(config.reward)) as r,
        ):
            before.sample()
            memory = worker_memory()
            rounds = [play(r, samples) for _ in range(ROUNDS)]
            memory = [now - b for now, b in zip(worker_memory(), memory, strict=True)]
        cpu, wall, watch, groups = min(rounds, key=lambda r: r[0])
        rss = max(w.rss for _, _, w, _ in rounds) - before.rss
        files = max(w.files for _, _, w, _ in rounds) - before.files
        ended = after(groups, config, Path(folder) / "trajectories")
    turns, ideal = episodes * (CALLS + 1), (CALLS + 1) * engine_s
    name = f"load/{tools}/{episodes}" + (f"/context_{context}" if context else "")
    name += f"/workers_{workers}" if workers else ""
    best = min(wall for _, wall, _, _ in rounds)
    seen = {"episodes": episodes, "turns": CALLS + 1, "tools": tools, "tokens_of_question": context}
    p99 = sorted(watch.stalls)[int(0.99 * len(watch.stalls))] if watch.stalls else wall
    print_figure(f"{name}/cpu", 1e6 * cpu / turns, "us a turn", **seen)
    print_figure(f"{name}/turns", turns / best, "a second", **seen)
    if engine_s:
        print_figure(f"{name}/wall", best / ideal, "of ideal", **seen)
    for grown in memory:
        print_figure(f"{name}/worker_rss", grown / 2**20, "MiB a worker", **seen)
    print_figure(f"{name}/stall", 1e3 * p99, "ms", **seen)
    print_figure(f"{name}/rss", rss / episodes / 1024, "KiB an episode", **seen)
    print_figure(f"{name}/files", files / episodes, "an episode", **seen)
    rows = [x for g in groups for s in g.scored for x in s.trajectory.segments]
    tokens = sum(len(x.prompt_ids) + len(x.response_ids) for x in rows) / len(rows)
    each = {part: round(1e6 * seconds / episodes, 1) for part, seconds in ended.items()}
    print_figure(f"{name}/after", sum(each.values()), "us a rollout", **each, tokens=round(tokens))


@contextmanager
def make_engine(
    talks: list[Talk], tokenizer: Any, engine_s: float, workers: int
) -> Iterator[Sampler]:
    """Yield an engine in this process, or with `workers` a server of prepared turns."""
    if not workers:
        yield Prepared(lambda name: talks[int(name.split("-")[2]) % len(talks)], engine_s)
        return
    from workload.turn_server import turn_server

    from agentrl.engine.remote.pool import EnginePool
    from agentrl.engine.remote.sglang import SGLangEngine

    with turn_server([talk.turns for talk in talks], engine_s) as url:
        pool = EnginePool([lambda: SGLangEngine(url, vocabulary=len(tokenizer))])
        yield pool
        pool.close()


def worker_memory() -> list[int]:
    """Return the bytes in use of each rollout worker, a child of this process."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if (
                int(parent) == os.getpid()
                and b"rollout_workers" in (folder / "cmdline").read_bytes()
            ):
                pages = int((folder / "statm").read_text().split()[1])
                found.append(pages * os.sysconf("SC_PAGE_SIZE"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--tools", nargs="+", choices=("local", "http"), default=["local", "http"])
    parser.add_argument("--context", type=int, nargs="+", default=[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[0])
    parser.add_argument("--engine-s", type=float, default=ENGINE_S, help="seconds of a turn")
    parser.add_argument("--case", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if args.case:
        episodes, tools, context, workers, engine_s = args.case
        run_case(int(episodes), tools, int(context), int(workers), float(engine_s))
        return
    for tools in args.tools:
        for context in args.context:
            for episodes, workers in product(args.episodes, args.workers):
                case = [str(episodes), tools, str(context), str(workers), str(args.engine_s)]
                subprocess.run([sys.executable, __file__, "--case", *case], check=True)


if __name__ == "__main__":
    main()
