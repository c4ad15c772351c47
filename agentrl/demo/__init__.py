"""A model and data from nothing: the arithmetic problems and the `tiny` model."""

from __future__ import annotations

from typing import Any

from agentrl.demo.recipe import resolve_model, tiny_model

TINY_SETTINGS: dict[str, Any] = {
    "files": ["shelf:calculator"],
    "rollout.max_turn_tokens": 64,
    "rollout.max_trajectory_tokens": 384,
    "algorithm.ppo_epochs": 2,
    "optim.lr": 2.5e-4,
    "optim.lr_final": 0.3,
    "trainer.total_steps": 100,
    "trainer.test_freq": 10,
    "trainer.save_freq": 50,
}
"""Config keys in place of their defaults for runs of the `tiny` model."""

__all__ = ["TINY_SETTINGS", "resolve_model", "tiny_model"]
