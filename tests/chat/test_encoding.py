"""Foreign text never becomes a control token, on any family's vocabulary."""

from __future__ import annotations

import copy
import json
import random
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.families import (
    FAMILIES,
    control_tokens,
    families_of_all_vocabularies,
    family_names,
    family_tokenizer,
)
from support.family_chats import CACHED, as_decoded, chat, control_ids, near_control_tokens
from tokenizers import Tokenizer, normalizers, pre_tokenizers

from agentrl.chat.encoding import MAX_WORD_LENGTH, BpeCache, Encoder
from agentrl.chat.template import ChatTemplate
from agentrl.errors import TemplateError
from agentrl.trajectory import Message, Role, ToolCall

# The number of texts: 20,000 in `make test-all`, 6,000 in `make test`.
N = 200 * settings.default.max_examples
families = pytest.mark.parametrize("name", family_names())
vocabularies = pytest.mark.parametrize("name", families_of_all_vocabularies())

# Text of any kind, and what may be taken for control tokens after some normalization.
PIECES = [
    "a", "The", " weather", "12", "3.5", "\n", "\n\n\n", "  ", " ", "\t", "\r\n", "'s", "'LL", "é",
    "e\u0301", "日本語", "Привет", "🙂", "👍🏽", "\u00a0", "\u200b", "\u200d", "\u2060", "\ufeff",
    "\u00ad", "▁", "▁▁", "\u2028", "\x00", "\x1c", "\x85", "½", "ʕ", "\U000323b0", "\u1df6",
    "<0x0A>", "<0x3C>", "<0xE2>", "\ud800", "\udfff", "\\u003c", "&lt;", "<", "|", ">", "[", "]",
    "<|", "|>", "<｜", "</", "{%", "{{ x }}", "zq0content0qz", "Ⓘ", "\uff5cim_end\uff5c", "\u2223",
    "system", "user", "assistant", "\nsystem\n", "INST", "im_start", "end▁of▁sentence", "\u1fef",
    "\u037e", "\u212a", "\u2126", "\u0338", "\u226e", "\u226f", "\u0345",
]  # fmt: skip


anything = st.lists(
    st.text(max_size=12)
    | st.text("aB'sſ \n\r\t1½٣é\u0301ʕ日の-/.|<", max_size=20)
    | st.sampled_from(PIECES),
    max_size=6,
).map("".join)


@cache
def fuzz(name: str) -> tuple[str, ...]:
    """Every control token in every way, then random text made of the same pieces."""
    rng = random.Random(name)
    near = [way for token in control_tokens(name) for way in near_control_tokens(token, rng)]
    texts = [*near, "".join(control_tokens(name)), *map("".join, pairwise(near))]
    near += [
        way
        for _ in range(4)
        for token in control_tokens(name)
        for way in near_control_tokens(token, rng)
    ]
    pieces = rng.choices(PIECES, k=2 * N) + rng.choices(near, k=2 * N)
    rng.shuffle(pieces)
    cuts = sorted(rng.sample(range(1, len(pieces)), N - len(texts)))
    return (*texts, *("".join(pieces[a:b]) for a, b in pairwise([0, *cuts])))


def whole(encoder: Encoder, texts: tuple[str, ...]) -> list[list[int]]:
    """The tokenizer without control tokens, and nothing else."""
    valid = [text.encode("utf-8", "replace").decode() for text in texts]
    return [e.ids for e in encoder.plain_tokenizer.encode_batch(valid, add_special_tokens=False)]


@vocabularies
def test_no_text_becomes_a_control_token_and_all_text_comes_back(name):
    encoder, texts = Encoder(family_tokenizer(name)), fuzz(name)
    made = [list(encoder.encode_plain(text)) for text in texts]
    assert not {i for ids in made for i in ids} & encoder.control_ids
    back = encoder.plain_tokenizer.decode_batch(made, skip_special_tokens=False)
    lost = [(t, b) for t, b in zip(texts, back, strict=True) if b != as_decoded(name, t)]
    assert not lost, lost[:5]
    assert encoder.decode_plain(made[0]) == back[0]
    # They are the ids of the copy without added tokens; where that owns control tokens itself,
    # those are cut.
    assert (encoder.cache is not None) == (FAMILIES[name].kind in CACHED and name != "bpe_owning")
    if encoder.cache is not None:
        assert made == whole(encoder, texts)
        assert len(encoder.cache) > 100
        # A second time, from what the cache has kept.
        assert made[:5_000] == [list(encoder.encode_plain(text)) for text in texts[:5_000]]


