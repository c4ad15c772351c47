"""Budgets from the episode that spends one to the batch that trains, and what never happens."""

import asyncio
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.agent_loops.play import play
from agentrl.config import AlgorithmConfig, Config
from agentrl.config.sections import BUDGETS
from agentrl.engine.scripted import Scripted
from agentrl.errors import EngineError
from agentrl.learner.algorithms import make_targets
from agentrl.learner.batch import collate
from agentrl.rewards import Scorer, reward
from agentrl.testing import byte_tokenizer, call, react_call
from agentrl.tools import tool
from agentrl.trajectory import Group, Message, Sample

TOKENIZER = byte_tokenizer()


@tool
def repeat_budgets(text: str, times: int = 1) -> str:
    """Say a text again."""
    return text * times


@tool
async def nap_budgets() -> str:
    """Sleep for long."""
    await asyncio.sleep(60)
    return "slept"


@reward("speaks_of_17_budgets")
def speaks_of_17(trajectory) -> float:
    return 1.0 if "17" in trajectory.assistant_text else 0.5


def sample(loop="tool_agent"):
    names = ("repeat_budgets", "nap_budgets")
    return Sample("s", (Message("user", "How much is 3*4+5?"),), loop, tools=names)


ROLLOUT = {
    "max_turn_tokens": 120,
    "max_trajectory_tokens": 700,
    "max_turns": 3,
    "max_tool_calls": 3,
    "timeout_s": 2.0,
}
ONE_CALL = call("repeat_budgets", text="17")
SPENDING = {
    "turn_tokens": ["17" * 100],
    "trajectory_tokens": [call("repeat_budgets", text="17", times=400)],
    "turns": [ONE_CALL] * 3,
    "tool_calls": [ONE_CALL] * 2 + [call("repeat_budgets", text="1") * 2],
    "time": ["17" + call("nap_budgets")],
    "done": ["17"],
    "done badly": ["no"],
}  # fmt: skip


@cache
def played(script):
    config = Config.model_validate({"rollout": ROLLOUT})
    return play(sample(), Scripted(SPENDING[script], TOKENIZER), TOKENIZER, config=config)


def batch_of(trajectories, policies):
    """One group, scored as a run does."""
    config = Config.model_validate(
        {
            "rollout": {"budget_policy": policies},
            "reward": {"function": "speaks_of_17_budgets"},
        }
    )
    scorer = Scorer(config.reward, config.rollout.budget_policy)

    async def scored():
        return tuple([await scorer.score(t) for t in trajectories])

    return collate([Group(sample(), asyncio.run(scored()))], TOKENIZER.pad_token_id)


def targets_of(batch):
    config = Config(algorithm=AlgorithmConfig(norm_adv_by_std=False))
    return make_targets(batch, config, None, None, None)


WORTH = {"keep": 1.0, "zero": 0.0, "mask": 1.0, 0.25: 0.75}


@pytest.mark.parametrize("policy", WORTH)
@pytest.mark.parametrize("reason", BUDGETS)
def test_budget_policies_set_the_reward_of_an_episode_that_spent_its_budget(reason, policy):
    trajectories = [played("done"), played("done badly"), played(reason)]
    spent = trajectories[-1]
    assert (spent.stop_reason, spent.final_text[:1] != "") == (reason, True)
    batch = batch_of(trajectories, {reason: policy})
    targets = targets_of(batch)
    trains = policy != "mask"
    assert batch.rewards.tolist() == [1.0, 0.5, WORTH[policy]]
    assert batch.token_rewards.sum(1).tolist() == batch.rewards.tolist()
    assert batch.train.tolist() == [True, True, trains]
    # What was sampled is on record in any case, and in the loss where the rollout trains.
    sampled = [t.sampled_tokens for t in trajectories]
    assert batch.response_mask.sum(1).tolist() == sampled and min(sampled) > 0
    chosen = [sampled[0], sampled[1], sampled[2] * trains]
    assert (targets.weights > 0).sum(1).tolist() == chosen
    assert torch.equal(targets.weights > 0, batch.action_mask)
    assert targets.weights.sum().item() == pytest.approx(1.0)
    # The baseline is that of the rollouts that train.
    baseline = batch.rewards[batch.train].mean()
    expected = ((batch.rewards - baseline) * batch.train)[:, None] * batch.response_mask
    torch.testing.assert_close(targets.advantages, expected.to(targets.advantages.dtype))


@pytest.mark.parametrize("reason", BUDGETS)
def test_a_masked_rollout_changes_nothing_for_the_others(reason):
    rest = [played("done"), played("done badly")]
    alone, beside = batch_of(rest, {}), batch_of([*rest, played(reason)], {reason: "mask"})
    for ours, theirs in (
        (targets_of(alone).advantages, targets_of(beside).advantages),
        (targets_of(alone).weights, targets_of(beside).weights),
    ):
        width = ours.shape[1]
        assert torch.equal(ours, theirs[:2, :width])
        assert not theirs[:, width:].any() and not theirs[2].any()


