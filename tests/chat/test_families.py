"""The families' tokenizers are sound, and their templates do what `family_table.py` says."""

from __future__ import annotations

import json
import time

import pytest
from jinja2 import TemplateError
from support.families import (
    FAMILIES,
    TOOLS,
    answering,
    calling,
    control_tokens,
    family_names,
    family_tokenizer,
)
from tokenizers import Tokenizer

TEXTS = [
    "Plain words, 12345 of them!",
    "naïve café – 你好 🙂 π",
    "a\nb\n\nc\n\n\nd\t\n\n",
    "\r\n x",
    "trail  ",
    '{"a": [1, 2]}',
    " leading",
    "   ",
]
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "What is it?"}
AGAIN = {"role": "user", "content": "And now?"}
SAID = {"role": "assistant", "content": "It is so."}
ONE = ("calculator", {"expression": "12*7"})
TWO = ("search", {"query": "Rome", "k": 3})

families = pytest.mark.parametrize("name", family_names())


def encode(name: str, text: str) -> list[int]:
    return family_tokenizer(name).encode(text, add_special_tokens=False)


def render(name: str, messages: list[dict], tools: list | None = None, **switches) -> str:
    text = family_tokenizer(name).apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True, **switches
    )
    assert isinstance(text, str)
    return text


def without_added(name: str) -> Tokenizer:
    """The vocabulary alone."""
    state = json.loads(family_tokenizer(name).backend_tokenizer.to_str())
    state["added_tokens"], state["post_processor"] = [], None
    return Tokenizer.from_str(json.dumps(state))


@families
@pytest.mark.timing
def test_the_vocabulary_is_small_and_made_quickly(name):
    tokenizer = family_tokenizer(name)
    assert 300 <= len(tokenizer) <= 1000
    begin = time.process_time()
    again = family_tokenizer.__wrapped__(name)
    assert time.process_time() - begin < 1
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    # Merges were learned.
    assert len(encode(name, "The weather in Paris is mild today")) < 20


@families
def test_a_control_token_is_one_id(name):
    tokenizer, tokens = family_tokenizer(name), control_tokens(name)
    assert len(set(tokens)) == len(tokens)
    ids = [encode(name, token) for token in tokens]
    assert ids == [[tokenizer.convert_tokens_to_ids(token)] for token in tokens]
    assert len({i for (i,) in ids}) == len(tokens)
    text = "".join(f"a{token}b" for token in tokens)
    assert [i for i in encode(name, text) if [i] in ids] == [i for (i,) in ids]


@families
def test_flags_and_named_tokens(name):
    family, tokenizer = FAMILIES[name], family_tokenizer(name)
    added = {str(t): t for t in tokenizer.added_tokens_decoder.values()}
    assert set(added) == set(control_tokens(name))
    assert {t for t in added if added[t].special} == set(family.special)
    assert {t for t in added if added[t].rstrip} == set(family.rstrip)
    named = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token)
    assert named == (family.bos, family.eos, family.pad)
    assert set(family.end_ids) <= set(control_tokens(name))
    first = tokenizer.encode("Hello")[0]
    assert (first == tokenizer.bos_token_id) == family.adds_bos
    # What takes the white space after it is the same with and without it.
    for token in family.rstrip:
        assert encode(name, f"{token} \n") == encode(name, token)


@families
def test_text_comes_back(name):
    tokenizer = family_tokenizer(name)
    for text in TEXTS:
        back = tokenizer.decode(encode(name, text))
        # Metaspace puts its mark before a text only where there is none, and decoding takes it off.
        lost = FAMILIES[name].prefix == "first" and text.startswith(" ")
        assert back == (text[1:] if lost else text)


@families
def test_normalization(name):
    decomposed = "cafe\N{COMBINING ACUTE ACCENT}"
    back = family_tokenizer(name).decode(encode(name, decomposed))
    assert back == ("café" if FAMILIES[name].nfc else decomposed)


def test_the_dummy_prefix():
    """A `legacy` vocabulary puts a space before each stretch of text, `first` only at the start."""
    pieces = {
        name: family_tokenizer(name).convert_ids_to_tokens(encode(name, "is[INST]is[INST] is"))
        for name in ("mistral_v3", "mistral_v3_legacy")
    }
    assert pieces["mistral_v3"] == ["▁is", "[INST]", "is", "[INST]", "▁is"]
    assert pieces["mistral_v3_legacy"] == ["▁is", "[INST]", "▁is", "[INST]", "▁", "▁is"]
    # So a text after a control token does not come back, nor do parts join to the whole.
    legacy = family_tokenizer("mistral_v3_legacy")
    assert legacy.decode(encode("mistral_v3_legacy", "is[INST]is")) == "is[INST] is"
    parts = encode("mistral_v3_legacy", "is") + encode("mistral_v3_legacy", " is")
    assert legacy.decode(parts) == "is  is"


def test_llama_has_no_newline_and_gemma_does():
    assert "\n" not in family_tokenizer("phi3").get_vocab()
    assert "\n" in family_tokenizer("gemma3").get_vocab()
    tokens = family_tokenizer("phi3").convert_ids_to_tokens(encode("phi3", "a\nb"))
    assert "<0x0A>" in tokens


