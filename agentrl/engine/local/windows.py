"""Find the attention windows of a model, and build a small copy of it in which they are short.

A test with a few tokens does not show how a model behaves beyond a window of 4,096 tokens, and a
row of this length needs minutes on a CPU and gigabytes for its masks. The behaviour depends on the
code and the config of the model, not on its weights. So the test runs a model of the same class and
config with random weights, in which each window has `SHORT` tokens, on rows of `LONG` tokens or
more.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

SHORT = 4
LONG = 24
"""The tokens of a test row: more than `SHORT` blocks of `SHORT` tokens, because sparse attention
counts in blocks."""
WINDOW_KEYS = re.compile(
    "window|chunk|span|local_attention|block_size|budget|compress|(index|block).*topk"
)
"""Config keys whose values limit which tokens a token sees."""
NOT_WINDOW_KEYS = re.compile("layers|pattern|feed_forward")
"""Config keys that match `WINDOW_KEYS` but limit something else."""
STEP_KEYS = re.compile(r"(^|\.)(mamba_)?chunk_size$")
"""Config keys that match `WINDOW_KEYS` but limit nothing: Mamba layers compute so many tokens at a
time, and pass their state on. They are short in the copy, too, so that its rows have several."""
DENSE_KEYS = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
"""Config keys with the number of the first layers that have no experts."""
SHARED_KEY = "num_kv_shared_layers"
"""The config key with the number of the last layers that read the keys and values of earlier ones
(Gemma 3n, Gemma 4)."""
SMALL = 16
"""The width of the copy's feed-forward layers."""
POSITIONS = 128
"""The positions of the copy, if they are not rotary: enough for a row of a test, and fewer than the
tokens of all its rows. Some models have masks of this size (GPT-Neo)."""
MOST_KINDS = 4
"""The layers of a model that may all be of different kinds."""
VISION = "vision_config"
"""The config key with the config of a model's layers for images."""
SMALL_VISION = {"depth": 1, "fullatt_block_indexes": [0], "deepstack_visual_indexes": [0]}
"""Its values in the copy."""
VOCABULARY = LONG
"""The size of the vocabulary of the copy: all tokens of a row can be different."""


def find_windows(config: PretrainedConfig) -> dict[str, int]:
    """Return the config values that limit which tokens a token sees, by their dotted path.

    Values up to `SHORT` are left out, because a test on rows of a few tokens already exceeds them.

    Args:
        config: the config of a model; nested configs and dictionaries are searched too.
    """
    windows = _windows(vars(config), "")
    return {path: values[key] for path, values, key in windows if not STEP_KEYS.search(path)}


def describe_windows(config: PretrainedConfig) -> str:
    """Return a clause for messages that lists the windows of a config."""
    windows = ", ".join(f"{path}={value}" for path, value in find_windows(config).items())
    return f"its config limits which tokens a token sees ({windows})"


def find_rope_types(model: PreTrainedModel) -> set[str]:
    """Return the types of a model's rotary positions: from its layers, else of its config.

    A layer may compute another type than its config names: HunYuan V1's `dynamic` has a fixed base.
    """
    types = [t for layer in model.modules() if (t := getattr(layer, "rope_type", None))]
    if not types:
        return set(_rope_types(model.config.get_text_config(decoder=True).to_dict()))
    return {t for one in types for t in (one.values() if isinstance(one, dict) else [one])}


def _rope_types(values: object) -> Iterator[str]:
    if isinstance(values, dict):
        for key, value in values.items():
            if key in ("rope_type", "type") and isinstance(value, str):
                yield value
            else:
                yield from _rope_types(value)


class NoSmallCopy(Exception):
    """A small copy of a model cannot be built; the message is a clause with the reason."""


def small_copy(model: PreTrainedModel, device: torch.device | str | None = None) -> PreTrainedModel:
    """Return a small copy of a model in which every window has `SHORT` tokens.

    The copy has one layer of each kind, a small vocabulary, narrow feed-forward layers and random
    float32 weights. Its attention layers have the shape of the model's.

    Args:
        model: any model; it is not changed.
        device: the device of the copy; None: the model's device.

    Raises:
        NoSmallCopy: the class of the model does not accept such a config.
    """
    try:
        try:
            return _small_copy(model, device or model.device, narrow=True)
        except Exception:  # The widths of some models depend on one another.
            return _small_copy(model, device or model.device, narrow=False)
    except Exception as e:  # The model's class can raise any exception.
        raise NoSmallCopy(
            f"agentrl cannot build the small copy that tests it ({type(e).__name__}: {e})"
        ) from e


