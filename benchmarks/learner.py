"""Measure the learner's update, compared with a hand-written loop and TRL's, on the same rows.

    python benchmarks/learner.py --shape tiny --trajs 16           # a CPU: a minute or two
    python benchmarks/learner.py --shape 0.5b                      # a GPU
    python benchmarks/learner.py --shape 7b --lora 32 --arms agentrl
    python benchmarks/learner.py --case long --shape 7b --lora 32  # one row of 32 k tokens
    python benchmarks/learner.py --case long --shape 7b --lora 32 --ranks 2 --context 2
    python benchmarks/learner.py --case shared --shape 1.5b        # prompts of 4 k, shared or not
    python benchmarks/learner.py --case modes --shape 1.5b         # packed, padded, one by one
    TORCHINDUCTOR_CACHE_DIR=$(mktemp -d) python benchmarks/learner.py --case compile --shape 1.5b

agentrl  `Learner.update` and the calls of `Trainer` before it: targets, packing, metrics
hand     a hand-written loop for this model (`workload/packed.py`)
trl      TRL's loss, if TRL is installed

Every line is a JSON object: name, value, unit, context. Tokens are the tokens of all trajectories
with their prompts, without padding and without sharing of prompts. MFU is the FLOPs of the model
for them divided by the peak of the device (on a CPU: of a matrix product): 6 per weight and token,
4 for a frozen weight, none for recomputation (`Rollouts.flops`). Times are medians. On a CPU the
arms take turns, and CPU seconds are reported, too.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from workload.models import SHAPES, random_model
from workload.packed import Packed
from workload.ranks import Weighed, most
from workload.rows import draw, long_tailed
from workload.timing import print_figure
from workload.updates import (
    DEVICE,
    GPU,
    Timed,
    Update,
    limit_memory,
    measure,
    memory,
    peak_flops,
    release,
)

from agentrl.config import Config
from agentrl.errors import RunStopped
from agentrl.learner.algorithms import make_targets
from agentrl.learner.attention import PACKED
from agentrl.learner.batch import Batch, Targets
from agentrl.learner.learner import Learner
from agentrl.learner.packing import Mode, assign_rows, pack

CARD = 78e9
"""The bytes that PyTorch may use of a card of 80 GB; the driver and the libraries use the rest."""
MemoryUse = Callable[[], dict[str, float | None]]
"""Returns the memory that the updates used."""
Arm = tuple[Update, MemoryUse]


# --- the arms ------------------------------------------------------------------------------------


def settings(args: argparse.Namespace) -> Config:
    """Return the config of a run with these updates."""
    return Config.model_validate(
        {
            "model": {"lora_rank": args.lora, "quantization": args.quantization},
            "algorithm": {"adv_estimator": args.estimator},
            "optim": {
                "micro_batch_tokens": args.tokens,
                "recompute": args.recompute,
                "compile": args.compile,
                "offload": args.offload,
            },
            "trainer": {
                "device": DEVICE,
                "n_gpus_per_node": args.ranks,
                "context_parallel_size": args.context,
            },
        }
    )


@contextmanager
def open_learner(
    folder: Path, config: Config, limit: float = math.inf
) -> Iterator[tuple[Learner, MemoryUse]]:
    """Yield a learner as in a run, in this process or on ranks, and a function of its memory.

    Args:
        folder: the model.
        config: the config of the run.
        limit: the bytes of a GPU that PyTorch may use.
    """
    if config.trainer.n_gpus_per_node == 1:
        limit_memory(limit)
        yield Learner(folder, config, total_steps=1000), memory
        return
    from agentrl.cluster import open_placement

    with open_placement(config) as placement:
        group = placement.start_ranks(Weighed, folder, config)
        group.limit(limit)
        learner = Learner(folder, config, total_steps=1000, group=group)
        yield learner, lambda: most(group.memory([None] * group.size))


def update_of(learner: Learner, batch: Batch) -> dict[str, float]:
    """Run the part of `train_step` that follows the collection of a batch."""
    old = learner.old_logprobs(batch)
    targets = make_targets(batch, learner.config, old, None, None)
    return learner.update(batch, targets, 1)[0]


def targets_of(batch: Batch, args: argparse.Namespace) -> Targets:
    return make_targets(batch, settings(args), None, None, None)


@contextmanager
def agentrl_arm(folder: Path, batch: Batch, args: argparse.Namespace) -> Iterator[Arm]:
    with open_learner(folder, settings(args)) as (learner, memory_use):
        yield partial(update_of, learner, batch), memory_use


@contextmanager
def hand_arm(folder: Path, batch: Batch, args: argparse.Namespace) -> Iterator[Arm]:
    packed = Packed(
        folder,
        batch,
        targets_of(batch, args),
        args.tokens,
        device=DEVICE,
        compiled=GPU and args.compile == "auto",
        recompute=args.recompute,
        rank=args.lora,
    )
    yield packed.update, memory


@contextmanager
def trl_arm(folder: Path, batch: Batch, args: argparse.Namespace) -> Iterator[Arm]:
    from workload.trl_step import trl_update

    targets, how = targets_of(batch, args), {"device": DEVICE, "recompute": args.recompute}
    yield trl_update(folder, batch, targets, args.trl_rows, **how), memory


ARMS = {"hand": hand_arm, "trl": trl_arm, "agentrl": agentrl_arm}


# --- the cases -----------------------------------------------------------------------------------


def tokens_run(batch: Batch, args: argparse.Namespace, mode: Mode = Mode.PACKED) -> dict[str, int]:
    """Return the number of tokens that run, with padding, and of micro-batches."""
    every = torch.arange(len(batch.prompt_ids))
    dealt = assign_rows(batch, every, args.ranks, args.tokens, mode)
    pieces = [rows for share in dealt for rows in share if len(rows)]
    passes = [pack(batch, rows, batch.response_mask[rows], mode) for rows in pieces]
    return {"tokens": sum(p.input_ids.numel() for p in passes), "passes": len(dealt[0])}


def side_by_side(folder: Path, model: Any, args: argparse.Namespace) -> None:
    """Report the tokens per second of each arm."""
    rollouts = draw(
        args.trajs, args.group, args.prompt, long_tailed(args.mean), model.vocab_size, args.seed
    )
    batch = rollouts.batch(model.vocab_size)
    run = tokens_run(batch, args)
    peak = peak_flops(args.peak) * args.ranks
    flops = rollouts.flops(model, frozen=args.lora > 0)
    context: dict[str, object] = {
        "shape": args.shape,
        "dtype": "bfloat16" if GPU else "float32",
        "rows": len(rollouts.rows),
        "real_tokens": rollouts.tokens,
        "trained_tokens": rollouts.trained,
        "lora": args.lora,
        "recompute": args.recompute,
        "compile": args.compile,
        "offload": args.offload,
        "ranks": args.ranks,
        "flops": "4 a frozen weight" if args.lora else "6 a weight",
        "peak_tflops": round(peak / 1e12, 2),
    }
    wanted = [a for a in args.arms if a != "trl" or importlib.util.find_spec("trl")]
    # All arms at once would not fit into the memory of a GPU.
    times: dict[str, Timed] = {}
    failed = False
    for arms in [[arm] for arm in wanted] if GPU else [wanted]:
        try:
            with ExitStack() as stack:
                opened = {a: stack.enter_context(ARMS[a](folder, batch, args)) for a in arms}
                timed = measure({a: update for a, (update, _) in opened.items()}, args.steps)
                memory_use = {a: memory() for a, (_, memory) in opened.items()}
        except Exception as e:
            fail(e, arms=arms, **context)
            failed = True
            continue
        finally:
            opened = {}
            release()
        times |= timed
        for name, took in timed.items():
            own = {"run_tokens": run["tokens"], "passes": run["passes"]}
            wall = took.seconds
            print_figure(
                f"learner/{name}",
                rollouts.tokens / wall,
                "tokens/s",
                **context,
                **(own if name == "agentrl" else {}),
                step_s=round(wall, 4),
                spread=round((max(took.wall) - min(took.wall)) / wall, 3),
                cpu_s=round(statistics.median(took.cpu), 4),
                mfu=round(flops / wall / peak, 4),
                warmup_s=round(took.warmup_s, 2),
                **memory_use[name],
            )
    for other in ("hand", "trl"):
        if other in times and "agentrl" in times:
            mine, its = times["agentrl"], times[other]
            cpu = statistics.median(its.cpu) / statistics.median(mine.cpu)
            of_cpu = {} if GPU else {"of_cpu_seconds": round(cpu, 3)}
            print_figure(
                f"learner/over_{other}",
                its.seconds / mine.seconds,
                "times its tokens/s",
                shape=args.shape,
                **of_cpu,
            )
    if failed:
        raise SystemExit(1)


def fail(error: Exception, **context: object) -> None:
    """Report an error; the other arms continue."""
    why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    print_figure("learner/failed", None, "", **context, why=why)
    traceback.print_exception(error)


def long(folder: Path, model: Any, args: argparse.Namespace) -> None:
    """Train on one row of 32 k tokens (`--long`) in the memory of a card of 80 GB."""
    args.estimator = "reinforce_plus_plus"  # no other row to compare it with
    response = args.long - args.prompt
    rollouts = draw(1, 1, args.prompt, lambda _: response, model.vocab_size, args.seed)
    rollouts = replace(rollouts, rewards=[1.0])
    batch = rollouts.batch(model.vocab_size)
    context = {"shape": args.shape, "lora": args.lora, "recompute": args.recompute}
    context |= {"ranks": args.ranks, "context": args.context, "tokens": rollouts.tokens}
    try:
        with open_learner(folder, settings(args), CARD) as (learner, memory_use):
            took = measure({"long": partial(update_of, learner, batch)}, args.steps)["long"]
            used = memory_use()
    except (torch.cuda.OutOfMemoryError, RunStopped) as e:
        if "out of memory" not in str(e):
            raise
        print_figure("learner/long_row", 0.0, "tokens/s", **context, verdict=False)
        return
    flops = rollouts.flops(model, frozen=args.lora > 0)
    print_figure(
        "learner/long_row",
        rollouts.tokens / took.seconds,
        "tokens/s",
        **context,
        limit_gb=CARD / 1e9,
        verdict=True if GPU else None,
        step_s=round(took.seconds, 3),
        mfu=round(flops / took.seconds / peak_flops(args.peak) / args.ranks, 4),
        **used,
    )


def shared(folder: Path, model: Any, args: argparse.Namespace) -> None:
    """Compare groups that share a long prompt with the same rows with different prompts."""
    prompt, mean = (args.long // 8, args.long // 64)
    rollouts = draw(
        args.trajs, args.group, prompt, lambda r: r.randint(mean // 2, 3 * mean // 2),
        model.vocab_size, args.seed,
    )  # fmt: skip
    batches = {
        "shared": rollouts.batch(model.vocab_size),
        "apart": rollouts.apart(model.vocab_size).batch(model.vocab_size),
    }
    run = {name: tokens_run(batch, args) for name, batch in batches.items()}
    with open_learner(folder, settings(args)) as (learner, _):
        updates = {name: partial(update_of, learner, batch) for name, batch in batches.items()}
        took = measure(updates, args.steps)
    faster = took["apart"].seconds / took["shared"].seconds
    fewer = run["apart"]["tokens"] / run["shared"]["tokens"]
    print_figure(
        "learner/shared_prompt",
        faster / fewer,
        "of the tokens' ratio",
        shape=args.shape,
        group=args.group,
        rows=args.trajs,
        prompt=prompt,
        response=mean,
        verdict=faster / fewer >= 0.8,
        faster=round(faster, 3),
        fewer_tokens=round(fewer, 3),
        step_s={name: round(t.seconds, 4) for name, t in took.items()},
        run_tokens={name: r["tokens"] for name, r in run.items()},
        passes={name: r["passes"] for name, r in run.items()},
        lora=args.lora,
        recompute=args.recompute,
    )


def modes(folder: Path, model: Any, args: argparse.Namespace) -> None:
    """Compare the modes of rows, in a model that is right in each of them."""
    rollouts = draw(
        args.trajs, args.group, args.prompt, long_tailed(args.mean), model.vocab_size, args.seed
    )
    batch = rollouts.batch(model.vocab_size)

    def cost_of(timed: Timed) -> float:
        return timed.seconds if GPU else statistics.median(timed.cpu)

    def update_in(mode: Mode) -> None:
        packed_model.mode = mode
        packed_model.model.set_attn_implementation(PACKED if mode.is_flat else "sdpa")
        update_of(learner, batch)

    with open_learner(folder, settings(args)) as (learner, _):
        assert learner.rank is not None, "--ranks 1"
        packed_model = learner.rank.policy.packed_model
        took = measure({mode.value: partial(update_in, mode) for mode in Mode}, args.steps)
    for mode in Mode:
        wall, run = took[mode.value].seconds, tokens_run(batch, args, mode)
        print_figure(
            f"learner/{mode.value.replace(' ', '_')}",
            cost_of(took[mode.value]) / cost_of(took[Mode.PACKED.value]),
            "times the seconds of packed rows" if GPU else "times the CPU seconds of packed rows",
            shape=args.shape,
            group=args.group,
            rows=args.trajs,
            prompt=args.prompt,
            mean_response=round((rollouts.tokens / args.trajs) - args.prompt),
            step_s=round(wall, 4),
            cpu_s=round(statistics.median(took[mode.value].cpu), 4),
            run_tokens=run["tokens"],
            times_the_tokens=round(run["tokens"] / tokens_run(batch, args)["tokens"], 3),
            passes=run["passes"],
            lora=args.lora,
            recompute=args.recompute,
        )


def compilation(folder: Path, model: Any, args: argparse.Namespace) -> None:
    """Time `ranks.compile()`, which a run calls while servers start, and updates after it."""
    rollouts = draw(
        args.trajs, args.group, args.prompt, long_tailed(args.mean), model.vocab_size, args.seed
    )
    batch = rollouts.batch(model.vocab_size)
    with open_learner(folder, settings(args)) as (learner, _):
        seconds = []
        for run in (learner.ranks.compile, *[partial(update_of, learner, batch)] * args.steps):
            start = time.perf_counter()
            run()
            if GPU:
                torch.cuda.synchronize()
            seconds.append(round(time.perf_counter() - start, 2))
    print_figure(
        "learner/first_update",
        seconds[1] / min(seconds[2:]),
        "times a later update",
        shape=args.shape,
        lora=args.lora,
        recompute=args.recompute,
        compile_s=seconds[0],
        updates_s=seconds[1:],
    )


CASES = {
    "update": side_by_side, "long": long, "shared": shared, "modes": modes, "compile": compilation,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--case", choices=CASES, default="update")
    add("--arms", nargs="+", choices=ARMS, default=["hand", "agentrl"])
    add("--shape", choices=SHAPES, default="tiny")
    add("--trajs", type=int, default=64)
    add("--group", type=int, default=8, help="rollouts per prompt")
    add("--prompt", type=int, default=400, help="tokens of a prompt")
    add("--mean", type=float, default=1500, help="response tokens")
    add("--long", type=int, default=32768, help="tokens of the long row; 8 times a shared prompt")
    add("--seed", type=int, default=0)
    add("--lora", type=int, default=0, help="rank of the adapters; 0: all weights learn")
    add("--quantization", choices=("none", "nf4"), default="none", help="of the base below LoRA")
    add("--recompute", action="store_true")
    add("--compile", choices=("auto", "never"), default="auto")
    add("--offload", choices=("none", "optimizer", "all"), default="none")
    add("--tokens", type=int, default=32768, help="tokens of a micro-batch")
    add("--trl-rows", type=int, default=8, help="rows of a micro-batch of TRL")
    add("--ranks", type=int, default=1, help="GPUs or, on a CPU, processes")
    add("--context", type=int, default=1, help="ranks that share each row")
    add("--steps", type=int, default=4)
    add("--threads", type=int, default=2, help="threads of a CPU")
    add("--peak", type=float, default=0.0, help="FLOP/s; 0: an H200's, or this CPU's")
    add("--models", type=Path, default=Path(tempfile.gettempdir()) / "agentrl-models")
    args = parser.parse_args()
    args.estimator = "grpo"
    if not GPU:
        torch.set_num_threads(args.threads)
    torch.set_float32_matmul_precision("highest")
    folder = random_model(args.models, args.shape, device=DEVICE)
    release()
    try:
        CASES[args.case](folder, AutoConfig.from_pretrained(folder), args)
    except Exception as e:
        fail(e, case=args.case, shape=args.shape)
        raise SystemExit(1) from e


if __name__ == "__main__":
    main()
