"""A model and data from nothing: the arithmetic problems and the `tiny` model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.config import TINY, Config, load_config
from agentrl.demo.recipe import tiny_model

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


def tiny_config(
    yaml_path: str | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> Config:
    """The config of a run of the `tiny` model, which is made on first use (a minute or two).

        Trainer(tiny_config(overrides=["data.train=rows.jsonl"])).run()

    Args:
        yaml_path: a YAML file of sections.
        overrides: texts `a.b.c=1`; they win over the file.
        flags: dotted key -> value; they win over the overrides.

    Raises:
        ConfigError: every mistake, as `load_config` says them.
    """
    flags = {**(flags or {}), "model.path": TINY}
    preset = tiny_settings(load_config(yaml_path, overrides, flags))
    config = load_config(yaml_path, overrides, flags, preset=preset)
    model = config.model.model_copy(update={"path": str(tiny_model())})
    return config.model_copy(update={"model": model})


def tiny_settings(config: Config) -> dict[str, Any]:
    """Return `TINY_SETTINGS`, less the number of steps where a config asks for epochs."""
    settings = dict(TINY_SETTINGS)
    if "total_epochs" in config.trainer.model_fields_set:
        del settings["trainer.total_steps"]  # it would win
    return settings


__all__ = ["TINY_SETTINGS", "tiny_config", "tiny_model", "tiny_settings"]
