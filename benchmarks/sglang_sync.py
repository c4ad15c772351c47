"""Measure weight updates of an SGLang server: seconds, bytes, memory, and the canary check.

    python benchmarks/sglang_sync.py --shapes 0.5b 1.5b 7b        # a GPU: minutes
    python benchmarks/sglang_sync.py --device cpu --small --launch=--sleep-on-idle

Random models of Qwen2.5's shapes are used with the learner, publisher and engine of a run. Before
each update the learner's weights change so much that an engine with old weights would be detected.

full       all weights through the GPU's memory and through files; asleep without weights and cache
full_fp8   all weights through the GPU's memory, their matrices in 8 bits
lora       adapters of rank 32; asleep without the cache
lora_all   the same, asleep without weights and cache

`canary` is the mean distance in nats between the logprobs of engine and trainer, relative to the
start; more than 1.5 stops a run. `skipped` is the distance after an update that was not sent, and
whether the canary detected it. On a CPU only `full` runs, through files.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import time
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from workload import serving
from workload.models import SHAPES, random_model
from workload.serving import adapters, only, others_memory, surviving
from workload.timing import print_figure, short

from agentrl.chat import load_tokenizer
from agentrl.config import load_config
from agentrl.engine.base import Engine, Update
from agentrl.engine.open import open_engine
from agentrl.engine.remote.open import ADMIN_TOKEN, TOKEN
from agentrl.engine.remote.sglang import SGLangEngine
from agentrl.errors import RunStopped
from agentrl.learner.learner import Learner
from agentrl.trainer.publisher import Canary, Publisher

ROW = 256
RANK = 32
STEP = 0.7
"""The share of a weight that a perturbation replaces; its standard deviation stays the same."""
ADAPTER_SPREAD = 0.3
"""The standard deviation of LoRA's second matrices, which are zero at first."""
DISK_SECONDS = 90.0
"""The time limit of updates through files."""
ADAPTERS = 20
CASES: dict[str, dict[str, Any]] = {
    "full": {"rollout.sync": "ipc", "rollout.sleep": "all"},
    "full_fp8": {
        "rollout.sync": "ipc",
        "rollout.sleep": "all",
        "rollout.quantization": "fp8",
        "rollout.max_mismatch": 1.0,
        "algorithm.tis_cap": 2.0,
    },
    "lora": {"model.lora_rank": RANK, "rollout.sleep": "kv_cache"},
    "lora_all": {"model.lora_rank": RANK, "rollout.sleep": "all"},
}
CPU_KEYS = {"rollout.sync": "disk", "rollout.sleep": "none", "model.lora_rank": 0}


class Deaf:
    """An engine that silently ignores updates."""

    def publish(self, update: Update) -> int:
        return 0


class Lenient:
    """A canary that reports an error that would stop a run, and continues."""

    def __init__(self, strict: Canary, report: Callable[[str], None]):
        self.strict, self.baseline_noise = strict, strict.baseline_noise
        self._report = report

    def check(self, trainer: Tensor, engines: Tensor, version: int) -> dict[str, float]:
        try:
            return self.strict.check(trainer, engines, version)
        except RunStopped as e:
            self._report(str(e))
            self.strict._last = trainer
            worst = (engines - trainer).abs().mean(1).max().item()
            return {"canary/mismatch": worst, "canary/drift": 0.0}


