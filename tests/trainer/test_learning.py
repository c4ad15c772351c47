"""Runs that must learn, and broken runs that must be detected."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pyarrow.parquet as pq
import pytest
import torch

from agentrl.config import load_config
from agentrl.demo import TINY_SETTINGS
from agentrl.errors import RunStopped
from agentrl.learner.batch import collate
from agentrl.learner.mismatch import MismatchGuard
from agentrl.record import read_metrics
from agentrl.trainer import Trainer
from agentrl.trainer import step as step_module

pytestmark = [pytest.mark.learning, pytest.mark.timeout(600)]

DATA = Path(__file__).parents[2] / "datasets"


def learn(tiny_model, folder, steps, *overrides):
    """Train the tiny model; returns the mean training reward of each quarter of the run."""
    config = load_config(
        None,
        [
            f"trainer.total_steps={steps}",
            "trainer.val_before_train=false",
            f"data.train={DATA / 'arithmetic_train.parquet'}",
            *overrides,
        ],
        {
            "model.path": str(tiny_model),
            "trainer.output": str(folder),
        },
        preset=TINY_SETTINGS,
    )
    Trainer(config).run()
    rewards = [data["critic/score/mean"] for _, data in read_metrics(folder / "metrics.jsonl")]
    quarter = len(rewards) // 4
    return [sum(rewards[i * quarter : (i + 1) * quarter]) / quarter for i in range(4)]


def train_tool_tokens(*args):
    """The bug that the response mask protects from: what tools wrote trains as well."""
    batch = collate(*args)
    places = torch.arange(batch.response_ids.shape[1])
    return replace(batch, response_mask=places < batch.response_lengths[:, None])


def shuffle_rewards(*args):
    """Rewards dealt out at random: nothing to learn."""
    batch = collate(*args)
    generator = torch.Generator().manual_seed(len(batch.rollout) + int(batch.response_ids.sum()))
    order = torch.randperm(len(batch.rewards), generator=generator)
    return replace(batch, rewards=batch.rewards[order])


PLAIN = ("algorithm.tis_cap=0",)  # as the broken ones run: tool tokens have no engine logprobs


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_mask_bug_learns_slower(tiny_model, tmp_path, monkeypatch, seed):
    settings = (*PLAIN, f"trainer.seed={seed}")
    right = learn(tiny_model, tmp_path / "right", 24, *settings)
    monkeypatch.setattr(step_module, "collate", train_tool_tokens)
    monkeypatch.setattr(MismatchGuard, "check", lambda *_: None)  # It would end such a run.
    wrong = learn(tiny_model, tmp_path / "wrong", 24, *settings)
    print(f"seed {seed}: right {right}, tool tokens trained {wrong}")
    assert right[3] >= right[0] + 0.15
    assert (right[2] + right[3]) / 2 >= (wrong[2] + wrong[3]) / 2 + 0.10


def test_the_guard_sees_a_mask_bug_at_once(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(step_module, "collate", train_tool_tokens)
    with pytest.raises(RunStopped, match="engine and trainer disagree"):
        learn(
            tiny_model, tmp_path, 4, *PLAIN,
            "data.batch_size=4", "rollout.n=4", "tools.transport=in_process",
        )  # fmt: skip


@pytest.mark.slow
def test_shuffled_rewards_do_not_rise(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(step_module, "collate", shuffle_rewards)
    quarters = learn(tiny_model, tmp_path, 16)
    print(f"shuffled {quarters}")
    assert max(quarters) <= quarters[0] + 0.10


@pytest.mark.slow
def test_ppo_learns(tiny_model, tmp_path):
    quarters = learn(tiny_model, tmp_path, 24, "algorithm.name=ppo", "optim.critic_lr=1e-3")
    print(f"ppo {quarters}")
    assert quarters[3] >= quarters[0] + 0.20


@pytest.mark.slow
def test_lora_learns(tiny_model, tmp_path):
    quarters = learn(tiny_model, tmp_path, 20, "model.lora_rank=8", "optim.lr=2e-3")
    print(f"lora {quarters}")
    assert quarters[3] >= quarters[0] + 0.20


MIXED = """
from agentrl import reward

@reward("mixed_difficulty")
def mixed(trajectory):
    truth = trajectory.sample.ground_truth
    if truth in ("any", "none"):
        return float(truth == "any")
    return float(trajectory.final_text.rpartition("####")[2].strip() == truth)
"""


@pytest.fixture(scope="module")
def mixed_rows(tmp_path_factory):
    """A tenth of the rows can be learned. No answer solves 45 %, and every answer the others."""
    folder = tmp_path_factory.mktemp("mixed")
    (folder / "env.py").write_text(MIXED)
    for name, count in (("train", 320), ("val", 80)):
        table = pq.read_table(DATA / f"arithmetic_{name}.parquet").to_pylist()
        rows = [
            {"prompt": row["prompt"], "ground_truth": row["reward_model"]["ground_truth"]}
            for row in table
            if row["agent_name"] == "single_turn"
        ][:count]
        for i, row in enumerate(rows if name == "train" else []):
            row["ground_truth"] = (
                "none" if 32 <= i < 176 else "any" if i >= 176 else row["ground_truth"]
            )
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_curriculum_needs_fewer_steps(tiny_model, mixed_rows, tmp_path, seed):
    """Measured in benchmarks/README.md, A curriculum: 0.6 takes 40 to 60 steps without one."""
    accuracy, steps = {}, {}
    for curriculum in ("null", "{low: 0.1, high: 0.9}"):
        folder = tmp_path / f"run{len(accuracy)}"
        learn(
            tiny_model, folder, 45, f"trainer.seed={seed}", f"data.curriculum={curriculum}",
            f"data.train={mixed_rows / 'train.jsonl'}", f"data.val={mixed_rows / 'val.jsonl'}",
            f"files=[{mixed_rows / 'env.py'}]", "reward.function=mixed_difficulty",
            "data.batch_size=16", "rollout.n=8", "rollout.max_turn_tokens=16", "optim.lr=1e-4",
            "optim.lr_final=1", "trainer.test_freq=5", "val.n=2", "trainer.save_freq=never",
        )  # fmt: skip
        record = read_metrics(folder / "metrics.jsonl")
        validations = {step: data["val/acc/mean@2"] for step, data in record if step % 5 == 0}
        accuracy[curriculum] = mean(validations[step] for step in (35, 40, 45))
        # In the first pass of 20 steps, both play each row once.
        steps[curriculum] = min((s for s, v in validations.items() if v >= 0.6 - 1e-9), default=50)
    print(f"seed {seed}: {accuracy}, steps to 0.6: {steps}")
    uniform, chosen = accuracy.values()
    assert chosen >= uniform + 0.05
    without, with_curriculum = steps.values()
    assert with_curriculum < without
