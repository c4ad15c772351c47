"""SmolLM2 trains for a step by the recipe facts. What the run recorded is computed again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forked_python import run_agentrl
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl import load_run, registry
from agentrl.record import METRICS, read_metrics
from agentrl.report.run import Run
from agentrl.trainer.publisher import MAX_NOISE_GROWTH, MIN_NOISE
from agentrl.trajectory import Scored, Trajectory

ROOT = Path(__file__).parents[1]
STEPS = 1


@pytest.fixture(scope="module")
def run(tmp_path_factory, smollm2) -> Run:
    """A run of a step of 2 easy rows with 8 rollouts; 2 other rows validate it."""
    folder = tmp_path_factory.mktemp("real")
    lines = (ROOT / "recipes/facts/train.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    easy = [r for r in rows if r["data_source"] == "sum" and int(r["ground_truth"]) < 10]
    for name, part in (("train", easy[4:6]), ("val", easy[:2])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    done = run_agentrl(
        "train", "-c", "recipes/facts/run.yaml", f"data.train={folder}/train.jsonl",
        f"data.val={folder}/val.jsonl", "data.batch_size=2", "rollout.n=8",
        "rollout.max_turn_tokens=12", "optim.lr=4e-5", f"trainer.total_steps={STEPS}",
        "trainer.test_freq=0", "trainer.val_before_train=false", "trainer.save_freq=never",
        f"trainer.output={folder}/run", cwd=ROOT, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return load_run(folder / "run")


@pytest.fixture(scope="module")
def trained(run):
    """The model that the run has written, in float32."""
    return AutoModelForCausalLM.from_pretrained(run.folder / "model")


def played(run: Run, split: str) -> list[Scored]:
    return [rollout.scored for rollout in run.rollouts(split)]


def tokens_of(trajectory: Trajectory) -> tuple[Any, list[int]]:
    """The only segment of an answer, and the tokens of its only turn."""
    [segment], [turn] = trajectory.segments, trajectory.turns
    assert (turn.segment, turn.start) == (0, 0)
    return segment, list(segment.response_ids[: turn.end])


def largest_gap(model, trajectories: list[Trajectory]) -> float:
    """The largest difference of a sampled token's logprob from transformers' own."""
    gaps = []
    for trajectory in trajectories:
        segment, tokens = tokens_of(trajectory)
        ids = torch.tensor([[*segment.prompt_ids, *tokens]])
        with torch.no_grad():
            logprobs = model(ids).logits[0, -len(tokens) - 1 : -1].float().log_softmax(-1)
        own = logprobs[torch.arange(len(tokens)), ids[0, -len(tokens) :]]
        gaps.append((own - torch.tensor(segment.logprobs[: len(tokens)])).abs().max().item())
    return max(gaps)


def test_the_weights_change_and_the_engine_samples_from_them(run, trained, smollm2):
    base = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    before, after = base.state_dict(), trained.state_dict()
    assert before.keys() == after.keys()
    assert all(not after[name].equal(before[name]) for name in before)
    metrics = [data for _, data in read_metrics(run.folder / METRICS)][-STEPS:]
    assert any(data.get("actor/grad_norm", 0.0) > 0 for data in metrics)
    validated = [s.trajectory for s in played(run, "val")]
    assert largest_gap(trained, validated) < 1e-3
    assert largest_gap(base, validated) > 1e-2


def test_rewards_are_those_of_the_stored_texts(run, smollm2, own_registries):
    registry.load_file(str(ROOT / "recipes/facts/env.py"))
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    number, rewards = registry.rewards.get("number"), []
    for scored in played(run, "train"):
        trajectory = scored.trajectory
        text = tokenizer.decode(tokens_of(trajectory)[1]).removesuffix("<|im_end|>")
        assert trajectory.final_text == text
        assert scored.reward == scored.rewards["outcome"] == number(trajectory)
        rewards.append(scored.reward)
    assert len(rewards) == STEPS * 2 * 8 and 0 < sum(rewards) < len(rewards)


def test_masks_cover_exactly_the_sampled_tokens(run, smollm2):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    for rollout in run.rollouts("train"):
        trajectory = rollout.scored.trajectory
        segment, tokens = tokens_of(trajectory)
        prompt = tokenizer.apply_chat_template(
            [m.as_dict() for m in trajectory.sample.prompt], add_generation_prompt=True
        )
        assert list(segment.prompt_ids) == prompt["input_ids"]
        rest = len(segment.response_ids) - len(tokens)
        assert list(segment.response_mask) == [1] * len(tokens) + [0] * rest
        assert list(segment.versions) == [rollout.step - 1] * len(tokens) + [-1] * rest
        assert tokens[-1] == tokenizer.eos_token_id or len(tokens) == 12


def test_the_canary_is_inside_its_limit(run):
    metrics = [data for step, data in read_metrics(run.folder / METRICS) if step]
    assert len(metrics) == STEPS
    for data in metrics:
        assert 0 < data["canary/mismatch"] <= MAX_NOISE_GROWTH * MIN_NOISE
    assert sum(data["canary/drift"] for data in metrics) > 10 * MIN_NOISE


@pytest.mark.slow
def test_the_exported_model_validates_to_the_same_score(run, tmp_path):
    done = run_agentrl(
        "eval", "-c", run.folder / "config.yaml", "--model", run.folder / "model", "--output",
        tmp_path / "eval", cwd=ROOT, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    again = load_run(tmp_path / "eval")
    for split in ("val", "greedy"):
        recorded, repeated = (
            {(s.trajectory.sample.id, s.trajectory.rollout): (s.reward, tokens_of(s.trajectory)[1])
             for s in played(r, split)}
            for r in (run, again)
        )  # fmt: skip
        assert len(recorded) == 2 and recorded == repeated
