"""The games of TextArena for one player, as an environment.

    pip install textarena
    python examples/text_games/env.py data/games.jsonl --game Mastermind-v0 --rows 128 --seed 1

TextArena's games take their random numbers from one generator of the process, so they are made one
after another. Some of them pay for a lost game: GuessTheNumber gives 0.47 for two invalid moves. So
the outcome is 1 only for a game that is won.
"""

from __future__ import annotations

import argparse
import threading

from agentrl import Environment, Message, Reply, environment
from agentrl.data import write_rows

_generator = threading.Lock()


@environment("text_game")
class TextGame(Environment):
    """A game. Each text of the assistant is a move."""

    def __init__(self, game: str, seed: int):
        import textarena

        self.game, self.seed, self.won = textarena.make(f"{game}-raw"), seed, False

    def start(self) -> list[Message]:
        with _generator:
            self.game.reset(num_players=1, seed=self.seed)
        return [Message("user", self._seen())]

    def respond(self, messages) -> Reply:
        done, _ = self.game.step(messages[-1].content)
        if done:
            rewards, _ = self.game.close()
            self.won = rewards[0] == 1
        return Reply("" if done else self._seen(), done=done)

    async def reward(self) -> float:
        return float(self.won)

    def _seen(self) -> str:
        """Return the game's messages since the last move."""
        _, observed = self.game.get_observation()
        return "\n".join(text for speaker, text, *_ in observed if speaker == -1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("output", help="a .jsonl or .parquet file")
    parser.add_argument("--game", default="Mastermind-v0")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write_rows(
        args.output,
        [
            {
                "prompt": "Play the game.",
                "environment": "text_game",
                "environment_kwargs": {"game": args.game, "seed": args.seed * 1_000_000 + i},
            }
            for i in range(args.rows)
        ],
    )