@pytest.mark.parametrize("policy", WORTH)
def test_an_episode_without_a_turn_is_a_row_without_tokens(policy):
    late = Config.model_validate({"rollout": {"timeout_s": 1e-9}})
    nothing = play(sample(), Scripted([], TOKENIZER), TOKENIZER, config=late)
    assert (nothing.stop_reason, nothing.sampled_tokens) == ("time", 0)
    batch = batch_of([played("done"), nothing], {"time": policy})
    targets = targets_of(batch)
    assert targets.weights.sum().item() == pytest.approx(1.0)
    assert not batch.response_mask[1].any() and targets.advantages.isfinite().all()


# -- what the engine is asked, and what the row holds ---------------------------------------------


class Strict(Scripted):
    """Refuses what a server with a context limit refuses; remembers what it sampled."""

    def __init__(self, answers, max_length):
        super().__init__(answers, TOKENIZER, max_length=max_length)
        self.sampled = []

    async def generate(self, prompt_ids, sampling, **rest):
        total = len(prompt_ids) + sampling.max_tokens
        if sampling.max_tokens < 1 or total > self.max_length:
            raise EngineError(f"400: {total} tokens, at most {self.max_length}")
        generation = await super().generate(prompt_ids, sampling, **rest)
        self.sampled.append(generation.token_ids)
        return generation


def assert_only_what_was_sampled_trains(trajectory, engine):
    [row] = trajectory.segments
    own = [i for i, m in zip(row.response_ids, row.response_mask, strict=True) if m]
    assert own == [i for ids in engine.sampled for i in ids]
    for turn, ids in zip(trajectory.turns, engine.sampled, strict=True):
        assert row.response_ids[turn.start : turn.end] == ids
    assert not row.response_mask or row.response_mask[-1] == 1, "nothing half in the row"


answer_texts = st.sampled_from(
    [
        ONE_CALL,
        ONE_CALL * 3,
        ONE_CALL[:-3],
        call("repeat_budgets", text="😀", times=60),
        react_call("repeat_budgets", text="17"),
        react_call("repeat_budgets", text="17", times=200) + " made up",
        "<tool_call>{broken</tool_call>",
        "word " * 30,
        "<|im_end|>",
    ]
)


@given(
    answers=st.lists(answer_texts, max_size=6),
    loop=st.sampled_from(["tool_agent", "react"]),
    max_length=st.integers(1, 3000),
    max_turn=st.integers(1, 150),
    max_trajectory=st.integers(1, 800),
    max_result=st.integers(1, 300),
)
def test_no_request_is_too_long_and_only_sampled_tokens_train(
    answers, loop, max_length, max_turn, max_trajectory, max_result
):
    budgets = {"max_turn_tokens": max_turn, "max_trajectory_tokens": max_trajectory}
    config = Config.model_validate({"rollout": budgets, "tools": {"max_result_tokens": max_result}})
    engine = Strict([*answers, "done", "done", "done"], max_length)
    t = play(sample(loop), engine, TOKENIZER, config=config)
    assert_only_what_was_sampled_trains(t, engine)
    [row] = t.segments
    assert len(row.response_ids) <= max_trajectory
    assert len(row.prompt_ids) + len(row.response_ids) <= max_length or not t.turns
    assert all(request.sampling.max_tokens <= max_turn for request in engine.requests)
    assert t.stop_reason in ("done", *BUDGETS)
    spent = [turn.finish_reason for turn in t.turns if turn.finish_reason == "length"]
    assert not spent or t.stop_reason in ("turn_tokens", "trajectory_tokens")


@pytest.mark.parametrize("by", ["max_trajectory_tokens", "max_length"])
def test_a_result_that_does_not_fit_ends_the_episode(by):
    """To the token: with room for the result alone, for it and one token more, and for all."""

    def attempt(room):
        prompt = len(free.segments[0].prompt_ids)
        engine = Strict(answers, prompt + room if by == "max_length" else 9999)
        rollout = {by: room} if by == "max_trajectory_tokens" else {}
        t = play(sample(), engine, TOKENIZER, config=Config.model_validate({"rollout": rollout}))
        assert_only_what_was_sampled_trains(t, engine)
        return t

    answers = [ONE_CALL, "17"]
    free = play(sample(), Scripted(answers, TOKENIZER), TOKENIZER)
    first, second = free.turns
    without = attempt(second.start)
    assert (without.stop_reason, len(without.turns)) == ("trajectory_tokens", 1)
    assert without.segments[0].response_ids == free.segments[0].response_ids[: first.end]
    assert without.turns[0].tool_results[0].content == "17", "it ran, and is on record"
    started = attempt(second.start + 1)
    assert (started.stop_reason, len(started.turns)) == ("trajectory_tokens", 2)
    assert started.segments[0].response_ids == free.segments[0].response_ids[: second.start + 1]
    whole = attempt(second.end)
    assert (whole.stop_reason, whole.segments) == ("done", free.segments)


def test_a_prompt_longer_than_the_engine_takes_is_never_sent():
    engine = Strict(["never said"], 5)
    t = play(sample(), engine, TOKENIZER)
    assert (t.stop_reason, t.turns, engine.requests) == ("trajectory_tokens", (), [])
