"""The reward of the recipe, and that of the control."""

import random
import re

from agentrl import reward


@reward("number")
def number(trajectory):
    """Return 1.0 if the last number of the answer is the ground truth, else 0.0."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", trajectory.final_text.replace(",", ""))
    return float(bool(numbers) and numbers[-1] == trajectory.sample.ground_truth)


@reward("number_permuted", group=True)
def number_permuted(trajectories):
    """Return the rewards of `number`, permuted; see `permute`."""
    return permute(trajectories, number)


def permute(trajectories, score):
    """Return the rewards of `score`, permuted within the group, so that nothing can be learned.

    The metric `right` is the reward of `score` itself.
    """
    right = [score(t) for t in trajectories]
    texts = [t.final_text for t in trajectories]
    permuted = random.Random(str(texts)).sample(right, len(right))
    return [{"score": p, "right": r} for p, r in zip(permuted, right, strict=True)]
