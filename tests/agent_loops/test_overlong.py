"""The penalty of overlong rollouts: exact numbers. Only sampled tokens count."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.trainer_fixtures import segment

from agentrl.agent_loops.attempt import Runtime
from agentrl.chat import ChatTemplate
from agentrl.config import Config, RewardConfig
from agentrl.engine.base import Sampling
from agentrl.engine.scripted import Scripted
from agentrl.evaluate import evaluate
from agentrl.learner.batch import collate
from agentrl.metrics import rollout_metrics
from agentrl.rewards import Scorer
from agentrl.rewards.scorer import overlong
from agentrl.rollout import Rollouts
from agentrl.testing import byte_tokenizer
from agentrl.tools import LocalToolbox
from agentrl.trajectory import Group, Message, Sample, Scored, Trajectory, Turn

SAMPLE = Sample("r", (Message("user", "What is 3*4?"),), "single_turn", "openai/gsm8k", "12")


@pytest.mark.parametrize(
    ("sampled", "expected"),
    [(0, 0), (80, 0), (81, -0.1), (85, -0.5), (99, -1.9), (100, -2), (101, -2), (10_000, -2)],
)
def test_the_penalty_grows_linearly_within_the_buffer(sampled, expected):
    assert overlong(sampled, limit=100, buffer=20, penalty=2.0) == pytest.approx(expected)


@given(st.integers(0, 300), st.integers(1, 200), st.integers(1, 200), st.floats(0, 10))
def test_the_penalty_is_monotonic_and_bounded(sampled, limit, buffer, penalty):
    here = overlong(sampled, limit, buffer, penalty)
    assert -penalty <= overlong(sampled + 1, limit, buffer, penalty) <= here <= 0


def episode(sampled: int, observed: int, stop_reason: str = "done") -> Trajectory:
    """A right answer after a turn with a tool that said much; half is sampled in each turn."""
    half = sampled // 2
    row = segment([1], ("A", [5] * half), ("E", [6] * observed), ("A", [7] * (sampled - half)))
    turns = (Turn(0, 0, half, "tool_calls"), Turn(0, half + observed, half + observed, "stop"))
    messages = (Message("assistant", "hm"), Message("tool", "!"), Message("assistant", "#### 12"))
    return Trajectory(SAMPLE, "e", 0, (row,), turns, (*SAMPLE.prompt, *messages), {}, stop_reason)


def score(trajectory: Trajectory, policy: Any = None, trains: bool = True, **keys: Any) -> Scored:
    section = RewardConfig(overlong_buffer=20, overlong_penalty=0.5, **keys)
    return asyncio.run(Scorer(section, policy, 100).score(trajectory, trains=trains))


def test_observed_tokens_do_not_count():
    for observed in (0, 15, 60, 1000):
        scored = score(episode(90, observed))
        assert scored.rewards["overlong"] == -0.25 and scored.reward == 0.75
        assert score(episode(80, observed)).rewards["overlong"] == 0.0


def test_the_penalty_is_a_reward_source_without_a_weight():
    scored = score(episode(100, 5), outcome_weight=3.0)
    assert dict(scored.rewards) == {"outcome": 1.0, "turn": 0, "tool": 0, "overlong": -0.5}
    assert scored.reward == 2.5
    metrics = rollout_metrics([Group(SAMPLE, (scored, score(episode(4, 5))))])
    assert metrics["reward/overlong"] == -0.25 and metrics["reward/outcome"] == 1.0
    batch = collate([Group(SAMPLE, (scored,))], 0)
    assert batch.token_rewards.sum() == 2.5, "the gradient sees it"


@pytest.mark.parametrize(("policy", "reward"), [("zero", -0.5), (0.125, 0.375), ("mask", 0.5)])
def test_the_penalty_is_added_after_the_budget_policy(policy, reward):
    scored = score(episode(100, 5, "trajectory_tokens"), {"trajectory_tokens": policy})
    assert scored.reward == reward and scored.masked == (policy == "mask")


def test_without_a_buffer_there_is_no_penalty():
    scored = asyncio.run(Scorer(RewardConfig(), {}, 100).score(episode(100, 5)))
    assert "overlong" not in scored.rewards and scored.reward == 1.0


def test_only_training_rollouts_are_penalized():
    assert score(episode(100, 5), trains=False).reward == 1.0
    tokenizer = byte_tokenizer()
    tree = {"rollout": {"max_trajectory_tokens": 20}, "reward": {"overlong_buffer": 20}}
    config = Config.model_validate(tree)
    engine = Scripted(["#### 12"], tokenizer)
    runtime = Runtime(engine, ChatTemplate(tokenizer), LocalToolbox(), config)
    rollouts = Rollouts(runtime, Scorer(config.reward, {}, 20), seed=0)
    try:
        [played] = rollouts.collect([SAMPLE], n=1, sampling=Sampling(), step=0, greedy=True)
        result = evaluate(rollouts, [SAMPLE], config.val)
    finally:
        rollouts.close()
    tokens = played.scored[0].trajectory.sampled_tokens
    assert 0 < tokens < 20 and played.scored[0].reward == 1 - tokens / 20
    assert played.greedy and played.greedy.reward == 1 - tokens / 20, "as the others, to compare"
    assert result.metrics["val/reward/mean@1"] == result.metrics["val/acc/mean@1"] == 1.0
    assert all("overlong" not in s.rewards for g in result.splits["val"] for s in g.scored)


def test_a_buffer_longer_than_the_budget_is_refused():
    tree = {"rollout": {"max_trajectory_tokens": 19}, "reward": {"overlong_buffer": 20}}
    with pytest.raises(ValueError, match="every rollout would get a penalty"):
        Config.model_validate(tree)
