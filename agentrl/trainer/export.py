"""From a checkpoint to a folder that others load: transformers, PEFT, SGLang."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from pydantic import ValidationError

from agentrl.chat import load_tokenizer
from agentrl.config import Config
from agentrl.engine.local.load import load_causal_lm
from agentrl.errors import ConfigError, RunStopped, UserError
from agentrl.trainer.checkpoint import Checkpoint, open_checkpoint
from agentrl.trainer.policy import ACTOR, Policy
from agentrl.trainer.rank import ADAPTER_FOLDER
from agentrl.trainer.state import PARAMETER_PREFIX, check_state, read_state

Precision = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True, slots=True)
class ExportResult:
    """What a folder was made from, and what it is."""

    checkpoint: Checkpoint
    base: str
    """The model that training began with."""
    adapter: bool
    """A PEFT adapter's folder; else a model's."""
    lora: bool
    """An adapter was trained; else all weights."""


def export(
    path: Path, out: Path, *, merge: bool = False, dtype: Precision = "auto", model: str = ""
) -> ExportResult:
    """Make a folder of a checkpoint's policy, with its tokenizer and chat template.

    Of a full training it is a model's; of LoRA an adapter's, or with `merge` a model's, merged anew
    from the base.

    Args:
        path: a checkpoint, or a run's folder for the newest that verifies.
        out: to be made; it appears whole or not at all.
        merge: put LoRA into the weights.
        dtype: of a model's weights; "auto": as its base was published, which is what an engine
            held while it sampled.
        model: where the model is that training began with, in place of the run's `model.path`.

    Raises:
        UserError: `out` exists, no checkpoint or model is where it should be, or they do not fit.
        RunStopped: the disk is full or refuses.
    """
    if out.exists() or out.is_symlink():
        raise UserError(f"{out} is there already: name a new folder")
    checkpoint = open_checkpoint(path)
    config = _config_of(checkpoint)
    base = model or config.model.path
    lora = config.model.lora_rank > 0
    adapter = lora and not merge
    try:
        tokenizer = load_tokenizer(base)
        with _atomic_folder(out) as folder:
            if adapter:
                _copy_adapter(checkpoint.folder / ADAPTER_FOLDER, folder, base)
            else:
                _load_policy(checkpoint, config, base, dtype).save_whole(folder)
            tokenizer.save_pretrained(folder)
    except UserError as e:
        if model or Path(base).exists():
            raise
        raise ConfigError(
            f"{e}\nThe run began with model.path={base!r}. If that is a folder, export from where"
            " the run was started, or name it: --model FOLDER"
        ) from e
    return ExportResult(checkpoint, base, adapter, lora)


def _config_of(checkpoint: Checkpoint) -> Config:
    try:
        return Config.model_validate(checkpoint.meta["config"])
    except (KeyError, ValidationError) as e:
        raise ConfigError(
            f"{checkpoint.folder} holds no config that this version of agentrl reads: {e}"
        ) from e


def _load_policy(checkpoint: Checkpoint, config: Config, base: str, dtype: Precision) -> Policy:
    """The policy as it was trained, on the CPU."""
    m = config.model
    loaded = load_causal_lm(base, "auto" if dtype == "auto" else getattr(torch, dtype))
    policy = Policy(loaded, config.rollout.temperature)
    if m.lora_rank:
        policy.add_adapter(ACTOR, m.lora_rank, m.lora_alpha, m.lora_target_modules, seed=0)
    weights = {PARAMETER_PREFIX + n: p.detach() for n, p in policy.parameters(ACTOR).items()}
    check_state(checkpoint.folder / "actor", weights, PARAMETER_PREFIX)
    read_state(checkpoint.folder / "actor", weights)
    return policy


def _copy_adapter(adapter: Path, folder: Path, base: str) -> None:
    """The adapter as it was saved, and where its base is from wherever one looks."""
    if not adapter.is_dir():
        raise ConfigError(
            f"training began with the adapter {base!r}, merged: an adapter's folder could only name"
            " another base. Add --merge for the whole model"
        )
    shutil.copytree(adapter, folder, dirs_exist_ok=True)
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text())
    config["base_model_name_or_path"] = str(Path(base).resolve()) if Path(base).is_dir() else base
    file.write_text(json.dumps(config, indent=2) + "\n")


@contextmanager
def _atomic_folder(out: Path) -> Iterator[Path]:
    """A folder to write into that is `out` once all is written."""
    staging = out.parent / f".tmp-{out.name}-{os.getpid()}"
    try:
        staging.mkdir(parents=True)
        yield staging
        staging.rename(out)
    except OSError as e:
        raise RunStopped(f"cannot write {out}: {e}") from e
    finally:
        shutil.rmtree(staging, ignore_errors=True)
