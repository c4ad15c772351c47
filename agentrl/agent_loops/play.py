"""One attempt at a sample, from opening the conversation to cleaning up after it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable
from typing import Any

from agentrl import registry
from agentrl.agent_loops.attempt import Attempt, World, template_of
from agentrl.agent_loops.chat import EngineChat
from agentrl.agent_loops.episode import Episode
from agentrl.agent_loops.loops import AgentLoop
from agentrl.config import Config
from agentrl.engine.base import Sampler, Sampling
from agentrl.errors import EpisodeOver, Infrastructure, UserCodeError, user_code
from agentrl.interactions import Interaction, build_interaction
from agentrl.sandbox import configure
from agentrl.tools import LocalToolbox, Toolbox
from agentrl.trajectory import Sample, Trajectory

log = logging.getLogger("agentrl")

CLEANUP_S = 10.0
"""How long an ended episode may take to close its tools and its interaction."""


async def play_episode(
    world: World,
    sample: Sample,
    *,
    episode_id: str,
    rollout: int,
    sampling: Sampling,
    seed: int,
    watch: Callable[[Attempt], None] | None = None,
) -> Trajectory:
    """Play one attempt at a sample, whose `begin` was called, to its end.

    Raises:
        Infrastructure: a machine failed; play again under another id.
        UserCodeError: the loop, the interaction or a tool's constructor raised.
    """
    loop: AgentLoop = registry.agent_loops.get(sample.agent_name)
    interaction = None
    opened = False
    playing: Attempt | None = None
    stop_reason, tool_reward = "done", 0.0
    try:
        with user_code(f"agent loop {loop.name!r}: its opening"):
            opening, schemas = loop.opening(sample, world.toolbox.schemas(sample.tools))
        attempt = playing = Attempt(world, sample, episode_id, rollout, sampling, seed)
        if watch:
            watch(attempt)
        if sample.tools:
            opened = True
            attempt.enter(f"opening tools {world.toolbox.where}")
            with user_code(f"opening the tools of row {sample.id!r}"):
                await world.toolbox.open(episode_id, sample)
            attempt.begin()
        arguments = world.config.interaction.kwargs
        interaction = build_interaction(sample, arguments, EngineChat(attempt))
        episode = Episode(attempt, opening, schemas, interaction)
        try:
            # Only what the loop raises of its own is `UserCodeError`.
            async with attempt.limit:
                with user_code(f"agent loop {loop.name!r}"):
                    await loop.target(episode)
        except EpisodeOver as over:
            stop_reason = over.reason
        except TimeoutError:  # it waited for something of its own
            stop_reason = "time"
        stop_reason = attempt.spent or stop_reason
        await attempt.end()
        if not attempt.turns and stop_reason == "done":
            raise UserCodeError(
                f"agent loop {loop.name!r} ended without a turn: write `await ep.generate()`"
            )
        if opened:
            opened = False
            tool_reward = await world.toolbox.close(episode_id)
        return episode.finish(stop_reason, tool_reward)
    finally:
        if playing:
            await playing.end()
        world.sampler.end(episode_id)
        # Nothing that fails while cleaning up may hide why the episode ended.
        try:
            if opened:
                with contextlib.suppress(Infrastructure, UserCodeError):
                    await world.toolbox.close(episode_id)
        finally:
            if interaction is not None:
                await _close(interaction, sample)


async def _close(interaction: Interaction, sample: Sample) -> None:
    try:
        async with asyncio.timeout(CLEANUP_S):
            with user_code(f"closing the interaction of row {sample.id!r}"):
                await interaction.close()
    except TimeoutError:
        log.error("closing the interaction of row %r took too long", sample.id)
    except UserCodeError as e:
        log.error("%s", e)
    except (EpisodeOver, Infrastructure) as e:
        log.error("closing the interaction of row %r: %s", sample.id, e)


def play(
    sample: Sample,
    sampler: Sampler,
    tokenizer: Any,
    *,
    toolbox: Toolbox | None = None,
    config: Config | None = None,
    seed: int = 0,
) -> Trajectory:
    """Play one episode to its end, outside of any run.

    Args:
        sample: the row; its loop, tools and interaction must be registered.
        sampler: a `LocalEngine`, or a `Scripted` one in tests.
        tokenizer: the policy's.
        toolbox: by default the registered tools, in process.
        config: budgets and temperature; by default all defaults.
        seed: the only source of randomness.
    """
    if config is not None:
        configure(config.sandbox)
    config = config or Config()
    template = template_of(tokenizer, config)
    tools = toolbox or LocalToolbox()
    world = World(sampler, template, tools, config)
    episode_id = f"play-{uuid.uuid4().hex[:12]}"
    sampler.begin(episode_id)
    played = play_episode(
        world,
        sample,
        episode_id=episode_id,
        rollout=0,
        sampling=Sampling(temperature=config.rollout.temperature),
        seed=seed,
    )

    async def whole() -> Trajectory:
        try:
            return await played
        finally:
            if toolbox is None:
                await tools.aclose()

    try:
        return asyncio.run(whole())
    finally:
        world.close()
