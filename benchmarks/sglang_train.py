"""Observe a training run on an SGLang server: reward, adapters, memory, canary, timings.

    python benchmarks/sglang_train.py --lora 16 --steps 50     # adapters go to the server
    python benchmarks/sglang_train.py --goal 0.9               # all weights, `make demo`'s settings
    python benchmarks/sglang_train.py --device cpu --small --launch=--sleep-on-idle

The task is the arithmetic task with the tiny model (created on first use; `--model` names another
folder) and a calculator. The run is the same as `agentrl train` with these keys; further KEY=VALUE
follow the options.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from workload import serving
from workload.timing import print_figure, short

from agentrl.config import Config, load_config
from agentrl.demo import TINY_SETTINGS, tiny_model
from agentrl.record import METRICS, read_metrics
from agentrl.trainer import Trainer, run
from agentrl.trainer.parts import MadeStep, Parts, RunState
from agentrl.trainer.step import train_step

DATASETS = Path(__file__).parent.parent / "datasets"
EVERY = 10
"""The steps between two measurements of the server."""
LORA_LR = 2e-3
VAL = "val/reward/mean@1"
LEADING = {
    "critic/score/mean": "reward",
    "canary/mismatch": "nats",
    "canary/drift": "nats",
    "rollout_corr/logprob_diff_mean": "nats",
    "rollout_corr/logprob_diff_mean/after_observation": "nats",
    "rollout_corr/k3_kl": "nats",
    "rollout_corr/rollout_is_eff_sample_size": "share",
    "rollout/cached_token_ratio/later_turns": "of prompt tokens",
    "tool_call_counts/mean": "calls",
}
"""The metrics that are reported over time, and their units."""


class Watched:
    """Measures the server of a run every few steps. It takes the place of `train_step`."""

    def __init__(self, name: str):
        self.name = name
        self.resident: list[int] = []
        self.used: list[float] = []

    def __call__(self, parts: Parts, state: RunState) -> MadeStep:
        made = train_step(parts, state)
        metrics, step = made.metrics, state.step + 1
        if step % EVERY == 0 or step == 1:
            self.resident.append(serving.adapters(parts.engine))
            self.used.append(serving.others_memory())
            print_figure(
                f"{self.name}/step",
                step,
                "step",
                adapters=self.resident[-1],
                others_gib=round(self.used[-1], 3),
                **{key: short(metrics[key]) for key in LEADING if key in metrics},
            )
        return made


def config_of(args: argparse.Namespace) -> Config:
    output = args.output / ("lora" if args.lora else "full")
    keys: dict[str, Any] = {
        **serving.engine_keys(args),
        "data.train": str(DATASETS / "arithmetic_train.parquet"),
        "data.val": str(DATASETS / "arithmetic_val.parquet"),
        "model.path": args.model or str(tiny_model()),
        "trainer.output": str(output),
        "trainer.resume": "never",
        "trainer.total_steps": args.steps,
    }
    if args.lora:
        keys |= {"model.lora_rank": args.lora, "model.lora_alpha": args.lora, "optim.lr": LORA_LR}
    if args.small:
        keys |= {"data.val": "", "data.batch_size": 4, "rollout.n": 4, "optim.lr": 1e-3}
    return load_config(None, args.keys, preset=TINY_SETTINGS | keys)


def report(name: str, history: Sequence[tuple[int, Any]], watched: Watched, goal: float) -> None:
    say_figure = partial(print_figure, steps=max(step for step, _ in history))
    by_step = {step: metrics for step, metrics in history if step > 0}
    for key, unit in LEADING.items():
        course = [metrics[key] for metrics in by_step.values() if metrics.get(key) is not None]
        if course:
            tens = [course[i : i + EVERY] for i in range(0, len(course), EVERY)]
            say_figure(
                f"{name}/{key}",
                statistics.fmean(tens[-1]),
                unit,
                what=f"mean of the last {EVERY} steps, and of every {EVERY} steps",
                course=[short(statistics.fmean(ten)) for ten in tens],
                largest=short(max(course)),
            )
    timings = sorted({k for metrics in by_step.values() for k in metrics if k[:9] == "timing_s/"})
    for key in timings:
        seen = [metrics[key] for metrics in by_step.values() if key in metrics]
        say_figure(f"{name}/{key}", statistics.median(seen), "s", times=len(seen))
    say_figure(
        f"{name}/grown", round(watched.used[-1] - watched.used[0], 3), "GiB", all=watched.used
    )
    say_figure(f"{name}/adapters_resident", max(watched.resident), "adapters", most=2)
    vals = {step: round(m[VAL], 4) for step, m in history if m.get(VAL) is not None}
    if vals:
        best = max(vals.values())
        say_figure(
            f"{name}/val_reward",
            vals[max(vals)],
            "reward",
            course=vals,
            best=best,
            **({"goal": goal, "reached": vals[max(vals)] >= goal} if goal else {}),
        )


def main() -> None:
    made = serving.parser(__doc__)
    made.add_argument("--model", default="", help="a folder; by default the tiny model")
    made.add_argument("--lora", type=int, default=0, help="rank; 0: all weights learn")
    made.add_argument("--steps", type=int, default=0, help="by default 100")
    made.add_argument("--goal", type=float, default=0.0, help="of the last validation")
    made.add_argument("--output", type=Path, default=Path("runs/sglang_train"))
    made.add_argument("keys", nargs="*", help="further config keys, KEY=VALUE")
    args = serving.parse(made)
    args.steps = args.steps or (3 if args.small else TINY_SETTINGS["trainer.total_steps"])
    name = f"sglang_train/{'lora' if args.lora else 'full'}"
    config = config_of(args)
    run.train_step = watched = Watched(name)  # type: ignore[assignment]
    began = time.perf_counter()
    try:
        Trainer(config).run()
    finally:
        folder = Path(config.trainer.output)
        if (folder / METRICS).exists() and watched.used:
            report(name, read_metrics(folder / METRICS), watched, args.goal)
        print_figure(f"{name}/run", round(time.perf_counter() - began, 1), "s")


if __name__ == "__main__":
    main()
