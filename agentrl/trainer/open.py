"""Open the parts of a run: the learner, the engine, the rollouts, the publisher and the store."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from agentrl.agent_loops.attempt import load_template
from agentrl.chat import ChatTemplate
from agentrl.chat.tokenizer import hash_vocabulary
from agentrl.config import Config
from agentrl.data import Curriculum
from agentrl.engine.base import Engine
from agentrl.engine.local import LocalEngine
from agentrl.engine.local.load import resolve_device
from agentrl.engine.open import EngineStart, describe_engine
from agentrl.engine.remote.admin import in_thread
from agentrl.errors import EngineError, RunStopped
from agentrl.learner.dispatch import Placement
from agentrl.learner.learner import Learner
from agentrl.learner.memory import LOCAL_ROWS
from agentrl.learner.mismatch import MismatchGuard
from agentrl.learner.modes import describe_mode
from agentrl.learner.packing import Mode
from agentrl.learner.policy import describe_targets
from agentrl.learner.rank import LearnerRanks, start_ranks
from agentrl.preflight import (
    CANARY_TOKENS,
    CANARY_TOKENS_OF_FLOAT32,
    Plan,
    check_rows_fit,
    check_template_fits,
    check_tokenizers,
    describe_run,
    encode_prompts,
    longest_prompt,
    longest_response,
    make_canary_row,
)
from agentrl.record import TRAJECTORIES
from agentrl.rollout import Rollouts, open_rollouts
from agentrl.rollout_workers.workers import LocalProcess
from agentrl.store import TrajectoryStore, TrajectoryWriter
from agentrl.torch_threads import choose_threads
from agentrl.trainer.clock import StepClock
from agentrl.trainer.display import Display
from agentrl.trainer.interrupt import Interrupt
from agentrl.trainer.parts import Parts, RunState
from agentrl.trainer.publisher import ROW_TOKENS_PER_SAMPLE, SAMPLED_SECONDS, Publisher
from agentrl.trainer.recorded import RecordedStream
from agentrl.trainer.resume import Start
from agentrl.trainer.speed import describe_local_speed, measure_sampling
from agentrl.trainer.stream import RolloutStream
from agentrl.trainer.teacher import Teacher
from agentrl.trajectory import Generation


@contextmanager
def open_run(
    config: Config,
    plan: Plan,
    start: Start,
    state: RunState,
    display: Display,
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
        display: shows the progress.
        placement: where the ranks and the servers run. None: the learner runs in this process.
    """
    with ExitStack() as stack:
        logging.disable_progress_bar()  # one bar per model folder is noise
        display.note(describe_run(plan))
        template = load_template(config)
        tokenizer = template.tokenizer
        check_tokenizers(config, tokenizer)
        if config.rollout.name != "local":
            display.note(describe_engine(config))
        opening = EngineStart(config, tokenizer, placement.engine_slots() if placement else None)
        stack.callback(opening.close)
        with display.phase("load the model"):
            ranks = _start_ranks(config, plan, template, opening, placement)
            if placement is None:
                stack.callback(ranks.close)
        learner = Learner(config.model.path, config, total_steps=start.total_steps, group=ranks)
        canary = _prepare(learner, start, state, display)
        with display.phase("start the engine"):
            engine = opening.finish()
        display.note(f"threads: {_describe_threads(engine, placement)}")
        check_rows_fit(plan, template, engine.max_length)
        pad_id = _pad_id_of(tokenizer)
        start_worker = placement.start_worker if placement else LocalProcess
        rollouts = stack.enter_context(
            open_rollouts(config, engine, template, plan.scorer, start=start_worker)
        )
        stream = _make_stream(plan, rollouts, start, tokenizer, pad_id)
        stack.callback(stream.close)
        state.curriculum = _resume_curriculum(stream, start)
        teacher = _open_teacher(plan, template, learner, engine, rollouts, display)
        row = make_canary_row(plan, template, _canary_tokens(engine))
        publisher = _make_publisher(learner, engine, rollouts, row, canary)
        with display.phase("send the weights and compare the engine"):
            publisher.publish(state.step)
        guard = MismatchGuard(publisher.noise)
        if isinstance(stream, RecordedStream) and not config.trainer.val_only:
            _verify(stream, learner, start, state.step, guard.limit, display)
        if isinstance(engine, LocalEngine) and resolve_device(config.trainer.device) != "cpu":
            _note_speed(engine, rollouts, plan, template, display)
        store = _open_store(config, display)
        stack.callback(store.close)
        yield Parts(
            config=config,
            plan=plan,
            start=start,
            display=display,
            placement=placement,
            tokenizer=tokenizer,
            pad_id=pad_id,
            stream=stream,
            rollouts=rollouts,
            engine=engine,
            dtype=opening.dtype,
            learner=learner,
            teacher=teacher,
            publisher=publisher,
            guard=guard,
            store=store,
            clock=StepClock(),
            interrupt=stack.enter_context(Interrupt()),
        )


def _pad_id_of(tokenizer: Any) -> int:
    pad_id = tokenizer.pad_token_id
    return tokenizer.eos_token_id if pad_id is None else pad_id


