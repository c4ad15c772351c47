"""What an episode was worth: `@reward`, the graders that come with agentrl, and the `Scorer`."""

from agentrl.rewards import gsm8k
from agentrl.rewards.base import Grader, reward
from agentrl.rewards.graders import GRADERS
from agentrl.rewards.scorer import Scorer, check_graders, make_scorer

__all__ = ["GRADERS", "Grader", "Scorer", "check_graders", "gsm8k", "make_scorer", "reward"]
