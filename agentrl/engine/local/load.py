"""Weights from a folder or the hub: always a plain model, also where they are a PEFT adapter's.

An adapter is merged into its base. Left in place, everything after would have to know of it: full
training would save the adapter alone, and lose what the base had learned.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import PeftConfig, PeftModel
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.hub import cached_file
from transformers.utils.peft_utils import find_adapter_config_file

from agentrl.errors import ConfigError
from agentrl.workers.variables import environment_variables

LAUNCHER_PREFIXES = ("ACCELERATE_", "PMI_", "OMPI_", "MV2_")
"""Prefixes of the environment variables that `accelerate launch` and MPI launchers set."""


@contextmanager
def without_launcher_variables() -> Iterator[None]:
    """Hide the variables of launchers within the block.

    They override the arguments of accelerate and transformers, or decide what has no argument: by
    what number a gradient is divided, the device, the kind of parallelism, how many processes there
    are, which of them load weights at all. A shell or a container may have them from another job.
    """
    with environment_variables(
        {name: None for name in os.environ if name.startswith(LAUNCHER_PREFIXES)}
    ):
        yield


def resolve_device(device: str) -> str:
    """The device that `trainer.device` means here: "auto" is the GPU where there is one."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


@without_launcher_variables()
def load_causal_lm(
    path: str | Path, dtype: torch.dtype | str, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """A plain causal LM in evaluation mode.

    Weights are read from safetensors only: a pickle could run code. Of a model with merged adapters
    `name_or_path` is empty: no folder holds its weights.

    Args:
        path: a folder in transformers' format or a PEFT adapter's, or the name of either on the
            hub.
        dtype: of the weights, adapters are merged in it; "auto": the base's own.
        device: where it is put.

    Raises:
        ConfigError: no such model, no causal LM, or an adapter without a base that it fits.
    """
    base, adapters = base_and_adapters(path)
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            base, dtype=dtype, use_safetensors=True
        )
    except (OSError, ValueError, SafetensorError) as e:
        of = f", the base of the adapter {str(path)!r}" if adapters else ""
        raise ConfigError(
            f"cannot load a model from {base!r}{of}: {e}. It must be a causal language model: a"
            " folder in transformers' format with safetensors weights, or a name on the hub."
        ) from e
    model.to(device)  # type: ignore[arg-type]  # a device_map would have PEFT spread it anew
    for adapter in adapters:
        model = _merge(model, adapter)
    return model.eval()


def base_and_adapters(path: str | Path) -> tuple[str, list[str]]:
    """The plain model behind a folder or hub name, and the adapters on it, the innermost first.

    Reads no weights.

    Raises:
        ConfigError: an adapter that names no base, or itself.
    """
    base, adapters = str(path), []
    while _is_adapter(base):
        adapters.insert(0, base)
        try:
            named = PeftConfig.from_pretrained(base).base_model_name_or_path
        except (OSError, ValueError, TypeError, KeyError) as e:
            raise ConfigError(f"the adapter {base!r} has a config PEFT cannot read: {e}") from e
        if not named or named in adapters:
            raise ConfigError(
                f"the adapter {base!r} does not say which model it is for: base_model_name_or_path"
                f" is {named!r}. Write the base's folder or hub name into its adapter_config.json."
            )
        base = named
    return base, adapters


def _is_adapter(path: str) -> bool:
    try:
        return find_adapter_config_file(path) is not None
    except (OSError, ValueError):
        return False  # neither a folder nor a name: loading it says so


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Within the block nobody is told that PEFT asks transformers by an old name."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning
        )
        yield


@quiet_peft()
def _merge(model: PreTrainedModel, adapter: str) -> PreTrainedModel:
    try:
        config = PeftConfig.from_pretrained(adapter)
        if config.is_prompt_learning:
            raise ValueError(f"{config.peft_type} adds tokens, which cannot be merged into weights")
        cached_file(adapter, "adapter_model.safetensors")  # PEFT would fall back to a pickle
        device = str(model.device)
        tuned = PeftModel.from_pretrained(model, adapter, torch_device=device)
        # PEFT passes over weights that have no place in the model; asked once more, it names them.
        keys = tuned.load_adapter(adapter, "default", torch_device=device)
        if astray := keys.unexpected_keys + keys.missing_keys:
            raise ValueError(f"{astray[0]} is in only one of the two")
        merged = tuned.merge_and_unload(safe_merge=True)  # type: ignore[operator]
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as e:
        raise ConfigError(
            f"the adapter {adapter!r} cannot be merged into {model.name_or_path!r}, its base: {e}"
        ) from e
    merged.name_or_path = ""
    return merged.requires_grad_(True)  # PEFT froze it
