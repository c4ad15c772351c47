"""Load a plain model from a folder or the hub, also from a PEFT adapter.

An adapter is merged into its base model. Otherwise all later code would need to know about it: full
training would save only the adapter, and lose the changes to the base.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file
from transformers.utils.peft_utils import find_adapter_config_file

from agentrl.engine.local.quantize import rounded
from agentrl.errors import ConfigError
from agentrl.images import FAMILIES, load_processor
from agentrl.workers.variables import environment_variables

LAUNCHER_PREFIXES = ("ACCELERATE_", "PMI_", "OMPI_", "MV2_")
"""Prefixes of the environment variables that `accelerate launch` and MPI launchers set."""


@contextmanager
def without_launcher_variables() -> Iterator[None]:
    """Hide the environment variables of launchers within the block.

    These variables override arguments of accelerate and transformers, or set values that have no
    argument: the divisor of gradients, the device, the kind of parallelism, the number of
    processes, and which processes load weights. A shell or a container may still have them from
    another job.
    """
    with environment_variables(
        {name: None for name in os.environ if name.startswith(LAUNCHER_PREFIXES)}
    ):
        yield


def resolve_device(device: str) -> str:
    """Return the device that `trainer.device` selects: "auto" is the GPU if there is one."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def compute_dtype(device: str) -> torch.dtype:
    """Return the precision in which learner and local engine compute on a device.

    Trainable weights of a learner on a GPU are kept in float32, but its passes use this one.
    """
    return torch.float32 if device == "cpu" else torch.bfloat16


@without_launcher_variables()
def load_causal_lm(
    path: str | Path, dtype: torch.dtype | str, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """Load a plain causal language model in evaluation mode.

    Weights are read only from safetensors, because a pickle can run code. If adapters were merged,
    `name_or_path` of the model is empty, because no folder has its weights. Weights that the files
    lack, such as an output layer, are random, and the same in each process.

    Args:
        path: a folder in the format of transformers or of a PEFT adapter, or the hub name of
            either.
        dtype: the dtype of the weights; "auto": the dtype of the base. Adapters are merged in
            float32, then the sum is rounded once, as the learner does it.
        device: the device of the model.

    Raises:
        ConfigError: there is no such model, it is not a causal language model, or the base of an
            adapter is missing or does not fit.
    """
    base, adapters = base_and_adapters(path)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            config = AutoConfig.from_pretrained(base, trust_remote_code=False)
            model: PreTrainedModel = auto_class(config).from_pretrained(
                base, dtype=dtype, use_safetensors=True, trust_remote_code=False
            )
    except (OSError, ValueError, SafetensorError) as e:
        owner = f", the base of the adapter {str(path)!r}" if adapters else ""
        raise ConfigError(
            f"cannot load a model from {base!r}{owner}: {e}. It must be a causal language model: a"
            " folder in transformers' format with safetensors weights, or a name on the hub."
        ) from e
    model.to(device)  # type: ignore[arg-type]  # With a device_map, PEFT would spread it again.
    for adapter in adapters:
        model = _merge(model, adapter)
    return model.eval()


def auto_class(config: PretrainedConfig) -> Any:
    """Return the class that loads models with a config: whole ones, if they read images here."""
    return AutoModelForImageTextToText if reads_images(config) else AutoModelForCausalLM


def empty_model(config: PretrainedConfig, **options: Any) -> PreTrainedModel:
    """Return a model without memory for its weights: its modules, and the shapes of its tensors.

    Args:
        config: the config of the model.
        options: further arguments of transformers' `from_config`.
    """
    with torch.device("meta"):
        return auto_class(config).from_config(config, **options)


def reads_images(config: PretrainedConfig) -> bool:
    """Return whether models with a config read images here."""
    return config.model_type in FAMILIES


@cache
def image_processor(path: str | Path) -> Any:
    """Return the image processor of a model, or of the model below an adapter. It is loaded once.

    Raises:
        ConfigError: see `load_processor` and `base_and_adapters`.
    """
    return load_processor(base_and_adapters(path)[0])


def load_model_config(path: str | Path) -> PretrainedConfig:
    """Return the config of a model, or of the model below an adapter; no weights are read.

    Raises:
        ConfigError: there is no such model.
    """
    base, _ = base_and_adapters(path)
    try:
        return AutoConfig.from_pretrained(base, trust_remote_code=False)
    except (OSError, ValueError) as e:
        raise ConfigError(f"no model at {base!r}: {str(e).splitlines()[0]}") from e


LENGTH_KEYS = ("max_position_embeddings", "max_seq_len", "seq_length")
"""The keys under which configs have the length of a row: all, then MPT, then BLOOM as published."""
UNLIMITED = 1 << 20
"""The length of a row for models that have no limit, such as Mamba."""


def max_row_length(config: PretrainedConfig) -> int:
    """Return the largest number of tokens in a row that a model accepts."""
    text = config.get_text_config(decoder=True)
    return next((n for key in LENGTH_KEYS if (n := getattr(text, key, 0))), UNLIMITED)


def base_and_adapters(path: str | Path) -> tuple[str, list[str]]:
    """Return the plain model behind a folder or hub name, and its adapters, innermost first.

    Reads no weights.

    Raises:
        ConfigError: an adapter names no base, or itself.
    """
    base, adapters = str(path), []
    while _is_adapter(base):
        adapters.insert(0, base)
        try:
            base_name = PeftConfig.from_pretrained(base).base_model_name_or_path
        except (OSError, ValueError, TypeError, KeyError) as e:
            raise ConfigError(f"PEFT cannot read the config of the adapter {base!r}: {e}") from e
        if not base_name or base_name in adapters:
            raise ConfigError(
                f"the adapter {base!r} does not name its base model: base_model_name_or_path"
                f" is {base_name!r}. Write the base's folder or hub name into"
                " its adapter_config.json."
            )
        base = base_name
    return base, adapters


def _is_adapter(path: str) -> bool:
    try:
        return find_adapter_config_file(path) is not None
    except (OSError, ValueError):
        return False  # Neither a folder nor a hub name: loading it raises the error.


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Silence PEFT's warnings about an old name of transformers and merged layers, in the block."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning
        )
        warnings.filterwarnings("ignore", "All adapters are already merged")
        yield


