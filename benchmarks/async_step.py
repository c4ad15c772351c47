"""Measure how well rollouts and updates overlap, without a model: `trainer.max_staleness`.

    python benchmarks/async_step.py                       # six minutes
    python benchmarks/async_step.py --steps 40 --sigma 1

The engine has a slot for each rollout of a step, and a rollout takes a drawn time: the same for all
(sigma 0), or lognormal. The learner takes as long as the mean synchronous generation of a step, so
1 / max(generation, learner) is the highest rate of steps. Everything else is as in a training run:
`RolloutStream` with `Rollouts`, episodes, rewards and metrics. One JSON object a line:

    value         the rate of steps, divided by the highest one; the first step is not counted
    simulation    the same for a simulation of the same draws without any cost of its own
    wait_engines  seconds per step in which the learner waited for rollouts
    wait_learner  seconds per step in which no rollout was played
"""

from __future__ import annotations

import argparse
import heapq
import random
import time
from array import array
from asyncio import Semaphore, sleep
from collections import Counter
from collections.abc import Sequence

from workload.timing import print_figure, short

from agentrl.agent_loops.attempt import Runtime
from agentrl.chat import ChatTemplate
from agentrl.config import Config
from agentrl.engine.base import Sampling
from agentrl.engine.scripted import Scripted
from agentrl.images import RowImage
from agentrl.metrics import mean
from agentrl.rewards import Scorer, reward
from agentrl.rollout import Rollouts
from agentrl.testing import byte_tokenizer
from agentrl.tools import LocalToolbox
from agentrl.trainer.stream import RolloutStream
from agentrl.trajectory import Generation, Message, Sample, Trajectory

TOKENIZER = byte_tokenizer()


@reward("rollout_number")
def rollout_number(trajectory: Trajectory) -> float:
    """Return a reward that differs within a group."""
    return float(trajectory.rollout)


def draw_seconds(steps: int, batch_size: int, n: int, sigma: float) -> list[list[float]]:
    """Return the time of each rollout of each draw, so that a synchronous step takes 1 on average.

    Args:
        steps: the number of steps.
        batch_size: draws per step.
        n: rollouts per draw.
        sigma: the spread of the lognormal distribution; 0: all times are equal.
    """
    rng = random.Random(0)
    draws = [[rng.lognormvariate(0, sigma) for _ in range(n)] for _ in range(steps * batch_size)]
    slowest = [max(map(max, draws[i : i + batch_size])) for i in range(0, len(draws), batch_size)]
    return [[seconds / mean(slowest) for seconds in draw] for draw in draws]


def simulate(draws: Sequence[Sequence[float]], batch_size: int, staleness: int) -> list[float]:
    """Return the times at which the steps end, if nothing but rollouts and updates takes time.

    A learner takes 1 for each step. Rollouts get slots in the order of draws.
    """
    free = [0.0] * batch_size * len(draws[0])
    ready: list[float] = []
    now, ends = 0.0, []
    for first in range(0, len(draws), batch_size):
        for draw in draws[len(ready) : first + (staleness + 1) * batch_size]:
            finished = 0.0
            for seconds in draw:
                finished = max(finished, end := max(now, heapq.heappop(free)) + seconds)
                heapq.heappush(free, end)
            ready.append(finished)
        now = max(now, *ready[first : first + batch_size]) + 1.0
        ends.append(now)
    return ends


class TimedEngine(Scripted):
    """An engine whose turns take given times, in a limited number of slots."""

    def __init__(self, draws: Sequence[Sequence[float]], scale: float, slots: int):
        super().__init__(["#### 1"], TOKENIZER)
        self.version = 0
        self._draws, self._scale = draws, scale
        self._slots = Semaphore(slots)

    async def generate(
        self,
        prompt_ids: array[int],
        sampling: Sampling,
        *,
        episode_id: str,
        seed: int,
        deadline: float,
        images: Sequence[RowImage] = (),
    ) -> Generation:
        _, _, row, rollout, *_ = episode_id.split("-")
        async with self._slots:
            await sleep(self._scale * self._draws[int(row)][int(rollout)])
        generation = await super().generate(
            prompt_ids, sampling, episode_id=episode_id, seed=seed, deadline=deadline
        )
        generation.versions[:] = array("i", [self.version] * len(generation.versions))
        return generation


def run(
    draws: Sequence[Sequence[float]], batch_size: int, staleness: int, scale: float
) -> tuple[list[float], dict[str, float]]:
    """Take and train all steps. Return their ends in units of `scale`, and means of metrics."""
    n, steps = len(draws[0]), len(draws) // batch_size
    config = Config.model_validate(
        {
            "data": {"batch_size": batch_size, "shuffle": False},
            "rollout": {"n": n},
            "reward": {"function": "rollout_number"},
            "trainer": {"max_staleness": staleness, "device": "cpu"},
        }
    )
    engine = TimedEngine(draws, scale, batch_size * n)
    runtime = Runtime(engine, ChatTemplate(TOKENIZER), LocalToolbox(), config)
    rollouts = Rollouts(runtime, Scorer(config.reward), seed=0)
    rows = [
        Sample(f"r{i}", (Message("user", "?"),), agent_name="single_turn", row=i)
        for i in range(len(draws))
    ]
    stream = RolloutStream(config, rows, rollouts, total_steps=steps)
    ends, sums = [], Counter[str]()
    try:
        start = time.perf_counter()
        for step in range(steps):
            taken = stream.take(batch_size * step, step)
            if step:
                sums.update(taken.stream_metrics)
            time.sleep(scale)  # the update
            engine.version = step + 1
            stream.advance(step + 1)
            ends.append((time.perf_counter() - start) / scale)
    finally:
        stream.close()
        rollouts.close()
    return ends, {name: total / (steps - 1) for name, total in sums.items()}


def rate(ends: Sequence[float]) -> float:
    """Return the steps per unit of time after the first step; 1 is the highest rate."""
    return (len(ends) - 1) / (ends[-1] - ends[0])


def main() -> None:
    """Measure all spreads and limits of staleness."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--n", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a synchronous generation")
    parser.add_argument("--sigma", type=float, nargs="+", default=[0.0, 0.5, 1.0])
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    for sigma in args.sigma:
        draws = draw_seconds(args.steps, args.batch_size, args.n, sigma)
        for staleness in args.staleness:
            ends, metrics = run(draws, args.batch_size, staleness, args.seconds)
            simulated = simulate(draws, args.batch_size, staleness)
            print_figure(
                f"async_step/sigma_{sigma:g}/max_staleness_{staleness}",
                rate(ends),
                "share of 1 / max(generation, learner)",
                simulation=short(rate(simulated)),
                staleness=short(metrics.get("staleness/mean", 0.0)),
                wait_engines=short(metrics.get("async/wait_engines", 0.0)),
                wait_learner=short(metrics.get("async/wait_learner", 0.0)),
                steps=args.steps,
                rollouts=args.batch_size * args.n,
                seconds=args.seconds,
            )


if __name__ == "__main__":
    main()
