"""Simulate a step on 8 to 1,024 GPUs from measured figures, and name the part that limits it.

    python benchmarks/scale_model.py                           # all cases: some minutes
    python benchmarks/scale_model.py --gpus 64 256 --case short --driver-us 200
    python benchmarks/scale_model.py --gpus 256 1024 --workers 32   # rollout.workers

The model: all GPUs first generate and then learn (`trainer.placement=colocated`). An episode has
turns; each is sampled by the engine of one GPU, which shares its speed among its sequences, then
handled by the driver, one turn after the other, and its tool call by a tool server that works
through a queue, and by the tool. With `--workers`, the episodes are spread over as many drivers,
each with a tool server, and the run's process receives and prepares their results. The lengths of
turns and the times of tools are lognormal. When all episodes have ended, the driver prepares the
rows, the GPUs learn, and the weights are sent. The run's process stores the rollouts meanwhile: no
step is shorter than its work for all of them.

The limit of a step is the part that shortens it most if it alone is twice as fast. `gpu_share` is
the share of the step that is left if driver, tool server and publishing cost nothing: what the GPUs
and the longest episodes need.

`DRIVER` and `SHAPES` say where the figures come from. The model leaves out the communication of
learners over several machines, the network, prefill, and pauses of Ray. With turns of 250 ms and
307 us of the driver it gives wall/ideal 2.63 for 2,048 episodes; `load.py` measured 2.6.

One JSON object a line: name, value, unit, context.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from workload.timing import print_figure, short

SIZES = (8, 64, 256, 1024)
FREE = 1e-12


@dataclass(frozen=True)
class Speeds:
    """What the parts of a run need. Times are in seconds."""

    driver: float
    """For each turn, without the prompt."""
    driver_per_token: float
    """For each token of each prompt."""
    prepare: float
    """The run's process for each rollout after the last has ended: metrics, rows, advantages."""
    store: float
    """The run's process for each rollout in the background: the file of trajectories."""
    tool_call: float
    """The tool server's time for a call."""
    gpu: float
    """Tokens per second that the engine of a GPU samples with many sequences."""
    sequence: float
    """The most tokens per second of one sequence."""
    learner: float
    """Tokens per second that a GPU learns from."""
    receive: float
    """The run's process for each rollout of a worker, while others are played."""
    publish: float
    """From the end of the update to the first request: sending, canary."""


DRIVER = {
    "driver": 387e-6,  # load.py: 2,048 episodes, tools over HTTP, one core
    "driver_per_token": 5.3e-9,  # 0.68 ms of JSON for 128k ids
    # load.py: `after` of 1,024 rollouts of 9 turns and 1,939 tokens
    "prepare": 0.23e-3,
    "store": 0.47e-3,
    "receive": 0.20e-3,
    "tool_call": 1 / (4 * 2910),  # tools_http.py: 512 at once; four workers
}
SHAPES = {
    # One H200: sglang_rollouts.py with 256 trajectories, architectures.py --case update, and
    # sglang_sync.py. The speed of a single sequence is assumed.
    "0.5b": Speeds(**DRIVER, gpu=21_724, sequence=200, learner=110_300, publish=0.096),
    # Computed: 7.5 ms for a token of 32 sequences (3.5 ms to read the weights at 4.3 TB/s, and 4 ms
    # as 0.5B needs), and the learner at 0.5B's share of the GPU's peak. Measured on two H200s:
    # publish.py, 0.62 s and 0.15 s for the canary.
    "7b": Speeds(**DRIVER, gpu=4_270, sequence=133, learner=7_160, publish=0.77),
}


@dataclass(frozen=True)
class Case:
    """The episodes of a step.

    Attributes:
        shape: a key of `SHAPES`.
        per_gpu: rollouts for each GPU.
        turns: the turns of an episode; each but the last calls a tool.
        tokens: the mean length of a turn.
        result: the tokens of a tool's result.
        tool: the mean seconds of a tool.
    """

    shape: str
    per_gpu: int
    turns: int
    tokens: int
    result: int
    tool: float


CASES = {
    "short": Case("0.5b", 128, 8, 64, 64, 0.1),
    "search": Case("7b", 32, 8, 250, 500, 0.5),
    "long": Case("7b", 32, 16, 1000, 1000, 1.0),
}
SIGMA = 0.7
"""The spread of the logarithm of lengths and times."""


class Engine:
    """A GPU that samples sequences; all advance by the same number of tokens."""

    def __init__(self, speeds: Speeds):
        self._speeds = speeds
        self._advanced = self._time = 0.0
        self._ends: list[tuple[float, int]] = []
        self.version = 0

    def _advance(self, now: float) -> None:
        self._advanced += (now - self._time) * self._speed()
        self._time = now

    def _speed(self) -> float:
        return min(self._speeds.sequence, self._speeds.gpu / max(1, len(self._ends)))

    def add(self, now: float, episode: int, tokens: float) -> float:
        """Begin a turn; return when the next turn of this engine ends if nothing changes."""
        self._advance(now)
        heapq.heappush(self._ends, (self._advanced + tokens, episode))
        return self._next()

    def pop(self, now: float) -> tuple[int, float]:
        """End a turn; return its episode, and when the next one ends."""
        self._advance(now)
        _, episode = heapq.heappop(self._ends)
        return episode, self._next()

    def _next(self) -> float:
        self.version += 1
        if not self._ends:
            return math.inf
        return self._time + max(0.0, self._ends[0][0] - self._advanced) / self._speed()


