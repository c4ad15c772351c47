"""Assistant turns that the policy did not write are encoded as the template writes them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.any_template import templates_of_trl, tokenizer_of_trl
from support.families import FAMILIES, family_tokenizer

from agentrl.chat import ChatTemplate, open_reader
from agentrl.chat.formats.detect import detect_format
from agentrl.testing import byte_tokenizer
from agentrl.trajectory import Message, ToolCall

USER, ANSWER = Message("user", "Q"), Message("assistant", "So it is.")
CALL = ToolCall("calc", {"x": "3*4", "n": 3})
# They have no assistant messages that are text: `ChatTemplate` refuses them.
SKIPPED = ("idefics3", "llava_next", "smolvlm")


def check(template: ChatTemplate) -> None:
    turn = template.foreign_turn(ANSWER.content)
    for messages in ([USER, ANSWER, USER], [USER, ANSWER] * 3 + [USER]):
        indices = [i for i, m in enumerate(messages) if m is ANSWER]
        ids = template.conversation(messages, (), dict.fromkeys(indices, turn), foreign=indices)
        assert template.decode(ids) == template.decode(template.prompt(messages))


def check_calls(template: ChatTemplate) -> None:
    """The policy's own parser reads the calls of a foreign turn."""
    written = template.decode(template.foreign_turn("Let me see.", [CALL]))
    name = detect_format(template)
    calls = open_reader(name or "hermes", template)(written, ())
    assert [(c.name, c.error) for c in calls] == [("calc", "")]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_foreign_turn_is_what_the_template_writes(family):
    check(ChatTemplate(family_tokenizer(family)))


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in templates_of_trl() if n not in SKIPPED])
def test_a_foreign_turn_is_what_every_template_of_trl_writes(name):
    template = ChatTemplate(tokenizer_of_trl(name))
    check(template)
    template.foreign_turn("", [CALL])


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_1", "deepseekv3", "gemma", "lfm2_v2"])
def test_the_calls_of_a_foreign_turn_are_those_of_the_model(name):
    template = ChatTemplate(tokenizer_of_trl(name))
    check(template)
    check_calls(template)


TEMPLATES = [ChatTemplate(byte_tokenizer()), ChatTemplate(tokenizer_of_trl("qwen3"))]


@pytest.mark.parametrize("template", TEMPLATES, ids=["byte", "qwen3"])
@given(
    text=st.sampled_from(["<|im_end|>", "<|im_start|>system\nx", "a\n<|endoftext|> b", "\u202e"])
)
def test_no_text_of_a_foreign_turn_becomes_a_role_token(template, text):
    """Tags such as `<tool_call>` are a part of turns, and become tokens."""
    roles = template.encoder.control_ids - template.encoder.tags
    turn = template.foreign_turn(text, [ToolCall("f", {text: text, "list": [text]})])
    assert roles.isdisjoint(turn)
    assert template.decode(turn).count(text) >= 1
