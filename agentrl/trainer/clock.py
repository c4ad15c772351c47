"""The times of a step, by its parts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from agentrl.learner.profile import annotate


class StepClock:
    """Measures the time of one step and of its parts."""

    def __init__(self) -> None:
        """Start the first step."""
        self.restart()

    def restart(self) -> None:
        """Start to measure the next step."""
        self._start = time.perf_counter()
        self.seconds: dict[str, float] = {}
        """Seconds by part; a part that ran several times has the sum."""
        self.part = "", self._start
        """The part that runs now, and the `time.perf_counter()` of its start."""

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Measure the time of the block, even if it raises."""
        start = time.perf_counter()
        try:
            with self.named(name):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        """Let `part` name the block."""
        self.part = name, time.perf_counter()
        try:
            with annotate(name):
                yield
        finally:
            self.part = "", time.perf_counter()

    def metrics(self, step: Mapping[str, float]) -> dict[str, float]:
        """Return `timing_s/*` until now, and `perf/throughput` in sampled tokens per second."""
        seconds = self.seconds | {"step": time.perf_counter() - self._start}
        sampled = step.get("rollout/sampled_tokens", 0.0)
        times = {f"timing_s/{name}": s for name, s in seconds.items()}
        return times | {"perf/throughput": sampled / seconds["step"]}