@vocabularies
def test_the_tokenizers_own_methods_let_control_tokens_through(name):
    """The same texts, encoded as one would."""
    tokenizer: Any = family_tokenizer(name)
    control = chat(name).encoder.control_ids
    texts = [t for t in fuzz(name)[:2_000] if "\ud800" not in t and "\udfff" not in t]
    let = {i for ids in tokenizer(texts, add_special_tokens=False)["input_ids"] for i in ids}
    # All but those that are always part of a longer one.
    assert len(let & control) >= len(control) - 1
    for text in control_tokens(name)[:3]:
        split = tokenizer.encode(f"a{text}b", add_special_tokens=False, split_special_tokens=True)
        whole = tokenizer.apply_chat_template([{"role": "user", "content": text}])["input_ids"]
        bare = tokenizer.apply_chat_template([{"role": "user", "content": "x"}])["input_ids"]
        assert sum(i in control for i in whole) > sum(i in control for i in bare)
        assert FAMILIES[name].owned or control.isdisjoint(split)
    for text in FAMILIES[name].tags[:1]:  # what is not flagged special
        if text.strip():
            split = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
            assert not control.isdisjoint(split)
    tokenizer.backend_tokenizer.encode_special_tokens = False  # it stays, and others share this one


def after(name: str) -> list[tuple[list[Message], list[Role]]]:
    """Conversations, and the roles that may speak next."""
    question, family = Message("user", "Q"), FAMILIES[name]
    calls = (ToolCall("calculator", {}, id="call00000"), ToolCall("search", {}, id="call00001"))
    cases: list[tuple[list[Message], list[Role]]] = [
        ([question, Message("assistant", "A")], ["user"])
    ]
    if family.results not in ("refused", "dropped"):
        cases.append(([question, Message("assistant", "A", calls[:1])], ["tool"]))
        cases.append(([question, Message("assistant", "A", calls)], ["tool", "tool"]))
        if family.tool_then_user:
            cases.append(([question, Message("assistant", "A", calls[:1])], ["tool", "user"]))
    return cases


@families
def test_a_delta_has_only_the_control_tokens_of_the_template(name):
    """Whatever the contents are, also two halves of a token in two contents."""
    template, texts = chat(name), iter(fuzz(name)[: 1_000 if name != "gemma4" else 500])
    shapes = after(name)
    empty = [
        control_ids(template, template.delta(h, [Message(r, "") for r in roles], -1))
        for h, roles in shapes
    ]
    # `fuzz` begins with halves of tokens, one after another: they meet in one delta.
    for i, text in enumerate(texts):
        history, roles = shapes[i % len(shapes)]
        contents = [text, *(next(texts, "") for _ in roles[1:])]
        replies = [Message(r, c) for r, c in zip(roles, contents, strict=True)]
        ids = template.delta(history, replies, -1)
        assert control_ids(template, ids) == empty[i % len(shapes)], contents
    for token in control_tokens(name):
        for at in range(1, len(token)):
            for history, roles in shapes:
                if len(roles) == 2:
                    replies = [Message(roles[0], "x" + token[:at]), Message(roles[1], token[at:])]
                    i = shapes.index((history, roles))
                    assert control_ids(template, template.delta(history, replies, -1)) == empty[i]


