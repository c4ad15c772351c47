"""On-policy distillation: a student reaches its teacher without a reward, and nothing is guessed."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from agentrl.config import load_config
from agentrl.errors import UserError
from agentrl.learner.learner import Learner
from agentrl.record import read_metrics
from agentrl.replay.replay import Replayer, replay
from agentrl.report.run import Run
from agentrl.store import TrajectoryStore
from agentrl.trainer import Trainer

ENV = """
from agentrl import ToolCall, ToolResult, agent_loop, reward, tool

@reward("nothing_opd")
def nothing(trajectory) -> float:
    return 0.0

@reward("letters_opd")
def letters(trajectory) -> float:
    return len(set(trajectory.assistant_text)) / 10

@tool
def weather_opd(city: str = "") -> ToolResult:
    "Say what the weather is."
    return ToolResult("It rains and rains.")

@agent_loop("two_turns_opd")
async def two_turns(ep):
    await ep.generate(parse=lambda text: [ToolCall("weather_opd", {})])
    await ep.call_tools()
    await ep.generate()
"""


@pytest.fixture(scope="module")
def teacher(random_model, tmp_path_factory) -> Path:
    """The folder of another random model with the same tokenizer, which is more certain."""
    folder = tmp_path_factory.mktemp("teacher") / "model"
    shutil.copytree(random_model, folder)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(7)
    changed = {
        name: t + 0.3 * torch.randn(t.shape, generator=generator) if t.dim() > 1 else t
        for name, t in weights.items()
    }
    save_file(changed, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def train(random_model, teacher, tmp_path_factory):
    """Return a function that trains a run, and returns its folder."""
    home = tmp_path_factory.mktemp("opd")
    (home / "env.py").write_text(ENV)
    rows = [
        {
            "prompt": f"Say {i}.",
            "data_source": "ab"[i % 2],
            "ground_truth": str(i),
            "agent_name": "two_turns_opd",
            "tools": ["weather_opd"],
        }
        for i in range(8)
    ]
    (home / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def run(name: str, *keys: str) -> Path:
        base = [
            "algorithm.name=opd", "trainer.total_steps=4", "trainer.save_freq=2",
            "data.batch_size=4", "rollout.n=2", "rollout.max_turn_tokens=8", "optim.lr=0.01",
            "trainer.device=cpu", "tools.transport=in_process", "reward.function=nothing_opd",
            f"teacher.model={teacher}",
        ]  # fmt: skip
        flags = {
            "data.train": str(home / "rows.jsonl"),
            "model.path": str(random_model),
            "trainer.output": str(home / name),
            "files": [str(home / "env.py")],
        }
        Trainer(load_config(None, [*base, *keys], flags)).run()
        return home / name

    return run


def kls(folder: Path) -> list[float]:
    return [m["teacher/reverse_kl"] for _, m in read_metrics(folder / "metrics.jsonl")]


def weights_of(folder: Path) -> bytes:
    return (folder / "model/model.safetensors").read_bytes()


def test_a_student_reaches_its_teacher_without_a_reward(train):
    folder = train("reach", "trainer.total_steps=60", "optim.lr=0.02", "data.batch_size=8")
    first, last = kls(folder)[0], sum(kls(folder)[-5:]) / 5
    print(first, last)
    assert first > 1 and last < 0.1 * first
