"""Where a step's time goes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class StepClock:
    """The times of one step's parts; it runs from its making."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self.seconds: dict[str, float] = {}
        """By part, summed where one came several times."""

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Count the time of the block, also of one that fails."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def metrics(self, step: Mapping[str, float]) -> dict[str, float]:
        """`timing_s/*` until now, and `perf/throughput` in sampled tokens a second."""
        seconds = self.seconds | {"step": time.perf_counter() - self._start}
        sampled = step.get("rollout/sampled_tokens", 0.0)
        times = {f"timing_s/{name}": s for name, s in seconds.items()}
        return times | {"perf/throughput": sampled / seconds["step"]}
