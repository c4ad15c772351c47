"""The options that several commands share, and the config they make."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    **flags: str | list[str] | bool | None,
) -> Config:
    """Defaults, then the preset's settings, YAML, overrides and flags, later ones winning.

    Args:
        config: a YAML file.
        overrides: texts `a.b.c=1`.
        flags: what was given by flag: `val_dataset` for the key with the flag `--val-dataset`.

    Raises:
        ConfigError: what is wrong with them, or neither rows nor a model were named.
    """
    from agentrl.config import FIELDS, TINY, load_config
    from agentrl.config.load import flag_of

    keys = {flag_of(key).removeprefix("--").replace("-", "_"): key for key in FIELDS}
    layers = (
        str(config) if config else None,
        overrides or [],
        {keys[name]: value for name, value in flags.items() if value},
    )
    loaded = load_config(*layers)
    if loaded.model.path == TINY:
        from agentrl.demo import tiny_settings

        loaded = load_config(*layers, preset=tiny_settings(loaded))
    _check_given(loaded)
    return loaded


def resolve_model(path: str, say: Callable[[str], None] = print) -> str:
    """The model folder or hub name behind what a user wrote; makes the `tiny` preset if need be.

    What could be a folder's name misspelt is said before anybody asks the hub for it.

    Raises:
        UserError: a path that is no model folder, or nearly the preset's name.
    """
    from agentrl.config import TINY

    if path == TINY:
        from agentrl.demo import tiny_model

        return str(tiny_model(say=say))
    from agentrl.errors import UserError
    from agentrl.registry import did_you_mean

    folder = Path(path).expanduser()
    if folder.is_dir():
        if not any((folder / f).is_file() for f in ("config.json", "adapter_config.json")):
            raise UserError(f"{path} is no model folder: it holds no config.json")
        return str(folder)
    if folder.exists():
        raise UserError(f"{path} is a file: give its folder, {folder.parent}")
    beside = [f.name for f in folder.parent.glob("*") if f.is_dir()]
    if folder.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1:
        raise UserError(
            f"no model folder at {path} (looked at {folder.resolve()})."
            f"{did_you_mean(folder.name, beside)} Give a folder in transformers' format, a hub name"
            f" such as Qwen/Qwen2.5-0.5B-Instruct, or {TINY!r}"
        )
    if "/" not in path and did_you_mean(path.lower(), [TINY]):
        raise UserError(f"no model {path!r}.{did_you_mean(path.lower(), [TINY, *beside])}")
    hint = did_you_mean(folder.name, beside)
    if hint or ("/" in path and folder.parent.is_dir()):
        # A folder may be named as an owner on the hub is: it is no mistake for sure.
        say(f"note: no folder {path!r} here, so the hub is asked for it.{hint}")
    return path


def with_model_folder(config: Config) -> Config:
    """Return the config with `resolve_model` of its `model.path`.

    Raises:
        UserError: there is no such model.
    """
    model = config.model.model_copy(update={"path": resolve_model(config.model.path)})
    return config.model_copy(update={"model": model})


def read_config_to_play(
    config: Path | None,
    overrides: list[str] | None,
    dataset: str | None,
    model: str | None,
    file: list[str] | None,
) -> Config:
    """`read_config`, with one file of rows: `--dataset`, else data.val where set, else data.train.

    Raises:
        ConfigError: as `read_config` does.
    """
    read = read_config(config, overrides, dataset=dataset, model=model, file=file)
    path = dataset or read.data.val or read.data.train
    data = read.data.model_copy(update={"train": path, "val": ""})
    return read.model_copy(update={"data": data})


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
