"""Recorded runs: their tables (`load_run`), and what went wrong in them (`@diagnosis`)."""

from __future__ import annotations

from agentrl.report import shipped as shipped  # registers the shipped diagnoses
from agentrl.report.diagnosis import Finding, diagnose, diagnosis
from agentrl.report.run import Run, load_run

__all__ = ["Finding", "Run", "diagnose", "diagnosis", "load_run"]
