"""Whether one more call may come in: a server that takes all of them serves none in time."""

from __future__ import annotations

from agentrl.errors import ToolServerError

MAX_CALLS = 1024
"""Calls at once in a process, those that wait for a thread included."""
RETRY_AFTER_SECONDS = 1


class Busy(ToolServerError):
    """The server has as many calls as it takes; sending this one again a little later may help."""


class Draining(ToolServerError):
    """The server is about to stop: calls that run may end, episodes may be closed, no more."""


class WrongWorker(ToolServerError):
    """The episode stays with another worker of this server."""


class Admission:
    """Counts the calls in a process.

    Args:
        most: calls at once.
    """

    def __init__(self, most: int = MAX_CALLS):
        self.most = most
        self.in_flight = 0
        self.draining = False

    def session(self) -> None:
        """Let a session be opened.

        Raises:
            Draining: the server stops.
        """
        if self.draining:
            raise Draining("the tool server is about to stop")

    def enter(self) -> None:
        """Let a call in, and count it until `leave`.

        Raises:
            Draining: the server stops.
            Busy: there are as many as may be.
        """
        self.session()
        if self.in_flight >= self.most:
            raise Busy(f"the tool server has {self.in_flight} calls in flight, and takes no more")
        self.in_flight += 1

    def leave(self) -> None:
        """The call was answered."""
        self.in_flight -= 1