@quiet_peft()
@torch.no_grad()
def _merge(model: PreTrainedModel, adapter: str) -> PreTrainedModel:
    try:
        config = PeftConfig.from_pretrained(adapter)
        if config.is_prompt_learning:
            raise ValueError(f"{config.peft_type} adds tokens, which cannot be merged into weights")
        # Without this file, PEFT would load a pickle.
        cached_file(adapter, "adapter_model.safetensors")
        device = str(model.device)
        tuned = PeftModel.from_pretrained(model, adapter, torch_device=device)
        # PEFT ignores weights that do not belong to the model. A second call returns their names.
        keys = tuned.load_adapter(adapter, "default", torch_device=device)
        if unmatched := keys.unexpected_keys + keys.missing_keys:
            raise ValueError(f"{unmatched[0]} is in only one of adapter and model")
        is_quantized = (Path(adapter) / QUANTIZED_BASE).exists()
        for layer in tuned.modules():
            if isinstance(layer, BaseTunerLayer):
                base = layer.get_base_layer()
                dtype = next(base.parameters()).dtype
                if is_quantized:
                    base.weight.data = rounded(base.weight.data)  # type: ignore[arg-type]
                base.float()
                layer.merge(safe_merge=True)
                base.to(dtype)
        merged = tuned.merge_and_unload(safe_merge=True)  # type: ignore[operator]
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as e:
        raise ConfigError(
            f"the adapter {adapter!r} cannot be merged into {model.name_or_path!r}, its base: {e}"
        ) from e
    merged.name_or_path = ""
    return merged.requires_grad_(True)  # PEFT froze the weights.


QUANTIZED_BASE = "quantized_base.json"
"""A file in the folder of an adapter whose base was quantized while it learned (`quantize.py`)."""


def mark_quantized(folder: Path) -> None:
    """Mark an adapter: `load_causal_lm` then merges it into the rounded base."""
    _write_json(folder / QUANTIZED_BASE, {"model.quantization": "nf4"})


PROCESSORS = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
"""Files of models for images, without which servers do not load them."""
NOT_OF_THE_SAVED_MODEL = ("quantization_config", "auto_map", "torch_dtype", "transformers_version")
"""Keys of a base's config that a saved model does not take over: its weights are not quantized, it
has no separate code, and it has its own `dtype`."""


