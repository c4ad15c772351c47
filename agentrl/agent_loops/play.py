"""Play one attempt at a sample: open the conversation, run the agent loop, clean up."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from agentrl import registry
from agentrl.agent_loops.attempt import CLEANUP_SECONDS, Attempt, Runtime, make_template
from agentrl.agent_loops.chat_model import ChatEpisode, ChatModel
from agentrl.agent_loops.control import EpisodeControl
from agentrl.agent_loops.episode import Episode
from agentrl.agent_loops.loops import AgentLoop
from agentrl.chat.images import images_of
from agentrl.config import Config
from agentrl.engine.base import Sampler, Sampling
from agentrl.errors import (
    AgentRLError,
    EpisodeOver,
    Infrastructure,
    PromptTooLong,
    UserCodeError,
    user_code,
)
from agentrl.images import Image, ImageError, ImageRule
from agentrl.interactions import Interaction, Reply, build_interaction
from agentrl.rewards.scorer import check_turns
from agentrl.sandbox import configure
from agentrl.tools import LocalToolbox, Toolbox
from agentrl.tools.payloads import to_opening
from agentrl.tools.session import Opened
from agentrl.trajectory import Message, Sample, Trajectory, copy_value

log = logging.getLogger("agentrl")


async def play_episode(
    runtime: Runtime,
    sample: Sample,
    *,
    episode_id: str,
    rollout: int,
    sampling: Sampling,
    seed: int,
    watch: Callable[[Attempt], None] | None = None,
) -> Trajectory:
    """Play one attempt at a sample to its end and return the trajectory.

    `runtime.sampler.begin(episode_id)` must have been called.

    Args:
        runtime: the parts that all episodes of the run share.
        sample: the dataset row.
        episode_id: unique per attempt.
        rollout: the index of this rollout among the sample's n rollouts.
        sampling: the sampling parameters.
        seed: the seed of the run.
        watch: called with the attempt when it starts, for the watchdog.

    Raises:
        Infrastructure: a part of the infrastructure failed. Play the sample again, with a new id.
        UserError: the row, its tools or its chat template cannot be used.
        UserCodeError: the loop, the interaction or a tool's constructor raised.
    """
    loop: AgentLoop = registry.agent_loops.get(sample.agent_name)
    row, sample = sample, copy_value(sample)  # Its loop, tools and interaction may change it.
    interaction = None
    opened = Opened()
    has_open_tools = False
    attempt: Attempt | None = None
    tool_reward = 0.0
    observed: list[Message] = []
    try:
        attempt = Attempt(runtime, sample, episode_id, rollout, sampling, seed)
        if watch:
            watch(attempt)
        if sample.tools:
            has_open_tools = True
            opened = await _open_tools(attempt)
            observed.extend(opened.messages)
            attempt.parses_calls = bool(opened.functions or not sample.environment)
        # After the tools are open: a toolbox reads the tools of a server then.
        every = runtime.toolbox.schemas(sample.tools)
        tool_schemas = copy_value([s for s in every if s["function"]["name"] in opened.functions])
        with user_code(f"agent loop {loop.name!r}: its opening"):
            opening, schemas = loop.opening(sample, tool_schemas)
        if "respond" in opened.hooks:
            interaction = EnvironmentReplies(attempt)
        else:
            arguments = runtime.config.interaction.kwargs
            interaction = build_interaction(sample, arguments, EngineChat(attempt))
        if interaction is not None:
            attempt.enter("opening the interaction")
            observed.extend(await _open(interaction, attempt))
        if images := images_of([*opening, *observed]):
            await _prepare(attempt, images)
        kind = ChatEpisode if isinstance(runtime.sampler, ChatModel) else Episode
        episode = kind(attempt, opening, schemas, interaction, observed=observed)
        stop_reason = await _run_loop(loop, attempt, episode)
        if "reward" in opened.hooks:
            await _ask_reward(attempt, episode)
        if has_open_tools:
            has_open_tools = False
            tool_reward = await runtime.toolbox.close(episode_id)
        return replace(EpisodeControl(episode).finish(stop_reason, tool_reward), sample=row)
    finally:
        if attempt:
            await attempt.end()
        runtime.sampler.end(episode_id)
        # An error in the clean-up must not hide the reason why the episode ended.
        try:
            if has_open_tools:
                with contextlib.suppress(AgentRLError):
                    await runtime.toolbox.close(episode_id)
        finally:
            if interaction is not None:
                await _close(interaction, sample)


async def _prepare(attempt: Attempt, images: Sequence[Image]) -> None:
    """Decode the images with which the episode begins.

    Raises:
        ImageError: an image cannot be read. The message names the row.
    """
    for i, image in enumerate(images):
        try:
            await attempt.prepare([image])
        except ImageError as e:
            raise ImageError(
                f"row {attempt.sample.row} (id {attempt.sample.id!r}), image {i}: {e}"
            ) from e


async def _open_tools(attempt: Attempt) -> Opened:
    """Open the tools of the episode's row, and start its clock."""
    toolbox, sample = attempt.runtime.toolbox, attempt.sample
    attempt.enter(f"opening tools {toolbox.where}")
    kind = "environment" if sample.environment else "tools"
    with user_code(f"opening the {kind} of row {sample.id!r}"):
        opened = await toolbox.open(attempt.episode_id, sample)
    attempt.start_clock()
    attempt.record("open", attempt.created, attempt.started)
    return opened


