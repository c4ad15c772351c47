"""The games of TextArena for one player: `data.train='textarena:Mastermind-v0?n=500&seed=0'`.

Each text of the assistant is a move. The outcome is the reward of the package, but 0 if an invalid
move has ended the game: GuessTheNumber gives 0.47 after a guess and two invalid moves. The metric
`won` counts full rewards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.doors.door import Door, Named, read_address
from agentrl.doors.episodes import SEEDS, TIMEOUT, PackageEnvironment
from agentrl.doors.program import call_once
from agentrl.replies import Reply
from agentrl.tools.environment import environment
from agentrl.trajectory import Message, Scores

NAME = "textarena"

_named = Named("game")


class TextGame(PackageEnvironment):
    """A game for one player."""

    _door = NAME

    def __init__(self, game: str, seed: int):
        _named.require(game)
        self._game, self._seed, self._outcome = game, seed, 0.0

    async def start(self) -> list[Message]:
        """Return the rules and the first observation."""
        return [Message("user", await self._call("start", game=self._game, seed=self._seed))]

    async def respond(self, messages: Sequence[Message]) -> Reply:
        """Make a move."""
        text = messages[-1].content
        answer = await self._call("move", text=text)
        if answer["reward"] is not None:
            self._outcome = answer["reward"]
        return Reply(answer["seen"], done=answer["reward"] is not None)

    async def reward(self) -> Scores:
        """Return the package's reward; a game that is not over has none."""
        return Scores(self._outcome, metrics={"won": float(self._outcome == 1)})


def rows(address: str) -> list[Mapping[str, Any]]:
    """Return the rows of `textarena:GAME?n=500&seed=0`."""
    game, options = read_address(address, {"n": 500, "seed": 0}, only=True)
    call_once(NAME, "check", game=game)
    return [
        {
            "prompt": "Play the game.",
            "data_source": f"{NAME}/{game}",
            "environment": NAME,
            "environment_kwargs": {"game": game, "seed": options["seed"] * SEEDS + i},
        }
        for i in range(options["n"])
    ]


def load(alias: str, address: str) -> None:
    """Register the environment, and allow rows to name this game."""
    _named.add(read_address(address, {})[0])
    environment(alias, timeout=TIMEOUT)(TextGame)


DOOR = Door(NAME, "games for one player", load, rows, requirements=("textarena>=0.7",))
