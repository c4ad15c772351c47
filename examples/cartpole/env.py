"""CartPole as a conversation: the user describes the pole, the assistant answers left or right.

    python examples/cartpole/env.py data/cartpole_train.jsonl --rows 400 --seed 1

A row is an initial state: the environment's seed and the first observation. Its column `trace`, for
`agentrl sft`, is a game of a player who pushes at random in three of four steps. It teaches a model
what a game looks like, but not how to win.
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
    """Describe the signs of two of the four numbers: the side of the pole, and its movement."""
    _position, _speed, angle, turning = observation
    return f"leans {side(angle)}, falls {side(turning)}"


def side(value: float) -> str:
    return "right" if value > 0 else "left"


@interaction("cartpole")
class CartPole(GymInteraction):
    """The game with its state in words."""

    def describe(self, observation: Any) -> str:
        return words(observation)


@reward("cartpole")
def steps_up(trajectory: Trajectory) -> dict[str, float]:
    """Return the number of steps that the pole stayed up, divided by GOAL."""
    steps = trajectory.turn_rewards("turn")
    return {"score": steps / GOAL, "acc": float(steps >= GOAL), "steps": steps}


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Return the rows of a dataset; all initial states are different."""
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


def gold(text: str) -> str:
    """Return the answer of a policy that is right: push to the side to which the pole falls."""
    return text.rpartition(" ")[2]


def habit(start: int, looks: float = LOOKS) -> list[dict[str, str]]:
    """Return a game of a player who pushes right in the share `looks` of steps, else at random."""
    import gymnasium

    chance, env = random.Random(start), gymnasium.make(ENV)
    observation, _ = env.reset(seed=start)
    messages, over = [{"role": "user", "content": f"{ASK}\n{words(observation)}"}], False
    while not over and len(messages) < 2 * GOAL:
        looks_now = chance.random() < looks
        push = gold(messages[-1]["content"]) if looks_now else chance.choice(PUSHES)
        observation, _, fell, late, _ = env.step(PUSHES.index(push))
        over = fell or late
        messages.append({"role": "assistant", "content": push})
        messages.append({"role": "user", "content": words(observation)})
    env.close()
    return messages[:-1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("output")
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    write_rows(args.output, rows(args.rows, args.seed))
    print(f"{args.rows} rows: {args.output}")
