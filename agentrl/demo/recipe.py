"""The `tiny` model: made here from nothing on first use, then kept.

Half a million weights in Qwen2's shape, warm-started on conversations of `arithmetic`: first on
right ones, then on those with bad habits. It knows the formats of all loops and copies numbers
reliably, and answers about a quarter of the problems: mediocre on purpose.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl import registry
from agentrl.agent_loops import AgentLoop
from agentrl.config import TINY
from agentrl.demo.arithmetic import TOOL, Row, questions, rows, split_rows
from agentrl.errors import RunStopped
from agentrl.interactions import gsm8k
from agentrl.testing.tokenizer import SPECIAL, TAGS, chatml, fast_tokenizer
from agentrl.trajectory import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from agentrl.chat import ChatTemplate
    from agentrl.trainer.learner import Learner
    from agentrl.trainer.sft import Example

WHICH = ("gold", "trace")
MODEL = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    # With transformers' 0.02 a model this narrow does not learn to copy numbers.
    "initializer_range": 0.08,
}

VOCABULARY = 576

# Qwen2's rule for what a merge may not cross.
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# ChatML as Qwen2.5 writes it, but a tool's schema is cut down to its name and arguments, and the
# instructions around it are left out.
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

# The tool in shelf:calculator. That is not loaded here: users may have a calculator of their own.
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
    """How the model is made; its folder is named after the hash of this and of what it is fed."""

    version: int = 2
    """Raised when the code makes another model of the same settings."""
    model: dict[str, Any] = field(default_factory=lambda: dict(MODEL))
    seed: int = 3
    steps: int = 900
    batch_size: int = 16
    lr: float = 2e-3
    gold_share: float = 0.6
    """Share of the steps that imitate `gold`; the others imitate `trace`."""
    loops: tuple[str, ...] = ("single_turn", "tool_agent", "single_turn", "react")
    """Finding a number takes the most examples, and they are the shortest."""
    copied: float = 0.99
    """Least share of a call's digits that must be copied right: without it, reinforcement learning
    has nothing to find."""

    def rows(self) -> Iterator[Row]:
        """Endless rows to imitate, none of them in datasets/arithmetic_val.parquet."""
        return rows(self.seed, questions(split_rows("val")), self.loops)

    def key(self) -> str:
        """A name for what comes of it: changes with the settings and with the texts."""
        fed = [
            ([(m.role, m.content) for m in messages], schemas)
            for row in islice(self.rows(), 64)
            for messages, schemas in (conversation(row, "gold"), conversation(row, "trace"))
        ]
        text = json.dumps([asdict(self), CHAT_TEMPLATE, fed])
        return blake2b(text.encode(), digest_size=6).hexdigest()


def home() -> Path:
    """Where agentrl keeps what it makes: $AGENTRL_HOME, else a folder in the user's cache."""
    if own := os.environ.get("AGENTRL_HOME"):
        return Path(own).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "agentrl"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrl"


def tiny_model(
    folder: Path | None = None, recipe: Recipe | None = None, say: Callable[[str], None] = print
) -> Path:
    """The tiny model's folder; made on first use, which takes a minute or two on two cores.

    Two processes may make it at once: each works in a folder of its own, and the first to finish
    gives its folder the name.

    Args:
        folder: where models are kept; by default in `home()`.
        recipe: how it is made; by default the one that everybody uses.
        say: told of progress.

    Raises:
        RunStopped: it did not learn to copy numbers.
    """
    recipe = recipe or Recipe()
    kept = (folder or home()) / f"{TINY}-{recipe.key()}"
    if kept.is_dir():
        return kept
    kept.parent.mkdir(parents=True, exist_ok=True)
    say(f"making the model {TINY!r} (once; kept in {kept})")
    workplace = Path(tempfile.mkdtemp(prefix=f".{kept.name}-", dir=kept.parent))
    try:
        make(recipe, workplace, say)
        workplace.chmod(0o755)  # mkdtemp's is for its owner alone
        workplace.rename(kept)
    except OSError:
        if not kept.is_dir():  # else another process was quicker
            raise
    finally:
        shutil.rmtree(workplace, ignore_errors=True)
    return kept


