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
PlayedDataset = Annotated[
    str | None,
    typer.Option(
        "--dataset",
        help="Rows to play, .parquet or .jsonl; by default data.val where set, else data.train.",
    ),
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
Deterministic = Annotated[
    bool,
    typer.Option(
        "--deterministic",
        help="Rollouts of the run's seeds, and as near to the trainer as the engine can"
        " (rollout.deterministic).",
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
    deterministic: bool = False,
) -> Config:
    """Defaults, then the preset's settings, YAML, overrides and flags, later ones winning.

    Raises:
        ConfigError: what is wrong with them, or neither rows nor a model were named.
    """
    from agentrl.demo import load_with_preset

    flags: dict[str, Any] = {
        "data.train": dataset,
        "data.val": val_dataset,
        "model.path": model,
        "trainer.output": output,
        "files": files,
        "rollout.deterministic": deterministic,
    }
    flags = {key: value for key, value in flags.items() if value}
    loaded = load_with_preset(str(config) if config else None, overrides or [], flags)
    _check_given(loaded)
    return loaded


def rows_to_play(config: Config, dataset: str | None) -> Config:
    """The config with one file of rows: `--dataset`, else data.val where set, else data.train."""
    path = dataset or config.data.val or config.data.train
    data = config.data.model_copy(update={"train": path, "val": ""})
    return config.model_copy(update={"data": data})


def sampled(temperature: float) -> str:
    """How turns are sampled, in words."""
    return f"sampled at T={temperature}" if temperature else "greedy"


def _check_given(config: Config) -> None:
    from agentrl.errors import ConfigError

    missing = []
    if not config.data.train and not config.data.val:
        missing.append("no rows: give --dataset FILE (data.train), .parquet or .jsonl")
    if not config.model.path:
        missing.append("no model: give --model FOLDER, a hub name, or --model tiny (model.path)")
    if missing:
        raise ConfigError("\n".join(missing))
