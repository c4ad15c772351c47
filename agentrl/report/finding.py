"""A finding: a problem of a recorded run, which a diagnosis has found."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal, get_args

import pyarrow as pa

Severity = Literal["error", "warning", "audit", "note"]
SEVERITIES: tuple[str, ...] = get_args(Severity)
"""The most severe first. An error: the run cannot succeed like this. A warning: something that the
user does not want is likely. An audit: read these episodes, for the reward may be exploited. A
note: a fact about the run, such as where its time goes. Errors and warnings are alarms."""
ALARMS = SEVERITIES[:2]


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
        severity: "error", "warning", "audit" or "note"; see `SEVERITIES`.
        subject: the part of the run that is concerned, such as an agent loop or a kind of rows;
            "" for the whole run. A run warns once for each name and subject.
        turns: for each of `episodes` the index of the turn that shows it; empty, or None for one of
            them: the whole episode shows it.

    Raises:
        ValueError: the severity is unknown, or `turns` has another length than `episodes`.
    """

    step: int
    text: str
    evidence: Mapping[str, float] = field(default_factory=dict)
    episodes: Sequence[str] = ()
    causes: Sequence[str] = ()
    tries: Sequence[str] = ()
    name: str = ""
    severity: Severity = "warning"
    subject: str = ""
    turns: Sequence[int | None] = ()

    def __post_init__(self):
        if self.severity not in SEVERITIES:
            raise ValueError(
                f"unknown severity {self.severity!r}. Severities: {', '.join(SEVERITIES)}"
            )
        if self.turns and len(self.turns) != len(self.episodes):
            raise ValueError(f"{len(self.turns)} turns for {len(self.episodes)} episodes")


def findings_table(findings: Sequence[Finding]) -> pa.Table:
    """Return one row per finding: the fields of `Finding`; `evidence` is JSON text."""
    texts = ("name", "severity", "subject", "text", "evidence")
    lists = ("episodes", "causes", "tries")
    schema = pa.schema(
        [
            ("step", pa.int64()),
            *((name, pa.string()) for name in texts),
            *((name, pa.list_(pa.string())) for name in lists),
            ("turns", pa.list_(pa.int32())),
        ]
    )
    rows = [asdict(f) | {"evidence": json.dumps(dict(f.evidence), default=float)} for f in findings]
    return pa.Table.from_pylist(rows, schema)


def describe(finding: Finding) -> str:
    """Return a finding as a few lines for a terminal; the first one ends with the diagnosis."""
    lines = [f"{finding.severity}: {finding.text} [{finding.name}]"]
    if finding.causes:
        lines.append(f"  likely cause: {finding.causes[0]}")
    if finding.tries:
        lines.append(f"  try: {finding.tries[0]}")
    return "\n".join(lines)