async def _ask_reward(attempt: Attempt, episode: Episode) -> None:
    """Ask the environment of an episode that has ended for its reward, and set the scores."""
    attempt.enter("the reward of the environment")
    start = time.monotonic()
    with user_code(f"the environment {attempt.sample.environment!r}"):
        scores = await attempt.runtime.toolbox.score(attempt.episode_id, episode.messages)
        check_turns(attempt.sample.id, scores.turns, len(attempt.turns))
        attempt.scores = scores
    attempt.record("reward", start, time.monotonic())


async def _run_loop(loop: AgentLoop, attempt: Attempt, episode: Episode) -> str:
    """Run the agent loop within the time limit, end the attempt, and return the stop reason."""
    stop_reason = "done"
    attempt.enter("loop")
    try:
        async with attempt.limit:
            with user_code(f"agent loop {loop.name!r}"):
                await loop.target(episode)
    except EpisodeOver as over:
        stop_reason = over.reason
    except TimeoutError:  # The loop waited for something other than the episode.
        stop_reason = "time"
    stop_reason = attempt.end_reason or stop_reason
    await attempt.end()
    if not attempt.turns and stop_reason == "done":
        raise UserCodeError(
            f"agent loop {loop.name!r} returned without a turn: call `await ep.generate()`"
        )
    return stop_reason


async def _open(interaction: Interaction, attempt: Attempt) -> Sequence[Message]:
    """Return the messages with which an interaction opens its episode.

    Raises:
        UserCodeError: `opening` raised, took too long, or returned something else.
    """
    label = f"interaction {type(interaction).__qualname__}: opening"
    try:
        async with asyncio.timeout(attempt.deadline - time.monotonic()):
            with user_code(label):
                returned = interaction.opening()
                value = await returned if inspect.isawaitable(returned) else returned
    except (TimeoutError, EpisodeOver):
        raise UserCodeError(f"{label} took longer than rollout.timeout_s") from None
    return to_opening(label, value)


async def _close(interaction: Interaction, sample: Sample) -> None:
    try:
        async with asyncio.timeout(CLEANUP_SECONDS):
            with user_code(f"closing the interaction of row {sample.id!r}"):
                await interaction.close()
    except TimeoutError:
        log.error("closing the interaction of row %r took too long", sample.id)
    except UserCodeError as e:
        log.error("%s", e)
    except (EpisodeOver, AgentRLError) as e:
        log.error("closing the interaction of row %r: %s", sample.id, e)


