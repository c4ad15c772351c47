"""The reward of the recipe."""

from agentrl import reward


@reward("answer")
def answer(trajectory):
    """Return 1.0 if the last message is "The answer is N." with the right number, else 0.0.

    The last number of any text would be less strict: a result of the calculator would be right in
    "# returns 18720", too.
    """
    is_right = trajectory.final_text.strip() == f"The answer is {trajectory.sample.ground_truth}."
    return float(is_right)
