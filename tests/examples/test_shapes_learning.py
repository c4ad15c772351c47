"""A tiny model with random weights learns to count what is in pictures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.forked_python import run_agentrl

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_model_learns_to_see_from_nothing(tmp_path):
    def python(*words):
        done = subprocess.run(
            [sys.executable, *map(str, words)], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr

    def agentrl(*words):
        done = run_agentrl(*words, cwd=ROOT, timeout=1500)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def rows(name, count, seed):
        file = tmp_path / f"{name}.parquet"
        python("examples/shapes/env.py", file, "--rows", count, "--seed", seed, "--difficulty", 0)
        return file

    python("examples/shapes/tiny.py", tmp_path / "tiny")
    val = rows("val", 64, 3)
    agentrl(
        "sft", "--dataset", rows("sft", 2048, 1), "--column", "answer",
        "--model", tmp_path / "tiny", "--output", tmp_path / "sees",
        "--steps", 600, "--batch-size", 16, "--lr", 1e-3, "optim.weight_decay=0",
    )  # fmt: skip
    accuracy = {}
    for name in ("tiny", "sees"):
        output = tmp_path / f"eval_{name}"
        agentrl(
            "eval", "--file", "examples/shapes/env.py", "--dataset", val,
            "--model", tmp_path / name, "--output", output,
            "reward.function=shapes", "rollout.max_turn_tokens=16", "val.n=4",
        )  # fmt: skip
        metrics = json.loads((output / "metrics.json").read_text())
        accuracy[name] = metrics["val/reward/mean@4"]
    assert accuracy["tiny"] < 0.1 and accuracy["sees"] > 0.9, accuracy
