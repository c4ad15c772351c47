"""An interaction that plays the user: it asks again after a wrong answer."""

from agentrl import Interaction, Reply, interaction, reward


# There is one object per episode. Its arguments are the row's interaction_kwargs.
@interaction("coach")
class Coach(Interaction):
    """Allows several attempts, and says how the answer is wrong."""

    def __init__(self, ground_truth: str, attempts: int = 3) -> None:
        self.ground_truth, self.attempts = ground_truth, attempts

    async def respond(self, messages) -> Reply:
        """Reply to the last answer. `done=True` ends the conversation."""
        self.attempts -= 1
        answer = messages[-1].content.strip()
        if answer == f"#### {self.ground_truth}":
            return Reply("", score=1.0, done=True)
        if not answer.startswith("####"):
            return Reply("Answer with ####.", done=self.attempts == 0)
        return Reply("That is wrong. Try again.", done=self.attempts == 0)


# A reward sees the whole trajectory: messages, final_text, turns, stop_reason, the sample.
@reward("early")
def early(trajectory) -> float:
    """Return 1 for a right first answer, 1/2 for a right second answer, and so on; else 0."""
    is_right = trajectory.final_text.strip() == f"#### {trajectory.sample.ground_truth}"
    return is_right / len(trajectory.turns)
