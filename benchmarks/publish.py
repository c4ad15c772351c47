"""Measure how long a new policy takes to reach all engines of a run.

    python benchmarks/publish.py --fakes                           # 1 and 32 servers of 200 ms
    python benchmarks/publish.py --shapes 1.5b 7b --gpus 4         # real runs on GPUs
    python benchmarks/publish.py --device cpu --small --gpus 2     # real servers on a CPU
    python benchmarks/publish.py --cases separate --gpus 2 --staleness 0 1 2 --batch 32 --turn 512

A run trains a random model of Qwen2.5's shape for some steps on random rewards, with ranks and
SGLang servers of the case:

colocated  a server on the GPU of each rank, which releases its memory to the trainer
tp2        servers on two GPUs each, which are also the ranks'
separate   half of the GPUs for ranks, the others for servers

`--staleness` runs a case with rollouts that go on during updates (`trainer.max_staleness`), and
reports how long learner and engines waited for each other.

`update` is the median of `timing_s/update_weights` without the first, `canary` that of the check
with a scored row, `step` that of whole steps. A run whose canary is not sound stops.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import tempfile
import time
import zlib
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from workload import serving
from workload.models import SHAPES, random_model
from workload.serving import surviving
from workload.timing import print_figure

from agentrl.config import load_config
from agentrl.engine.base import Update
from agentrl.engine.remote.distributor import Distributor
from agentrl.engine.remote.senders import Delivery, Route, Sent, Target, WeightsSender
from agentrl.errors import EngineError
from agentrl.record import METRICS, read_metrics
from agentrl.trainer import Trainer

CASES = ("colocated", "tp2", "separate")
FAKE_SECONDS = 0.2


def case_keys(case: str, gpus: int, cpu: bool) -> dict[str, Any]:
    """Return the config keys of a case."""
    ranks = gpus // 2 if case == "separate" else gpus
    tp = 2 if case == "tp2" else 1
    colocated = case != "separate"
    return {
        "trainer.n_gpus_per_node": ranks,
        "trainer.placement": "colocated" if colocated else "separate",
        "rollout.engines": (gpus if colocated else gpus - ranks) // tp,
        "rollout.tensor_parallel_size": tp,
        "rollout.sleep": "all" if colocated and not cpu else "none",
    }


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: object = None
) -> float:
    """Return a reward that differs between responses, so that every step changes the weights."""
    return zlib.crc32(solution_str.encode()) % 1000 / 1000


def write_rows(folder: Path, count: int) -> Path:
    """Write rows without tools; return their file."""
    rows = [
        {
            "prompt": [{"role": "user", "content": f"How much is {k} + {k}?"}],
            "data_source": "publish",
            "ground_truth": str(2 * k),
        }
        for k in range(8 * count)
    ]
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def measure(shape: str, case: str, staleness: int, args: Any) -> None:
    """Run a case and report its figures."""
    name = f"publish/{shape}/{case}" + (f"/staleness_{staleness}" if args.staleness != [0] else "")
    model = random_model(args.models, shape, device=args.device)
    with tempfile.TemporaryDirectory() as output:
        keys = {
            **serving.engine_keys(args),
            **case_keys(case, args.gpus, args.device == "cpu"),
            "data.train": str(write_rows(Path(output), args.batch)),
            "data.batch_size": args.batch,
            "data.agent_name": "single_turn",
            "reward.function": f"{__file__}:compute_score",
            "model.path": str(model),
            "rollout.n": 4,
            "rollout.max_turn_tokens": args.turn,
            "optim.lr": 1e-5,
            "optim.recompute": shape == "7b",
            "trainer.output": str(Path(output) / "run"),
            "trainer.total_steps": args.steps,
            "trainer.max_staleness": staleness,
            "trainer.save_freq": 0,
        }
        config = load_config(None, args.keys, preset=keys)
        began = time.perf_counter()
        try:
            train(config)
        finally:
            report(name, Path(output) / "run", args, time.perf_counter() - began)


def train(config: Any) -> None:
    """Run the training, on a cluster of its own if there are several ranks."""
    if not config.trainer.spread:
        Trainer(config).run()
        return
    from agentrl.cluster import open_placement

    with open_placement(config) as placement:
        Trainer(config, placement=placement).run()


def report(name: str, output: Path, args: Any, seconds: float) -> None:
    """Print the figures of a run, also of one that failed."""
    lines = read_metrics(output / METRICS) if (output / METRICS).exists() else []
    history = [metrics for _, metrics in lines]
    context = {"gpus": args.gpus, "torch": torch.__version__, "steps": len(history)}
    for what, key in (
        ("update", "timing_s/update_weights"),
        ("canary", "timing_s/canary"),
        ("step", "timing_s/step"),
        ("generation", "timing_s/gen"),
        ("learner", "timing_s/update_actor"),
        ("wait_engines", "async/wait_engines"),
        ("wait_learner", "async/wait_learner"),
    ):
        values = [metrics[key] for metrics in history if key in metrics]
        if values[1:]:
            rounded = [round(value, 4) for value in values]
            print_figure(
                f"{name}/{what}", statistics.median(values[1:]), "s", all=rounded, **context
            )
    for key, unit in (
        ("perf/update_weights_bytes", "bytes"),
        ("canary/mismatch", "nats"),
        ("rollout_corr/logprob_diff_mean", "nats"),
        ("staleness/max", "versions"),
    ):
        values = [metrics[key] for metrics in history if key in metrics]
        if values:
            print_figure(f"{name}/{key.rpartition('/')[2]}", max(values), unit, **context)
    print_figure(f"{name}/run", round(seconds, 1), "s", **context)


# -- fake servers ----------------------------------------------------------------------------------


class FakeServer(BaseHTTPRequestHandler):
    """Takes `FAKE_SECONDS` for each request."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        time.sleep(FAKE_SECONDS)
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *arguments: object) -> None: ...


