"""An OpenEnv server: `python openenv_server.py PORT`."""

import random
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Guess(Action):
    """Guess the number."""

    number: int


class Hint(Observation):
    text: str


class Numbers(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True  # Each session has an object of its own.

    def reset(self, seed=None, episode_id=None, highest=1000):
        self.number, self.guesses = random.Random(seed).randint(1, highest), 0
        return Hint(text=f"A number from 1 to {highest}.")

    def step(self, action, timeout_s=None):
        self.guesses += 1
        if action.number == self.number:
            return Hint(text="Right!", reward=1.0, done=True)
        side = "higher" if action.number < self.number else "lower"
        return Hint(text=f"It is {side}.", reward=0.0, done=self.guesses == 12)

    @property
    def state(self):
        return State(step_count=self.guesses)


if __name__ == "__main__":
    app = create_app(Numbers, Guess, Hint, max_concurrent_envs=256)
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
