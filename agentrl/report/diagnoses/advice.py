"""The likely causes of findings and what to try: the texts of advice.yaml."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from agentrl.config.sections import BUDGETS
from agentrl.config.sources import load_yaml
from agentrl.report.run import Run, config_value


def advice(run: Run, *names: str, **values: Any) -> dict[str, Any]:
    """Return `causes` and `tries` of a finding.

    Args:
        run: the run; its folder, model and learning rate are filled into the texts.
        names: the entries of advice.yaml whose texts are joined, in this order.
        values: other values that are filled in, by their names.
    """
    values["folder"], values["lr"] = run.folder, config_value(run, "optim.lr")
    values["model"] = config_value(run, "model.path") or "MODEL"
    entries = [_read_texts()[name] for name in names]
    return {
        part: [text.format(**values) for entry in entries for text in entry.get(part, ())]
        for part in ("causes", "tries")
    }


def join(*parts: dict[str, Any]) -> dict[str, Any]:
    """Return the causes of all parts, and what they try."""
    return {name: [text for part in parts for text in part[name]] for name in ("causes", "tries")}


def budget(run: Run, reason: str) -> dict[str, Any]:
    """Return the values {reason}, {key} and {value} of a budget, by its stop reason."""
    return {"reason": reason, "key": BUDGETS[reason], "value": config_value(run, BUDGETS[reason])}


@cache
def _read_texts() -> dict[str, dict[str, list[str]]]:
    return load_yaml(Path(__file__).parent / "advice.yaml")
