"""A rank that says what memory it took: a module of its own, which other processes can import."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.trainer.dispatch import SPLIT, dispatch
from agentrl.trainer.rank import Rank
from workload.updates import memory


class Weighed(Rank):
    """The learner's rank, otherwise."""

    @dispatch(SPLIT)
    def memory(self, share: None) -> dict[str, float | None]:
        """Since it began."""
        return memory()


def most(found: Sequence[dict[str, float | None]]) -> dict[str, float | None]:
    """Of all ranks."""
    return {
        name: None if found[0][name] is None else max(f[name] or 0.0 for f in found)
        for name in found[0]
    }
