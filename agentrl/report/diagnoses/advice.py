"""Causes and advice that several diagnoses give."""

from __future__ import annotations

from agentrl.config.sections import BUDGETS
from agentrl.report.run import Run, config_value

IMITATE = "imitate first: docs/debugging.md"
FILTER = "replace such rows within a step: algorithm.filter_groups=true"
MORE_TOOL_WORKERS = "more processes of the tool server: tools.workers"
SMALLER_TIMEOUT = "a smaller rollout.timeout_s"


def check_template(run: Run) -> str:
    """Return the command that tests the chat template of the run's model."""
    return f"agentrl check-template {config_value(run, 'model.path') or 'MODEL'}"


def show_episodes(run: Run, what: str = "read some episodes") -> str:
    """Return the command that prints episodes, behind what to do with them."""
    return f"{what}: agentrl show {run.folder}"


def too_small(run: Run, budget: str, rows: str) -> str:
    """Return the cause that a budget (a stop reason) is too small for some rows."""
    key = BUDGETS[budget]
    return f"{key} ({config_value(run, key)}) is too small for {rows}"


def learning_rate(run: Run) -> str:
    """Return the key of the learning rate with its value."""
    return f"optim.lr ({config_value(run, 'optim.lr')})"
