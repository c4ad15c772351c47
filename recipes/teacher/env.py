"""The teacher of the recipe, and the reward."""

from agentrl import Interaction, Reply, interaction, reward
from agentrl.answers import gsm8k_answer, same_number

HINT = "That is wrong. {tens} * {b} = {x} and {ones} * {b} = {y}. {x} + {y} ="
NO_HINT = "That is wrong. Try again."


def is_right(text, product):
    """Return whether the last number of a text is the product."""
    answer = gsm8k_answer(text, "flexible")
    return answer is not None and same_number(answer, product)


@interaction("teacher")
class Teacher(Interaction):
    """A teacher who gives a hint after the first wrong answer. The second answer is the last.

    The hint is the product of the tens and that of the ones.
    """

    def __init__(self, a, b, hint=True):
        """Make the teacher of one product, a * b. Without `hint`, it only says that it is wrong."""
        b, a = sorted((a, b))
        tens, ones = a - a % 10, a % 10
        self.product = a * b
        self.reply = NO_HINT
        if hint:
            self.reply = HINT.format(tens=tens, ones=ones, b=b, x=tens * b, y=ones * b)
        self.answers = 0

    async def respond(self, messages):
        self.answers += 1
        is_over = self.answers == 2 or is_right(messages[-1].content, self.product)
        return None if is_over else Reply(self.reply)


@reward("right")
def right(trajectory):
    """Return 1.0 if an answer is right. The metric `first` is the share of right first answers."""
    product = trajectory.sample.ground_truth
    scores = [float(is_right(m.content, product)) for m in trajectory.answers] or [0.0]
    return {"score": max(scores), "first": scores[0]}