def add_other_parts(folder: Path, base: str | Path) -> None:
    """Add to a saved model what else its base has, such as layers for images.

    transformers loads the text part alone of some models (Qwen3.5 as published), but SGLang serves
    only the whole. The added weights, the config and the files of processors are those of the base.

    If the saved model has the class of its base, only keys are added to its config: transformers
    leaves out some that servers read, such as `full_attention_interval` (Qwen3-Next), and others
    that older versions read, such as `rope_theta`.

    Does nothing if the base no longer exists.

    Args:
        folder: a model in the format of transformers, whose tensors have their published names.
        base: the folder or the hub name of the model that it was loaded from.
    """
    try:
        whole_config = load_model_config(base)
    except ConfigError:  # It was moved during the run. The text model that was saved is complete.
        return
    config, own = (
        json.loads(Path(cast(str, cached_file(path, CONFIG_NAME))).read_text())
        for path in (base, folder)
    )
    if type(load_model_config(folder)) is type(whole_config):
        _add_keys(own, config)
        _write_json(folder / CONFIG_NAME, own)
        if reads_images(whole_config):
            _copy_processors(folder, base)
        return
    saved, published = _weight_files(folder), _weight_files(base)
    others = {name: file for name, file in published.items() if name not in saved}
    parts: dict[str, Tensor] = {}
    for file in sorted(set(others.values())):
        with safe_open(file, "pt") as weights:
            parts |= {n: weights.get_tensor(n) for n, owner in others.items() if owner == file}
    whole = folder / SAFE_WEIGHTS_NAME
    first = folder / "model-text.safetensors"
    if whole.exists():  # transformers would read this file and not the index
        whole.rename(first)
    rest = folder / "model-others.safetensors"
    save_file(parts, rest, {"format": "pt"})
    files = {n: first.name if file == str(whole) else Path(file).name for n, file in saved.items()}
    files |= dict.fromkeys(others, rest.name)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    index = {"metadata": {"total_size": size}, "weight_map": files}
    _write_json(folder / SAFE_WEIGHTS_INDEX_NAME, index)
    for section in (config, config.get("text_config", {})):
        section |= {key: own["dtype"] for key in ("dtype", "torch_dtype") if key in section}
    _write_json(folder / CONFIG_NAME, config)
    _copy_processors(folder, base)


def _copy_processors(folder: Path, base: str | Path) -> None:
    for name in PROCESSORS:
        file = cached_file(base, name, _raise_exceptions_for_missing_entries=False)
        if file is not None:
            shutil.copyfile(file, folder / name)


def _add_keys(own: dict[str, Any], base: dict[str, Any]) -> None:
    """Add to a saved config, and to the configs in it, the keys of its base that it lacks."""
    for key, value in base.items():
        if key in NOT_OF_THE_SAVED_MODEL:
            continue
        mine = own.setdefault(key, value)
        if key.endswith("_config") and isinstance(mine, dict) and isinstance(value, dict):
            _add_keys(mine, value)


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")


def _weight_files(path: str | Path) -> dict[str, str]:
    """Return the file of each tensor of a model: a folder or a hub name."""
    index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False)
    if index is not None:
        names: dict[str, str] = json.loads(Path(index).read_text())["weight_map"]
        located = {file: cast(str, cached_file(path, file)) for file in {*names.values()}}
        return {name: located[file] for name, file in names.items()}
    file = cast(str, cached_file(path, SAFE_WEIGHTS_NAME))
    with safe_open(file, "pt") as weights:
        return dict.fromkeys(weights.keys(), file)


def stacked_parameters(model: PreTrainedModel) -> list[str]:
    """Return the names of the parameters in which transformers stacks the matrices of experts."""
    found = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            own = module.named_parameters(name, recurse=False)
            found += [path for path, parameter in own if parameter.dim() == 3]
    return found


def find_targets(targets: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return those of `targets` that are the end of a dotted name."""
    return [t for t in targets if any(f".{name}".endswith(f".{t}") for name in names)]


def with_published_names(
    model: PreTrainedModel, tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model by the names, and in the shapes, of its files.

    transformers changes some tensors when it loads a model: it stacks all experts of a layer into
    one tensor, for example. Servers load the files, so this undoes the changes, one layer at a
    time. For a model that was not loaded from files, the files are those that `save_pretrained`
    writes.

    Args:
        model: the model; its weights may be sharded, and it may have adapters.
        tensors: by their names in the model, in its order. Either all or none of the tensors that
            are one tensor in the files.
    """
    for _, layer in groupby(tensors, key=lambda named: _layer_of(named[0])):
        yield from revert_weight_conversion(model, dict(layer)).items()


def _layer_of(name: str) -> str:
    """Return the part of a tensor's name that ends with the number of its layer, or ""."""
    match = re.match(r".*?\.\d+\.", name)
    return match[0] if match else ""
