"""Which worker of a tool server an episode stays with: everybody works it out, nobody keeps a list.

Each worker listens on a port of its own, and a driver goes to the right one by itself: a process in
front that looks at every call would cost each of them a hop, and be the first thing to be full.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass


def worker_of(episode_id: str, count: int) -> int:
    """The worker's number: CRC-32 of the id's UTF-8 bytes, modulo `count`."""
    return zlib.crc32(episode_id.encode("utf-8", "replace")) % count


@dataclass(frozen=True, slots=True)
class Place:
    """A worker's place among those of its server."""

    ports: tuple[int, ...] = ()
    """Where the workers listen, by number; none where there is but one."""
    number: int = 0

    def elsewhere(self, episode_id: str) -> int:
        """The port of the worker that the episode stays with; 0 if it is this one."""
        if not self.ports:
            return 0
        number = worker_of(episode_id, len(self.ports))
        return 0 if number == self.number else self.ports[number]