@families
def test_control_tokens_in_the_vocabulary_or_only_added(name):
    """Without its added tokens, a vocabulary that owns them still makes them of plain text."""
    bare, tokenizer = without_added(name), family_tokenizer(name)
    made = {
        token
        for token in control_tokens(name)
        if tokenizer.convert_tokens_to_ids(token) in bare.encode(f"a{token}b").ids
    }
    # Runs of newlines and tags of HTML are text to Gemma: added tokens and merges at once.
    text = {"\n\n", "<td>"} if name in ("gemma3", "gemma4") else set()
    assert made == (set(control_tokens(name)) if FAMILIES[name].owned else text)


@families
def test_prompts(name):
    family = FAMILIES[name]
    for messages in ([USER], [SYSTEM, USER], [USER, SAID, AGAIN], [SYSTEM, USER, SAID, AGAIN]):
        for tools in (None, TOOLS):
            text = render(name, messages, tools)
            shown = {m["content"] in text for m in messages}
            assert shown == {True}
            assert ("Search the web." in text) == (family.tools and tools is not None)
    assert family.system == (SYSTEM["content"] in render(name, [SYSTEM, USER]))


@families
def test_a_call_and_its_result(name):
    family = FAMILIES[name]
    raw = ' a "quote"\nü  '
    messages = [USER, calling(name, [ONE]), answering(raw)]
    if family.results == "refused":
        with pytest.raises(TemplateError):
            render(name, messages, TOOLS)
        return
    text = render(name, messages, TOOLS)
    assert ("12*7" in text) == family.calls
    forms = {"verbatim": raw, "trimmed": raw.strip(), "json": r'" a \"quote\"\nü  "'}
    shown = [form for form, result in forms.items() if result in text]
    # What holds the text as it is also holds it without the white space around it.
    assert shown[:1] == ([family.results] if family.results != "dropped" else [])


@families
def test_two_calls_at_once(name):
    family = FAMILIES[name]
    messages = [USER, calling(name, [ONE, TWO]), answering("84"), answering("Italy", 1, "search")]
    if "refused" in (family.parallel, family.results):
        with pytest.raises(TemplateError):
            render(name, messages, TOOLS)
        return
    text = render(name, messages, TOOLS)
    assert ("Rome" in text) == (family.calls and family.parallel == "yes")
    assert ("Italy" in text) == (family.results != "dropped")


@families
def test_orders_of_roles(name):
    family = FAMILIES[name]
    for messages, fine in (
        ([USER, AGAIN], not family.alternates),
        ([USER, calling(name, [ONE]), answering("84"), AGAIN], family.tool_then_user),
        ([SYSTEM, SAID], not (family.needs_user or family.alternates)),
    ):
        if fine:
            assert messages[-1]["content"] in render(name, messages)
        else:
            with pytest.raises(TemplateError):
                render(name, messages)


@families
def test_rounds_are_alike(name):
    """Return the text between a call and its result. DeepSeek opens its outputs only once."""
    family = FAMILIES[name]
    if family.results in ("refused", "dropped") or not family.calls:
        return
    call = calling(name, [ONE])
    text = render(name, [USER, call, answering("RESULT"), call, answering("RESULT")])
    _, first, second = text.split("12*7")
    first, second = first.split("RESULT")[0], second.split("RESULT")[0]
    assert (first == second) == family.rounds_alike


@families
def test_thinking_and_dates(name):
    family = FAMILIES[name]
    default, on, off = (
        render(name, [USER], None, **switches)
        for switches in ({}, {"enable_thinking": True}, {"enable_thinking": False})
    )
    if family.thinking is None:
        assert default == on == off
    else:
        assert on != off
        assert default == (on if family.thinking else off)
    assert family.dated == ("strftime_now" in family_tokenizer(name).chat_template)


def test_mistral_v3_word_for_word():
    """The format of the V3 tokenizer, as its documentation writes it."""
    call = calling("mistral_v3", [ONE])
    messages = [SYSTEM, USER, call, answering("84"), SAID]
    tools = '[{"type": "function", "function": {"name": "f"}}]'
    assert render("mistral_v3", messages, [{"type": "function", "function": {"name": "f"}}]) == (
        f"<s>[AVAILABLE_TOOLS] {tools}[/AVAILABLE_TOOLS][INST] Be brief.\n\nWhat is it?[/INST]"
        '[TOOL_CALLS] [{"name": "calculator", "arguments": {"expression": "12*7"}, '
        '"id": "call00000"}]</s>[TOOL_RESULTS] {"content": 84, "call_id": "call00000"}'
        "[/TOOL_RESULTS] It is so.</s>"
    )
    assert render("mistral_v3", [SYSTEM, USER, SAID, AGAIN]) == (
        "<s>[INST] What is it?[/INST] It is so.</s>[INST] Be brief.\n\nAnd now?[/INST]"
    )
    for wrong in ("call0", "call_0000", None):
        with pytest.raises(TemplateError, match="9 letters or digits"):
            render("mistral_v3", [USER, call, answering("84") | {"tool_call_id": wrong}])
