"""Weights change while turns are in flight: the parts of a turn before and after the change.

A server aborts its turns before it gets new weights, and answers with the tokens so far. The rest
of each turn is requested again once the server samples from the new weights. So each token is of
exactly one version.

    part of version 3     part of version 4
    prompt ─► a b c  (d)  prompt a b c ─► e f <end>      turn: a b c e f <end>
               └ not checked for the end of the turn, so it is sampled again
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace

from agentrl.errors import EngineError
from agentrl.http.pool import paused_time_limits
from agentrl.trajectory import Generation

GateState = bool | str
"""True: open. False: closed. A text: the weights did not arrive, for this reason."""


class TurnGate:
    """Holds back requests for tokens while the weights of a server change.

    Requests pass in an event loop. Another thread closes and opens the gate.
    """

    def __init__(self) -> None:
        """Start open."""
        self.in_flight = 0
        """The number of requests that have passed and have no answer."""
        self._closed: Future[EngineError | None] | None = None
        """Set while the gate is closed. Its result is an error if the weights did not arrive."""

    @property
    def is_closed(self) -> bool:
        """Return whether requests have to wait."""
        return self._closed is not None

    @property
    def state(self) -> GateState:
        """The state, as another process may take it over."""
        if (closed := self._closed) is None:  # Read it once: another thread may open the gate.
            return True
        error = closed.result() if closed.done() else None
        return False if error is None else str(error)

    @state.setter
    def state(self, state: GateState) -> None:
        if state is True:
            self.open()
            return
        self.close()
        if isinstance(state, str):
            self.fail(EngineError(state))

    @asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        """Wait until the gate is open. Within the block, the request is in flight.

        Time limits do not count the wait.

        Raises:
            EngineError: the server did not get the weights.
        """
        # First count, then look at the gate; `close` is followed by the opposite order. So either
        # this request sees that the gate is closed, or the other thread sees the request.
        self.in_flight += 1
        try:
            while (closed := self._closed) is not None:
                self.in_flight -= 1
                try:
                    with paused_time_limits():
                        error = await asyncio.shield(asyncio.wrap_future(closed))
                finally:
                    self.in_flight += 1
                if error is not None:
                    raise EngineError(str(error))  # Many requests wait for one error.
            yield
        finally:
            self.in_flight -= 1

    def close(self) -> None:
        """Hold back all further requests."""
        if self._closed is None or self._closed.done():
            self._closed = Future()

    def open(self) -> None:
        """Let the requests pass."""
        closed, self._closed = self._closed, None
        if closed is not None and not closed.done():
            closed.set_result(None)

    def fail(self, error: EngineError) -> None:
        """Let requests that wait, and later ones, fail until `open`. An open gate stays open."""
        if self._closed is not None and not self._closed.done():
            self._closed.set_result(error)


def without_last_token(part: Generation) -> Generation:
    """Return an aborted part of a turn without its last token.

    A server that aborts a turn does not check whether the token sampled last ends it. The time of
    the abort does not depend on this token, so sampling it again changes no distribution.
    """
    return part.first(len(part.token_ids) - 1)


def join_parts(parts: Sequence[Generation]) -> Generation:
    """Return the turn whose parts were sampled one after another. Each part has tokens."""
    first, last = parts[0], parts[-1]
    tokens, logprobs, versions = array("i"), array("f"), array("i")
    kept_ids, kept_counts, experts = array("i"), array("i"), array("h")
    for part in parts:
        tokens += part.token_ids
        logprobs += part.logprobs
        versions += part.versions
        kept_ids += part.kept_ids
        kept_counts += part.kept_counts
        experts += part.experts
    return replace(
        first,
        token_ids=tokens,
        logprobs=logprobs,
        versions=versions,
        kept_ids=kept_ids,
        kept_counts=kept_counts,
        experts=experts,
        experts_width=last.experts_width,
        finish_reason=last.finish_reason,
    )
