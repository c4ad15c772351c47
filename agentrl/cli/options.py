"""Options that several commands share, and the functions that read the config from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from agentrl.file_loaders import RECORDED
from agentrl.registry import YAML, did_you_mean
from agentrl.terminal import echo

if TYPE_CHECKING:
    from agentrl.config import Config
    from agentrl.config.sections import RolloutConfig, ValConfig
    from agentrl.config.sources import Setting

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[VERL.YAML] [KEY=VALUE]...",
        help="Config keys, e.g. rollout.n=4 optim.lr=1e-5; before them, a config of verl's.",
    ),
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="A YAML file of config keys.")
]
Dataset = Annotated[
    list[str] | None,
    typer.Option(
        help="Rows to train on, .parquet, .jsonl or a door's (data.train). It may be repeated."
    ),
]
PlayedDataset = Annotated[
    list[str] | None,
    typer.Option(
        "--dataset",
        help="Rows to play, .parquet or .jsonl; default: data.val if set, else data.train.",
    ),
]
ValDataset = Annotated[
    list[str] | None, typer.Option(help="Rows to validate on (data.val). It may be repeated.")
]
Model = Annotated[
    str | None,
    typer.Option(
        help="A model folder or hub name; a run's folder or a checkpoint; or `tiny`: trained here"
        " on first use (model.path)."
    ),
]
Output = Annotated[str | None, typer.Option(help="The run's folder (trainer.output).")]
Files = Annotated[
    list[str] | None,
    typer.Option(
        "--file",
        "-f",
        help="Files with tools, interactions, rewards, loops or diagnoses; or shelf:NAME (files).",
    ),
]
MAX_RECORDED_STALENESS = 16
"""The value of `trainer.max_staleness` that `--from` sets."""
LogFormat = Annotated[
    Literal["text", "json"],
    typer.Option(help="json: one JSON object per line on standard output (docs/console.md)."),
]
Deterministic = Annotated[
    bool,
    typer.Option(
        "--deterministic",
        help="Reproducible rollouts, with logprobs close to the trainer's (rollout.deterministic).",
    ),
]


def read_config(
    config: Path | None,
    overrides: list[str] | None,
    *,
    needs_model: bool = True,
    needs_rows: bool = True,
    uses_run_config: bool = False,
    recorded: Path | None = None,
    **flags: str | list[str] | bool | None,
) -> Config:
    """Read the config from the preset, a YAML file, overrides and flags.

    Args:
        config: a YAML file.
        overrides: texts such as `optim.lr=1e-5`. The first may be a config of verl's, which is
            translated; the translation is printed.
        needs_model: False for a command that plays nothing.
        needs_rows: False for a command that reads no rows.
        uses_run_config: without `config`, use that of the run that `--model` names.
        recorded: the folder of `--from`. Without `config`, use that of the run that was served.
        flags: values of flags: `val_dataset` sets the key with the flag `--val-dataset`.

    Raises:
        ConfigError: the config has mistakes, or there are no rows or no model.
    """
    from agentrl.config import FIELDS, TINY
    from agentrl.config.load import flag_of, load_config
    from agentrl.errors import ConfigError
    from agentrl.preflight import announce_files, find_code, load_files

    run_config = config_of_run(flags.get("model")) if uses_run_config and not config else None
    settings: list[Setting] = []
    if recorded:
        if flags.get("dataset"):
            raise ConfigError(f"--from {recorded} and --dataset: name one of them")
        served_config, settings = _settings_of_recorded(recorded, flags.get("output"))
        run_config = served_config if not config and not flags.get("model") else None
    config = config or run_config
    keys = {flag_of(key).removeprefix("--").replace("-", "_"): key for key in FIELDS}
    overrides = overrides or []
    flag_values: dict[str, Any] = {keys[name]: value for name, value in flags.items() if value}
    for key in ("data.train", "data.val"):
        if isinstance(files := flag_values.get(key), list):
            flag_values[key] = _rows_of(files)
    yaml_path, report = str(config) if config else None, ""
    load = partial(load_config, yaml_path, overrides, flag_values, translated=settings)
    if verl_file := _verl_config(config, overrides):
        from agentrl.compat.verl.config import translate

        translation = translate(verl_file, overrides[1:], flag_values)
        version, report = translation.version, translation.report()
        echo(f"{verl_file} is translated to agentrl's keys. Its keys are those of verl {version}.")
        load = partial(
            load_config,
            flags=flag_values,
            translated=[*translation.settings, *settings],
            mistakes=translation.mistakes,
        )
    loaded = load()
    if report:
        echo(f"{report}\n")
    if loaded.model.path == TINY:
        from agentrl.demo import tiny_settings

        loaded = load(preset=tiny_settings(loaded))
    if run_config:
        announce_files(run_config, find_code(loaded, load_config(str(run_config))))
    problems = [*_find_missing(loaded, needs_model, needs_rows and not settings)]
    if not needs_rows:  # Otherwise `make_plan` loads them.
        problems += load_files(loaded)
    if problems:
        raise ConfigError("\n".join(problems))
    return loaded


def _settings_of_recorded(folder: Path, output: Any) -> tuple[Path | None, list[Setting]]:
    """Return the config of the run that was served last, and the settings of `--from`.

    The settings replace those of the config; those of the command line replace them. A run with
    another folder than the served one starts from its newest checkpoint, as a fork.
    """
    from agentrl.config.sources import Setting
    from agentrl.data.recorded import open_recorded

    address = f"{RECORDED}{folder}"
    policy = open_recorded(address).policies[-1]
    run, output = policy["run"], output or f"runs/{folder.resolve().name}"
    config = Path(run) / "config.yaml"
    has_config = bool(run) and config.is_file()
    is_same = bool(run) and Path(output).expanduser().resolve() == Path(run)
    values = {
        "data.train": address,
        "trainer.output": output,
        "trainer.resume": run if run and not is_same else "auto",
        "trainer.total_steps": 0,
        "trainer.max_staleness": MAX_RECORDED_STALENESS,
        "rollout.n": 1,
        "algorithm.mini_batch_size": 0,
        "algorithm.name": "reinforce_plus_plus",
    } | ({} if has_config else {"model.path": policy["model"]})
    settings = [Setting(path, value, "--from") for path, value in values.items()]
    return config if has_config else None, settings


def _rows_of(files: list[str]) -> Any:
    """Return the value of `data.train` for the values of `--dataset`.

    Each is a file, a glob, or a list with weights as the config has it:
    `[{path: a.jsonl, weight: 2}, b.jsonl]`.
    """
    import yaml

    from agentrl.config.sources import BoundedLoader

    rows: list[Any] = []
    for file in files:
        listed = None
        if file.startswith("["):
            with suppress(yaml.YAMLError):
                listed = yaml.load(file, BoundedLoader)
        rows += listed if isinstance(listed, list) else [file]
    return rows[0] if len(rows) == 1 and isinstance(rows[0], str) else rows


def _verl_config(config: Path | None, overrides: Sequence[str]) -> str:
    """Return the path of a config of verl's that the command line names; "" if it names none.

    Raises:
        ConfigError: the file is missing or has agentrl's keys, or verl's file is that of --config.
    """
    from agentrl.compat.verl.hydra import is_verl_config
    from agentrl.errors import ConfigError

    first = overrides[0] if overrides else ""
    path = first if first.endswith(YAML) and "=" not in first else ""
    if config and not path and is_verl_config(str(config)):
        raise ConfigError(
            f"--config {config}: this is a config of verl's. Give it without --config, then it is"
            f" translated: agentrl train {config}"
        )
    if not path:
        return ""
    if config:
        raise ConfigError(f"{path} and --config {config}: give one of them")
    if not Path(path).is_file():
        raise ConfigError(f"no such file: {path}")
    if not is_verl_config(path):
        raise ConfigError(
            f"{path} is not a config of verl's (it has no actor_rollout_ref). If it has agentrl's"
            f" keys, use --config {path}"
        )
    return path


def resolve_model(path: str, say: Callable[[str], None] = echo) -> str:
    """Return the model folder or hub name for a user's text.

    The `tiny` model is trained if necessary, those of `agentrl.pretrained.MODELS` are downloaded,
    and a GGUF file is written as a folder. For a run or a checkpoint, the folder is that of its
    exported policy (`agentrl.trainer.export.exported_model`). Possible misspellings of folder names
    are reported before the hub is asked.

    Raises:
        UserError: the path is not a model folder, or the name is a misspelling of `tiny`.
    """
    from agentrl.config import TINY

    if path == TINY:
        from agentrl.demo import tiny_model

        return str(tiny_model(say=say))
    from agentrl.errors import UserError
    from agentrl.pretrained import MODELS, convert_gguf, get_model

    folder = Path(path).expanduser()
    if path in MODELS and not folder.exists():
        return str(get_model(path, say))
    if folder.suffix == ".gguf" and folder.is_file():
        return str(convert_gguf(folder, say=say))
    if _is_trained(folder):
        from agentrl.trainer.export import exported_model

        return str(exported_model(folder, say))
    if folder.is_dir():
        configs = ("config.json", "adapter_config.json")
        if not any((folder / f).is_file() for f in configs):
            models = sorted(folder.glob("*.gguf"))
            models += [folder / "model"] * any((folder / "model" / f).is_file() for f in configs)
            raise UserError(
                f"{path} is not a model folder: it has no config.json. It is not the folder of a"
                " run either: it has no checkpoint"
                + (f". Use {', or '.join(map(str, models))}" if models else "")
            )
        return str(folder)
    if folder.exists():
        raise UserError(f"{path} is a file: use its folder, {folder.parent}")
    siblings = [f.name for f in folder.parent.glob("*") if f.is_dir() or f.suffix == ".gguf"]
    is_gguf = folder.suffix == ".gguf"
    if is_gguf or folder.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1:
        raise UserError(
            f"no model {'file' if is_gguf else 'folder'} at {path} (looked at {folder.resolve()})."
            f"{did_you_mean(folder.name, siblings)} Use a folder in transformers' format, a GGUF"
            " file, a hub name such as Qwen/Qwen2.5-0.5B-Instruct, or"
            f" {', '.join([TINY, *MODELS])}"
        )
    if "/" not in path and did_you_mean(path.lower(), names := [TINY, *MODELS]):
        raise UserError(f"no model {path!r}.{did_you_mean(path.lower(), [*names, *siblings])}")
    suggestion = did_you_mean(folder.name, siblings)
    if suggestion or ("/" in path and folder.parent.is_dir()):
        # This may not be a mistake: a folder can have the name of an owner on the hub.
        say(f"note: there is no folder {path!r}, so it is loaded from the hub.{suggestion}")
    return path


def _is_trained(folder: Path) -> bool:
    """Return whether a path is a checkpoint, a run with checkpoints, or `RUN/best`."""
    if not folder.is_dir():
        return folder.name == "best" and any(folder.parent.glob("global_step_*"))
    if (folder / "config.json").is_file():
        return False
    return (folder / "meta.json").is_file() or any(folder.glob("global_step_*"))


def with_model_folder(config: Config) -> Config:
    """Return the config with `resolve_model` of its `model.path`, unless that is a URL.

    Raises:
        UserError: there is no such model.
    """
    path = config.model.path
    return config.with_values("model", path=path if is_address(path) else resolve_model(path))


def is_address(model: str) -> bool:
    """Return whether a model is at a URL."""
    return model.startswith(("http://", "https://"))


def with_teacher_folders(config: Config) -> Config:
    """Return the config with `resolve_model` of its teachers that are models.

    Raises:
        UserError: there is no such model.
    """
    model = config.teacher.model
    folders = {name: resolve_model(name) for name in config.teacher.local}
    if isinstance(model, str):
        return config.with_values("teacher", model=folders.get(model, model))
    resolved = {source: folders.get(name, name) for source, name in model.items()}
    return config.with_values("teacher", model=resolved)


def config_of_run(model: Any) -> Path | None:
    """Return the config of a run if a model is the folder of the run; else None.

    A config names code and commands, so that of a checkpoint or a model is not used unless the user
    names it. A line says so.
    """
    from agentrl.record import is_run

    folder = Path(model or "").expanduser()
    if not model or is_run(folder):
        file = folder / "config.yaml"
        return file if model and file.is_file() else None
    part_of_run = folder.name in ("best", "model") or folder.name.startswith("global_step_")
    for file in (folder / "config.yaml", folder.parent / "config.yaml")[: 1 + part_of_run]:
        if file.is_file():
            echo(
                f"note: {file} is not used: {model} is not the folder of a run. To use it, with the"
                f" code and the commands that it names: -c {file}",
                err=True,
            )
    return None


def read_config_to_play(
    config: Path | None,
    overrides: list[str] | None,
    dataset: list[str] | None,
    model: str | None,
    file: list[str] | None,
) -> Config:
    """Read the config with the rows to play: `--dataset`, else data.val if set, else data.train.

    Raises:
        ConfigError: the config has mistakes, or there are no rows or no model.
    """
    url = model if model and is_address(model) else ""
    flags = {"dataset": dataset, "model": "" if url else model, "file": file}
    loaded = read_config(config, overrides, needs_model=not url, **flags)
    if url:
        from agentrl.agent_loops.chat_model import parse_address

        parse_address(url)
        loaded = loaded.with_values("model", path=url)
    return rows_to_play(loaded, loaded.data.train if dataset else "")


def rows_to_play(config: Config, rows: Any = "") -> Config:
    """Return a config with only these rows: by default those of data.val, else of data.train."""
    rows = rows or config.data.val or config.data.train
    return config.with_values("data", train=rows, val="")


def describe_sampling(config: RolloutConfig | ValConfig) -> str:
    """Return a short text about the sampling that a section sets, for the console."""
    if not config.temperature:
        return "greedy"
    top_k = f", top_k={config.top_k}" if config.top_k else ""
    top_p = f", top_p={config.top_p:g}" if config.top_p < 1 else ""
    return f"sampled at T={config.temperature}{top_k}{top_p}"


def _find_missing(config: Config, needs_model: bool, needs_rows: bool) -> Iterator[str]:
    """Yield what a command lacks: rows, or a model."""
    from agentrl.config import TINY
    from agentrl.errors import UserError

    if needs_rows and not config.data.train and not config.data.val:
        yield (
            "no rows: set --dataset FILE (data.train), .parquet or .jsonl"
            + _explain_old_run(config.trainer.output)
        )
    path = config.model.path
    if needs_model and not path:
        yield "no model: set --model to a folder, a hub name or tiny (model.path)"
    elif needs_model and path != TINY and not _is_trained(Path(path).expanduser()):
        try:
            resolve_model(path, say=lambda _: None)
        except UserError as e:
            yield str(e)


def _explain_old_run(output: str) -> str:
    """Return how to use the config of the run in a folder, or "" if there is none."""
    file = Path(output).expanduser() / "config.yaml"
    return f". To use the config of the run in {output}: --config {file}" if file.is_file() else ""