def generate(
    case: Case, speeds: Speeds, gpus: int, workers: int = 1, seed: int = 0
) -> tuple[float, int]:
    """Play the episodes of a step; return the seconds and the number of their tokens."""
    rng = random.Random(seed)

    def draw(mean: float) -> float:
        return mean * rng.lognormvariate(-(SIGMA**2) / 2, SIGMA)

    episodes = gpus * case.per_gpu
    lengths = [[draw(case.tokens) for _ in range(case.turns)] for _ in range(episodes)]
    tools = [[draw(case.tool) for _ in range(case.turns - 1)] for _ in range(episodes)]
    prompts, turn = [case.result] * episodes, [0] * episodes
    engines = [Engine(speeds) for _ in range(gpus)]
    driver, server, now = [0.0] * workers, [0.0] * workers, 0.0
    # (time, number, kind, engine or episode, version): a turn ends, the driver has handled it, a
    # tool call ends
    events: list[tuple[float, int, str, int, int]] = []
    numbers = itertools.count()

    def at(time: float, kind: str, which: int, version: int = 0) -> None:
        if time < math.inf:
            heapq.heappush(events, (time, next(numbers), kind, which, version))

    def begin(episode: int) -> None:
        which = episode % gpus
        end = engines[which].add(now, episode, lengths[episode][turn[episode]])
        at(end, "turn", which, engines[which].version)

    for episode in range(episodes):
        begin(episode)
    while events:
        time, _, kind, which, version = heapq.heappop(events)
        if kind == "turn":
            if version != engines[which].version:
                continue
            now = time
            episode, end = engines[which].pop(now)
            at(end, "turn", which, engines[which].version)
            prompts[episode] += int(lengths[episode][turn[episode]])
            worker = episode % workers
            work = speeds.driver + speeds.driver_per_token * prompts[episode]
            driver[worker] = max(now, driver[worker]) + work
            at(driver[worker], "handled", episode)
        elif kind == "handled":
            now = time
            turn[which] += 1
            if turn[which] < case.turns:
                worker = which % workers
                server[worker] = max(now, server[worker]) + speeds.tool_call
                at(server[worker] + tools[which][turn[which] - 1], "tool", which)
        else:
            now = time
            prompts[which] += case.result
            begin(which)
    return now, sum(prompts)


def step_seconds(
    case: Case, speeds: Speeds, gpus: int, workers: int
) -> tuple[float, dict[str, float]]:
    """Return the seconds of a step, and those of its phases."""
    generation, tokens = generate(case, speeds, gpus, workers)
    rollouts, own = gpus * case.per_gpu, speeds.prepare + speeds.store
    if workers > 1:
        own += speeds.receive
        generation = max(generation, rollouts * speeds.receive)
    phases = {
        "generation": generation,
        "prepare": rollouts * speeds.prepare,
        "update": tokens / (gpus * speeds.learner),
        "publish": speeds.publish,
    }
    return max(sum(phases.values()), rollouts * own), phases


FASTER: dict[str, Callable[[Speeds, Case, float], tuple[Speeds, Case]]] = {
    "engines": lambda s, c, f: (replace(s, gpu=s.gpu * f), c),
    "longest episodes": lambda s, c, f: (
        replace(s, sequence=s.sequence * f),
        replace(c, tool=c.tool / f),
    ),
    "driver": lambda s, c, f: (
        replace(
            s,
            driver=s.driver / f,
            driver_per_token=s.driver_per_token / f,
            prepare=s.prepare / f,
            store=s.store / f,
            receive=s.receive / f,
        ),
        c,
    ),
    "tool server": lambda s, c, f: (replace(s, tool_call=s.tool_call / f), c),
    "learner": lambda s, c, f: (replace(s, learner=s.learner * f), c),
    "publish": lambda s, c, f: (replace(s, publish=s.publish / f), c),
}
"""For each part: the speeds and the case if this part is faster by a factor."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, nargs="+", default=SIZES)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--driver-us", type=float, help="the driver's microseconds a turn")
    parser.add_argument("--workers", type=int, default=1, help="rollout.workers")
    args = parser.parse_args()
    for name in args.case:
        for gpus in args.gpus:
            speeds = SHAPES[CASES[name].shape]
            if args.driver_us is not None:
                speeds = replace(speeds, driver=args.driver_us / 1e6)
            report(name, CASES[name], speeds, gpus, args.workers)


def report(name: str, case: Case, speeds: Speeds, gpus: int, workers: int) -> None:
    step, phases = step_seconds(case, speeds, gpus, workers)
    gains = {}
    for part, make in FASTER.items():
        faster, easier = make(speeds, case, 2.0)
        gains[part] = 1 - step_seconds(easier, faster, gpus, workers)[0] / step
    limit = max(gains, key=lambda part: gains[part])
    free = speeds
    for part in ("driver", "tool server", "publish"):
        free, _ = FASTER[part](free, case, 1 / FREE)
    print_figure(
        f"scale_model/{name}/{gpus}",
        step,
        "s a step",
        rollouts=gpus * case.per_gpu,
        workers=workers,
        limit=limit,
        gpu_share=short(step_seconds(case, free, gpus, workers)[0] / step),
        phases={k: short(v) for k, v in phases.items()},
        shorter_if_twice_as_fast={k: short(v) for k, v in gains.items()},
    )


if __name__ == "__main__":
    main()
