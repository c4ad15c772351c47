"""The preset of the model `tiny`."""

from __future__ import annotations

from typing import Any

TINY = "tiny"
"""The value of `model.path` for the small model that `agentrl.demo` trains on first use."""
TINY_SETTINGS: dict[str, Any] = {
    "files": ["shelf:calculator"],
    "rollout.max_turn_tokens": 64,
    "rollout.max_trajectory_tokens": 384,
    "algorithm.ppo_epochs": 2,
    "optim.lr": 2.5e-4,
    "optim.lr_final": 0.3,
    "trainer.total_steps": 60,
    "trainer.test_freq": 10,
    "trainer.save_freq": 30,
}
"""Defaults of config keys for runs of the `tiny` model."""
