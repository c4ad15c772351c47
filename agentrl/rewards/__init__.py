"""What an episode was worth: `@reward`, the graders that come with agentrl, and the `Scorer`."""

from agentrl.rewards import gsm8k
from agentrl.rewards.base import Grader, reward
from agentrl.rewards.scorer import GRADERS, Scorer, make_scorer

__all__ = ["GRADERS", "Grader", "Scorer", "gsm8k", "make_scorer", "reward"]
