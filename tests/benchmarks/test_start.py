"""Every benchmark starts: its imports exist, and `--help` shows what it measures."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.forked_python import run_python

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(path.name for path in BENCHMARKS.glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_benchmark_starts(script):
    done = run_python([BENCHMARKS / script, "--help"])
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout
