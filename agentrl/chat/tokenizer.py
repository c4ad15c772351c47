"""Load a tokenizer, with clear errors for common mistakes."""

from __future__ import annotations

import math
from hashlib import blake2b
from pathlib import Path
from typing import Any

import orjson

from agentrl.errors import UserError
from agentrl.plural import plural

_FILES = ("tokenizer.json", "tokenizer_config.json")
_VOCABULARIES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json"),
    *("spiece.model", "sentencepiece.bpe.model"),
)
"""The vocabulary files of transformers; a tokenizer has at least one of them."""


CHATML = ("<|im_start|>", "<|im_end|>")
"""The control tokens of ChatML."""
HUB_SECONDS = 10.0
"""The time limit for the check whether the hub can be reached."""


def end_of_turn_ids(path: str | Path) -> list[int]:
    """Return the `eos_token_id`s of a model's generation_config.json, or none without such a file.

    A model may end its turns with several tokens; its tokenizer knows only one of them.
    """
    from transformers import GenerationConfig

    try:
        ids = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:
        return []
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def hash_vocabulary(tokenizer_json: str) -> str:
    """Return a hash of the tokens in the text of a tokenizer.json, and of their ids."""
    data = orjson.loads(tokenizer_json)
    vocabulary = data["model"].get("vocab")
    added = [(token["id"], token["content"]) for token in data.get("added_tokens") or ()]
    text = orjson.dumps([vocabulary, sorted(added)], option=orjson.OPT_SORT_KEYS)
    return blake2b(text, digest_size=16).hexdigest()


def load_tokenizer(path: str | Path, *, needs_template: bool = True) -> Any:
    """Load the fast tokenizer of a model folder or a hub name.

    Args:
        path: the folder or the hub name.
        needs_template: True if a missing chat template is an error.

    Raises:
        UserError: if there is no tokenizer, or if it is not a fast one or has no chat template. If
            the hub cannot be reached, the error is raised at once.
    """
    from transformers import AutoTokenizer

    folder = Path(path)
    missing = [name for name in _FILES if not (folder / name).is_file()]
    if folder.is_dir() and not any((folder / name).is_file() for name in _VOCABULARIES):
        raise UserError(
            f"no tokenizer at {str(path)!r}: the folder has no {' and no '.join(missing)}"
        )
    if not folder.is_dir():
        _check_hub(str(path))
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as e:
        first = str(e).strip().splitlines()[0]
        raise UserError(f"no tokenizer at {str(path)!r}: {first}") from e
    if not tokenizer.is_fast:
        raise UserError(
            f"the tokenizer of {str(path)!r} is not a fast tokenizer, and agentrl needs a"
            " tokenizer.json. Convert it with transformers' AutoTokenizer and save it."
        )
    if tokenizer.chat_template:
        _check_vocabulary(tokenizer, path)
    elif needs_template:
        raise UserError(_explain_missing_template(tokenizer, path))
    return tokenizer


def has_chatml(tokenizer: Any) -> bool:
    """Return whether a tokenizer has the control tokens of ChatML."""
    return all(token in tokenizer.get_vocab() for token in CHATML)


def _explain_missing_template(tokenizer: Any, path: str | Path) -> str:
    """Return a message that says how a model without a chat template gets one."""
    is_folder = Path(path).is_dir()
    if is_folder and has_chatml(tokenizer):
        how = f"`agentrl check template {path} --with-tools hermes` writes one into its folder"
    else:
        download = "" if is_folder else "download the model, and "
        how = (
            f"{download}write a chat_template.jinja into its folder (the template of the instruct"
            " model fits if both have the same vocabulary)"
        )
    return (
        f"the tokenizer of {str(path)!r} has no chat template (base models have none). Use an"
        f" instruct model. Or give this one a template: {how}. Then train it with `agentrl sft`:"
        " a base model does not know yet how to write turns in this template"
    )


def _check_vocabulary(tokenizer: Any, path: str | Path) -> None:
    """Raise `UserError` if the model of a tokenizer has no embedding for a token that is used.

    Added tokens that neither the chat template writes nor end a turn are not used: Gemma 3 has one
    for images, also in its models for text alone.
    """
    from transformers import AutoConfig

    try:
        config: Any = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError):  # a folder with a tokenizer alone, or with an adapter
        return
    size = getattr(config.get_text_config(decoder=True), "vocab_size", None) or math.inf
    source, added = template_source(tokenizer), tokenizer.get_added_vocab()
    beyond = {
        i: token
        for token, i in tokenizer.get_vocab().items()
        if i >= size and (token not in added or token in source or token == tokenizer.eos_token)
    }
    if beyond:
        raise UserError(
            f"the tokenizer of {str(path)!r} has {plural(len(beyond), 'token')} that its model does"
            f" not know, such as {beyond[max(beyond)]!r} (id {max(beyond)}): vocab_size is {size}."
            " Use the model's own tokenizer, or add embeddings (model.resize_token_embeddings)"
        )


def _check_hub(name: str) -> None:
    """Raise `UserError` if a tokenizer is not in the hub's cache and the hub cannot be reached.

    Without this check, transformers would repeat its first requests for about 50 seconds.
    """
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.utils import get_session

    try:
        if try_to_load_from_cache(name, "tokenizer_config.json"):
            return
    except ValueError:  # not a hub name: transformers explains why
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_SECONDS)
    except Exception as e:  # the exceptions of the HTTP library that huggingface_hub uses
        raise UserError(
            f"no tokenizer at {name!r}: there is no such folder, the hub's cache on this machine"
            f" ({constants.HF_HUB_CACHE}) does not have it, and the hub cannot be reached ({e})."
            " If it is the output of another command, such as `agentrl sft`, run that one first"
        ) from e


def template_source(tokenizer: Any) -> str:
    """Return the source of a tokenizer's chat template, or of all its named templates."""
    template = tokenizer.chat_template
    return template if isinstance(template, str) else "\n".join(template.values())
