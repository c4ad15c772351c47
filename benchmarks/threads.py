"""Sweep the number of CPU threads of torch, and compare the number that agentrl chooses.

    python benchmarks/threads.py                                   # a CPU: all workloads
    python benchmarks/threads.py --work update --shape 0.5b        # a GPU on a host with many cores
    python benchmarks/threads.py --wait passive --counts 1 4 8     # some of the sweep

sampling  the local engine: 64 requests of 64 tokens, a model of 0.5 million weights, on the CPU
update    `Learner.update` on the available device, as in `learner.py`
step      the engine plays 128 episodes of up to 4 turns, then the learner updates on 128 rows, on
          the CPU: as a step of `make demo`, without tools

Every arm is a process of its own: a number in OMP_NUM_THREADS with threads that sleep while they
wait (`passive`) or with OpenMP's default, which is to spin first (`spin`), and `chosen`, where
agentrl chooses as its command does. On a CPU the arms take turns in a random order, because other
work on the machine changes what is best. On a GPU they run one after the other, and each is
reported as soon as it is done. Every line is a JSON object: name, value, unit, context. Values are
medians; `others` are the cores that other processes used meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path

from workload.timing import cpu_seconds, print_figure

from agentrl.torch_threads import NUMBER, WAIT_POLICY, count_cores, prepare_threads

WORK = ("sampling", "update", "step")
CHOSEN = "chosen"


# --- a process of an arm -------------------------------------------------------------------------


def make_work(name: str, args: argparse.Namespace) -> Callable[[int], int]:
    """Return a function that does the work once and returns its tokens; it takes the round."""
    import numpy as np
    import torch

    torch.set_float32_matmul_precision("highest")
    if name == "update":
        update, tokens = make_update(args, "cuda" if torch.cuda.is_available() else "cpu")
        return lambda _: (update(), tokens)[1]
    import local_engine as engines

    engine = engines.LocalEngine(engines.tiny_model(), engines.tiny_tokenizer(), deterministic=True)
    if name == "sampling":
        rng = np.random.default_rng(0)
        prompts = [array("i", rng.integers(0, engines.VOCABULARY, 16).tolist()) for _ in range(64)]
        return lambda i: asyncio.run(engines.flood(engine, prompts, 64, str(i)))
    args.shape, args.trajs, args.prompt, args.mean = "small", 128, 100, 60
    update, _ = make_update(args, "cpu")

    def step(i: int) -> int:
        sampled, _ = asyncio.run(engines.episodes(engine, str(i), 0.0))
        update()
        return sampled

    return step


def make_update(args: argparse.Namespace, device: str) -> tuple[Callable[[], object], int]:
    """Return an update as the trainer makes it, and the number of its tokens."""
    from transformers import AutoConfig
    from workload.models import random_model
    from workload.rows import draw, long_tailed
    from workload.updates import finish

    from agentrl.config import Config
    from agentrl.learner.algorithms import make_targets
    from agentrl.learner.learner import Learner

    folder = random_model(args.models, args.shape, device=device)
    vocabulary = AutoConfig.from_pretrained(folder).vocab_size
    rollouts = draw(args.trajs, 8, args.prompt, long_tailed(args.mean), vocabulary, 0)
    batch = rollouts.batch(vocabulary)
    config = Config.model_validate(
        {"algorithm": {"adv_estimator": "grpo"}, "trainer": {"device": device}}
    )
    learner = Learner(folder, config, total_steps=1000)

    def update() -> None:
        targets = make_targets(batch, config, learner.old_logprobs(batch), None, None)
        learner.update(batch, targets, 1)

    return (lambda: finish(update)), rollouts.tokens


def run_arm(name: str, args: argparse.Namespace) -> None:
    """Warm up, then do the work once for each line of standard input, and print the results."""
    work = make_work(name, args)
    for i in range(2):
        work(-1 - i)
    import torch

    print(json.dumps(torch.get_num_threads()), flush=True)
    for i, _ in enumerate(sys.stdin):
        cpu, busy, start = cpu_seconds(), busy_seconds(), time.perf_counter()
        tokens = work(i)
        wall = time.perf_counter() - start
        cpu = cpu_seconds() - cpu
        others = max(0.0, busy_seconds() - busy - cpu) / wall
        print(json.dumps([tokens / wall, cpu, others]), flush=True)


def busy_seconds() -> float:
    """Return the CPU seconds of all processes since the machine started; 0 if unknown."""
    try:
        user, nice, system = map(int, Path("/proc/stat").read_text().split()[1:4])
    except OSError:
        return 0.0
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


# --- the sweep -----------------------------------------------------------------------------------


class Arm:
    """A process with some number of threads."""

    def __init__(self, name: str, work: str, args: argparse.Namespace):
        self.name = name
        self.figures: list[list[float]] = []
        environment = {k: v for k, v in os.environ.items() if k not in (NUMBER, WAIT_POLICY)}
        if name != CHOSEN:
            environment[NUMBER], wait = name.split("/")
            if wait == "passive":
                environment[WAIT_POLICY] = "PASSIVE"
        self._process = subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--arm", work],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        self.threads = self._read()

    def run(self) -> None:
        assert self._process.stdin is not None
        print("go", file=self._process.stdin, flush=True)
        self.figures.append(self._read())

    def close(self) -> float:
        """Print the medians, and return the tokens per second."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        return statistics.median(speed for speed, *_ in self.figures)

    def report(self, work: str, args: argparse.Namespace) -> None:
        speeds, cpu, others = zip(*self.figures, strict=True)
        print_figure(
            f"threads/{work}/{self.name}",
            statistics.median(speeds),
            "tokens/s",
            threads=self.threads,
            rounds=len(speeds),
            best=round(max(speeds)),
            cpu_s=round(statistics.median(cpu), 3),
            others=round(statistics.median(others), 2),
            cores=count_cores(),
            **({"shape": args.shape} if work == "update" else {}),
        )

    def _read(self):
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line[0] in "[0123456789":  # libraries print, too
                return json.loads(line)
        raise SystemExit(f"the process of {self.name} ended")


