"""Tests of the environment: the policy is scripted, everything else is real."""

from pathlib import Path

import env  # noqa: F401  # it registers the environment

from agentrl.data import load_samples

pytest_plugins = ["agentrl.testing.fixtures"]
FOLDER = Path(__file__).parent


def test_halving_wins_every_game(play_scripted):
    for secret, guesses in {1: "5 3 2 1", 5: "5", 7: "5 7", 9: "5 7 8 9"}.items():
        samples = load_samples(f"{FOLDER}/train.jsonl")
        sample = next(s for s in samples if s.environment_kwargs["secret"] == secret)
        episode = play_scripted(sample, *[f"#### {guess}" for guess in guesses.split()])
        assert episode.scores.outcome == 1.0


def test_the_hints_and_the_end(play_scripted):
    sample = next(
        s for s in load_samples(f"{FOLDER}/train.jsonl") if s.environment_kwargs["secret"] == 5
    )
    episode = play_scripted(sample, "#### 9", "#### 1", "#### 9", "#### 1")
    replies = [m.content for m in episode.messages if m.role == "user"][1:]
    assert replies == ["Lower.", "Higher.", "Lower."] and episode.scores.outcome == 0.0
