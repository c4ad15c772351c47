"""A game: guess a number from 1 to 9; the game says higher or lower."""

from agentrl import Interaction, Reply, interaction, reward


# There is one object per episode, which holds the state of the game. Its arguments are the row's
# interaction_kwargs.
@interaction("higher_lower")
class HigherLower(Interaction):
    """Compares each guess with the secret number."""

    def __init__(self, secret: int, guesses: int = 4) -> None:
        self.secret, self.guesses = secret, guesses

    async def respond(self, messages) -> Reply:
        """Reply to a guess. The score is the reward of the turn."""
        self.guesses -= 1
        _, mark, text = messages[-1].content.partition("####")
        if not mark or not text.strip().isdigit():
            return Reply("Answer with #### and a number.", score=0.0, done=True)
        guess = int(text)
        if guess == self.secret:
            return Reply("", score=1.0, done=True)
        hint = "Higher." if guess < self.secret else "Lower."
        return Reply(hint, score=0.0, done=self.guesses == 0)


@reward("won")
def won(trajectory) -> float:
    """Return 1 if the last guess was right, else 0."""
    return float(trajectory.turns[-1].rewards.get("turn", 0.0) == 1.0)
