"""A model, its engine and the run's tools, open for a command's duration; nothing is trained."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from agentrl.cli.options import resolve

if TYPE_CHECKING:
    from agentrl.config import Config
    from agentrl.plan import Plan
    from agentrl.rollout import Rollouts


@contextlib.contextmanager
def open_session(config: Config) -> Iterator[tuple[Plan, Rollouts]]:
    """Check the rows, then load the model and start the tools.

    Raises:
        UserError: what is wrong with config, rows or model.
    """
    from agentrl.plan import make_plan

    plan = make_plan(config)
    plan = replace(plan, config=resolve(config))
    from transformers.utils import logging

    from agentrl.chat import ChatTemplate, load_tokenizer
    from agentrl.engine.local import LocalEngine
    from agentrl.plan import check_lengths
    from agentrl.rollout import open_rollouts

    logging.disable_progress_bar()
    path = plan.config.model.path
    tokenizer = load_tokenizer(path)
    template = ChatTemplate(tokenizer)
    engine = LocalEngine.load(path, tokenizer, device=plan.config.trainer.device)
    try:
        check_lengths(plan, template, engine.max_length)
        with open_rollouts(plan.config, engine, template, plan.scorer) as rollouts:
            yield plan, rollouts
    finally:
        engine.close()
