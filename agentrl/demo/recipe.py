"""The `tiny` model, which is trained on this machine on first use and stored in a cache.

It has half a million parameters in Qwen2's architecture, and is trained on conversations of
`arithmetic`: first on right conversations, then on conversations with mistakes. It knows the
formats of all loops, copies numbers reliably and solves about a third of the problems, so that
reinforcement learning can improve it.
"""

from __future__ import annotations

import json
import math
import shutil
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from hashlib import blake2b, sha256
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl import registry
from agentrl.agent_loops import AgentLoop
from agentrl.config import TINY
from agentrl.demo.arithmetic import TOOL, Row, questions, rows, split_rows
from agentrl.errors import RunStopped
from agentrl.installation import home
from agentrl.interactions import gsm8k
from agentrl.regular_files import staging_folder
from agentrl.terminal import echo
from agentrl.testing.tokenizer import SPECIAL, TAGS, chatml, fast_tokenizer
from agentrl.trajectory import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from agentrl.chat import ChatTemplate
    from agentrl.learner.learner import Learner
    from agentrl.learner.sft import Example

KINDS = ("gold", "trace")
MODEL = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    # With transformers' default of 0.02 such a narrow model does not learn to copy numbers.
    "initializer_range": 0.08,
}

VOCABULARY = 576

# Qwen2's pre-tokenizer: merges do not cross these pieces.
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# ChatML as in Qwen2.5's template, but without instructions on tools, and with only the name and the
# arguments of each schema.
CHAT_TEMPLATE = chatml("""\
        {{- '\\n<tools>' }}
        {%- for tool in tools %}
            {{- '\\n{"name": ' + tool.function.name | tojson + ', "arguments": {' }}
            {%- for name, schema in tool.function.parameters.properties.items() %}
                {{- (', ' if not loop.first else '') + name | tojson + ': ' }}
                {{- schema.type | default('any') | tojson }}
            {%- endfor %}
            {{- '}}' }}
        {%- endfor %}
        {{- '\\n</tools>' }}""")