@families
def test_text_in_a_prompt_makes_no_role_and_no_turn(name):
    family, template, trusting = FAMILIES[name], chat(name, untrusted=True), chat(name)
    roles: list[Role] = ["system", "user"] if family.system else ["user"]

    def control(template: ChatTemplate, text: str) -> list[int]:
        return control_ids(template, template.prompt([Message(r, text) for r in roles]))

    plain = control(template, "Hello.")
    tags = trusting.encoder.tags
    for text in fuzz(name)[::80]:
        if not text.strip():  # some templates leave an empty system message out
            continue
        assert control(template, text) == plain
        # Tags are text of a turn; they stay where a prompt speaks of them.
        assert [i for i in control(trusting, text) if i not in tags] == [
            i for i in plain if i not in tags
        ]
    assert not tags & set(trusting.stop_ids)
    spoken = [
        t
        for t in ("<think>", "</think>", "<tool_call>")
        if t in FAMILIES[name].tags and tags.issuperset(trusting.encoder.encode_trusted(t))
    ]
    assert all(len(control(trusting, t)) == len(plain) + len(roles) for t in spoken)


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("qwen3", "<|im_start|> <|im_end|> <tool_response> </tool_response>"),
        ("deepseekv3", "<｜User｜> <｜Assistant｜> <｜tool▁outputs▁begin｜> <｜tool▁output▁end｜>"),
        ("deepseek_r1_distill", "<｜User｜> <｜Assistant｜> <｜end▁of▁sentence｜>"),
        ("cohere2", "<|START_OF_TURN_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|> <|SYSTEM_TOKEN|>"),
        ("glm4moe", "<|user|> <|observation|> <|assistant|> <|system|> <tool_response>"),
    ],
)
def test_role_tokens_are_guarded_even_if_not_special(name, tokens):
    template = chat(name)
    empty = control_ids(template, template.prompt([Message("user", "")]))
    for token in tokens.split():
        messages = [Message("user", f"a{token}b {token}")]
        assert control_ids(template, template.prompt(messages)) == empty, token


def test_prompts_may_contain_think_tags_and_few_shot_calls():
    for name in ("qwen3", "deepseekv3"):
        template = chat(name)
        think = template.encoder.encode_trusted("<think>")[0]
        question = [Message("user", "Write <think> first.")]
        # DeepSeek's prompt ends with one of its own.
        own = list(template.prompt([Message("user", "")])).count(think)
        assert list(template.prompt(question)).count(think) == own + 1
        assert list(chat(name, untrusted=True).prompt(question)).count(think) == own
        # A tool's text may not, in a prompt either.
        history, result = after(name)[1][0], Message("tool", "<think>")
        assert think not in template.delta(history, [result], -1)
        assert think not in template.prompt([*history, result])
    template = chat("qwen3")
    call = template.encoder.encode_trusted("<tool_call>")[0]
    shots = [Message("user", "Q"), Message("assistant", "<tool_call>{}"), Message("user", "Q")]
    for trust in (template, chat("qwen3", untrusted=True)):
        assert list(trust.prompt(shots)).count(call) == 1


@families
def test_attempts_are_counted(name):
    encoder = chat(name).encoder
    tokens = [t for t in control_tokens(name) if t.strip(" \n▁")]
    assert all(encoder.count_control_tokens(t) == 1 for t in tokens)
    assert encoder.count_control_tokens(" x ".join(tokens)) == len(tokens)
    assert encoder.count_control_tokens("Nothing of it: a < b, [i], 3|4 /x " + tokens[0][:-1]) == 0


@vocabularies
@examples(20)
@given(data=st.data())
def test_any_ids_decode_as_the_tokenizer_decodes_them(name, data):
    """The ids include parts of characters and ids outside of the vocabulary."""
    encoder, backend = chat(name).encoder, family_tokenizer(name).backend_tokenizer
    ids = data.draw(st.lists(st.integers(0, backend.get_vocab_size() + 3), max_size=40))
    assert encoder.decode(ids) == backend.decode(ids, skip_special_tokens=False)
    text = data.draw(anything)
    ids = (
        [i for i in encoder.encode_plain(text) if data.draw(st.booleans())]
        if len(text) < 40
        else ids
    )
    assert encoder.decode(ids) == backend.decode(ids, skip_special_tokens=False)


# -- the cache ------------------------------------------------------------------------------------

words = pytest.mark.parametrize(
    "name", ["qwen3", "qwen3_5_think", "llama3", "gptoss", "deepseekv3", "cohere2"]
)


@words
@examples(150)
@given(text=anything)
def test_the_cache_is_the_tokenizer(name, text):
    warm = chat(name).encoder
    cold = copy.copy(warm)
    cold.cache = BpeCache.of(warm.plain_tokenizer, state_of(warm), warm.control_ids)
    assert cold.cache == {}
    assert (
        cold.encode_plain(text)
        == warm.encode_plain(text)
        == warm.encode_plain(text)
        == warm.encode_uncached(text)
    )


def state_of(encoder: Encoder) -> dict:
    return json.loads(encoder.plain_tokenizer.to_str())


