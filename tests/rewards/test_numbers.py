"""The numbers that are rewards: the same ones wherever an episode gets a reward."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from agentrl import (
    Interaction,
    Message,
    Reply,
    Sample,
    ToolResult,
    agent_loop,
    interaction,
    play,
    tool,
)
from agentrl.agent_loops.control import EpisodeControl
from agentrl.compat.verl.adapters import convert_result
from agentrl.errors import UserCodeError
from agentrl.rewards.base import parse_score
from agentrl.testing import Scripted, byte_tokenizer, call
from agentrl.trajectory import Scores

TOKENIZER = byte_tokenizer()


def play_with(**numbers):
    """Play an episode whose parts return these rewards."""

    @tool
    class Payer:
        def pay(self):
            """Pay."""
            return ToolResult("ok", reward=numbers.get("call"))

        def reward(self):
            return numbers.get("tool", 0)

    @interaction("payer")
    class Answer(Interaction):
        async def respond(self, messages):
            return Reply("", numbers.get("reply", 0), done=True)

    @agent_loop("paid")
    async def paid(ep):
        await ep.generate()
        await ep.call_tools()
        ep.reward(numbers.get("turn", 0))
        EpisodeControl(ep).set_outcome(numbers.get("outcome", 0))
        await ep.generate()
        await ep.interact()

    question = (Message("user", "x"),)
    row = Sample("row", question, agent_name="paid", tools=("payer",), interaction="payer")
    return play(row, Scripted([call("pay"), "done"], TOKENIZER), TOKENIZER)


@pytest.mark.parametrize(
    "number", [np.float32(0.5), torch.tensor(0.5), Fraction(1, 2), Decimal("0.5"), True]
)
def test_any_real_number_is_a_reward_everywhere(number):
    t = play_with(**dict.fromkeys(("call", "tool", "reply", "turn", "outcome"), number))
    value = float(number)
    assert t.scores.outcome == t.tool_reward == value
    assert [turn.rewards["turn"] for turn in t.turns] == [value, value]
    assert t.turn_rewards("tool") == value
    scores = parse_score("here", {"score": number, "more": number})
    assert scores == Scores(value, metrics={"more": value})
    assert convert_result(("x", number), "here").reward == value


@pytest.mark.parametrize("value", ["0.5", float("nan"), 10**400, 1j, [1, 2]])
@pytest.mark.parametrize("place", ["tool", "reply", "turn", "outcome"])
def test_everything_else_is_refused(place, value):
    with pytest.raises(UserCodeError, match="finite number"):
        play_with(**{place: value})