def make(recipe: Recipe, folder: Path, say: Callable[[str], None]) -> None:
    """Train tokenizer and model and write them into an existing folder.

    Raises:
        RunStopped: it did not learn to copy numbers.
    """
    from transformers import Qwen2Config
    from transformers.utils import logging

    from agentrl.chat import ChatTemplate
    from agentrl.trainer.sft import ProgressPrinter, SFTLearner, make_sft_config, single_thread

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
    # A device that everybody has: half a million weights keep no GPU busy.
    config = make_sft_config(
        folder,
        steps=recipe.steps,
        lr=recipe.lr,
        seed=recipe.seed,
        overrides=["trainer.device=cpu"],
    )
    with single_thread():
        learner = SFTLearner(config, fresh=True)
        learner.fit(_batches(recipe, template), ProgressPrinter(recipe.steps, say))
        copied = share_copied(learner, template)
    if copied < recipe.copied:
        raise RunStopped(
            f"the tiny model copies {copied:.1%} of the digits of a call right, but must copy"
            f" {recipe.copied:.0%}: on this machine its training went another way. Please report"
            " it, with your processor and the version of torch."
        )
    say(f"  copies {copied:.1%} of the digits of held-out calls right")
    logging.disable_progress_bar()
    learner.ranks.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def share_copied(learner: Learner, template: ChatTemplate) -> float:
    """Of which share of the digits in held-out calls is the model sure (p > 1/2)?

    It is given the right conversation up to each digit.
    """
    from agentrl.trainer.sft import Example, make_rows

    digits = {template.encode(d)[0] for d in "0123456789"}
    examples = []
    for row in split_rows("val"):
        if row.sample.tools:
            messages, schemas = conversation(row, "gold")
            # Less the last result and the answer: what is left of the assistant's are calls.
            ids, mask = template.trace(messages[:-2], schemas)
            own = array("i", (m and i in digits for i, m in zip(ids, mask, strict=True)))
            examples.append(Example(ids, own))
    asked = make_rows(examples)
    sure = learner.logprobs(asked) > math.log(0.5)
    return float(sure[asked.response_mask].float().mean())


def conversation(row: Row, which: str) -> tuple[list[Message], list[Mapping[str, Any]]]:
    """A row's `gold` or `trace` as its loop shows it, and the schemas that the template shows."""
    loop: AgentLoop = registry.agent_loops.get(row.sample.agent_name)
    opening, schemas = loop.opening(row.sample, [CALCULATOR] if row.sample.tools else [])
    return [*opening, *(row.gold if which == "gold" else row.trace)], list(schemas)


def _texts(recipe: Recipe) -> Iterator[str]:
    """What the tokenizer learns its merges from."""
    yield from (gsm8k.RIGHT, gsm8k.WRONG, gsm8k.UNREADABLE)
    for row in islice(recipe.rows(), 1500):
        yield 'system\nuser\nassistant\n<tools>\n{"name": "calculator", "arguments": {"expression":'
        yield ' "string"}}\n</tools>\n'
        yield from (m.content for which in WHICH for m in conversation(row, which)[0])


def _batches(recipe: Recipe, template: ChatTemplate) -> Iterator[list[Example]]:
    """Batches of rows that are all new: first what is right, then also what is not."""
    from agentrl.trainer.sft import Example

    source = recipe.rows()
    for step in range(recipe.steps):
        which = "gold" if step < recipe.gold_share * recipe.steps else "trace"
        batch = islice(source, recipe.batch_size)
        yield [Example(*template.trace(*conversation(row, which))) for row in batch]


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Make a tokenizer of 576 tokens with Qwen's structure, its merges learned from these texts.

    Byte-level BPE in which every digit is a token, control tokens (`<|im_end|>` ends a turn), and
    tags such as `<tool_call>` that are added tokens but not special: they belong to the text of a
    turn.
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
