"""A tokenizer of realistic size, without a download.

Byte-level BPE, 48,000 tokens, Qwen's pre-tokenizer and control tokens, trained on the sources of
Python's standard library (code, and the prose of its docstrings and topics). It is trained once, in
15 seconds, and saved in agentrl's home; the same Python version gives the same tokenizer. The chat
template is Qwen3's, from an installed TRL. `TOKENIZER=folder` selects another tokenizer.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import random
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from agentrl.chat import load_tokenizer
from agentrl.demo.recipe import home

VOCABULARY = 48_000
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)


def workload_tokenizer() -> PreTrainedTokenizerFast:
    """Load the tokenizer of `TOKENIZER`, or the trained one."""
    if folder := os.environ.get("TOKENIZER"):
        return load_tokenizer(folder)
    kept = home() / "benchmarks" / f"tokenizer-python{platform.python_version()}"
    if not kept.is_dir():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as made:
            train().save_pretrained(made)
            Path(made).rename(kept)
            Path(made).mkdir()  # for the context manager to remove
    return load_tokenizer(kept)


def sources() -> list[Path]:
    """Return the modules of the standard library without tests, in random order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "test", "tests", "idle_test", "__pycache__"}
    files = [f for f in sorted(root.rglob("*.py")) if left_out.isdisjoint(f.parts)]
    random.Random(0).shuffle(files)
    return files


def train() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        chat_template=_qwen3_template(),
    )


def _texts() -> Iterator[str]:
    for file in sources():
        yield file.read_text(encoding="utf-8", errors="replace")


def _qwen3_template() -> str:
    trl = importlib.util.find_spec("trl")
    if trl is None or trl.origin is None:
        raise SystemExit("the workload needs Qwen3's chat template: pip install trl")
    return (Path(trl.origin).parent / "chat_templates" / "qwen3.jinja").read_text()
