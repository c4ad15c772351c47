"""Tests of the environment: the policy is scripted, everything else is real."""

from pathlib import Path

import env
import pytest

from agentrl.data import load_samples

pytest_plugins = ["agentrl.testing.fixtures"]
FOLDER = Path(__file__).parent


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_an_early_right_answer_earns_more(play_scripted, wrong):
    sample = load_samples(f"{FOLDER}/train.jsonl")[0]
    episode = play_scripted(sample, *["#### 99"] * wrong, f"#### {sample.ground_truth}")
    assert env.early(episode) == 1 / (1 + wrong)


def test_the_coach_stops_after_three_answers(play_scripted):
    episode = play_scripted(load_samples(f"{FOLDER}/train.jsonl")[0], *["I do not know"] * 3)
    assert len(episode.turns) == 3 and env.early(episode) == 0.0
    assert episode.messages[-2].content == "Answer with ####."
