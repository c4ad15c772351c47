"""Open the parts of a run: the learner, the engine, the rollouts, the publisher and the store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from agentrl.agent_loops.attempt import load_template
from agentrl.config import Config
from agentrl.engine.base import Engine
from agentrl.engine.local import LocalEngine
from agentrl.engine.local.load import resolve_device
from agentrl.engine.open import EngineStart, describe_engine
from agentrl.engine.remote.admin import in_thread
from agentrl.errors import EngineError
from agentrl.learner.dispatch import Placement
from agentrl.learner.learner import Learner
from agentrl.learner.memory import LOCAL_ROWS
from agentrl.learner.mismatch import MismatchGuard
from agentrl.learner.modes import describe_mode
from agentrl.learner.packing import Mode
from agentrl.learner.policy import describe_targets
from agentrl.learner.rank import start_ranks
from agentrl.preflight import (
    CANARY_TOKENS,
    CANARY_TOKENS_OF_FLOAT32,
    Plan,
    check_rows_fit,
    check_template_fits,
    describe_run,
    encode_prompts,
    make_canary_row,
)
from agentrl.rollout import open_rollouts
from agentrl.store import TrajectoryStore, TrajectoryWriter
from agentrl.torch_threads import choose_threads
from agentrl.trainer.clock import StepClock
from agentrl.trainer.console import TRAJECTORIES, Console
from agentrl.trainer.interrupt import Interrupt
from agentrl.trainer.parts import Parts, RunState
from agentrl.trainer.publisher import ROW_TOKENS_PER_SAMPLE, SAMPLED_SECONDS, Publisher
from agentrl.trainer.resume import Start
from agentrl.trainer.speed import describe_local_speed, measure_sampling
from agentrl.trainer.stream import RolloutStream


@contextmanager
def open_run(
    config: Config,
    plan: Plan,
    start: Start,
    state: RunState,
    console: Console,
    placement: Placement | None = None,
) -> Iterator[Parts]:
    """Load the model and the checkpoint, start the engine and the tools; close them at the end.

    The engine starts while the model loads and the chat template is checked. The first error ends
    all of this.

    Args:
        config: the config of the run.
        plan: its rows and rewards.
        start: the state that the run starts from.
        state: the state of a new run; becomes that of the checkpoint.
        console: shows the progress.
        placement: where the ranks and the servers run. None: the learner runs in this process.
    """
    with ExitStack() as stack:
        logging.disable_progress_bar()  # one bar per model folder is noise
        console.note(describe_run(plan))
        template = load_template(config)
        tokenizer = template.tokenizer
        if config.rollout.name != "local":
            console.note(describe_engine(config))
        slots = placement.engine_slots() if placement else None
        opening = EngineStart(config, tokenizer, slots)
        stack.callback(opening.close)
        load = partial(start_ranks, placement, config.model.path, config)
        starting = in_thread(load, "start-ranks") if placement else None
        with console.phase("load the model"):
            check_template_fits(plan, template)
            # A rank in this process belongs to this thread, as all its later work does.
            group = load() if starting is None else opening.wait_for(starting)
            learner = Learner(config.model.path, config, total_steps=start.total_steps, group=group)
            if starting is None:
                stack.callback(learner.ranks.close)
        mode, reason = learner.ranks.mode()
        if mode is not Mode.PACKED:
            console.note(describe_mode(mode, reason, config.rollout.n))
        if config.model.lora_rank and (line := describe_targets(config.model)):
            console.note(line)
        with console.phase("load the checkpoint"):
            canary = _load(learner, start, state, console)
        # A server that starts on the learner's GPU measures its free memory meanwhile.
        if config.trainer.placement == "separate":
            with console.phase("compile the layers"):
                learner.ranks.compile()
        with console.phase("start the engine"):
            engine = opening.finish()
        console.note(f"threads: {_describe_threads(engine, placement)}")
        check_rows_fit(plan, template, engine.max_length)
        pad_id = tokenizer.pad_token_id
        pad_id = tokenizer.eos_token_id if pad_id is None else pad_id
        rollouts = stack.enter_context(open_rollouts(config, engine, template, plan.scorer))
        stream = RolloutStream(
            config, plan.train, rollouts, total_steps=start.total_steps, pad_id=pad_id
        )
        stack.callback(stream.close)
        publisher = Publisher(
            learner,
            engine,
            make_canary_row(plan, template, _canary_tokens(engine)),
            lambda ids: rollouts.run(engine.scores(ids)),
            canary,
            sample=lambda ids: rollouts.run(
                engine.continue_row(ids, -(-len(ids) // ROW_TOKENS_PER_SAMPLE), SAMPLED_SECONDS)
            ),
        )
        with console.phase("send the weights and compare the engine"):
            publisher.publish(state.step)
        on_gpu = resolve_device(config.trainer.device) != "cpu"
        if on_gpu and isinstance(engine, LocalEngine) and plan.train:
            rows = min(LOCAL_ROWS, config.rollouts_of_step)
            samples = islice(plan.train, config.data.batch_size)
            prompts = [*encode_prompts(samples, template)]
            with suppress(EngineError):  # A slow engine is no reason to end the run.
                speed = rollouts.run(measure_sampling(engine, prompts, rows))
                console.note(describe_local_speed(speed, config.rollout.python))
        trajectories = TrajectoryStore(Path(config.trainer.output) / TRAJECTORIES)
        store = TrajectoryWriter(trajectories, config.trainer.keep_trajectories, console.warning)
        stack.callback(store.close)
        yield Parts(
            config=config,
            tokenizer=tokenizer,
            pad_id=pad_id,
            stream=stream,
            rollouts=rollouts,
            engine=engine,
            dtype=opening.dtype,
            learner=learner,
            publisher=publisher,
            guard=MismatchGuard(publisher.noise),
            store=store,
            clock=StepClock(),
            interrupt=stack.enter_context(Interrupt()),
        )


def _canary_tokens(engine: Engine) -> int:
    """Return the length of the canary; the row must be shorter than the engine's longest."""
    is_exact = isinstance(engine, LocalEngine) and engine.dtype == torch.float32
    tokens = CANARY_TOKENS_OF_FLOAT32 if is_exact else CANARY_TOKENS
    return min(tokens, engine.max_length - 1)


def _describe_threads(engine: Engine, placement: Placement | None) -> str:
    """Return the CPU threads of the learner and of a local engine, and why."""
    if placement:
        return placement.describe_threads()
    learner = choose_threads(current=torch.get_num_threads())
    if isinstance(engine, LocalEngine):
        return f"the learner uses {learner}, the local engine {engine.threads}"
    return f"the learner uses {learner}"


def _load(
    learner: Learner, start: Start, state: RunState, console: Console
) -> Mapping[str, Any] | None:
    """Load the state that the run starts from.

    Returns:
        The state of the canary; None for a new run or a new fork, whose engine or rows may be
        others.
    """
    if start.checkpoint is None:
        return None
    meta = start.checkpoint.meta
    learner.ranks.load(start.checkpoint.folder)
    state.step, state.position = start.checkpoint.step, start.position
    if "algorithm.kl_reward_coef" not in {change.key for change in start.new_changes}:
        state.kl.load(meta["kl"])
    for line in start.describe():
        console.note(line)
    if start.is_new_fork:  # the other run records its last step itself
        return None
    state.unfinished = meta["unfinished"]
    return meta["canary"]
