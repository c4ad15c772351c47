"""A box for an episode, whatever the programs in it do: where one ends its box, another comes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from agentrl.sandbox.base import Completed, Language
from agentrl.sandbox.box import BoxLost, DriverBox

NEW = "\n[this ran in a new sandbox: the variables and files of before are lost]\n"
TRIES = 3
"""For an order that no box was there to begin."""

T = TypeVar("T")


class LastingBox:
    """See `Box`. Begins anew, with the files that it was opened with, where a box is gone.

    Else a policy could have a rollout that goes badly dropped as a machine's failure.
    """

    def __init__(self, box: DriverBox, again: Callable[[], Awaitable[DriverBox]]):
        """Take over an open box.

        Args:
            box: the first.
            again: opens another like it.
        """
        self._box, self._again = box, again
        self._turn = asyncio.Lock()
        self._new = False
        """Whether it is still to be said that this is not the first."""
        self._closed = False

    async def run(
        self,
        code: str,
        *,
        language: Language = "python",
        stdin: str = "",
        seconds: float | None = None,
    ) -> Completed:
        """See `Box.run`."""
        done = await self._lasting(
            lambda box: box.run(code, language=language, stdin=stdin, seconds=seconds)
        )
        if self._new:
            self._new = False
            done = replace(done, stderr=done.stderr + NEW)
        return done

    async def read(self, path: str, max_bytes: int = 65_536) -> bytes:
        """See `Box.read`."""
        return await self._lasting(lambda box: box.read(path, max_bytes))

    async def write(self, path: str, content: bytes) -> None:
        """See `Box.write`."""
        await self._lasting(lambda box: box.write(path, content))

    async def aclose(self) -> None:
        """See `Box.aclose`. Idempotent."""
        self._closed = True
        await self._box.aclose()

    async def _lasting(self, ask: Callable[[DriverBox], Awaitable[T]]) -> T:
        """What a box answers that is there.

        Raises:
            SandboxError: no other can be had, or they go as they come.
        """
        for _ in range(TRIES - 1):
            try:
                return await ask(await self._present())
            except BoxLost:  # with another's program, or before this one's began
                continue
        return await ask(await self._present())

    async def _present(self) -> DriverBox:
        async with self._turn:
            if self._box.lost and not self._closed:
                await self._box.aclose()
                self._box, self._new = await self._again(), True
                if self._closed:  # meanwhile
                    await self._box.aclose()
        return self._box
