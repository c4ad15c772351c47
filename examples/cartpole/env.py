"""CartPole as a conversation: the user says how the pole stands, the assistant left or right.

    python examples/cartpole/env.py data/cartpole_train.jsonl --rows 400 --seed 1

A row is a start: the environment's seed, and what is seen of it first. Its column `trace`, for
`agentrl sft`, is a game of somebody who looks at the pole one time in four and else pushes at
random: it shows a model that has never seen the game what one looks like, not how to win it.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

from agentrl import Trajectory, interaction, reward
from agentrl.data import write_rows
from agentrl.interactions import GymInteraction

ENV = "CartPole-v1"
PUSHES = ("left", "right")
GOAL = 50
LOOKS = 0.25
ASK = "Keep the pole up: answer left or right."


def words(observation: Any) -> str:
    """Two of the four numbers, and of these the sign: where the pole leans, and where it falls."""
    _position, _speed, angle, turning = observation
    return f"leans {side(angle)}, falls {side(turning)}"


def side(value: float) -> str:
    return "right" if value > 0 else "left"


@interaction("cartpole")
class CartPole(GymInteraction):
    """The game, with its state in words."""

    def describe(self, observation: Any) -> str:
        return words(observation)


@reward("cartpole")
def steps_up(trajectory: Trajectory) -> dict[str, float]:
    """The share of GOAL steps that the pole stayed up: the environment pays 1 for each."""
    steps = trajectory.turn_rewards("turn")
    return {"score": steps / GOAL, "acc": float(steps >= GOAL), "steps": steps}


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Rows of a dataset; no two begin in the same state."""
    return [row(seed * 1_000_000 + i) for i in range(count)]


def row(start: int) -> dict[str, Any]:
    trace = habit(start)
    return {
        "prompt": trace[0]["content"],
        "agent_name": "tool_agent",
        "data_source": "examples/cartpole",
        "interaction": "cartpole",
        "interaction_kwargs": {"seed": start},
        "trace": trace,
    }


def gold(said: str) -> str:
    """What a policy that is right answers: push to where it falls."""
    return said.rpartition(" ")[2]


def habit(start: int, looks: float = LOOKS) -> list[dict[str, str]]:
    """A game of somebody who looks at the pole in this share of the pushes."""
    import gymnasium

    chance, env = random.Random(start), gymnasium.make(ENV)
    observation, _ = env.reset(seed=start)
    said, over = [{"role": "user", "content": f"{ASK}\n{words(observation)}"}], False
    while not over and len(said) < 2 * GOAL:
        looked = chance.random() < looks
        push = gold(said[-1]["content"]) if looked else chance.choice(PUSHES)
        observation, _, fell, late, _ = env.step(PUSHES.index(push))
        over = fell or late
        said.append({"role": "assistant", "content": push})
        said.append({"role": "user", "content": words(observation)})
    env.close()
    return said[:-1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("output")
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    write_rows(given.output, rows(given.rows, given.seed))
    print(f"{given.rows} rows: {given.output}")
