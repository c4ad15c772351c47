"""The metrics of the engine's prefix cache."""

from array import array
from dataclasses import replace

import pytest

from agentrl.agent_loops import agent_loop
from agentrl.agent_loops.attempt import Runtime
from agentrl.chat import ChatTemplate
from agentrl.config import Config
from agentrl.engine.base import Sampling
from agentrl.engine.scripted import Scripted
from agentrl.metrics import rollout_metrics
from agentrl.rewards import Scorer
from agentrl.rollout import Rollouts
from agentrl.testing import byte_tokenizer
from agentrl.tools import LocalToolbox
from agentrl.trajectory import Group, Message, Sample, Scored, Segment, Trajectory, Turn

EMPTY = Segment(array("i"), array("i"), array("i"), array("f"), array("i"))
NAME = "rollout/cached_token_ratio"


def ratios(*turns: tuple[int, int, int]) -> dict[str, float]:
    """Of one rollout's turns: conversation, prompt tokens, those cached."""
    sample = Sample("r", (Message("user", "?"),))
    made = tuple(
        Turn(0, 0, 1, "stop", thread=thread, prompt_tokens=prompt, cached_tokens=cached)
        for thread, prompt, cached in turns
    )
    trajectory = Trajectory(sample, "e", 0, (EMPTY,), made, (), {}, "done")
    group = Group(sample, (Scored(trajectory, {}, 0.0),))
    return {k: v for k, v in rollout_metrics([group]).items() if k.startswith(NAME)}


def test_later_turns_are_those_after_a_conversations_first():
    assert ratios((0, 10, 5), (0, 30, 27), (1, 20, 0), (1, 40, 36), (0, 100, 95)) == {
        NAME: pytest.approx((5 + 27 + 0 + 36 + 95) / 200),
        f"{NAME}/later_turns": pytest.approx((27 + 36 + 95) / 170),
    }


def test_without_later_turns_there_are_no_metrics_of_them():
    assert ratios((0, 10, 5), (1, 10, 0)) == {NAME: 0.25}


def test_an_engine_that_reports_no_prompts_has_no_ratio():
    assert ratios((0, 0, 0), (0, 0, 0)) == {}


class Caching(Scripted):
    """Finds all but the last four tokens of each prompt in its cache."""

    async def generate(self, prompt_ids, sampling, **kwargs):
        generation = await super().generate(prompt_ids, sampling, **kwargs)
        return replace(generation, cached_tokens=len(prompt_ids) - 4)


def test_each_turn_has_the_number_of_cached_tokens():
    @agent_loop("twice")
    async def twice(ep):
        await ep.generate()
        ep.observe(Message("user", "And?"))
        await ep.generate()

    tokenizer = byte_tokenizer()
    engine, config = Caching(["a", "b"], tokenizer), Config()
    runtime = Runtime(engine, ChatTemplate(tokenizer), LocalToolbox(), config)
    rollouts = Rollouts(runtime, Scorer(config.reward), seed=0)
    sample = Sample("r", (Message("user", "?"),), "twice", "openai/gsm8k", "12")
    try:
        [group] = rollouts.collect([sample], n=1, sampling=Sampling(), step=0)
    finally:
        rollouts.close()
    prompt_lengths = [len(r.prompt_ids) for r in engine.requests]
    turns = group.scored[0].trajectory.turns
    assert [(t.prompt_tokens, t.cached_tokens) for t in turns] == [
        (n, n - 4) for n in prompt_lengths
    ]
    metrics = rollout_metrics([group])
    assert metrics[f"{NAME}/later_turns"] == pytest.approx(
        (prompt_lengths[1] - 4) / prompt_lengths[1]
    )
