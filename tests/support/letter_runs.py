"""Short runs whose reward is the number of letters, and what of them must be equal."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from agentrl.config import load_config
from agentrl.engine.local import LocalEngine
from agentrl.errors import EngineError, RunStopped
from agentrl.store import TrajectoryStore
from agentrl.trainer import Trainer
from agentrl.trajectory import Segment

Start = Callable[..., Path]
"""Runs with an output folder and overrides; returns the folder."""


def letter_runs(folder: Path, env: str, model: Path, keys: Sequence[str]) -> Start:
    """Return a function that trains three steps with the loop and the reward of a file."""
    (folder / "env.py").write_text(env)
    rows = [{"prompt": f"Say {i}.", "ground_truth": "1"} for i in range(4)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def start(output: Path, *overrides: str) -> Path:
        base = [
            "trainer.total_steps=3", "trainer.save_freq=0", "data.batch_size=2", "rollout.n=4",
            "rollout.max_turn_tokens=16", "trainer.device=cpu", "tools.transport=in_process",
            f"model.path={model}",
        ]  # fmt: skip
        flags = {
            "data.train": str(folder / "rows.jsonl"),
            "trainer.output": str(output),
            "files": [str(folder / "env.py")],
        }
        Trainer(load_config(None, [*base, *keys, *overrides], flags)).run()
        return output

    return start


def segments(output: Path, step: int | None = None) -> list[Segment]:
    stored = TrajectoryStore(output / "trajectories").read(step)
    return [segment for s in stored for segment in s.scored.trajectory.segments]


def metrics(output: Path) -> list[dict[str, float]]:
    lines = [json.loads(line)["data"] for line in (output / "metrics.jsonl").open()]
    return [{k: v for k, v in x.items() if "timing" not in k and "perf/" not in k} for x in lines]


def weights(output: Path) -> str:
    return hashlib.sha256((output / "model/model.safetensors").read_bytes()).hexdigest()


def check_workers(start: Start, trained: Path, output: Path, *overrides: str) -> None:
    """Check that two rollout workers play and train what the run's process does."""
    other = start(output, *overrides, "rollout.workers=2")
    assert segments(other) == segments(trained) and weights(other) == weights(trained)


def check_resume(start: Start, trained: Path, output: Path, *overrides: str) -> None:
    """Check that a run whose engine fails in its second step continues bit for bit."""
    real = LocalEngine.generate

    async def generate(self, *args, **kwargs):
        if kwargs["episode_id"].startswith("train-2-"):
            raise EngineError("the engine is down")
        return await real(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalEngine, "generate", generate)
        with pytest.raises(RunStopped, match="is down"):
            start(output, *overrides)
    resumed = start(output, *overrides)
    assert metrics(resumed) == metrics(trained) and segments(resumed) == segments(trained)
    before, after = (load_file(x / "model/model.safetensors") for x in (trained, resumed))
    assert all(torch.equal(before[name], after[name]) for name in before)