# The schema of shelf:calculator. The file is not loaded, because users may define another
# `calculator`.
CALCULATOR = {
    "type": "function",
    "function": {
        "name": TOOL,
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """The settings of the training. The model's folder is named by a hash of these and the data."""

    version: int = 2
    """Increased when the code trains a different model with the same settings."""
    model: dict[str, Any] = field(default_factory=lambda: dict(MODEL))
    seed: int = 3
    steps: int = 900
    batch_size: int = 16
    lr: float = 2e-3
    gold_share: float = 0.8
    """Share of the steps that train on `gold`; the others train on `trace`."""
    loops: tuple[str, ...] = ("single_turn", "tool_agent", "single_turn", "react")
    """The loops of the rows. Finding a number needs the most examples; they are the shortest."""
    copied: float = 0.99
    """The share of digits in calls that the model must at least copy right. Reinforcement learning
    cannot improve a model that copies less reliably."""

    def rows(self) -> Iterator[Row]:
        """Yield training rows without end; none is in datasets/arithmetic_val.parquet."""
        return rows(self.seed, questions(split_rows("val")), self.loops)

    def key(self) -> str:
        """Return a hash of the settings and of the training texts."""
        texts = [
            ([(m.role, m.content) for m in messages], schemas)
            for row in islice(self.rows(), 64)
            for messages, schemas in (conversation(row, "gold"), conversation(row, "trace"))
        ]
        text = json.dumps([asdict(self), CHAT_TEMPLATE, texts, DIGEST])
        return blake2b(text.encode(), digest_size=6).hexdigest()


DIGEST = "digest"
"""The file of a model's folder with the hash of the others."""


def tiny_model(
    folder: Path | None = None, recipe: Recipe | None = None, say: Callable[[str], None] = echo
) -> Path:
    """Return the folder of the tiny model. The first call trains it: 1-2 minutes on two cores.

    Two processes may train it at the same time: each uses its own temporary folder, and the first
    to finish renames its folder.

    Args:
        folder: the folder that contains the models; default: `home()`.
        recipe: the settings of the training; default: `Recipe()`.
        say: called with messages about the progress.

    Raises:
        RunStopped: the model did not learn to copy numbers.
    """
    recipe = recipe or Recipe()
    target = (folder or home()) / f"{TINY}-{recipe.key()}"
    if target.is_dir():
        digest = target / DIGEST
        if digest.is_file() and digest.read_text() == _hash_files(target):
            return target
        say(f"{target} is damaged, so the model {TINY!r} is trained again")
        shutil.rmtree(target)
    say(f"training the model {TINY!r} (once; saved in {target})")
    try:
        with staging_folder(target) as staging:
            make(recipe, staging, say)
            (staging / DIGEST).write_text(_hash_files(staging))
            staging.rename(target)
    except OSError:
        if not target.is_dir():  # otherwise another process was faster
            raise
    return target


def _hash_files(folder: Path) -> str:
    """Return a hash of the names and contents of a model's files."""
    files = [f for f in sorted(folder.iterdir()) if f.name != DIGEST]
    return sha256(b"".join(f.name.encode() + f.read_bytes() for f in files)).hexdigest()


def make(recipe: Recipe, folder: Path, say: Callable[[str], None]) -> None:
    """Train tokenizer and model, and save them in an existing folder.

    Raises:
        RunStopped: the model did not learn to copy numbers.
    """
    from transformers import Qwen2Config
    from transformers.utils import logging

    from agentrl.chat import ChatTemplate
    from agentrl.learner.sft import SFTLearner, make_sft_config, single_thread
    from agentrl.trainer.sft import ProgressPrinter

    tokenizer: Any = train_tokenizer(_texts(recipe))
    template = ChatTemplate(tokenizer)
    shape = Qwen2Config(
        vocab_size=len(tokenizer),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **recipe.model,
    )
    shape.save_pretrained(folder)
    # A GPU would not be faster for half a million parameters.
    config = make_sft_config(
        folder, steps=recipe.steps, lr=recipe.lr, seed=recipe.seed, overrides=["trainer.device=cpu"]
    )
    with single_thread():
        learner = SFTLearner(config, fresh=True)
        learner.fit(_batches(recipe, template), ProgressPrinter(recipe.steps, say))
        copied = share_copied(learner, template)
    if copied < recipe.copied:
        raise RunStopped(
            f"the tiny model copies {copied:.1%} of the digits in calls right, but needs"
            f" {recipe.copied:.0%}: training had another result on this machine. Please report"
            " it with your processor and the version of torch."
        )
    say(f"  it copies {copied:.1%} of the digits in held-out calls right")
    logging.disable_progress_bar()
    learner.ranks.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def share_copied(learner: Learner, template: ChatTemplate) -> float:
    """Return the share of digits in held-out calls to which the model gives p > 1/2.

    The prompt is the right conversation up to each digit.
    """
    from agentrl.learner.sft import Example, make_rows

    digits = {template.encode(d)[0] for d in "0123456789"}
    examples = []
    for row in split_rows("val"):
        if row.sample.tools:
            messages, schemas = conversation(row, "gold")
            # Without the last result and the answer, the assistant messages are calls.
            ids, mask = template.trace(messages[:-2], schemas)
            is_digit = array("i", (m and i in digits for i, m in zip(ids, mask, strict=True)))
            examples.append(Example(ids, is_digit))
    batch = make_rows(examples)
    is_sure = learner.logprobs(batch) > math.log(0.5)
    return float(is_sure[batch.response_mask].float().mean())


def conversation(row: Row, kind: str) -> tuple[list[Message], list[Mapping[str, Any]]]:
    """Return a row's conversation `gold` or `trace`, with its opening, and the tool schemas."""
    loop: AgentLoop = registry.agent_loops.get(row.sample.agent_name)
    opening, schemas = loop.opening(row.sample, [CALCULATOR] if row.sample.tools else [])
    return [*opening, *(row.gold if kind == "gold" else row.trace)], list(schemas)


def _texts(recipe: Recipe) -> Iterator[str]:
    """Yield the texts from which the tokenizer learns its merges."""
    yield from (gsm8k.RIGHT, gsm8k.WRONG, gsm8k.NO_ANSWER)
    for row in islice(recipe.rows(), 1500):
        yield 'system\nuser\nassistant\n<tools>\n{"name": "calculator", "arguments": {"expression":'
        yield ' "string"}}\n</tools>\n'
        yield from (m.content for kind in KINDS for m in conversation(row, kind)[0])


def _batches(recipe: Recipe, template: ChatTemplate) -> Iterator[list[Example]]:
    """Yield batches of new rows: first right conversations, then conversations with mistakes."""
    from agentrl.learner.sft import Example

    source = recipe.rows()
    for step in range(recipe.steps):
        kind = "gold" if step < recipe.gold_share * recipe.steps else "trace"
        batch = islice(source, recipe.batch_size)
        yield [Example(*template.trace(*conversation(row, kind))) for row in batch]


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train a tokenizer of 576 tokens with Qwen's structure on these texts.

    It is a byte-level BPE in which every digit is a token. It has control tokens (`<|im_end|>` ends
    a turn) and tags such as `<tool_call>`, which are added tokens but not special tokens: they are
    part of the text of a turn.
    """
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import BPE
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL) - len(TAGS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return fast_tokenizer(tokenizer, CHAT_TEMPLATE)
