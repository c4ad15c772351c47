"""Options that several commands share, and the functions that read the config from them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from agentrl.registry import YAML, did_you_mean

if TYPE_CHECKING:
    from agentrl.config import Config

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
    typer.Option(help="Rows to train on, .parquet or .jsonl (data.train). It may be repeated."),
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
    **flags: str | list[str] | bool | None,
) -> Config:
    """Read the config from the preset, a YAML file, overrides and flags.

    Args:
        config: a YAML file.
        overrides: texts such as `optim.lr=1e-5`. The first may be a config of verl's, which is
            translated; the translation is printed.
        needs_model: False for a command that plays nothing.
        needs_rows: False for a command that reads no rows.
        flags: values of flags: `val_dataset` sets the key with the flag `--val-dataset`.

    Raises:
        ConfigError: the config has mistakes, or there are no rows or no model.
    """
    from agentrl.config import FIELDS, TINY
    from agentrl.config.load import flag_of, refuse
    from agentrl.config.load import read_config as load_config
    from agentrl.errors import ConfigError
    from agentrl.plan import load_files

    keys = {flag_of(key).removeprefix("--").replace("-", "_"): key for key in FIELDS}
    overrides, intended, misplaced = _take_misplaced_words(overrides or [])
    flag_values = intended | {keys[name]: value for name, value in flags.items() if value}
    for key in ("data.train", "data.val"):
        if isinstance(files := flag_values.get(key), list):
            flag_values[key] = _rows_of(files)
    known_mistakes = [*unknown_options.get(), *misplaced]
    report = ""
    try:
        verl_file = _verl_config(config, overrides)
    except ConfigError as e:  # The meaning of other keys depends on the file.
        loaded, mistakes = load_config(flags=flag_values, mistakes=[*known_mistakes, str(e)])
        mistakes += load_files(loaded)
        if len(mistakes) > 1:
            refuse(mistakes)
        raise
    if verl_file:
        from agentrl.compat.verl.config import translate

        translation = translate(verl_file, overrides[1:], flag_values)
        report = translation.report()
        load = partial(
            load_config,
            flags=flag_values,
            translated=translation.settings,
            mistakes=[*known_mistakes, *translation.mistakes],
        )
    else:
        load = partial(
            load_config,
            str(config) if config else None,
            overrides,
            flag_values,
            mistakes=known_mistakes,
        )
    loaded, mistakes = load()
    if report and not mistakes:
        typer.echo(f"{verl_file} is translated from verl's keys to agentrl's.\n{report}\n")
    if loaded.model.path == TINY:
        from agentrl.demo import tiny_settings

        loaded, mistakes = load(preset=tiny_settings(loaded))
    _refuse_mistakes(loaded, mistakes, needs_model, needs_rows)
    return loaded


def _rows_of(files: list[str]) -> Any:
    """Return the value of `data.train` for the values of `--dataset`.

    Each is a file, a glob, or a list with weights as the config has it:
    `[{path: a.jsonl, weight: 2}, b.jsonl]`.
    """
    import yaml

    rows: list[Any] = []
    for file in files:
        listed = None
        if file.startswith("["):
            with suppress(yaml.YAMLError):
                listed = yaml.safe_load(file)
        rows += listed if isinstance(listed, list) else [file]
    return rows[0] if len(rows) == 1 and isinstance(rows[0], str) else rows


_KEY = re.compile(r"\w+(\.\w+)+")


def _take_misplaced_words(
    overrides: Sequence[str],
) -> tuple[list[str], dict[str, str | list[str]], list[str]]:
    """Separate the words that need an option or a `=`, such as `train.jsonl` or `optim.lr 1e-5`.

    Returns:
        The other words; the values that the separated words were meant to set, by key, so that they
        are checked too; a message for each of them.
    """
    from agentrl.config import TINY

    kept: list[str] = []
    intended: dict[str, str | list[str]] = {}
    mistakes: list[str] = []
    words = list(overrides)
    while words:
        word = words.pop(0)
        key = word.removesuffix("=")
        if "=" in key or (word.endswith(YAML) and not kept):
            kept.append(word)
        elif word.endswith((".jsonl", ".parquet")):
            mistakes.append(f"{word} is a file of rows: use --dataset {word}")
            intended.setdefault("data.train", word)
        elif word.endswith(".py") or word.startswith("shelf:"):
            mistakes.append(f"{word} is a file with code: use --file {word}")
            intended["files"] = [*intended.get("files", []), word]
        elif word.endswith(YAML):
            mistakes.append(
                f"{word}: use --config {word} for agentrl's keys, --file {word} for a list of"
                " tools; a config of verl's comes before the keys"
            )
        elif word == TINY or ("/" in word and Path(word).is_dir()):
            mistakes.append(f"{word} is a model: use --model {word}")
            intended.setdefault("model.path", word)
        elif _KEY.fullmatch(key) and words and (words[0] == "=" or "=" not in words[0]):
            separator = f" {words.pop(0)}" if words[0] == "=" else ""
            value = words.pop(0) if words else "VALUE"
            mistakes.append(f"{word}{separator} {value}: write it without spaces: {key}={value}")
            kept.append(f"{key}={value}")
        else:
            kept.append(word)
    return kept, intended, mistakes


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


def resolve_model(path: str, say: Callable[[str], None] = print) -> str:
    """Return the model folder or hub name for a user's text.

    The `tiny` model is trained if necessary. For a run or a checkpoint, the folder is that of its
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

    folder = Path(path).expanduser()
    if _is_trained(folder):
        from agentrl.trainer.export import exported_model

        return str(exported_model(folder, say))
    if folder.is_dir():
        if not any((folder / f).is_file() for f in ("config.json", "adapter_config.json")):
            raise UserError(
                f"{path} is not a model folder: it has no config.json. It is not the folder of a"
                " run either: it has no checkpoint"
            )
        return str(folder)
    if folder.exists():
        raise UserError(f"{path} is a file: use its folder, {folder.parent}")
    siblings = [f.name for f in folder.parent.glob("*") if f.is_dir()]
    if folder.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1:
        raise UserError(
            f"no model folder at {path} (looked at {folder.resolve()})."
            f"{did_you_mean(folder.name, siblings)} Use a folder in transformers' format, a hub"
            f" name such as Qwen/Qwen2.5-0.5B-Instruct, or {TINY!r}"
        )
    if "/" not in path and did_you_mean(path.lower(), [TINY]):
        raise UserError(f"no model {path!r}.{did_you_mean(path.lower(), [TINY, *siblings])}")
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
    """Return the config with `resolve_model` of its `model.path`.

    Raises:
        UserError: there is no such model.
    """
    model = config.model.model_copy(update={"path": resolve_model(config.model.path)})
    return config.model_copy(update={"model": model})


