"""Interactions reply to the policy as a user: `Interaction`, `Reply`, and the shipped ones."""

from agentrl.interactions.base import (
    Interaction,
    Reply,
    build_interaction,
    interaction,
    respond,
)
from agentrl.interactions.gsm8k import Gsm8kInteraction
from agentrl.interactions.gym import GymInteraction
from agentrl.interactions.simulated_user import SimulatedUser

__all__ = [
    "Gsm8kInteraction", "GymInteraction", "Interaction", "Reply", "SimulatedUser",
    "build_interaction", "interaction", "respond",
]  # fmt: skip
