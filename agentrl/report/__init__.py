"""Recorded runs: their tables (`load_run`), and what went wrong in them (`@diagnosis`)."""

from __future__ import annotations

from agentrl.report import diagnoses as diagnoses  # registers the shipped diagnoses
from agentrl.report.finding import Finding
from agentrl.report.run import Run, diagnose, diagnosis, load_run

__all__ = ["Finding", "Run", "diagnose", "diagnosis", "load_run"]