def sweep(work: str, args: argparse.Namespace, *, in_turns: bool) -> None:
    """Run all arms of a workload, and report them and the ratio of the chosen one to the best."""
    names = [f"{n}/{wait}" for n in args.counts for wait in args.wait if n > 1 or wait == "passive"]
    speeds: dict[str, float] = {}
    names.append(CHOSEN)
    for together in [names] if in_turns else [[name] for name in names]:
        arms = [Arm(name, work, args) for name in together]
        for _ in range(args.rounds):
            # In a new order each time: other work on the machine may have a rhythm.
            for arm in random.sample(arms, len(arms)):
                arm.run()
        for arm in arms:
            speeds[arm.name] = arm.close()
            arm.report(work, args)
    chosen = speeds.pop(CHOSEN)
    best = max(speeds, key=lambda name: speeds[name])
    print_figure(f"threads/{work}/{CHOSEN}_over_best", chosen / speeds[best], "", best=best)


def default_counts() -> list[int]:
    """Return the powers of two up to the number of cores, and that number."""
    cores = count_cores()
    return sorted({cores, *(2**i for i in range(cores.bit_length()) if 2**i <= cores)})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--work", nargs="+", choices=WORK, default=WORK)
    add("--counts", nargs="+", type=int, default=default_counts())
    add("--wait", nargs="+", choices=("passive", "spin"), default=["passive", "spin"])
    add("--rounds", type=int, default=7)
    add("--shape", default="tiny", help="of the update; see learner.py")
    add("--trajs", type=int, default=0, help="rows of the update; 0: 64 on a GPU, 16 on a CPU")
    add("--prompt", type=int, default=400, help="tokens of a prompt")
    add("--mean", type=float, default=1500, help="response tokens")
    add("--models", type=Path, default=Path(tempfile.gettempdir()) / "agentrl-models")
    add("--arm", choices=WORK, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm:
        if NUMBER not in os.environ:
            prepare_threads()  # as the command does, before torch is imported
        import torch

        args.trajs = args.trajs or (64 if torch.cuda.is_available() else 16)
        run_arm(args.arm, args)
        return
    import torch

    for work in args.work:
        on_gpu = work == "update" and torch.cuda.is_available()
        sweep(work, args, in_turns=not on_gpu)


if __name__ == "__main__":
    main()
