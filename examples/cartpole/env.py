"""CartPole as a conversation: the user says how the pole stands, the assistant left or right."""

from __future__ import annotations

from typing import Any

from agentrl import Trajectory, interaction, reward
from agentrl.interactions import GymInteraction

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


@reward("steps_up")
def steps_up(trajectory: Trajectory, goal: int = 50) -> dict[str, float]:
    """The share of `goal` steps that the pole stayed up, each of which the environment paid 1."""
    steps = trajectory.turn_rewards("turn")
    return {"score": steps / goal, "acc": float(steps >= goal), "steps": steps}
