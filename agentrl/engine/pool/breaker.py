"""When an engine of several is asked, and when it is tried again."""

from __future__ import annotations


class Breaker:
    """Closed: the engine is asked. Open: it is not, until somebody tried it and it held.

    Three failures in a row open it. The time until the next try doubles, also over tries that
    succeed, and is the first one again once the engine has answered a request. Not guarded: the
    owner's lock is.
    """

    def __init__(self, *, failures: int = 3, first_wait: float = 1.0, longest_wait: float = 60.0):
        """A closed one.

        Args:
            failures: how many in a row open it.
            first_wait: seconds from its opening to the first try.
            longest_wait: what doubling ends at.
        """
        self.open = False
        self._limit, self._failures = failures, 0
        self._first, self._longest, self._wait = first_wait, longest_wait, first_wait

    def succeeded(self) -> None:
        """A request was answered; after its opening that says nothing any more."""
        if not self.open:
            self._failures, self._wait = 0, self._first

    def failed(self) -> bool:
        """A request was not. True where it must be tripped."""
        self._failures += 1
        return self._failures >= self._limit

    def trip(self) -> None:
        """Open it."""
        self.open = True

    def close(self) -> None:
        """The engine held when it was tried."""
        self.open, self._failures = False, 0

    def next_wait(self) -> float:
        """Seconds until the next try."""
        wait = self._wait
        self._wait = min(2 * wait, self._longest)
        return wait
