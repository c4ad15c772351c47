"""Tests publish weights of their own as the trainer publishes its policy's."""

from agentrl.engine.base import Update


def update(weights, version):
    """An update of some named tensors."""
    held = list(weights)
    return Update(version, lambda: iter(held))
