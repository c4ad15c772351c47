"""Measure how fast a local engine samples, with a few short rows of a run."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Sequence
from itertools import cycle, islice

from agentrl.engine.base import Engine, Sampling
from agentrl.engine.remote.launch import find_package
from agentrl.errors import ConfigError
from agentrl.installation import install_command

STEPS = 6
"""The decode steps that are measured."""
PROMPT_TOKENS = 256
"""The most tokens of a measured prompt: its last ones."""
SECONDS = 60.0
"""The time limit of a measurement of the engine."""


async def measure_sampling(engine: Engine, prompts: Sequence[array[int]], rows: int) -> float:
    """Sample a few tokens after prompts of a run; return the tokens of all rows per second.

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
    # Other programs may have delayed the shorter one.
    return rows * STEPS / max(several - first, several / 10)


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


def describe_local_speed(tokens_per_s: float, rows: int, python: str) -> str:
    """Return a line about the speed of the local engine on a GPU, and about the alternative.

    Args:
        tokens_per_s: the measured speed.
        rows: the rows that were sampled at once.
        python: `rollout.python`, the interpreter that may have SGLang.
    """
    try:
        find_package("sglang", python)
        where = "which is installed"
    except ConfigError:
        where = f"which is not installed here ({install_command('sglang')})"
    return (
        f"the local engine samples {tokens_per_s:,.0f} tokens/s in {rows} rows."
        f" If generation takes most of a step, try rollout.name=sglang, {where}"
    )
