"""A model and data from nothing: the arithmetic problems and the `tiny` model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.config import Config, load_config
from agentrl.demo.recipe import TINY, resolve_model, tiny_model

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
    return resolve(load_with_preset(yaml_path, overrides, {**(flags or {}), "model.path": TINY}))


def load_with_preset(
    yaml_path: str | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> Config:
    """`load_config`, with `TINY_SETTINGS` in place of defaults where the model is `tiny`.

    Nothing is made yet: `model.path` is as it was given.

    Raises:
        ConfigError: every mistake, as `load_config` says them.
    """
    config = load_config(yaml_path, overrides, flags)
    if config.model.path != TINY:
        return config
    settings = dict(TINY_SETTINGS)
    if "total_epochs" in config.trainer.model_fields_set:
        del settings["trainer.total_steps"]  # it would win over the epochs that were asked for
    return load_config(yaml_path, overrides, flags, preset=settings)


def resolve(config: Config) -> Config:
    """The config with the model's folder in place of a preset's name; makes the preset if need be.

    Raises:
        UserError: there is no such model.
    """
    path = resolve_model(config.model.path)
    return config.model_copy(update={"model": config.model.model_copy(update={"path": path})})


__all__ = [
    "TINY_SETTINGS",
    "load_with_preset",
    "resolve",
    "resolve_model",
    "tiny_config",
    "tiny_model",
]
