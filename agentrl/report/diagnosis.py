"""Diagnoses: functions that look for a known problem in a recorded run.

@diagnosis("no_tools")
def no_tools(run):
\"\"\"The policy no longer calls tools.\"\"\"
...
yield Finding(step=40, text="...", evidence={"tool_calls": 0.0})
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from agentrl.registry import Registry
from agentrl.report.run import Run


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem of a run, with the evidence for it.

    Attributes:
        step: the step at which the problem begins.
        text: one sentence: what happens, where, since when.
        evidence: the numbers that show it, by name.
        episodes: ids of episodes that show it.
        causes: likely causes, the likeliest first.
        tries: what to change, the most promising first: commands or config keys.
        name: the name of the diagnosis; `diagnose` sets it.
    """

    step: int
    text: str
    evidence: Mapping[str, float] = field(default_factory=dict)
    episodes: Sequence[str] = ()
    causes: Sequence[str] = ()
    tries: Sequence[str] = ()
    name: str = ""


Diagnosis = Callable[[Run], Iterable[Finding]]
diagnoses: Registry[Diagnosis] = Registry("diagnosis", home="agentrl.report.shipped")


def diagnosis(name: str) -> Callable[[Diagnosis], Diagnosis]:
    """Register a function that looks for a problem in a run and yields a `Finding` for each."""

    def register(function: Diagnosis) -> Diagnosis:
        return diagnoses.add(name, function)

    return register


def diagnose(run: Run) -> list[Finding]:
    """Return the findings of all registered diagnoses, the gravest first."""
    raise NotImplementedError


def findings_table(findings: Sequence[Finding]) -> pa.Table:
    """Return one row per finding: the fields of `Finding`; `evidence` is JSON text."""
    raise NotImplementedError
