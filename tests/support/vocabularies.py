"""Small vocabularies with the structure of real ones, trained here on a page of text."""

from __future__ import annotations

import json
import math
from typing import Literal

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram
from tokenizers.trainers import BpeTrainer

Kind = Literal["byte_level", "tiktoken", "sentencepiece_bpe", "unigram"]
Prefix = Literal["none", "first", "legacy"]
"""The space that SentencePiece puts before a text: never, before the first piece, before each
stretch between added tokens (which is what a normalizer does)."""

# Patterns of pre-tokenization: a merge does not cross the borders of a match.
GPT2 = (r"\p{N}", r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
QWEN3_5 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
LLAMA3 = (QWEN2[0].replace(r"|\p{N}|", r"|\p{N}{1,3}|"),)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)

TEXT = (
    """\
The weather in Paris is mild today: 21 degrees, and a light wind from the west. Tomorrow it will
rain in the morning; the afternoon stays dry. You are a helpful assistant. Answer the question in a
few words, and call a tool where you do not know the answer. The user asks, the assistant answers,
the system has the first word. Think before you speak, then give the final answer: it is 42.

There are 12 apples and 30 pears in 6 boxes. How many are left when 18 have been eaten? We have
12 + 30 = 42, and 42 - 18 = 24, so that 24 are left. The result of the search was not found. What
is the capital of the country? I think that this would be the other one. These are their own.

def calculator(expression: str) -> float:
    \"\"\"Evaluate an expression.\"\"\"
    result = parse(expression)
    if result is None:
        raise ValueError(f"not an expression: {expression!r}")
    return float(result)

for index in range(len(values)):
    print(index, values[index])

{"type": "function", "function": {"name": "search", "description": "Search the web.",
 "parameters": {"type": "object", "properties": {"query": {"type": "string"},
 "k": {"type": "integer"}}, "required": ["query"]}}}
{"name": "calculator", "arguments": {"expression": "(12 + 30) * 3.5"}}
[{"content": "ok", "call_id": "a1b2c3d4e"}, {"error": "timeout", "code": 504}]
<p>A table:</p> <table><tr><td>1</td><td>2</td></tr></table> <!-- and so on -->

Der Zug fährt über die Brücke nach Köln; où est le café? El niño comió una piña. Привет, как дела?
今日はいい天気ですね。你好，世界。Ελληνικά: αβγ. “Quotes” – dashes — and … dots. π ≈ 3.14159
"""
    * 2
)
"""Prose, code, JSON and other scripts; twice, since a merge needs a pair that comes back."""

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def vocabulary(
    kind: Kind, added: tuple[str, ...], split: tuple[str, ...], prefix: Prefix, owned: bool
) -> Tokenizer:
    """Return a tokenizer without added tokens.

    Args:
        kind: how the vocabulary is built.
        added: the control tokens. SentencePiece kinds have them as pieces, before the bytes.
        split: the patterns of pre-tokenization, for the byte-level kinds.
        prefix: the space before a text, for SentencePiece kinds.
        owned: whether plain text that reads like a control token becomes it.
    """
    if kind in ("byte_level", "tiktoken"):
        return _byte_level(split, kind == "tiktoken", added if owned else ())
    # Llama's vocabularies have no piece with a newline in it, Gemma's do.
    text = TEXT if prefix == "none" else TEXT.replace("\n", " ")
    return _sentencepiece(text, added, prefix, kind == "unigram")


def _byte_level(split: tuple[str, ...], ignore_merges: bool, owned: tuple[str, ...]) -> Tokenizer:
    """Return byte-level BPE. The merges of `owned` come first, one character at a time."""
    pieces = [pre_tokenizers.Split(Regex(s), behavior="isolated") for s in split]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    cut = pre_tokenizers.Sequence([*pieces, letters])
    vocab, merges = _learn(TEXT, cut, 640, pre_tokenizers.ByteLevel.alphabet())
    chains = {(t[:i], t[i]): None for t in owned for i in range(1, len(t))}
    for left, right in chains:
        vocab.setdefault(left + right, len(vocab))
    merges = [*chains, *(pair for pair in merges if pair not in chains)]
    tokenizer = Tokenizer(BPE(vocab, merges, ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = cut
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(text: str, added: tuple[str, ...], prefix: Prefix, unigram: bool) -> Tokenizer:
    # Letters that occur once in the page get no piece and are encoded as bytes. (The trainer has a
    # limit for this, but breaks ties at random.)
    spaced = "".join(letter for letter in text.replace(" ", "▁") if text.count(letter) != 2)
    words = pre_tokenizers.Split("▁", behavior="merged_with_next")
    learned, merges = _learn(spaced, words, 420, [])
    pieces = list(dict.fromkeys([*added, *BYTES, *learned]))
    unknown = pieces.index("<unk>")
    if unigram:
        # The score of a piece is its log frequency. As in SentencePiece, control tokens win.
        seen = {piece: spaced.count(piece) for piece in learned}
        total = sum(seen.values())
        least = math.log(0.1 / total)
        scores = {piece: math.log(n / total) for piece, n in seen.items()}
        scores |= dict.fromkeys(added, 0.0)
        model = Unigram([(p, scores.get(p, least)) for p in pieces], unknown, byte_fallback=True)
    else:
        model = BPE(
            {piece: i for i, piece in enumerate(pieces)},
            merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    tokenizer = Tokenizer(model)
    if prefix == "first":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    elif prefix == "legacy":
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix != "none":
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _learn(text: str, cut: pre_tokenizers.PreTokenizer, size: int, alphabet: list[str]):
    """Return the vocabulary and the merges that BPE learns."""
    learner = Tokenizer(BPE())
    learner.pre_tokenizer = cut
    trainer = BpeTrainer(
        vocab_size=size,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    learner.train_from_iterator([text], trainer)
    model = json.loads(learner.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]
