"""The engine's prompt equals the text of `apply_chat_template` for the conversation so far.

The oracle renders whole conversations and knows nothing of prompts, deltas and stripped turns. A
turn is what a model can write: it goes on from the prompt and ends with its first stop token. Each
conversation has two turns, each in one of seven kinds, followed by results, a user, or both.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.any_template import templates_of_trl, tokenizer_for, tokenizer_of_trl
from support.families import TOOLS
from support.family_facts import FAMILY_FACTS
from support.template_from_facts import tokenizer_from_facts
from support.template_outcomes import (
    CLOSE,
    SPACED,
    outcomes,
)

from agentrl.chat import ChatTemplate
from agentrl.chat.formats.detect import detect_format
from agentrl.chat.verify_template import CALLS_ALONE, SHAPES, verify_template
from agentrl.errors import TemplateError
from agentrl.trajectory import Message, ToolCall

SOME = ["qwen3", "glm4moe", "gptoss"]
FAMILIES = ["Kimi-K2", "DeepSeek V3.1", "Hermes 2 Pro"]
DIFFERS = {"gemma4_v5": "text, call"}
"""It shows a text before a call behind the call's result: `check template` says so."""
REWRITTEN = ["deepseek_r1_distill", "Granite 20B"]
"""No rendered turn goes on from its prompt: R1 never shows a thought that the prompt has begun,
Granite drops the line break behind which the turn begins."""


@pytest.mark.parametrize("close", CLOSE)
def test_white_space_before_the_token_that_closes_a_turn_belongs_to_the_turn(close):
    tokenizer = tokenizer_for(SPACED.replace("CLOSE", CLOSE[close]))
    template = ChatTemplate(tokenizer, [tokenizer.get_vocab()["<|eot|>"]])
    if close != "not at the end":  # there no rendered turn shows what a model writes
        counts = outcomes(template)
        assert counts["same"] and not any(what.startswith("other") for what in counts), counts

    calls = (ToolCall("calculator", {"expression": "1"}, id="call00001"),)
    called = [Message("user", "Q"), Message("assistant", "A", calls), Message("tool", "1")]
    turn = template.encoder.encode_trusted("A\n<|eot|>")
    row = template.decode(template.conversation(called, (), {1: turn}))
    assert row.count("<|eot|>") == template.render([m.as_dict() for m in called]).count("<|eot|>")

    messages = [Message("user", "Q"), Message("assistant", "A")]
    ids, mask = template.trace(messages)
    own = [i for i, m in zip(ids, mask, strict=True) if m]
    assert template.decode(own) == "A\n<|eot|>"

    after = [*messages, Message("user", "B")]
    cut = template.conversation(after, (), {1: list(template.encode("A"))})
    assert template.decode(cut) == template.render([m.as_dict() for m in after])


def check(name: str, tokenizer: Any) -> None:
    """Compare an episode with the template; where they differ, the proof must say so."""
    try:
        template = ChatTemplate(tokenizer)
    except TemplateError:
        return  # said by `check template`: images alone, or nothing that ends a turn
    counts = outcomes(template)
    others = {what for what in counts if what.startswith(("other", "ends inside"))}
    verdicts = verify_template(template, TOOLS, (*SHAPES, CALLS_ALONE))
    if name in DIFFERS:
        assert all(DIFFERS[name] in what for what in others), others
        assert all(v.ok for v in verdicts)
        assert {v.kinds.get("text + call") for v in verdicts} == {"unsupported", None}
        return
    differing = {v.shape: v.detail for v in verdicts if v.status == "differs"}
    if others:
        assert differing, others  # such rows are refused
    if set(counts) == {"same"}:
        assert not differing
    ok = any(v.ok for v in verdicts)
    assert others or counts["same"] or not ok or name in REWRITTEN


@pytest.mark.parametrize("name", SOME)
def test_the_row_is_the_rendered_conversation(name):
    check(name, tokenizer_of_trl(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in templates_of_trl() if n not in SOME])
def test_the_row_is_the_rendered_conversation_for_every_template_of_trl(name):
    check(name, tokenizer_of_trl(name))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_row_is_the_rendered_conversation_for_some_rebuilt_families(name):
    check(name, tokenizer_from_facts(FAMILY_FACTS[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in FAMILY_FACTS if n not in FAMILIES])
def test_the_row_is_the_rendered_conversation_for_every_rebuilt_family(name):
    check(name, tokenizer_from_facts(FAMILY_FACTS[name]))


def test_templates_without_calls_and_tools_have_no_format():
    for name in ("GLM-4 Chat", "ChatGLM3", "Phi-3 small"):
        assert detect_format(ChatTemplate(tokenizer_from_facts(FAMILY_FACTS[name]))) == ""


def test_a_rebuilt_template_follows_its_facts():
    call = {"function": {"name": "add", "arguments": {"a": "1", "b": [2]}}}
    talk = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "T", "reasoning_content": "old"},
        {"role": "user", "content": "R"},
        {"role": "assistant", "content": "", "reasoning_content": "new", "tool_calls": [call] * 2},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "4"},
    ]
    calls = (
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
        "<parameter=b>\n[2]\n</parameter>\n</function>\n</tool_call>"
    ) * 2
    tokenizer = tokenizer_from_facts(FAMILY_FACTS["Step 3.5"])
    assert ChatTemplate(tokenizer).render(talk) == (
        "<s><|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n"
        "<|im_start|>assistant\nT<|im_end|>\n<|im_start|>user\nR<|im_end|>\n"
        f"<|im_start|>assistant\n<think>\nnew\n</think>\n{calls}<|im_end|>\n"
        "<|im_start|>tool_response\n<tool_response>3</tool_response>"
        "<tool_response>4</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


@pytest.mark.slow
def test_the_table_in_the_docs_is_up_to_date():
    from support.tokens_page import PAGE, with_table

    page = PAGE.read_text("utf-8")
    assert page == with_table(page), "run `make docs`"
