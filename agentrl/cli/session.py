"""Open a model, its engine and the tools for a command that does not train."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from agentrl.cli.options import is_address, with_model_folder
from agentrl.errors import UserError
from agentrl.registry import agent_loops

if TYPE_CHECKING:
    from agentrl.config import Config
    from agentrl.preflight import Plan
    from agentrl.rollout import Rollouts
    from agentrl.trainer.display import Display

log = logging.getLogger("agentrl")


def check_rows(config: Config, console: Display | None = None) -> Plan:
    """Check the rows, and find the folder of the model.

    Args:
        config: the config.
        console: shows what takes long; None: nothing does.

    Raises:
        UserError: config, rows or model are invalid.
    """
    from agentrl.preflight import make_plan

    with console.phase("check the dataset") if console else contextlib.nullcontext():
        plan = make_plan(config)
    return replace(plan, config=with_model_folder(config))


@contextlib.contextmanager
def open_session(
    config: Config,
    console: Display | None = None,
    plan: Plan | None = None,
    token_env: str = "",
) -> Iterator[tuple[Plan, Rollouts]]:
    """Check the rows, then load the model and start the tools.

    Args:
        config: the config.
        console: shows what takes long; None: nothing does.
        plan: the rows, if `check_rows` returned them before.
        token_env: the environment variable with the key, if the model is at a URL.

    Raises:
        UserError: config, rows or model are invalid.
    """
    plan, phase = plan or check_rows(config), console.phase if console else contextlib.nullcontext
    if is_address(plan.config.model.path):
        with silence_training_warnings(), _open_chat(plan, token_env) as rollouts:
            yield plan, rollouts
        return
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


def _open_chat(plan: Plan, token_env: str) -> AbstractContextManager[Rollouts]:
    """Open the rollouts of a model at a URL.

    Raises:
        UserError: the variable with the key is not set, or rows need an agent of their own.
    """
    from agentrl.agent_loops.chat_model import ChatModel, NoTemplate
    from agentrl.rollout import open_rollouts

    if token_env and not os.environ.get(token_env):
        raise UserError(f"--token-env {token_env}: there is no such environment variable")
    for name in sorted({kind.sample.agent_name for kind in plan.kinds}):
        if not agent_loops.get(name).awaited:
            raise UserError(
                f"rows with agent_name {name} cannot be played by a model at a URL: their agent"
                " is another program, which can ask the URL itself"
            )
    config = plan.config.with_values("rollout", workers=1, tool_format="hermes")
    model = ChatModel(config.model.path, os.environ.get(token_env, ""))
    return open_rollouts(config, model, cast(Any, NoTemplate()), plan.scorer)


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