class Listener(ThreadingHTTPServer):
    request_queue_size = 256


class FakeEngine:
    """The client of a fake server. The two steps of the engine itself take no time."""

    dtype = None
    delivery = Delivery("memory", ranks=(0,))

    def __init__(self, url: str):
        self.url, self.target = url, Target(url, ranks=(0,))

    def begin_update(self) -> None: ...

    def finish_update(self, route: Route, sent: Sent) -> None: ...

    def fail_update(self, error: EngineError) -> None: ...


def measure_fakes(repeats: int) -> None:
    """Report the time of an update of 1 and of 32 fake servers."""
    server = Listener(("0.0.0.0", 0), FakeServer)
    # In a process of its own: real servers do not share the interpreter's lock with the sender.
    process = multiprocessing.get_context("fork").Process(target=server.serve_forever, daemon=True)
    process.start()
    weights = [(f"layers.{i}.weight", torch.randn(64, 64)) for i in range(12)]
    medians = {}
    for count in (1, 32):
        urls = [f"http://127.0.0.{1 + k}:{server.server_port}" for k in range(count)]
        engines, seconds = [FakeEngine(url) for url in urls], []
        for version in range(repeats):
            send = partial(WeightsSender().send, weights)
            update = Update(version, lambda: iter(weights), send)
            began = time.perf_counter()
            _, errors = Distributor().send(engines, update)
            seconds.append(time.perf_counter() - began)
            assert not errors, errors
        medians[count] = statistics.median(seconds)
        print_figure(
            f"publish/fakes_{count}", medians[count], "s", repeats=repeats, server_s=FAKE_SECONDS
        )
    print_figure("publish/fakes_32_to_1", medians[32] / medians[1], "ratio")
    process.kill()


def main() -> None:
    made = serving.parser(__doc__)
    made.add_argument("--fakes", action="store_true", help="measure fake servers only")
    made.add_argument("--shapes", nargs="+", default=["1.5b"], choices=[*SHAPES])
    made.add_argument("--cases", nargs="+", default=[*CASES], choices=CASES)
    made.add_argument("--gpus", type=int, default=max(1, torch.cuda.device_count()))
    made.add_argument("--steps", type=int, default=6)
    made.add_argument("--batch", type=int, default=8, help="rows a step; 4 rollouts of each")
    made.add_argument("--turn", type=int, default=64, help="the most tokens of a rollout")
    made.add_argument("--staleness", type=int, nargs="+", default=[0], help="trainer.max_staleness")
    made.add_argument("keys", nargs="*", help="further config keys, KEY=VALUE")
    args = serving.parse(made)
    if args.fakes:
        measure_fakes(args.steps)
        return
    if args.small:
        args.shapes = ["small"]
    if args.device == "cpu":
        args.cases = [case for case in args.cases if case != "tp2"]
    for shape in args.shapes:
        for case in args.cases:
            for staleness in args.staleness:
                with surviving(f"publish/{shape}/{case}"):
                    measure(shape, case, staleness, args)


if __name__ == "__main__":
    main()
