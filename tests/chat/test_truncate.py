import random
import re
import unicodedata
from functools import partial

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from agentrl.chat.encoding import truncate
from agentrl.demo.recipe import train_tokenizer
from agentrl.testing import byte_tokenizer

SIDES = ("head", "tail", "middle")
NOTE = re.compile(r"\n?\((\d+) of (\d+) tokens shown\)\n?")
CORPUS = [
    "Traceback (most recent call last):\n  File 'calc.py', line 12, in <module>\n    return 3*4\n",
    "Größe: 12 €, naïve café, 東京都, 😀😀 (((x))) == [[y]];\n\n\treturn {'a': 1}\n",
] * 3


def byte_fallback():
    """SentencePiece's kind: spaces are `▁`, unknown characters are bytes."""
    tokenizer = Tokenizer(BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    trainer = BpeTrainer(
        vocab_size=420,
        initial_alphabet=list("abcdefghijklmnopqrstuvwxyz \n"),
        special_tokens=["<unk>", *(f"<0x{b:02X}>" for b in range(256))],
        show_progress=False,
    )
    tokenizer.train_from_iterator([c.encode("ascii", "ignore").decode() for c in CORPUS], trainer)
    return tokenizer


def merged():
    """Byte-level, with merges across anything but lines: a piece alone is often cut otherwise."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def lossy():
    """Odd: lowercases, drops accents, and adds a token of its own."""
    tokenizer = merged()
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
    )
    return tokenizer


class Counting:
    """A tokenizer's two functions, counting what they are given."""

    def __init__(self, backend):
        self.backend, self.calls, self.characters, self.decoded = backend, 0, 0, 0

    def encode(self, text):
        self.calls += 1
        self.characters += len(text)
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids):
        self.decoded += len(ids)
        return self.backend.decode(list(ids), skip_special_tokens=False)


BACKENDS = {
    "bytes": byte_tokenizer().backend_tokenizer,
    "qwen": train_tokenizer(CORPUS).backend_tokenizer,
    "merged": merged(),
    "byte fallback": byte_fallback(),
    "lossy": lossy(),
}


def cut(text, limit, side, name="bytes"):
    counting = Counting(BACKENDS[name])
    return truncate(text, limit, side, counting.encode, counting.decode), counting


def parts(text, shown, side):
    """Head and tail of what is shown, and the note's numbers; the text's own notes are not ours."""
    for note in NOTE.finditer(shown):
        head, tail = shown[: note.start()], shown[note.end() :]
        if text.startswith(head) and text.endswith(tail) and len(head) + len(tail) <= len(text):
            assert side != "head" or not tail
            assert side != "tail" or not head
            return head, tail, int(note[1]), int(note[2])
    raise AssertionError(f"{shown!r} is no cut of {text!r}")


pieces = st.sampled_from(
    [*CORPUS[:2], "😀", "é", "e\u0301", "\ufffd", "\u200d", "a", " ", "\n", "((("]
)
texts = st.lists(st.text(max_size=12) | pieces, max_size=12).map("".join)


@pytest.mark.parametrize(
    ("side", "shown"),
    [
        ("head", "abcde\n(5 of 10 tokens shown)"),
        ("tail", "(5 of 10 tokens shown)\nfghij"),
        ("middle", "abc\n(5 of 10 tokens shown)\nij"),
    ],
)
def test_what_is_shown(side, shown):
    assert cut("abcdefghij", 5, side)[0] == shown


@pytest.mark.parametrize(
    ("side", "limit", "shown"),
    [
        ("head", 6, "a😀\n(5 of 10 tokens shown)"),
        ("tail", 8, "(5 of 10 tokens shown)\n😀b"),
        ("middle", 7, "a\n(6 of 10 tokens shown)\n😀b"),
        ("head", 3, "a\n(1 of 10 tokens shown)"),
    ],
)
def test_no_character_is_halved(side, limit, shown):
    assert cut("a😀😀b", limit, side)[0] == shown


