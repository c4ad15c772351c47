"""The starter project: its tests pass, it is wired, and it trains."""

import os
import subprocess
import sys
from pathlib import Path

AGENTRL = [sys.executable, "-m", "agentrl.cli"]


def run(command, cwd):
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_starter_project(tmp_path, tiny_model):
    said = run([*AGENTRL, "init", "my_env"], tmp_path)
    folder = tmp_path / "my_env"
    assert "agentrl train -c run.yaml" in said
    assert {"env.py", "run.yaml", "test_env.py", "README.md"} <= set(os.listdir(folder))
    run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], folder)
    said = run([*AGENTRL, "check", "-c", "run.yaml"], folder)
    assert "calculator" in said and "interaction coach" in said and "all is wired" in said
    run([*AGENTRL, "train", "-c", "run.yaml", "trainer.total_steps=2"], folder)
    assert (Path(folder) / "runs/starter/curve.svg").exists()
