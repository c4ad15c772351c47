"""OpenEnv environments of several kinds, each at a path: `python openenv_kinds.py PORT`.

GET /open returns how many environments are open.
"""

import os
import sys
import time
from pathlib import Path
from typing import Annotated, Literal

import uvicorn
from fastapi import FastAPI
from fastmcp import FastMCP
from openenv.core.env_server import (
    Action,
    CallToolAction,
    CallToolObservation,
    Environment,
    MCPEnvironment,
    Observation,
    State,
    create_app,
)
from pydantic import BaseModel, Field, RootModel, field_validator

sys.path.insert(0, str(Path(__file__).parents[1]))
from openenv_server import Guess, Hint, Numbers

OPEN = [0]


class Counted:
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        OPEN[0] += 1

    def close(self):
        OPEN[0] -= 1
        super().close()


class CountedNumbers(Counted, Numbers):
    pass


class Message(Action):
    message: str = Field(max_length=100)


class Echo(Observation):
    echoed: str


class Chat(Counted, Environment):
    """Repeats messages. "bye" ends it."""

    def reset(self, seed=None, episode_id=None, greeting="Hello"):
        return Echo(echoed=greeting)

    def step(self, action, timeout_s=None):
        text = action.message
        return Echo(echoed=f"{text}!", reward=len(text) / 10, done=text == "bye")

    state = State()


class Cards(Counted, MCPEnvironment):
    """The tool `draw` pays what it draws; 3 ends it."""

    def __init__(self):
        mcp = FastMCP("cards")

        @mcp.tool
        def draw(type: int) -> str:
            """Draw a card."""
            return f"You drew {1 / type:.1f}"

        MCPEnvironment.__init__(self, mcp)
        OPEN[0] += 1

    def reset(self, seed=None, episode_id=None):
        return Observation(metadata={"status": "ready"})

    async def step_async(self, action, timeout_s=None):
        seen = await super().step_async(action, timeout_s)
        if isinstance(action, CallToolAction):
            kind = action.arguments.get("type", 0)
            seen.reward, seen.done = float(kind), kind == 3
        return seen

    def _step_impl(self, action, timeout_s=None):
        raise ValueError("only tools")

    state = State()


class Square(BaseModel):
    x: int
    y: int


class NoTools(Cards):
    def __init__(self):
        MCPEnvironment.__init__(self, FastMCP("nothing"))
        OPEN[0] += 1


class Move(Action):
    """Move on the board."""

    kind: Literal["move"]
    to: Square


class Look(Action):
    """Look around."""

    kind: Literal["look"] = "look"
    direction: Literal["north", "south"] = "north"


class MoveOrLook(RootModel[Annotated[Move | Look, Field(discriminator="kind")]]):
    pass


class Place(Observation):
    x: int
    y: int


class Board(Counted, Environment):
    """Each action pays 1."""

    def reset(self, seed=None, episode_id=None):
        self.place = Square(x=0, y=0)
        return Place(x=0, y=0)

    def step(self, action, timeout_s=None):
        action = action.root
        if isinstance(action, Move):
            self.place = action.to
        return Place(x=self.place.x, y=self.place.y, reward=1)

    state = State()


class Odd(Action, title="Action"):  # Its title is that of the base class.
    number: int

    @field_validator("number")
    @classmethod
    def is_odd(cls, value):
        if value % 2 == 0:
            raise ValueError("the number must be odd")
        return value


class Faults(Counted, Environment):
    """The numbers are faults."""

    def reset(self, seed=None, episode_id=None, broken=False, seconds=0):
        time.sleep(seconds)
        if broken:
            raise RuntimeError("no board")
        return Hint(text="Odd numbers.")

    def step(self, action, timeout_s=None):
        if action.number == 1:
            raise RuntimeError("the simulator is down")
        if action.number == 3:
            os._exit(1)
        if action.number == 5:
            time.sleep(3)
        return Hint(text="ok", reward=1.0)

    state = State()


KINDS = {
    "numbers": (256, CountedNumbers, Guess, Hint),
    "three": (3, CountedNumbers, Guess, Hint),
    "chat": (256, Chat, Message, Echo),
    "cards": (256, Cards, CallToolAction, CallToolObservation),
    "cards-untyped": (256, Cards, Action, Observation),
    "empty": (256, NoTools, CallToolAction, CallToolObservation),
    "board": (256, Board, MoveOrLook, Place),
    "faults": (256, Faults, Odd, Hint),
}

if __name__ == "__main__":
    app = FastAPI()
    app.get("/health")(lambda: "ok")
    app.get("/open")(lambda: OPEN[0])
    for name, (most, *classes) in KINDS.items():
        app.mount(f"/{name}", create_app(*classes, max_concurrent_envs=most))
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
