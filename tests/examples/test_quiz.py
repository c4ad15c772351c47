"""examples/quiz: turns that are marked one by one."""

from __future__ import annotations

import asyncio
import json
import statistics
from itertools import islice
from pathlib import Path

import pytest

from agentrl import play, registry
from agentrl.config import load_config
from agentrl.data import load_checked
from agentrl.demo import TINY_SETTINGS
from agentrl.preflight import make_plan
from agentrl.record import METRICS, read_metrics
from agentrl.rewards import Scorer
from agentrl.testing import Scripted, byte_tokenizer
from agentrl.trainer import Trainer

HERE = Path(__file__).parents[2] / "examples" / "quiz"


@pytest.fixture
def env():
    return registry.load_file(str(HERE / "env.py"))


def written(env, folder: Path, name: str, rows: int, seed: int, questions: int = 3) -> str:
    path = folder / name
    made = islice(env.rows(seed, questions), rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return str(path)


def played(env, tmp_path, answers):
    [sample] = load_checked(written(env, tmp_path, "one.jsonl", 1, 5), "tool_agent")
    tokenizer = byte_tokenizer()
    truth = sample.environment_kwargs["answers"]
    trajectory = play(sample, Scripted(answers(truth), tokenizer), tokenizer)
    config = load_config(str(HERE / "turns.yaml"))
    return asyncio.run(Scorer(config.reward).score(trajectory))


def test_the_right_answers_earn_all(env, tmp_path):
    scored = played(env, tmp_path, lambda truth: [f"#### {t}" for t in truth])
    assert scored.rewards["outcome"] == 1.0 and scored.metrics == {"acc": 1.0, "right": 1.0}
    assert scored.reward == pytest.approx(2.0)
    assert len(scored.trajectory.turns) == 3


def test_one_wrong_answer_costs_the_outcome_and_its_own_mark(env, tmp_path):
    scored = played(env, tmp_path, lambda truth: [f"#### {truth[0]}", "####", f"#### {truth[2]}"])
    assert scored.rewards["outcome"] == 0.0 and scored.metrics["right"] == pytest.approx(2 / 3)
    marks = [turn.rewards.get("turn", 0.0) for turn in scored.trajectory.turns]
    assert marks == pytest.approx([1 / 3, 0.0, 1 / 3])


def test_listing_all_numbers_earns_nothing(env, tmp_path):
    everything = " ".join(f"#### {n}" for n in range(10))
    scored = played(env, tmp_path, lambda truth: [everything] * 3)
    # The last one counts.
    assert scored.rewards["outcome"] == 0.0


def test_the_rows_and_settings_are_sound(env, tmp_path):
    rows = written(env, tmp_path, "rows.jsonl", 4, 1)
    for name in ("turns", "outcome"):
        config = load_config(
            str(HERE / f"{name}.yaml"), flags={"data.train": rows, "data.val": rows}
        )
        assert len(make_plan(config).train) == 4


@pytest.mark.slow
@pytest.mark.learning
def test_credit_of_turns_learns_faster(env, tmp_path, tiny_model):
    """Ten steps, three seeds each: where the outcome alone has begun, turns are further."""
    train = written(env, tmp_path, "train.jsonl", 2048, 1)
    val = written(env, tmp_path, "val.jsonl", 256, 2)

    def right_after(name: str, seed: int) -> float:
        output = tmp_path / f"{name}-{seed}"
        flags = {
            "data.train": train,
            "data.val": val,
            "model.path": str(tiny_model),
            "trainer.output": str(output),
        }
        overrides = [
            "trainer.total_steps=10", "trainer.val_before_train=false", "trainer.device=cpu",
            "tools.transport=in_process", f"trainer.seed={seed}",
        ]  # fmt: skip
        Trainer(
            load_config(str(HERE / f"{name}.yaml"), overrides, flags, preset=TINY_SETTINGS)
        ).run()
        last = list(read_metrics(output / METRICS))[-1][1]
        return last["val/acc/mean@1"]

    shares = {name: [right_after(name, s) for s in range(3)] for name in ("turns", "outcome")}
    print(shares)
    assert statistics.mean(shares["turns"]) >= statistics.mean(shares["outcome"]) + 0.04
    assert min(shares["turns"]) > min(shares["outcome"])
