"""Open a model, its engine and the tools for a command that does not train."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from agentrl.cli.options import with_model_folder

if TYPE_CHECKING:
    from agentrl.config import Config
    from agentrl.preflight import Plan
    from agentrl.rollout import Rollouts
    from agentrl.trainer.display import Display

log = logging.getLogger("agentrl")


@contextlib.contextmanager
def open_session(config: Config, console: Display | None = None) -> Iterator[tuple[Plan, Rollouts]]:
    """Check the rows, then load the model and start the tools.

    Args:
        config: the config.
        console: shows what takes long; None: nothing does.

    Raises:
        UserError: config, rows or model are invalid.
    """
    from agentrl.preflight import make_plan

    phase = console.phase if console else contextlib.nullcontext
    with phase("check the dataset"):
        plan = make_plan(config)
    plan = replace(plan, config=with_model_folder(config))
    with phase("load the libraries"):
        from transformers.utils import logging as transformers_logging

        from agentrl.agent_loops.attempt import load_template
        from agentrl.engine.open import open_engine
        from agentrl.preflight import check_model_fits
        from agentrl.rollout import open_rollouts

    if plan.config.rollout.name != "local" and plan.config.rollout.urls:
        log.warning(
            "no weights are sent to the servers of rollout.urls: they sample from the weights that"
            " they have loaded, not from --model (model.path)"
        )
    transformers_logging.disable_progress_bar()
    template = load_template(plan.config)
    with phase("start the engine"):
        engine = open_engine(plan.config, template.tokenizer)
    try:
        check_model_fits(plan, template, engine.max_length)
        with (
            silence_training_warnings(),
            open_rollouts(plan.config, engine, template, plan.scorer) as rollouts,
        ):
            yield plan, rollouts
    finally:
        engine.close()


@contextlib.contextmanager
def silence_training_warnings() -> Iterator[None]:
    """Silence warnings about rewards that do not train, because this command does not train."""
    log = logging.getLogger("agentrl.rewards")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
