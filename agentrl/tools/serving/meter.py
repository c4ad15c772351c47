"""What a tool server tells of itself at /metrics, in Prometheus' format.

Counting happens with every call and reading once in a while, so a call only adds to plain numbers;
they become Prometheus' families when somebody asks. (0.6 us a call; the labelled metrics of
prometheus-client would take 5.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Seconds: upper ends of the buckets, before infinity."""


class Seconds:
    """A histogram of durations."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """How many were at most so long, as Prometheus wants it."""
        so_far, buckets = 0, []
        for bound, count in zip((*map(str, BOUNDS), "+Inf"), self.counts, strict=True):
            so_far += count
            buckets.append((bound, so_far))
        return buckets


class Meter:
    """The numbers of one server's process.

    Args:
        sessions: how many episodes are open.
        in_flight: how many calls are being answered.
    """

    def __init__(self, sessions: Callable[[], int], in_flight: Callable[[], int]):
        self._sessions, self._in_flight = sessions, in_flight
        self._waited: dict[str, Seconds] = {}
        self._ran: dict[str, Seconds] = {}
        self._calls: Counter[tuple[str, str]] = Counter()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def ran(self, tool: str, waited: float, took: float) -> None:
        """A call ran: how long it waited to start, and how long it took from there, in seconds."""
        if tool not in self._ran:
            self._waited[tool], self._ran[tool] = Seconds(), Seconds()
        self._waited[tool].add(waited)
        self._ran[tool].add(took)

    def answered(self, tool: str, outcome: str) -> None:
        """A call was answered, or could not be.

        Args:
            tool: the function; "" where the model asked for one that is not offered.
            outcome: `ok`, a class of failure (`ToolResult.error`), or the name of an exception.
        """
        self._calls[tool, outcome] += 1

    def page(self) -> bytes:
        """All of it as text."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """See `prometheus_client.registry.Collector`."""
        for name, about, held in (
            ("agentrl_tool_queue_seconds", "Time a call waited to start", self._waited),
            ("agentrl_tool_execute_seconds", "Time a call took once started", self._ran),
        ):
            histogram = HistogramMetricFamily(name, about, labels=["tool"])
            for tool, seconds in held.items():
                histogram.add_metric([tool], seconds.buckets(), seconds.total)
            yield histogram
        calls = CounterMetricFamily(
            "agentrl_tool_calls", "Calls by how they ended", labels=["tool", "outcome"]
        )
        for labels, count in self._calls.items():
            calls.add_metric(labels, count)
        yield calls
        yield GaugeMetricFamily("agentrl_tool_sessions", "Open episodes", self._sessions())
        yield GaugeMetricFamily("agentrl_tool_calls_in_flight", "Calls now", self._in_flight())