def _open_teacher(
    plan: Plan,
    template: ChatTemplate,
    learner: Learner,
    engine: Engine,
    rollouts: Rollouts,
    display: Display,
) -> Teacher | None:
    config = learner.config
    if not config.teacher.model or config.trainer.val_only:
        return None
    longest = longest_prompt(plan, template)[0] + longest_response(plan)
    with display.phase("open the teacher"):
        return Teacher(config, template, learner, rollouts.run, min(longest, engine.max_length))


def _make_stream(
    plan: Plan, rollouts: Rollouts, start: Start, tokenizer: Any, pad_id: int
) -> RolloutStream | RecordedStream:
    config = plan.config
    if config.data.is_recorded:
        vocabulary = hash_vocabulary(tokenizer.backend_tokenizer.to_str())
        return RecordedStream(config, plan.train, vocabulary)
    return RolloutStream(config, plan.train, rollouts, total_steps=start.total_steps, pad_id=pad_id)


def _resume_curriculum(stream: object, start: Start) -> Curriculum | None:
    """Return the curriculum of a stream, if it has one, with the success of rows so far.

    Nothing is known if the run starts from the base model or has other rows.
    """
    curriculum = stream.curriculum if isinstance(stream, RolloutStream) else None
    if curriculum is not None:
        curriculum.position = start.position
        if start.checkpoint is not None and not start.restarts_rows:
            curriculum.load(start.checkpoint.folder)
    return curriculum


def _start_ranks(
    config: Config,
    plan: Plan,
    template: ChatTemplate,
    opening: EngineStart,
    placement: Placement | None,
) -> LearnerRanks:
    """Start the learner's ranks, and check the chat template meanwhile."""
    start = partial(start_ranks, placement, config.model.path, config)
    starting = in_thread(start, "start-ranks") if placement else None
    check_template_fits(plan, template)
    # A rank in this process belongs to this thread, as all its later work does.
    return start() if starting is None else opening.wait_for(starting)


def _prepare(
    learner: Learner, start: Start, state: RunState, display: Display
) -> Mapping[str, Any] | None:
    """Show what is not as usual, load the state of `start`, and compile; see `_load`."""
    config = learner.config
    mode, reason = learner.ranks.mode()
    if mode is not Mode.PACKED:
        display.note(describe_mode(mode, reason, config.rollout.n))
    if config.model.lora_rank and (line := describe_targets(config.model)):
        display.note(line)
    with display.phase("load the checkpoint"):
        canary = _load(learner, start, state, display)
    # A server that starts on the learner's GPU measures its free memory meanwhile.
    if config.trainer.placement == "separate":
        with display.phase("compile the layers"):
            learner.ranks.compile()
    return canary


def _make_publisher(
    learner: Learner,
    engine: Engine,
    rollouts: Rollouts,
    row: array[int],
    canary: Mapping[str, Any] | None,
) -> Publisher:
    def sample(ids: array[int]) -> Generation:
        tokens = -(-len(ids) // ROW_TOKENS_PER_SAMPLE)
        return rollouts.run(engine.continue_row(ids, tokens, SAMPLED_SECONDS))

    return Publisher(
        learner, engine, row, lambda ids: rollouts.run(engine.scores(ids)), canary, sample=sample
    )


def _verify(
    stream: RecordedStream,
    learner: Learner,
    start: Start,
    step: int,
    limit: float,
    display: Display,
) -> None:
    """Compare recorded logprobs with those of their versions.

    Raises:
        RunStopped: a new run has too few answers for a step.
    """
    with display.phase("compare the recorded logprobs"):
        problem = stream.verify(learner, start, step, limit)
    if problem:
        display.warning(f"warning: {problem}")
    is_new = start.checkpoint is None or start.is_new_fork
    if is_new and stream.is_used_up(start.position, step):
        raise RunStopped(f"no step: {stream.summary(start.position, step)}")


def _note_speed(
    engine: LocalEngine, rollouts: Rollouts, plan: Plan, template: ChatTemplate, display: Display
) -> None:
    """Measure how fast a local engine on a GPU samples, and show it."""
    config = plan.config
    rows = min(LOCAL_ROWS, config.rollouts_of_step)
    prompts = [*encode_prompts(islice(plan.train, config.data.batch_size), template)]
    if not prompts:
        return
    with suppress(EngineError):  # A slow engine is no reason to end the run.
        speed = rollouts.run(measure_sampling(engine, prompts, rows))
        display.note(describe_local_speed(speed, config.rollout.python))


def _open_store(config: Config, display: Display) -> TrajectoryWriter:
    trajectories = TrajectoryStore(Path(config.trainer.output) / TRAJECTORIES)
    return TrajectoryWriter(trajectories, config.trainer.keep_trajectories, display.warning)


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
    learner: Learner, start: Start, state: RunState, display: Display
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
        display.note(line)
    if start.is_new_fork:  # the other run records its last step itself
        return None
    state.unfinished = meta["unfinished"]
    return meta["canary"]