def config_of_run(model: str | None) -> Path | None:
    """Return the config of the run that a model belongs to; None if it belongs to none."""
    folder = Path(model or "").expanduser()
    if folder.name in ("best", "model") or folder.name.startswith("global_step_"):
        folder = folder.parent
    file = folder / "config.yaml"
    return file if model and file.is_file() else None


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
    loaded = read_config(config, overrides, dataset=dataset, model=model, file=file)
    return rows_to_play(loaded, loaded.data.train if dataset else "")


def rows_to_play(config: Config, rows: Any = "") -> Config:
    """Return a config with only these rows: by default those of data.val, else of data.train."""
    rows = rows or config.data.val or config.data.train
    data = config.data.model_copy(update={"train": rows, "val": ""})
    return config.model_copy(update={"data": data})


def describe_sampling(temperature: float) -> str:
    """Return a short text about the sampling, for the console."""
    return f"sampled at T={temperature}" if temperature else "greedy"


def _refuse_mistakes(
    config: Config, mistakes: list[str], needs_model: bool, needs_rows: bool
) -> None:
    """Report the mistakes of a config, and with them those of the model, files and rows.

    Raises:
        ConfigError: there are mistakes, no rows or no model.
    """
    from agentrl.config import TINY
    from agentrl.config.load import refuse
    from agentrl.errors import ConfigError, UserError
    from agentrl.plan import find_problems, load_files

    problems = []
    file_problems = load_files(config)
    are_rows_set = any(m.startswith(("data.train=", "data.val=")) for m in mistakes)
    if needs_rows and not config.data.train and not config.data.val and not are_rows_set:
        problems.append(
            "no rows: set --dataset FILE (data.train), .parquet or .jsonl"
            + _explain_old_run(config.trainer.output)
        )
    if not needs_model:
        pass
    elif not config.model.path:
        problems.append("no model: set --model to a folder, a hub name or tiny (model.path)")
    elif config.model.path != TINY and not _is_trained(Path(config.model.path).expanduser()):
        try:
            resolve_model(config.model.path, say=lambda _: None)
        except UserError as e:
            problems.append(str(e))
    if not mistakes and not problems and not file_problems:
        return
    problems += file_problems
    problems += find_problems(
        config,
        are_files_loaded=not file_problems,
        is_reward_valid=not any(m.startswith("reward.") for m in mistakes),
    )
    if not mistakes:
        raise ConfigError("\n".join(problems))
    refuse([*mistakes, *(problem.replace("\n", "\n    ") for problem in problems)])


