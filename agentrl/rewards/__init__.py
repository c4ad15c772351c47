"""Rewards: `@reward`, the graders that come with agentrl, and the `Scorer`."""

from agentrl.rewards import code, gsm8k, judge, math, math_dapo, search_qa
from agentrl.rewards.base import Grader, reward
from agentrl.rewards.graders import GRADERS
from agentrl.rewards.scorer import Scorer, check_graders

__all__ = [
    "GRADERS", "Grader", "Scorer", "check_graders", "code", "gsm8k", "judge", "math", "math_dapo",
    "reward", "search_qa",
]  # fmt: skip
