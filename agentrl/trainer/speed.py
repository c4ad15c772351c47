"""Measure how fast this machine samples and learns, with a few short rows of a run."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from agentrl.config import Config
from agentrl.engine.base import Engine, Sampling
from agentrl.engine.remote.launch import find_package
from agentrl.errors import ConfigError
from agentrl.installation import install_command
from agentrl.learner.sft import Example, SFTLearner

ROWS = 32
"""The rows that are sampled at once; more rows hardly sample more tokens per second on a CPU."""
STEPS = 6
"""The decode steps that are measured."""
PROMPT_TOKENS = 256
"""The most tokens of a measured prompt: its last ones."""
RESPONSE_TOKENS = 16
"""The tokens of a response in the learner."""
LEARNED_ROWS = 3
"""The rows of the learner."""
SECONDS = 60.0
"""The time limit of a measurement of the engine."""


@dataclass(frozen=True, slots=True)
class SamplingSpeed:
    """The measured speed of an engine."""

    rows: int
    """The rows that were sampled at once."""
    first_seconds: float
    """The time until the first token, for each different prompt."""
    tokens_per_s: float
    """The sum over all rows, without the first tokens."""


@dataclass(frozen=True, slots=True)
class LearningSpeed:
    """The measured speed of a learner."""

    tokens_per_s: float
    step_seconds: float
    """The time of an optimizer step without its forward and backward passes."""


async def measure_sampling(
    engine: Engine, prompts: Sequence[array[int]], rows: int = ROWS
) -> SamplingSpeed:
    """Sample a few tokens after prompts of a run.

    Args:
        engine: any engine; its cache and its counts grow.
        prompts: different prompts, at least one.
        rows: the rows to sample at once.

    Raises:
        EngineError: the engine failed, or needed more than `SECONDS`.
    """
    short = [prompt[-PROMPT_TOKENS:] for prompt in prompts[:rows]]
    chosen = [*islice(cycle(short), rows)]
    await _sample(engine, chosen[:1], 1)  # The first pass allocates and may compile.
    first = await _sample(engine, chosen, 1)
    several = await _sample(engine, chosen, 1 + STEPS)
    seconds = _difference(several, first)
    return SamplingSpeed(rows, first / len(short), rows * STEPS / seconds)


def _difference(long: float, short: float) -> float:
    """Return long - short, but at least long / 10: other programs may have delayed the short one.

    Both are in seconds.
    """
    return max(long - short, long / 10)


async def _sample(engine: Engine, rows: Sequence[array[int]], tokens: int) -> float:
    """Return the seconds that an engine needs to sample some tokens after each row."""
    ids = [f"speed-{tokens}-{i}" for i in range(len(rows))]
    for episode_id in ids:
        engine.begin(episode_id)
    start = time.perf_counter()
    turns = (
        engine.generate(
            row,
            Sampling(max_tokens=tokens),
            episode_id=episode_id,
            seed=i,
            deadline=time.monotonic() + SECONDS,
        )
        for i, (row, episode_id) in enumerate(zip(rows, ids, strict=True))
    )
    try:
        await asyncio.gather(*turns)
        return time.perf_counter() - start
    finally:
        for episode_id in ids:
            engine.end(episode_id)


def measure_learning(config: Config, prompts: Sequence[array[int]]) -> LearningSpeed:
    """Load the learner of a run in this process, and let it take three small optimizer steps.

    Raises:
        ConfigError: the model cannot be loaded or trained.
        RunStopped: a loss is not finite.
    """
    learner = SFTLearner(config)
    try:
        examples = []
        for prompt in islice(cycle(p[-PROMPT_TOKENS:] for p in prompts), LEARNED_ROWS):
            ids = prompt + array("i", islice(cycle(prompt), RESPONSE_TOKENS))
            mask = array("i", [0] * len(prompt) + [1] * RESPONSE_TOKENS)
            examples.append(Example(ids, mask))
        seconds = []
        for rows in (examples[:1], examples[:1], examples):  # The first step allocates.
            start = time.perf_counter()
            learner.train_step(rows, 1)
            seconds.append(time.perf_counter() - start)
    finally:
        learner.ranks.close()
    _, one, several = seconds
    tokens = sum(len(e.ids) for e in examples[1:])
    per_token = _difference(several, one) / tokens
    return LearningSpeed(1 / per_token, max(0.0, one - per_token * len(examples[0].ids)))


def step_seconds(
    config: Config, sampling: SamplingSpeed, learning: LearningSpeed, prompt: int, response: int
) -> float:
    """Return the seconds of a training step: sampling and the update.

    Args:
        config: the config of the run.
        sampling: the speed of the engine.
        learning: the speed of the learner.
        prompt: the tokens of each prompt.
        response: the tokens of each response, all of them sampled.
    """
    prompts, sampled = config.data.batch_size, config.rollouts_of_step * response
    steps = -(-config.rollouts_of_step // config.rollouts_of_update)
    passes = (prompts * prompt + sampled) / learning.tokens_per_s
    update = config.algorithm.ppo_epochs * (passes + steps * learning.step_seconds)
    return prompts * sampling.first_seconds + sampled / sampling.tokens_per_s + update


def describe_local_speed(sampling: SamplingSpeed, python: str) -> str:
    """Return a line about the speed of the local engine on a GPU, and about the alternative.

    Args:
        sampling: the measured speed.
        python: `rollout.python`, the interpreter that may have SGLang.
    """
    try:
        find_package("sglang", python)
        where = "which is installed"
    except ConfigError:
        where = f"which is not installed here ({install_command('sglang')})"
    return (
        f"the local engine samples {sampling.tokens_per_s:,.0f} tokens/s in {sampling.rows} rows."
        f" If generation takes most of a step, try rollout.name=sglang, {where}"
    )