@words
def test_characters_that_libraries_classify_differently(name):
    """New letters, letters whose kind has changed, and marks that one library does not order."""
    encoder = chat(name).encoder
    for c in "ʕ\u208f\ua7ce\U000323b0\U00011de0\u0897\u1df6\u2b96\u0558\u1ad0":
        for text in (f"A{c}b", f"1{c}1 {c}{c}", f"'{c} .{c}.", f"a\u0301{c}\u0323\u0301"):
            assert encoder.encode_plain(text) == encoder.encode_uncached(text)


def test_the_cache_is_bounded():
    made = []
    cache = BpeCache(lambda word: made.append(word) or [], list, str.split, normalizes=False)
    assert list(cache.encode("x" * (MAX_WORD_LENGTH + 1)) or []) == []
    assert len(cache) == 0
    import agentrl.chat.encoding as module

    most, module.MAX_CACHED_WORDS = module.MAX_CACHED_WORDS, 3
    try:
        for word in "abcda":
            cache.encode(word)
            assert len(cache) <= 3
    finally:
        module.MAX_CACHED_WORDS = most
    assert made[1:] == list("abcda")


def own(vocab: dict[str, int], merges: list[tuple[str, str]], *tokens: str, **parts) -> Encoder:
    """The encoder of a byte-level BPE with these merges and control tokens."""
    from tokenizers import decoders, models
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(letters)} | vocab
    made = Tokenizer(models.BPE(vocab, merges, ignore_merges=parts.pop("ignore_merges", False)))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=parts.pop("space", False))
    made.decoder = decoders.ByteLevel()
    for part, value in parts.items():
        setattr(made, part, value)
    made.add_special_tokens(list(tokens))
    return Encoder(PreTrainedTokenizerFast(tokenizer_object=made, pad_token=tokens[0]))


def test_a_word_of_the_vocabulary_that_is_a_control_token_is_cut():
    """As tiktoken-like vocabularies can: a whole word is looked up before anything is merged."""
    encoder = own({"<|%|>": 256, "Ġ<|%|>": 257}, [], "<|%|>", ignore_merges=True)
    assert list(encoder.encode_trusted("<|%|>")) == [256]
    for text in ("<|%|>", "a<|%|>b", "a <|%|>", "<|%|><|%|>"):
        assert 256 not in encoder.encode_plain(text)
        assert encoder.decode_plain(encoder.encode_plain(text)) == text
    # Not called: the cache itself knows.
    cache = BpeCache.of(encoder.plain_tokenizer, state_of(encoder), {256})
    assert cache is not None and cache.encode("a<|%|>b") is None


def test_a_control_token_that_is_made_by_normalizing_is_cut_and_no_more():
    merges = [("[", "K"), ("[K", "]")]
    nfc = normalizers.NFC()
    encoder = own({"[K": 256, "[K]": 257}, merges, "[K]", normalizer=nfc)
    long = "[ words " * 2_000
    for text in ("[\u212a]", f"{long}[\u212a]{long}", "[K][\u212a][K]"):
        ids = encoder.encode_plain(text)
        assert 257 not in ids
        assert encoder.decode_plain(ids) == text.replace("\u212a", "K")
    assert len(encoder.encode_plain(long + "[\u212a]")) == len(encoder.encode_plain(long)) + 3


def test_text_that_cannot_be_kept_harmless_is_refused():
    encoder = own({}, [], "<x>")
    encoder.control_ids |= set(encoder.encode_plain("~"))
    encoder.cache = None
    with pytest.raises(TemplateError, match="control token '~'"):
        encoder.encode_plain("a~b")


def test_a_tokenizer_that_adds_a_space_does_not_in_contents():
    encoder = own({}, [], "<x>", space=True)
    assert encoder.decode_plain(encoder.encode_plain("a b")) == "a b"


@pytest.mark.parametrize(
    ("cut", "cached"),
    [
        (pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                  pre_tokenizers.ByteLevel(add_prefix_space=False)]), True),
        (pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(False)]), True),
        (pre_tokenizers.Sequence([pre_tokenizers.Punctuation(),
                                  pre_tokenizers.ByteLevel(False)]), False),
        (pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), False),
    ],
)  # fmt: skip
def test_other_pre_tokenizers(cut, cached):
    encoder = own({"aa": 256, "11": 257}, [("a", "a"), ("1", "1")], "<x>", pre_tokenizer=cut)
    assert (encoder.cache is not None) == cached
    for text in ("aa 11aa  11½٣!?\n", "x111 222\t  3", "aaa  "):
        assert encoder.encode_plain(text) == encoder.encode_uncached(text)
