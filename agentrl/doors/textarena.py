"""The games of TextArena for one player: `data.train='textarena:Mastermind-v0?n=500&seed=0'`.

Each text of the assistant is a move. The outcome is the reward of the package, but 0 if an invalid
move has ended the game: GuessTheNumber gives 0.47 after a guess and two invalid moves. The metric
`won` counts full rewards.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.doors.door import Door, read_address
from agentrl.doors.program import call_once, program
from agentrl.replies import Reply
from agentrl.tools.environment import Environment, environment
from agentrl.trajectory import Message, Scores

NAME = "textarena"
TIMEOUT = 300.0
"""How long a method may take, in seconds. The first one waits until the package is imported."""
SEEDS = 1_000_000
"""The rows of a seed have the games' seeds from seed * SEEDS on."""


class TextGame(Environment):
    """A game for one player."""

    def __init__(self, game: str, seed: int):
        self._game, self._seed = game, seed
        self._episode, self._outcome = uuid.uuid4().hex, 0.0

    async def start(self) -> list[Message]:
        """Return the rules and the first observation."""
        seen = await program(NAME).call(
            "start", episode=self._episode, game=self._game, seed=self._seed
        )
        return [Message("user", seen)]

    async def respond(self, messages: Sequence[Message]) -> Reply:
        """Make a move."""
        text = messages[-1].content
        answer = await program(NAME).call("move", episode=self._episode, text=text)
        if answer["reward"] is not None:
            self._outcome = answer["reward"]
        return Reply(answer["seen"], done=answer["reward"] is not None)

    async def reward(self) -> Scores:
        """Return the package's reward; a game that is not over has none."""
        return Scores(self._outcome, metrics={"won": float(self._outcome == 1)})

    async def close(self) -> None:
        """Forget the game."""
        await program(NAME).call("end", episode=self._episode)


def rows(address: str) -> list[Mapping[str, Any]]:
    """Return the rows of `textarena:GAME?n=500&seed=0`."""
    game, options = read_address(address, {"n": 500, "seed": 0}, only=True)
    call_once(NAME, "check", game=game)
    first = options["seed"] * SEEDS
    return [
        {
            "prompt": "Play the game.",
            "data_source": f"{NAME}/{game}",
            "environment": NAME,
            "environment_kwargs": {"game": game, "seed": first + i},
        }
        for i in range(options["n"])
    ]


def load(alias: str, address: str) -> None:
    """Register the environment."""
    environment(alias, timeout=TIMEOUT)(TextGame)


DOOR = Door(NAME, "games for one player", load, rows, requirements=("textarena>=0.7",))
