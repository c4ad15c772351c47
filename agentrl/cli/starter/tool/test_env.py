"""Tests of the environment: the policy is scripted, everything else is real."""

from pathlib import Path

import env
import pytest

from agentrl.data import load_samples
from agentrl.testing import call

pytest_plugins = ["agentrl.testing.fixtures"]
FOLDER = Path(__file__).parent


def test_a_right_episode_earns_1(play_scripted):
    sample = load_samples(f"{FOLDER}/train.jsonl")[0]
    answers = call("calculator", expression="3*4"), f"#### {sample.ground_truth}"
    episode = play_scripted(sample, *answers)
    assert [m.content for m in episode.messages if m.role == "tool"] == ["12"]
    assert env.exact(episode) == 1.0


def test_the_calculator_explains_its_argument():
    assert env.calculator("3*4") == "12"
    with pytest.raises(Exception, match="two whole numbers"):
        env.calculator("three times four")
