"""Options that a command does not have: which config key or option to use instead."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

ALIASES = {
    "learning_rate": "optim.lr",
    "epochs": "trainer.total_epochs",
    "num_train_epochs": "trainer.total_epochs",
    "steps": "trainer.total_steps",
    "max_steps": "trainer.total_steps",
    "save_steps": "trainer.save_freq",
    "eval_steps": "trainer.test_freq",
    "output_dir": "trainer.output",
    "report_to": "trainer.logger",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "dataset_name": "data.train",
    "train_files": "data.train",
    "val_files": "data.val",
    "num_generations": "rollout.n",
    "max_completion_length": "rollout.max_trajectory_tokens",
    "max_response_length": "rollout.max_trajectory_tokens",
    "beta": "algorithm.kl_loss_coef",
    "lora_r": "model.lora_rank",
    "gradient_checkpointing": "optim.recompute",
    "gpus": "trainer.n_gpus_per_node",
    "num_gpus": "trainer.n_gpus_per_node",
}
"""agentrl's key for common options of TRL and other projects. `agentrl.compat.verl` has verl's."""


unknown_options: ContextVar[tuple[str, ...]] = ContextVar("unknown_options", default=())
"""The messages about options that the running command does not have, for `read_config`."""


def take_unknown_options(app: Any, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate the options that a command with config keys does not have.

    Args:
        app: the click group of all commands.
        words: the command and its arguments.

    Returns:
        The words without these options and their values; a message for each of the options. A
        command without config keys keeps its unknown options, and click reports them.

    Raises:
        ConfigError: a command without config keys has keys with dashes (`--rollout.n 4`).
    """
    from agentrl.errors import ConfigError

    command = app.commands.get(words[0]) if words else None
    parameters = command.params if command else []
    options = {name for p in parameters for name in p.opts if name.startswith("--")}
    flags = {name for p in parameters if getattr(p, "is_flag", False) for name in p.opts}
    has_keys = "--config" in options
    kept, mistakes = [], []
    i = 0
    while i < len(words):
        word = words[i]
        name, equals, value = word.partition("=")
        i += 1
        is_key = "." in name
        if (
            not re.fullmatch(r"--\w[\w.-]*", name)
            or name in {*options, *flags, "--help", "--version"}
            or not (is_key or has_keys)
        ):
            kept.append(word)
            continue
        following = words[i] if i < len(words) else ""
        if not equals and following and not following.startswith("-") and "=" not in following:
            value = following
            i += 1
        value = value or "VALUE"
        if is_key:
            mistakes.append(f"{name}: write config keys without dashes: {name[2:]}={value}")
        else:
            mistakes.append(f"no option {name}. {_advice(name, value, options)}")
    if mistakes and not has_keys:
        raise ConfigError("\n".join(mistakes))
    return kept, mistakes


def _advice(name: str, value: str, options: set[str]) -> str:
    from agentrl.compat.verl.keys import RENAMED
    from agentrl.config import FIELDS
    from agentrl.config.load import flag_of

    word = name.removeprefix("--").replace("-", "_")
    ours: dict[str, list[str]] = {}
    for key in FIELDS:
        ours.setdefault(key.rpartition(".")[2], []).append(key)
    verls = {theirs.rpartition(".")[2]: [key] for theirs, key in RENAMED.items()}
    known = {**verls, **{alias: [key] for alias, key in ALIASES.items()}, **ours}
    keys = known.get(word, [])
    if not keys and (close := difflib.get_close_matches(name, options, n=1, cutoff=0.75)):
        return f"Did you mean {close[0]}?"
    if not keys:
        keys = [
            key
            for match in difflib.get_close_matches(word, known, n=1, cutoff=0.75)
            for key in known[match]
        ]
    if not keys:
        return "`--help` lists the options; docs/config.md lists the config keys"
    texts = [
        f"{flag_of(key)} {value}" if flag_of(key) in options else f"{key}={value}" for key in keys
    ]
    return f"Use {' or '.join(texts)}"