def test_a_replacement_character_that_was_there_may_stay():
    text = "ok \ufffd\ufffd and so on"
    assert cut(text, 10, "head")[0].startswith("ok \ufffd")


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("side", SIDES)
@given(text=texts, limit=st.integers(1, 60))
@example(text="x" * 50 + "😀" * 50, limit=7)
@example(text="(1 of 2 tokens shown)\n" * 9, limit=20)
@example(text="a\u0300" * 40, limit=9)
def test_the_kept_parts_are_parts_of_the_text_and_fit(name, side, text, limit):
    shown, counting = cut(text, limit, side, name)
    whole = len(BACKENDS[name].encode(text, add_special_tokens=False).ids)
    if len(text.encode()) <= limit:
        assert shown is text and counting.calls == 0
    elif whole <= limit:
        assert shown is text and counting.calls == 1
    else:
        head, tail, kept, reported = parts(text, shown, side)
        again = [len(counting.encode(part)) for part in (head, tail)]
        assert kept == sum(again) <= limit
        assert reported == whole
        assert shown.count("\ufffd") <= text.count("\ufffd")


@pytest.mark.parametrize("name", ["bytes", "qwen", "merged", "byte fallback"])
@pytest.mark.parametrize("side", SIDES)
@given(text=texts.map(partial(unicodedata.normalize, "NFC")), limit=st.integers(12, 60))
def test_as_much_is_kept_as_fits(name, side, text, limit):
    """All but what a halved character at each cut, and a merge that a cut undoes, cost."""
    assume(len(BACKENDS[name].encode(text, add_special_tokens=False).ids) > limit)
    shown, _ = cut(text, limit, side, name)
    _, _, kept, _ = parts(text, shown, side)
    assert kept >= limit - 8


@pytest.mark.parametrize("side", SIDES)
def test_the_text_is_encoded_once(side):
    text = CORPUS[0] * 200
    shown, counting = cut(text, 100, side, "qwen")
    assert counting.calls == (3 if side == "middle" else 2), "the text, and each part of the cut"
    assert counting.characters <= len(text) + len(shown)


@given(
    st.text(min_size=2, max_size=200),
    st.integers(1, 9),
    st.sampled_from(SIDES),
    st.integers(0, 10**6),
)
def test_truncation_terminates_for_any_tokenizer(text, limit, side, seed):
    """Counts and texts out of thin air: the cut is a cut, after few steps."""
    rng, calls = random.Random(seed), []

    def encode(piece):
        calls.append(piece)
        return list(range(rng.randint(limit, limit + 3)))

    def decode(ids):
        return "".join(rng.choices(text + "\ufffd", k=rng.randint(0, 2 * len(text))))

    shown = truncate(text, limit, side, encode, decode)
    if shown is not text:
        parts(text, shown, side)
    assert len(calls) <= 1 + 2 * (len(text).bit_length() + 1)


def test_a_tokenizer_that_counts_too_many_tokens_leaves_only_the_note():
    for side in SIDES:
        shown = truncate("abc" * 9, 2, side, lambda text: [0] * (3 + len(text)), lambda ids: "abc")
        assert shown == "(0 of 30 tokens shown)"


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("text", [CORPUS[0] * 300, "東😀é" * 3000], ids=["plain", "wide"])
def test_the_cost_is_linear_in_the_text(text, name, side):
    """However long the text; counted, for time on a shared machine says little."""
    shown, counting = cut(text, 100, side, name)
    assert shown is not text
    assert counting.characters <= len(text) + 3 * len(shown)
    assert counting.decoded <= 2 * 5 * 100


@pytest.mark.parametrize("side", ["head", "tail", "middle"])
@pytest.mark.parametrize("name", ["bytes", "qwen"])
def test_the_middle_of_a_very_long_text_is_not_encoded(side, name):
    """What is shown is what is shown of the whole text; the number of all tokens is an estimate."""
    text = "".join(f"line {i}: {i * 7919 % 1000}\n" for i in range(20_000))
    shown, counting = cut(text, 100, side, name)
    exact = len(counting.encode(text))
    [(n, total)] = re.findall(r"\((\d+) of about (\d+) tokens shown\)", shown)
    assert int(n) <= 100 and abs(int(total) - exact) < 0.1 * exact
    whole, _ = cut(text[:12_000] if side == "head" else text[-12_000:], 100, side, name)
    if side != "middle":
        assert NOTE.sub("", whole).strip() == re.sub(r"\(.*shown\)", "", shown).strip()


def test_a_long_text_of_few_tokens_is_encoded_whole():
    text = "x" * 200_000
    shown = truncate(text, 3, "middle", lambda t: [0] * (len(t) // 40_000 + 2), lambda i: "x")
    assert "of 7 tokens shown" in shown
