"""A game: guess a number from 1 to 9; the game says higher or lower."""

from agentrl import Environment, Reply, environment


# There is one object per episode, which holds the state of the game. Its arguments are the row's
# environment_kwargs.
@environment("higher_lower")
class HigherLower(Environment):
    """Compares each guess with the secret number."""

    def __init__(self, secret: int, guesses: int = 4) -> None:
        self.secret, self.guesses, self.won = secret, guesses, False

    # Other public methods would be tools of the model. This game has none.
    async def respond(self, messages) -> Reply:
        """Reply to a guess. A score would be the reward of the turn."""
        self.guesses -= 1
        _, mark, text = messages[-1].content.partition("####")
        if not mark or not text.strip().isdigit():
            return Reply("Answer with #### and a number.", done=True)
        guess = int(text)
        if guess == self.secret:
            self.won = True
            return Reply("", done=True)
        hint = "Higher." if guess < self.secret else "Lower."
        return Reply(hint, done=self.guesses == 0)

    async def reward(self) -> float:
        """Return 1 if a guess was right, else 0."""
        return float(self.won)

    @classmethod
    def gold(cls, sample) -> list[str]:
        """Return a solution of a row, for `agentrl check environment`."""
        return [f"#### {sample.ground_truth}"]
