"""From a checkpoint to a folder that transformers, PEFT or SGLang loads."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from pydantic import ValidationError
from torch import Tensor
from transformers.utils import logging

from agentrl.chat import load_tokenizer
from agentrl.config import Config
from agentrl.engine.local.load import load_causal_lm
from agentrl.errors import ConfigError, RunStopped, UserError
from agentrl.learner.policy import ACTOR, Policy, base_weight
from agentrl.learner.rank import ADAPTER_FOLDER
from agentrl.learner.state import PARAMETER_PREFIX, check_state, read_state
from agentrl.learner.vision import freeze_vision_tower
from agentrl.regular_files import open_regular, staging_folder
from agentrl.terminal import echo
from agentrl.trainer.checkpoint import (
    META,
    Checkpoint,
    checkpoint_folders,
    open_checkpoint,
)

EXPORTED = "exported"
"""The folder in a run's folder with the exports that `--model RUN` has made."""

Precision = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True, slots=True)
class ExportResult:
    """The source and the kind of an exported folder."""

    checkpoint: Checkpoint
    base: str
    """The model that training started from."""
    adapter: bool
    """True for a PEFT adapter's folder, False for a model's."""
    lora: bool
    """True if an adapter was trained, False if all weights were."""
    rounding_note: str = ""
    """What rounding loses of the policy that was validated, for people to read; "": nothing."""


def export(
    path: Path, out: Path, *, merge: bool = False, dtype: Precision = "auto", model: str = ""
) -> ExportResult:
    """Export a checkpoint's policy to a folder, with its tokenizer and chat template.

    After full training it is the folder of a model. After LoRA training it is that of an adapter,
    or with `merge` that of a model, merged into the base.

    Args:
        path: a checkpoint, a run's folder for its newest valid one, or `RUN/best` for the one with
            the highest `trainer.keep_best`.
        out: the folder to make; it appears completely or not at all.
        merge: merge LoRA into the weights.
        dtype: the data type of a model's weights; "auto": that in which the run's engine sampled,
            so that the export is the policy that was validated.
        model: the model that training started from, if it is no longer at the run's `model.path`.

    Raises:
        UserError: `out` exists, there is no such checkpoint or model, or they do not fit together.
        RunStopped: the disk is full or refuses to write.
    """
    if out.exists() or out.is_symlink():
        raise UserError(f"{out} already exists: name a new folder")
    return _export(open_checkpoint(path), out, merge, dtype, model)


def exported_model(path: Path, say: Callable[[str], None] = echo) -> Path:
    """Return a folder with the policy of a run or a checkpoint, as an engine loads it.

    The first call exports it to `exported/` in the run's folder; the name of the export has the
    step and the hash of the checkpoint. Later calls return the same folder.

    Args:
        path: a checkpoint, a run's folder for its newest valid one, or `RUN/best`.
        say: called with a line before an export.

    Raises:
        UserError: there is no such checkpoint, or its base model is missing.
        RunStopped: the disk is full or refuses to write.
    """
    for folder in checkpoint_folders(path)[:1]:
        if (out := _export_path(folder)) and out.is_dir():
            return out
    checkpoint = open_checkpoint(path)
    out = _export_path(checkpoint.folder)
    assert out is not None  # the checkpoint was just read
    if not out.is_dir():
        for line in checkpoint.skipped:
            say(f"skipped: {line}")
        say(f"exporting {checkpoint.folder} to {out} (once; delete the folder when not needed)")
        has_adapter = any(Path(name).parts[0] == ADAPTER_FOLDER for name in checkpoint.files)
        if note := _export(checkpoint, out, not has_adapter, "auto", "").rounding_note:
            say(f"note: {note}")
    return out


def source_of_export(folder: str) -> tuple[str, int]:
    """Return the run and the step of a folder of `exported_model`; ("", 0) for another model."""
    path = Path(folder).resolve()
    match = re.fullmatch(r"global_step_(\d+)-[0-9a-f]{12}", path.name)
    if match is None or path.parent.name != EXPORTED:
        return "", 0
    return str(path.parents[1]), int(match[1])


def _export_path(checkpoint: Path) -> Path | None:
    """Return where a checkpoint is exported for engines; None if it has no readable `meta.json`."""
    try:
        with open_regular(checkpoint / META) as file:
            key = hashlib.file_digest(file, "sha256").hexdigest()[:12]
    except OSError:
        return None
    checkpoint = checkpoint.resolve()
    return checkpoint.parent / EXPORTED / f"{checkpoint.name}-{key}"


