"""A rank that reports its memory, in a module that other processes can import."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.learner.dispatch import BROADCAST, SPLIT, dispatch
from agentrl.learner.rank import Rank
from workload.updates import limit_memory, memory


class Weighed(Rank):
    """The learner's rank with a method for its memory."""

    @dispatch(BROADCAST)
    def limit(self, size: float) -> None:
        """Raise if this rank needs more bytes of its GPU."""
        limit_memory(size)

    @dispatch(SPLIT)
    def memory(self, share: None) -> dict[str, float | None]:
        """Return the memory since the start."""
        return memory()


def most(per_rank: Sequence[dict[str, float | None]]) -> dict[str, float | None]:
    """Return the largest values of all ranks."""
    return {
        name: None if per_rank[0][name] is None else max(f[name] or 0.0 for f in per_rank)
        for name in per_rank[0]
    }
