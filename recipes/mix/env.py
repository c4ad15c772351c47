"""The reward of the recipe, and that of the control."""

import re
from pathlib import Path

from agentrl import reward
from agentrl.registry import load_file

permute = load_file(str(Path(__file__).parents[1] / "facts/env.py")).permute


@reward("last_word")
def last_word(trajectory):
    """Return 1.0 if the last word or number of the answer is the ground truth, else 0.0.

    Upper and lower case are the same, and punctuation does not count. Jean-Pierre is one word.
    """
    words = re.findall(r"-?\w+(?:-\w+)*", trajectory.final_text.lower())
    return float(bool(words) and words[-1] == trajectory.sample.ground_truth.lower())


@reward("last_word_permuted", group=True)
def last_word_permuted(trajectories):
    """Return the rewards of `last_word`, permuted, so that nothing can be learned."""
    return permute(trajectories, last_word)
