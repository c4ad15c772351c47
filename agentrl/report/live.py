"""Warnings while a run trains: the diagnoses of its steps until now."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict

import orjson
import pyarrow as pa

from agentrl.callbacks import Event, Observer
from agentrl.record import METRICS, read_metrics
from agentrl.report.behaviour import BEHAVIOUR_SCHEMA, read_behaviour
from agentrl.report.finding import ALARMS, Finding
from agentrl.report.run import Run, diagnose, metrics_table

WARNED = "findings.jsonl"
"""The file of a run with the findings that were printed while it trained, one in a line."""
LIVE_STEPS = 20
"""The number of last steps whose episodes are read while the run trains."""
FIRST_STEP = 3
"""The number of recorded steps before the diagnoses run: fewer show no problem."""
MAX_SHARE = 0.01
"""The largest share of the run's time that the diagnoses take while it trains."""


class LiveDiagnosis(Observer):
    """Warns once about each finding while a run trains.

    After a step, the diagnoses see the metrics of all steps and the episodes of the last ones. They
    run in the thread of the step. After they took t seconds, the next steps within t / `MAX_SHARE`
    seconds run none, so they take that share of the time at most.
    """

    name = "the diagnosis of the run"

    def __init__(
        self, found: Callable[[Finding], None], clock: Callable[[], float] = time.perf_counter
    ):
        """Prepare the diagnoses.

        Args:
            found: called with each new finding.
            clock: returns the seconds.
        """
        self._found, self._clock = found, clock
        self._behaviour: dict[int, pa.Table] = {}
        self._next = -math.inf

    def on_begin(self, event: Event) -> None:
        """Read what the run has recorded, so that no warning is repeated.

        Warnings of steps that its `metrics.jsonl` does not have are removed: a resumed run repeats
        these steps.
        """
        self._folder, self._config = event.folder, Run(event.folder).config
        self._metrics = metrics_table(read_metrics(event.folder / METRICS))
        self._last = self._diagnosed = event.recorded
        self._known = self._read_known()

    def on_step(self, event: Event) -> None:
        tables = [self._metrics, metrics_table([(event.step, event.metrics)])]
        self._metrics = pa.concat_tables(tables, promote_options="default").combine_chunks()
        self._last = event.step
        if self._metrics.num_rows >= FIRST_STEP and self._clock() >= self._next:
            self._run()

    def on_end(self, event: Event) -> None:
        if event.error is None and self._diagnosed < self._last:
            self._run()

    def _run(self) -> None:
        """Diagnose the run until now, and measure the time."""
        start = self._clock()
        self._diagnosed = self._last
        try:
            self._print_new()
        finally:
            end = self._clock()
            self._next = end + (end - start) / MAX_SHARE

    def _print_new(self) -> None:
        steps = range(self._last - LIVE_STEPS + 1, self._last + 1)
        run = Run(self._folder, steps)
        # The properties that are cached: metrics of all steps, and what was parsed already.
        run.__dict__.update(
            metrics=self._metrics, behaviour=self._read_episodes(), config=self._config
        )
        for finding in diagnose(run):
            key = finding.name, finding.subject
            if finding.severity in ALARMS and key not in self._known:
                self._known.add(key)
                self._found(finding)
                self._write(finding)

    def _read_episodes(self) -> pa.Table:
        """Return the behaviour of the last steps; each file is parsed once."""
        store = Run(self._folder).store
        steps = [s for s in store.all_steps() if self._last - LIVE_STEPS < s <= self._last]
        # The last step's files may still be written.
        known = {s: t for s, t in self._behaviour.items() if s in steps and s < self._last}
        for step in steps:
            if step not in known:
                known[step] = read_behaviour(store, lambda s, step=step: s == step)
        self._behaviour = known
        return pa.concat_tables([BEHAVIOUR_SCHEMA.empty_table(), *(known[s] for s in steps)])

    def _read_known(self) -> set[tuple[str, str]]:
        """Return what the run warned about until its last step; remove later warnings."""
        path = self._folder / WARNED
        if not path.exists():
            return set()
        lines = [line for line in path.read_bytes().splitlines() if line.endswith(b"}")]
        kept = [line for line in lines if orjson.loads(line)["printed"] <= self._last]
        path.write_bytes(b"".join(line + b"\n" for line in kept))
        return {(f["name"], f["subject"]) for f in map(orjson.loads, kept)}

    def _write(self, finding: Finding) -> None:
        """Record a finding that was printed."""
        line = asdict(finding) | {"printed": self._last}
        with (self._folder / WARNED).open("ab") as file:
            file.write(orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")