def _export(checkpoint: Checkpoint, out: Path, merge: bool, dtype: str, model: str) -> ExportResult:
    config = _config_of(checkpoint)
    if dtype == "auto":
        dtype = checkpoint.meta["dtype"]
    base = model or config.model.path
    lora = config.model.lora_rank > 0
    adapter, note = lora and not merge, ""
    logging.disable_progress_bar()  # two bars per model are noise
    try:
        tokenizer = load_tokenizer(base)
        with _atomic_folder(out) as folder:
            if adapter:
                _copy_adapter(checkpoint, folder, base)
            else:
                policy, note = _load_policy(checkpoint, config, base, dtype)
                policy.save_whole(folder, dtype)
            tokenizer.save_pretrained(folder)
    except UserError as e:
        if model or Path(base).exists():
            raise
        raise ConfigError(
            f"{e}\nThe run started from model.path={base!r}. If that is a folder, run the export in"
            " the folder where the run was started, or name the model: --model FOLDER"
        ) from e
    return ExportResult(checkpoint, base, adapter, lora, note)


def _config_of(checkpoint: Checkpoint) -> Config:
    try:
        return Config.model_validate(checkpoint.meta["config"])
    except (KeyError, ValidationError) as e:
        raise ConfigError(
            f"{checkpoint.folder} has no config that this version of agentrl can read: {e}"
        ) from e


def _load_policy(
    checkpoint: Checkpoint, config: Config, base: str, dtype: str
) -> tuple[Policy, str]:
    """Load the trained policy on the CPU, to be saved in a precision.

    Returns:
        The policy, and what rounding loses of the policy that was validated; "": nothing.
    """
    m, folder, kind = config.model, checkpoint.folder / "actor", getattr(torch, dtype)
    policy = Policy(load_causal_lm(base, "auto"), config.rollout.temperature)
    if m.freeze_vision_tower:
        freeze_vision_tower(policy.model)
    if m.lora_rank:
        policy.add_adapter(ACTOR, m.lora_rank, m.lora_alpha, m.lora_target_modules, seed=0)
    if m.quantization == "nf4":
        policy.quantize("cpu")
    parameters, sums = policy.parameters(ACTOR), torch.zeros(5, dtype=torch.float64)
    check_state(folder, {PARAMETER_PREFIX + n: p for n, p in parameters.items()}, PARAMETER_PREFIX)
    for name, p in parameters.items():  # one by one: all in float32 may not fit into the memory
        trained = torch.empty(p.shape)
        read_state(folder, {PARAMETER_PREFIX + name: trained})
        if not m.lora_rank:
            rounded = trained.to(policy.saved_dtype(name, kind))
            sums += _compare(p.detach(), trained, rounded)
            trained = rounded
        p.data = trained
    if m.lora_rank:
        pairs = zip(policy.adapted(), policy.export(torch.float32), strict=True)
        for (_, layer), (_, merged) in pairs:
            sums += _compare(base_weight(layer), merged, merged.to(kind))
    # If the engine sampled from rounded weights, the export has the policy that was validated.
    is_own = not m.lora_rank and dtype == checkpoint.meta["dtype"]
    return policy, "" if is_own else _describe_rounding(sums, dtype)


def _compare(base: Tensor, trained: Tensor, rounded: Tensor) -> Tensor:
    """Return the products of the update with itself and with the rounded one, and their counts."""
    update, kept = trained - base.float(), rounded.float() - base.float()
    parts = update * kept, update.square(), kept.square(), update != 0, (update != 0) & (kept != 0)
    return torch.stack([part.sum(dtype=torch.float64) for part in parts])


def _describe_rounding(sums: Tensor, dtype: str) -> str:
    product, update, kept, changed, still_changed = sums.tolist()
    if product == update == kept:
        return ""
    cosine = product / math.sqrt(update * kept) if update * kept else 0.0
    return (
        f"rounding to {dtype} loses a part of the training: {still_changed / max(changed, 1):.1%}"
        " of the changed weights still differ from the base, and the cosine between the update and"
        f" the rounded update is {cosine:.3f}. --dtype float32 keeps all of it"
    )


def _copy_adapter(checkpoint: Checkpoint, folder: Path, base: str) -> None:
    """Copy the saved adapter. In the copy the path of its base is absolute.

    Only files that the checkpoint lists are copied: an exported folder is often published, so a
    file that somebody else put there, or a link to one, must not become a part of it.
    """
    names = [name for name in checkpoint.files if Path(name).parts[0] == ADAPTER_FOLDER]
    if not names:
        raise ConfigError(
            f"training started from the adapter {base!r}, which was merged: an adapter's folder"
            " could only name another base. Add --merge to export the whole model"
        )
    for name in names:
        copy = folder / Path(name).relative_to(ADAPTER_FOLDER)
        copy.parent.mkdir(parents=True, exist_ok=True)
        with open_regular(checkpoint.folder / name) as source, open(copy, "xb") as target:
            shutil.copyfileobj(source, target)
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text())
    config["base_model_name_or_path"] = str(Path(base).resolve()) if Path(base).is_dir() else base
    file.write_text(json.dumps(config, indent=2) + "\n")


@contextmanager
def _atomic_folder(out: Path) -> Iterator[Path]:
    """Yield a folder to write into, which is renamed to `out` at the end."""
    try:
        with staging_folder(out) as staging:
            yield staging
            staging.rename(out)
    except OSError as e:
        raise RunStopped(f"cannot write {out}: {e}") from e
