"""The other side of a conversation: `Interaction`, `Reply`, and the ones that come with agentrl."""

from agentrl.interactions.base import (
    Interaction,
    Reply,
    build_interaction,
    interaction,
    respond,
)
from agentrl.interactions.gsm8k import Gsm8kInteraction

__all__ = [
    "Gsm8kInteraction",
    "Interaction",
    "Reply",
    "build_interaction",
    "interaction",
    "respond",
]
