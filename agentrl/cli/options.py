"""The options that several commands share, and the config they make."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from agentrl.config import Config

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Config keys, e.g. rollout.n=4 optim.lr=1e-5."),
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="A YAML file of config keys.")
]
Dataset = Annotated[
    str | None, typer.Option(help="Rows to train on, .parquet or .jsonl (data.train).")
]
ValDataset = Annotated[str | None, typer.Option(help="Rows to validate on (data.val).")]
Model = Annotated[
    str | None,
    typer.Option(
        help="A model folder or hub name, or `tiny`: made here on first use (model.path)."
    ),
]
Output = Annotated[str | None, typer.Option(help="The run's folder (trainer.output).")]
Files = Annotated[
    list[str] | None,
    typer.Option(
        "--file",
        "-f",
        help="Python files with tools, interactions, rewards or loops; or shelf:NAME (files).",
    ),
]


def read_config(
    config: Path | None,
    overrides: list[str] | None,
    *,
    dataset: str | None = None,
    val_dataset: str | None = None,
    model: str | None = None,
    output: str | None = None,
    files: list[str] | None = None,
) -> Config:
    """Defaults, then the preset's settings, YAML, overrides and flags, later ones winning."""
    from agentrl.config import load_config
    from agentrl.demo import TINY_SETTINGS

    flags: dict[str, Any] = {
        "data.train": dataset,
        "data.val": val_dataset,
        "model.path": model,
        "trainer.output": output,
        "files": files,
    }
    flags = {key: value for key, value in flags.items() if value}
    path = str(config) if config else None
    loaded = load_config(path, overrides or [], flags)
    if loaded.model.path != "tiny":
        return loaded
    return load_config(path, overrides or [], flags, preset=TINY_SETTINGS)


def resolve(config: Config) -> Config:
    """The config with the model's folder in place of a preset's name; makes the preset if need be.

    Raises:
        UserError: no model was named, or there is none.
    """
    from agentrl.demo import resolve_model
    from agentrl.errors import ConfigError

    if not config.model.path:
        raise ConfigError("no model: give --model FOLDER, a hub name, or --model tiny")
    path = str(resolve_model(config.model.path))
    return config.model_copy(update={"model": config.model.model_copy(update={"path": path})})
