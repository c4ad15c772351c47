"""The arithmetic task and the `tiny` model, both of which are generated on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

from agentrl.config import TINY, TINY_SETTINGS, Config, load_config
from agentrl.config.sources import assignment
from agentrl.demo.recipe import tiny_model


def tiny_config(
    yaml_path: str | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> Config:
    """Return the config of a run of the `tiny` model, which is trained on first use (1-2 minutes).

        Trainer(tiny_config(overrides=["data.train=rows.jsonl"])).run()

    Args:
        yaml_path: a YAML file of sections.
        overrides: texts such as `optim.lr=1e-5`, which override the file.
        flags: values by dotted key, which override the overrides.

    Raises:
        ConfigError: the config has mistakes; the message lists all, as in `load_config`.
    """
    flags = {**(flags or {}), "model.path": TINY}
    preset = tiny_settings(load_config(yaml_path, overrides, flags))
    config = load_config(yaml_path, overrides, flags, preset=preset)
    return config.with_values("model", path=str(tiny_model()))


def tiny_settings(config: Config) -> dict[str, Any]:
    """Return `TINY_SETTINGS`, without the number of steps if the config sets epochs."""
    settings = dict(TINY_SETTINGS)
    if "total_epochs" in config.trainer.model_fields_set:
        del settings["trainer.total_steps"]  # it would override the epochs
    return settings


def describe_preset(config: Config) -> str:
    """Return a sentence with the keys that have the values of `TINY_SETTINGS`; "" if none has."""
    keys = [
        assignment(path, value)
        for path, value in TINY_SETTINGS.items()
        if attrgetter(path)(config) == value
    ]
    if not keys:
        return ""
    return f'the preset of {TINY!r} sets {" ".join(keys)} (docs/config.md, "The preset tiny")'


__all__ = ["TINY_SETTINGS", "describe_preset", "tiny_config", "tiny_model", "tiny_settings"]
