"""What all servers' answers have in common: refusals, and whose weights they name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from agentrl.errors import EngineError, EngineOverloaded, PromptTooLong, RequestRefused

_TOO_LONG = re.compile(
    r"longer than the model's context|maximum allowed length|context length|maximum model length"
)


def refusal(status: int, answer: Any, where: str) -> EngineError:
    """The error behind a status that is not 200."""
    said = _message(answer)
    text = f"{where}: status {status}: {said[:2000]}"
    if status in (429, 503):
        return EngineOverloaded(text)
    if status == 400:
        return PromptTooLong(text) if _TOO_LONG.search(said) else RequestRefused(text)
    return EngineError(text)


@dataclass(frozen=True, slots=True)
class Stamp:
    """What an answer says of the weights that sampled it, and which policy that is."""

    weights: str
    """The server's `weight_version`."""
    policy: int
    """The policy's version: the same number where weights are published, the adapter's else."""


def _message(answer: Any) -> str:
    """The text in one of the shapes that SGLang's errors have."""
    while isinstance(answer, dict):
        found = [answer[key] for key in ("error", "message", "detail") if key in answer]
        answer = found[0] if found else str(answer)
    return str(answer)