def _small_copy(
    model: PreTrainedModel, device: torch.device | str, *, narrow: bool
) -> PreTrainedModel:
    config = deepcopy(model.config)
    for _, values, key in _windows(vars(config), ""):
        values[key] = SHORT
    text = config.get_text_config(decoder=True)
    _keep_one_layer_of_each_kind(text)
    for key in vars(text) if narrow else ():
        if key.endswith("intermediate_size") and isinstance(getattr(text, key), int):
            setattr(text, key, SMALL)
    text.vocab_size, text.pad_token_id = VOCABULARY, 0
    if vision := getattr(config, VISION, None):
        # The tests have no images, and the layers for them may have a billion weights.
        for key, value in SMALL_VISION.items():
            if hasattr(vision, key):
                setattr(vision, key, value)
    if not getattr(text, "rope_parameters", None) and hasattr(text, "max_position_embeddings"):
        text.max_position_embeddings = POSITIONS
    devices = [device] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices), torch.device(device):
        torch.manual_seed(0)
        copy = type(model)._from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for weight in copy.parameters():
                # Large enough that each token changes the logits of the next ones. With the usual
                # initial weights, attention has little effect in a small model.
                noise = torch.randn_like(weight)
                if weight.dim() > 1:
                    weight.copy_(noise * weight.shape[-1] ** -0.5)
                else:
                    weight.add_(noise, alpha=0.1)
    return copy.eval()


def _windows(values: Any, path: str) -> list[tuple[str, Any, Any]]:
    """Return the windows of more than `SHORT` tokens: dotted path, container, key."""
    windows = []
    for key, value in values.items() if isinstance(values, dict) else enumerate(values):
        key_path = f"{path}{key}"
        if key == VISION:  # Its windows are of patches, not of tokens.
            continue
        if isinstance(value, PretrainedConfig):
            windows += _windows(vars(value), f"{key_path}.")
        elif isinstance(value, dict | list):
            windows += _windows(value, f"{key_path}.")
        elif not WINDOW_KEYS.search(key_path) or NOT_WINDOW_KEYS.search(key_path):
            continue
        elif type(value) is int and value > SHORT:
            windows.append((key_path, values, key))
    return windows


def _keep_one_layer_of_each_kind(text: PretrainedConfig) -> None:
    """Remove layers of the same kind as an earlier one.

    If no list of the config distinguishes layers, keep two.
    """
    count = text.num_hidden_layers
    shared = getattr(text, SHARED_KEY, None) or 0
    own_values = {int(i): v for i, v in (text.to_dict().get("per_layer_config") or {}).items()}
    for _, values, key in _windows(own_values, ""):
        values[key] = SHORT
    lists = {k: v for k, v in vars(text).items() if isinstance(v, list) and len(v) == count}
    distinguishing = list(filter(_lists_kinds, lists.values()))
    if shared:
        distinguishing.append([i >= count - shared for i in range(count)])
    if own_values:
        distinguishing.append([str(own_values.get(i)) for i in range(count)])
    kinds = list(zip(*distinguishing, strict=True))
    kept_layers = sorted({kinds.index(kind) for kind in kinds} if kinds else {0, count - 1})
    text.num_hidden_layers = len(kept_layers)
    for key in DENSE_KEYS:
        if isinstance(dense := getattr(text, key, None), int):
            setattr(text, key, min(dense, len(kept_layers) - 1))
    if shared:
        setattr(text, SHARED_KEY, sum(i >= count - shared for i in kept_layers))
    for key, values in lists.items():
        setattr(text, key, [values[i] for i in kept_layers])
    if own_values:
        text.per_layer_config = {
            new: own_values[old] for new, old in enumerate(kept_layers) if old in own_values
        }


def _lists_kinds(values: list[Any]) -> bool:
    """Return whether a list with a value for each layer distinguishes kinds of layers.

    If all values differ, they are rather the indices of layers (LFM2's `full_attn_idxs`).
    """
    return len(values) <= MOST_KINDS or any(value in values[:i] for i, value in enumerate(values))