def _explain_old_run(output: str) -> str:
    """Return how to use the config of the run in a folder, or "" if there is none."""
    file = Path(output).expanduser() / "config.yaml"
    return f". To use the config of the run in {output}: --config {file}" if file.is_file() else ""


command_words: ContextVar[tuple[str, ...]] = ContextVar("command_words")
"""The running command and its arguments."""
unknown_options: ContextVar[tuple[str, ...]] = ContextVar("unknown_options", default=())
"""The messages about options that the running command does not have, for `read_config`."""


def take_unknown_options(app: Any, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate the options that a command does not have.

    Args:
        app: the click group of all commands.
        words: the command and its arguments.

    Returns:
        The words without these options and their values; a message for each of the options, if the
        command reports them with the mistakes of its config.

    Raises:
        ConfigError: another command has such options, or options are missing.
    """
    from agentrl.errors import ConfigError

    command, rest = app, list(words)
    while rest and rest[0] in getattr(command, "commands", {}):  # `tools` has commands of its own
        command = command.commands[rest.pop(0)]
    if hasattr(command, "commands"):
        return list(words), []
    names = [name for p in command.params for name in (*p.opts, *p.secondary_opts)]
    options = {name for name in names if name.startswith("--")}
    kept, mistakes = list(words[: len(words) - len(rest)]), []
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if not re.fullmatch(r"--\w[\w.-]*", name) or name in {*options, "--help"}:
            kept.append(word)
            if word == "--":  # only arguments follow
                return kept + rest, mistakes
            continue
        following = rest[0] if rest else ""
        if not equals and following and not following.startswith("-") and "=" not in following:
            value = rest.pop(0)
        if "." in name:
            key = f"{name[2:]}={value or 'VALUE'}"
            mistakes.append(f"{name}: write config keys without dashes: {key}")
        else:
            advice = _advice(name, value or "VALUE", command.name, options)
            mistakes.append(f"no option {name}. {advice}")
    missing = [] if {"--help", "-h"} & {*kept} else _find_missing_options(command, kept)
    mistakes += missing
    if missing or (mistakes and "--config" not in options):
        raise ConfigError("\n".join(mistakes))
    return kept, mistakes


def _find_missing_options(command: Any, words: Sequence[str]) -> list[str]:
    """Return a message for each required option of a command that its words do not have."""
    names = {word.partition("=")[0] for word in words}
    return [
        f"{p.opts[0]} is missing: {p.help}"
        for p in command.params
        if p.param_type_name == "option" and p.required and not names & {*p.opts}
    ]


def _advice(name: str, value: str, command: str, options: set[str]) -> str:
    """Return what to write instead of an option that a command does not have."""
    from agentrl.config import FIELDS
    from agentrl.config.load import flag_of
    from agentrl.config.sources import keys_named

    word = name.removeprefix("--").replace("-", "_")
    flags = {key: flag for key in FIELDS if (flag := flag_of(key)) in options}
    usable = FIELDS.keys() if "--config" in options else flags.keys()
    if command == "sft":
        from agentrl.trainer.sft import FLAG_OF_KEY as flags
        from agentrl.trainer.sft import SFT_KEYS

        usable = {*flags, *SFT_KEYS}
    keys = [key for key in keys_named(word, FIELDS) if key in usable]
    if not keys and (close := difflib.get_close_matches(name, options, n=1, cutoff=0.75)):
        return f"Did you mean {close[0]}?"
    if not keys:
        keys = [key for key in keys_named(word, FIELDS, cutoff=0.75) if key in usable]
    if keys:
        texts = [f"{flags[key]} {value}" if key in flags else f"{key}={value}" for key in keys]
        return f"Use {' or '.join(texts)}"
    if "--config" in options:
        return "`--help` lists the options; docs/config.md lists the config keys"
    return f"Its options: {', '.join(sorted(options)) or 'none'}"
