"""examples/my_agent: an agent that knows nothing of agentrl."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from agentrl import play
from agentrl.config import AgentConfig, Config, load_config
from agentrl.data import load_checked
from agentrl.demo import TINY_SETTINGS
from agentrl.record import METRICS, read_metrics
from agentrl.testing import Scripted, byte_tokenizer, call
from agentrl.trainer import Trainer

HERE = Path(__file__).parents[2] / "examples" / "my_agent"


@pytest.fixture
def rows(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    monkeypatch.setattr(sys, "argv", ["rows.py", str(path)])
    runpy.run_path(str(HERE / "rows.py"), run_name="__main__")
    return str(path)


@pytest.mark.parametrize(
    "agent",
    [
        {"command": f"{sys.executable} {HERE / 'my_agent.py'}"},
        {"python": f"{HERE / 'my_agent.py'}:run"},
    ],
    ids=["command", "python"],
)
def test_the_agent_plays_a_row(rows, agent):
    sample = load_checked(rows)[0]
    turns = [
        call("calculator", expression="7*9-(1+1)"),
        call("calculator", expression="x"),
        "#### 1",
    ]
    engine, tokenizer = Scripted(turns, byte_tokenizer()), byte_tokenizer()
    t = play(sample, engine, tokenizer, config=Config(agent=AgentConfig(**agent)))
    first, second = (turn.tool_results[0].content for turn in t.turns[:2])
    assert first == "61" and second.startswith("Error: ")
    assert t.final_text == "#### 1" and len(t.segments) == 1


@pytest.mark.learning
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_it_learns(tiny_model, rows, tmp_path, seed):
    config = load_config(
        None,
        [
            f"agent.python={HERE / 'my_agent.py'}:run",
            "trainer.total_steps=40",
            "data.batch_size=8",
            "trainer.save_freq=0",
            f"trainer.seed={seed}",
        ],
        {
            "data.train": rows,
            "model.path": str(tiny_model),
            "trainer.output": str(tmp_path / "run"),
        },
        preset=TINY_SETTINGS,
    )
    Trainer(config).run()
    data = [d for _, d in read_metrics(tmp_path / "run" / METRICS)]
    rewards = [d["critic/score/mean"] for d in data]
    assert sum(rewards[-5:]) / 5 >= sum(rewards[:5]) / 5 + 0.25
    assert all(d["rollout/segments"] == 1.0 for d in data)
