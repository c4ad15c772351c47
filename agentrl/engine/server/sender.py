"""The one thing that all ways of sending have in common."""

from __future__ import annotations

from typing import Any, Protocol

from agentrl.engine.base import Update

SEND_SECONDS = 1800.0
"""Most seconds that a server may take to load what it was sent."""


class Sender(Protocol):
    """A way for the policy to one server."""

    def send(self, update: Update) -> int:
        """Have the server hold the policy when this returns.

        Returns:
            How many bytes were sent.

        Raises:
            EngineError: the server does not hold it.
        """
        ...

    def request(self) -> dict[str, Any]:
        """What every request says to be answered by what was sent last."""
        ...

    def close(self) -> None:
        """Leave nothing behind, also at a server that is not ours."""
        ...
