"""Compare rollouts of an SGLang server in 8 bits with those in bfloat16: `rollout.quantization`.

    python benchmarks/fp8_rollouts.py --shapes 1.5b 7b        # a GPU: minutes

Random models of Qwen2.5's shapes. For each precision a learner publishes its weights to a server on
the same GPU, which samples rows of 512 tokens; then a server with the whole GPU is timed. One JSON
object a line:

    tokens        sampled tokens per second, with 16, 64 and 256 rows at once
    update        seconds of an update, and its bytes
    mismatch      mean |logprob of the engine - logprob of the trainer| of sampled tokens, in nats
    sample_size   the effective sample size of their importance weights, a share of the tokens
"""

from __future__ import annotations

import asyncio
import random
import shlex
import time
from array import array
from typing import Any

import torch
from workload import serving
from workload.models import SHAPES, random_model
from workload.timing import print_figure, short

from agentrl.chat import load_tokenizer
from agentrl.config import load_config
from agentrl.engine.base import Sampling
from agentrl.engine.open import open_engine
from agentrl.engine.remote.launch import SGLangLaunch
from agentrl.engine.remote.sglang import SGLangEngine
from agentrl.learner.learner import Learner
from agentrl.trainer.publisher import Publisher
from agentrl.trajectory import Generation

PROMPT, TOKENS, SCORED = 256, 512, 16
FP8 = {"rollout.quantization": "fp8", "rollout.max_mismatch": 1.0, "algorithm.tis_cap": 2.0}


async def sample(engine: Any, prompts: list[array[int]], tokens: int) -> list[Generation]:
    """Sample a turn after each prompt at once."""

    async def one(i: int, prompt: array[int]) -> Generation:
        engine.begin(f"e{i}")
        try:
            return await engine.generate(
                prompt,
                Sampling(max_tokens=tokens),
                episode_id=f"e{i}",
                seed=i,
                deadline=time.monotonic() + 300,
            )
        finally:
            engine.end(f"e{i}")

    return await asyncio.gather(*(one(i, p) for i, p in enumerate(prompts)))


def measure(shape: str, precision: str, args: Any, runner: asyncio.Runner) -> None:
    name = f"fp8_rollouts/{shape}/{precision}"
    folder = random_model(args.models, shape, device=args.device)
    keys = {"model.path": str(folder), **serving.engine_keys(args)}
    config = load_config(None, [], keys | (FP8 if precision == "fp8" else {}))
    learner = Learner(folder, config, total_steps=1)
    assert learner.rank is not None
    vocabulary = learner.rank.policy.model.config.get_text_config().vocab_size
    rng = random.Random(0)

    def row() -> array[int]:
        return array("i", rng.choices(range(vocabulary - 1), k=PROMPT))

    engine = open_engine(config, load_tokenizer(folder))
    try:
        publisher = Publisher(learner, engine, row(), lambda ids: runner.run(engine.scores(ids)))
        first = publisher.publish(1)
        print_figure(
            f"{name}/canary", first["canary/mismatch"], "nats", rounding=publisher.state["rounding"]
        )
        with torch.no_grad():
            for p in learner.rank.policy.model.parameters():
                p.mul_(1.0 + 2**-7)
        publisher._sent_steps = -1
        again = publisher.publish(2)
        sent = again["perf/update_weights_bytes"] / 1e9
        print_figure(f"{name}/update", again["timing_s/update_weights"], "s", sent_gb=short(sent))
        prompts = [row() for _ in range(SCORED)]
        kept = [*zip(prompts, runner.run(sample(engine, prompts, TOKENS)), strict=True)]
        own = torch.cat(
            [learner.ranks.score(p + t.token_ids)[-len(t.token_ids) :].cpu() for p, t in kept]
        )
        engines = torch.cat([torch.tensor(t.logprobs) for _, t in kept])
        weights = (own - engines).double().exp()
        size = weights.sum().square() / weights.square().sum() / len(weights)
        print_figure(f"{name}/mismatch", (own - engines).abs().mean().item(), "nats")
        print_figure(f"{name}/sample_size", size.item(), "of the tokens", tokens=len(weights))
        print_figure(f"{name}/server", serving.others_memory(), "GiB")
    finally:
        engine.close()


def measure_speed(shape: str, precision: str, args: Any, runner: asyncio.Runner) -> None:
    """Time a server that has the whole GPU. In 8 bits its weights are random, too."""
    folder = random_model(args.models, shape, device=args.device)
    vocabulary = SHAPES[shape][5]
    launch = SGLangLaunch(
        str(folder),
        python=args.python,
        dtype="bfloat16",
        gpus=[0],
        memory=0.85,
        fp8=precision == "fp8",
        arguments=shlex.split(args.launch),
    )
    server = launch.start()
    try:
        engine = SGLangEngine(
            server.url,
            vocabulary=vocabulary,
            process=server,
            key=server.token,
            admin_key=server.admin_token,
            dtype=torch.bfloat16,
        )
        rng = random.Random(0)
        for rows in (8, 16, 64, 256):  # the first is a warm-up
            prompts = [array("i", rng.choices(range(vocabulary), k=PROMPT)) for _ in range(rows)]
            began = time.perf_counter()
            turns = runner.run(sample(engine, prompts, TOKENS))
            seconds = time.perf_counter() - began
            if rows > 8:
                rate = sum(len(t.token_ids) for t in turns) / seconds
                print_figure(
                    f"fp8_rollouts/{shape}/{precision}/tokens", rate, "tokens/s", rows=rows
                )
        engine.close()
    finally:
        server.stop()


def main() -> None:
    made = serving.parser(__doc__)
    made.add_argument("--shapes", nargs="+", default=["1.5b"], choices=[*SHAPES])
    made.add_argument("--precisions", nargs="+", default=["bf16", "fp8"])
    args = serving.parse(made)
    with asyncio.Runner() as runner:
        for shape in args.shapes:
            for precision in args.precisions:
                with serving.surviving(f"fp8_rollouts/{shape}/{precision}"):
                    measure(shape, precision, args, runner)
                torch.cuda.empty_cache()
            for precision in args.precisions:
                with serving.surviving(f"fp8_rollouts/{shape}/{precision}"):
                    measure_speed(shape, precision, args, runner)


if __name__ == "__main__":
    main()