def play(
    sample: Sample,
    sampler: Sampler,
    tokenizer: Any,
    *,
    toolbox: Toolbox | None = None,
    config: Config | None = None,
    seed: int = 0,
    images: ImageRule | None = None,
) -> Trajectory:
    """Play one episode without a run and return its trajectory.

    Args:
        sample: the dataset row. Its loop, tools and interaction must be registered.
        sampler: a `LocalEngine`, or `Scripted` in tests.
        tokenizer: the policy's tokenizer.
        toolbox: the tools; by default the registered ones, in this process.
        config: the budgets and the sampling parameters; by default the config's defaults.
        seed: the seed of all sampling.
        images: how the policy turns images into tokens; None: it reads none.

    Raises:
        UserError: the row's loop, tools or interaction do not exist or do not fit.
        UserCodeError: the loop, the interaction or a tool's constructor raised.
        Infrastructure: the engine or the tool server failed.
    """
    if config is not None:
        configure(config.sandbox)
    config = config or Config()
    template = make_template(tokenizer, config, images=images)
    tools = toolbox or LocalToolbox()
    runtime = Runtime(sampler, template, tools, config)
    episode_id = f"play-{uuid.uuid4().hex[:12]}"
    sampler.begin(episode_id)
    sampling = Sampling.of(config.rollout)
    episode = play_episode(
        runtime, sample, episode_id=episode_id, rollout=0, sampling=sampling, seed=seed
    )

    async def play_and_close() -> Trajectory:
        try:
            return await episode
        finally:
            if toolbox is None:
                await tools.aclose()

    try:
        return asyncio.run(play_and_close())
    finally:
        runtime.close()


class EnvironmentReplies(Interaction):
    """The replies of the row's environment, whose object the toolbox has."""

    def __init__(self, attempt: Attempt):
        self._attempt = attempt
        self._turn = 0

    async def respond(self, messages: Sequence[Message]) -> Reply | None:
        """Return the environment's reply."""
        turn, self._turn = self._turn, self._turn + 1
        toolbox = self._attempt.runtime.toolbox
        return await toolbox.respond(self._attempt.episode_id, turn, messages)


CHAT_SEED = -1
"""Part of the seed of each reply, so that it differs from the seeds of the episode's own turns."""


class EngineChat:
    """A `Chat` (see `agentrl.http.chat`) with the engine and the chat template of the run.

    The model that replies is the current policy, with its adapter. Its replies are in no row of the
    episode and are never trained on.

    Requests use the id of the episode, one at a time, as those of a spawned conversation do. With
    an id of its own, an engine that decodes episodes in lockstep would deadlock, because one
    episode would wait for another.
    """

    def __init__(self, attempt: Attempt):
        self._attempt = attempt
        self._requests = 0

    async def __call__(
        self,
        messages: Sequence[Message],
        *,
        deadline: float,
        max_tokens: int = 512,
        temperature: float = 1.0,
        stop: Sequence[str] = (),
    ) -> str:
        """Return the model's reply, without its thinking.

        Raises:
            EpisodeOver: the time is over.
            PromptTooLong: the conversation is too long for the engine. This is no budget of the
                policy's: `rollout.budget_policy` must not penalize it.
            Infrastructure: the engine failed, or the model used all of `max_tokens` for thinking.
        """
        attempt, template = self._attempt, self._attempt.runtime.template
        ids = template.prompt(messages, is_from_row=lambda message: False, exact=False)
        remaining = attempt.runtime.sampler.max_length - len(ids)
        if remaining < 1:
            raise PromptTooLong(
                f"the conversation of the model that plays the user has {len(ids)} tokens, but the"
                f" engine's context length is {attempt.runtime.sampler.max_length}"
            )
        sampling = Sampling(
            temperature=temperature,
            max_tokens=min(max_tokens, remaining),
            stop=tuple(stop),
            stop_ids=template.stop_ids,
        )
        seed = self._requests, CHAT_SEED
        self._requests += 1
        async with attempt.engine_lock:
            _, text = await attempt.sample_turn(ids, sampling, seed, deadline)
        for end in sampling.stop:
            text = text.removesuffix(end)
        thinking = template.thinking
        _, has_ended, reply = (thinking.opening(ids) + text).rpartition(thinking.end)
        if has_ended:
            return reply.strip()
        if reply.lstrip().startswith(thinking.begin.strip()):
            raise Infrastructure(
                f"the policy used all of max_tokens={max_tokens} for thinking and wrote no message"
            )
        return text.strip()