class Bench:
    """A run's learner, with updates of engines through a run's publisher."""

    def __init__(self, name: str, learner: Learner, repeats: int):
        self.name, self.learner, self.repeats = name, learner, repeats
        assert learner.rank is not None
        self.rank = learner.rank
        self._version = 0
        self._runner = asyncio.Runner()
        vocabulary = self.rank.policy.model.config.get_text_config().vocab_size
        self._row = array("i", random.Random(0).choices(range(vocabulary - 1), k=ROW))
        self._random = torch.Generator(self.rank.device).manual_seed(1)

    def close(self) -> None:
        self._runner.close()

    def report(self, what: str, value: float, unit: str, **context: object) -> None:
        print_figure(f"sglang_sync/{self.name}/{what}", value, unit, **context)

    def publisher(self, engine: Any) -> Publisher:
        return Publisher(self.learner, engine, self._row, partial(self._scores, engine))

    def _scores(self, engine: Engine, ids: array[int]) -> list[array[float]]:
        return self._runner.run(engine.scores(ids))

    @torch.no_grad()
    def move(self) -> None:
        """Change the weights as much as many training steps would."""
        keep, lora = (1 - STEP**2) ** 0.5, self.rank.policy.peft is not None
        for name, p in self.rank.policy.model.named_parameters():
            if not p.requires_grad or p.dim() < 2:
                continue
            spread = ADAPTER_SPREAD if "lora_B" in name else p.std().item()
            if lora and "lora_A" in name:
                continue  # half of the product is enough
            noise = torch.empty_like(p).normal_(generator=self._random)
            p.mul_(keep).add_(noise, alpha=STEP * spread)

    def publish(self, publisher: Publisher) -> dict[str, float]:
        """Publish the next version. The first update calibrates the canary."""
        self._version += 1
        updates = publisher.publish(self._version)
        if isinstance(publisher._canary, Canary):
            refused = partial(self.report, "refused", 1, "failure")
            publisher._canary = Lenient(publisher._canary, lambda error: refused(error=error))  # type: ignore
        return updates

    def updates(self, way: str, engine: Any, publisher: Publisher, most: float = 1e9) -> None:
        """Run updates by one transport, and report seconds, bytes and canary."""
        sends = _timed_sends(only(engine))
        first = self.publish(publisher)  # compiles, allocates and calibrates
        sends.clear()
        reference, seconds, updates = publisher.noise, [], [first]
        began = time.monotonic()
        while len(seconds) < self.repeats and (not seconds or time.monotonic() < began + most):
            self.move()
            updates.append(self.publish(publisher))
            seconds.append(updates[-1]["timing_s/update_weights"])
        count = len(seconds)
        self.report(
            f"{way}/update",
            statistics.median(seconds),
            "s",
            updates=count,
            sending=round(statistics.median(sends), 4),
            canary_seconds=round(statistics.median(m["timing_s/canary"] for m in updates[1:]), 4),
            all=[round(s, 4) for s in seconds],
        )
        self.report(f"{way}/sent", updates[-1]["perf/update_weights_bytes"] / 1e6, "MB")
        self.canary(way, reference, updates)

    def canary(self, way: str, reference: float, updates: list[dict[str, float]]) -> None:
        """Report the largest mismatch of some updates."""
        worst = max(m["canary/mismatch"] for m in updates)
        self.report(
            f"{way}/canary",
            worst / reference,
            "of the start's",
            start=short(reference),
            mismatches=[short(m["canary/mismatch"]) for m in updates],
            drifts=[short(m["canary/drift"]) for m in updates],
        )

    def skipped(self, engine: Any, publisher: Publisher) -> None:
        """Skip an update, which the canary must detect; the next update repairs it."""
        deaf = self.publisher(engine)
        deaf._engine = Deaf()  # type: ignore[assignment]
        deaf._canary = publisher._canary.strict  # type: ignore[union-attr]
        self.move()
        error = ""
        self._version += 1
        try:
            deaf.publish(self._version)
        except RunStopped as e:
            error = str(e)
        scores = torch.tensor(self._scores(engine, self._row)[0])[1:]
        apart = (scores - self.learner.ranks.score(self._row)).abs().mean().item()
        self.report("skipped", apart, "nats", noticed=bool(error), error=error)
        self.publish(publisher)

    def sleeps(self, way: str, engine: Any, publisher: Publisher) -> None:
        """Measure sleep and wake-up with an update: seconds, and the memory that becomes free."""
        reference, updates = publisher.noise, []
        falls, wakes, freed = [], [], []
        for _ in range(min(3, self.repeats)):
            before, began = others_memory(), time.perf_counter()
            engine.sleep()
            falls.append(time.perf_counter() - began)
            freed.append(before - others_memory())
            self.move()
            updates.append(self.publish(publisher))
            wakes.append(updates[-1]["timing_s/update_weights"])
        self.report(f"{way}/fall_asleep", statistics.median(falls), "s")
        self.report(f"{way}/wake_and_update", statistics.median(wakes), "s")
        self.report(
            f"{way}/freed", statistics.median(freed), "GiB", server=round(others_memory(), 2)
        )
        self.canary(way, reference, updates)

    def many_adapters(self, engine: Any, publisher: Publisher) -> None:
        """Check that the server's memory does not grow with updates."""
        before, resident, updates = others_memory(), 0, []
        for _ in range(ADAPTERS):
            self.move()
            updates.append(self.publish(publisher))
            resident = max(resident, adapters(engine))
        grown = others_memory() - before
        self.report("grown", grown, "GiB", updates=ADAPTERS, server=round(before, 2))
        self.report("adapters_resident", resident, "adapters", most=2)
        self.canary("many", publisher.noise, updates)


