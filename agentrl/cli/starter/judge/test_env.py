"""Tests of the environment: the policy is scripted, everything else is real."""

from pathlib import Path

import env
import pytest

from agentrl import load_config
from agentrl.data import load_samples

pytest_plugins = ["agentrl.testing.fixtures"]
FOLDER = Path(__file__).parent


@pytest.mark.parametrize(("form", "score"), [("#### {}", 1.0), ("{}", 0.5), ("It is {}", 0.0)])
def test_the_rule(play_scripted, form, score):
    sample = load_samples(f"{FOLDER}/train.jsonl")[0]
    episode = play_scripted(sample, form.format(sample.ground_truth))
    assert env.rule(episode)["score"] == score


def test_the_judge_has_a_url_and_a_rubric():
    judge = load_config(f"{FOLDER}/judge.yaml").reward.kwargs["judge"]
    assert judge["url"].endswith("/v1") and judge["rubric"]
