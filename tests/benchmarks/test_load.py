"""The benchmark of many episodes in one process runs, and prints its five figures."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.forked_python import run_python

LOAD = Path(__file__).parents[2] / "benchmarks" / "load.py"


@pytest.mark.slow  # It trains a tokenizer: 10 s.
@pytest.mark.parametrize("tools", ["local", "http"])
def test_a_case(tools):
    env = {**os.environ, "PYTHONPATH": str(LOAD.parent)}
    done = run_python([LOAD, "--case", 4, tools, 0, 0, 0.25], env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    figures = {line["name"]: line["value"] for line in map(json.loads, done.stdout.splitlines())}
    parts = ("cpu", "turns", "wall", "stall", "rss", "files")
    assert [*figures] == [f"load/{tools}/4/{part}" for part in parts]
    assert 1.0 <= figures[f"load/{tools}/4/wall"] < 10.0 and figures[f"load/{tools}/4/cpu"] > 0