def _timed_sends(engine: SGLangEngine) -> list[float]:
    """Return a list that collects the seconds of each update until it is loaded, without checks."""
    seconds: list[float] = []
    begin, load = engine.begin_update, engine.loader.load
    began = 0.0

    def timed_begin() -> None:
        nonlocal began
        began = time.perf_counter()
        begin()

    def timed_load(*args: Any) -> None:
        load(*args)
        seconds.append(time.perf_counter() - began)

    engine.begin_update = timed_begin  # type: ignore[method-assign]
    engine.loader.load = timed_load  # type: ignore[method-assign]
    return seconds


def measure(case: str, shape: str, args: argparse.Namespace) -> None:
    name = f"{shape}/{case}"
    gpu = args.device == "cuda"
    began = time.perf_counter()
    folder = random_model(args.models, shape, device=args.device)
    keys = CASES[case] if gpu else CASES[case] | CPU_KEYS
    with contextlib.ExitStack() as stack:
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        config = load_config(
            None, [], {**serving.engine_keys(args), "model.path": str(folder), **keys}
        )
        learner = Learner(folder, config, total_steps=1)
        bench = Bench(name, learner, args.repeats)
        stack.callback(bench.close)
        bench.report("learner", time.perf_counter() - began, "s")
        began = time.perf_counter()
        engine = open_engine(config, load_tokenizer(folder))
        stack.callback(engine.close)
        bench.report("ready", time.perf_counter() - began, "s", server=round(others_memory(), 2))
        publisher = bench.publisher(engine)
        way = "adapter" if keys.get("model.lora_rank") else str(keys["rollout.sync"])
        bench.updates(way, engine, publisher, DISK_SECONDS if way == "disk" else 1e9)
        with surviving(f"sglang_sync/{name}/skipped"):
            bench.skipped(engine, publisher)
        if "lora" in case and gpu:
            with surviving(f"sglang_sync/{name}/many_adapters"):
                bench.many_adapters(engine, publisher)
        if (sleep := keys["rollout.sleep"]) != "none":
            with surviving(f"sglang_sync/{name}/sleep_{sleep}"):
                bench.sleeps(f"sleep_{sleep}", engine, publisher)
        if case == "full":
            way = "disk" if way == "ipc" else "disk_attached"
            with surviving(f"sglang_sync/{name}/{way}"), _beside(engine, config) as attached:
                bench.updates(way, attached, bench.publisher(attached), DISK_SECONDS)
        if gpu:
            peak = torch.cuda.max_memory_allocated() / serving.GIB
            bench.report("trainer_peak", peak, "GiB")


@contextlib.contextmanager
def _beside(engine: Engine, config: Any) -> Iterator[Engine]:
    """The same server as one that runs already: it gets its weights through files."""
    process = only(engine).process
    assert process is not None
    os.environ |= {TOKEN: process.token, ADMIN_TOKEN: process.admin_token}
    rollout = config.rollout.model_copy(
        update={"urls": [process.url], "sync": "auto", "sleep": "none", "launch": []}
    )
    attached = open_engine(
        config.model_copy(update={"rollout": rollout}), load_tokenizer(config.model.path)
    )
    try:
        yield attached
    finally:
        attached.close()


def main() -> None:
    made = serving.parser(__doc__)
    made.add_argument("--shapes", nargs="+", default=["0.5b"], choices=[*SHAPES])
    made.add_argument("--cases", nargs="+", default=[*CASES], choices=[*CASES])
    made.add_argument("--repeats", type=int, default=5)
    args = serving.parse(made)
    if args.small:
        args.shapes, args.repeats = ["small"], min(args.repeats, 3)
    if args.device == "cpu":
        args.cases = ["full"]
    args.models = Path(args.models)
    for shape in args.shapes:
        for case in args.cases:
            with surviving(f"sglang_sync/{shape}/{case}"):
                measure(case, shape, args)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
