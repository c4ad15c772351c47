"""The test tokenizer: ids are bytes, and its template has Qwen's structure."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.chat import ChatTemplate
from agentrl.testing.tokenizer import SPECIAL, TAGS, byte_tokenizer
from agentrl.trajectory import Message

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
PREAMBLE = """\
# Tools

You may call functions. Their signatures:
<tools>
{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
</tools>

To call one, answer with a JSON object within these tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""


def render(messages, **kwargs) -> str:
    return byte_tokenizer().apply_chat_template(messages, tokenize=False, **kwargs)


def test_ids_are_bytes_and_control_tokens_follow():
    tokenizer = byte_tokenizer()
    assert tokenizer("a ü\n").input_ids == list("a ü\n".encode())
    assert tokenizer("".join(SPECIAL + TAGS)).input_ids == list(range(256, 263))
    assert len(tokenizer) == 263
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (258, 256)
    assert tokenizer.decode(range(256, 263), skip_special_tokens=True) == "".join(TAGS)


@given(st.text() | st.lists(st.sampled_from([*SPECIAL, *TAGS, " ", "\n", "a ,b"])).map("".join))
def test_any_text_comes_back(text):
    tokenizer = byte_tokenizer()
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_a_conversation():
    messages = [
        {"role": "user", "content": "1+2?"},
        {"role": "assistant", "content": " <tool_call>\n{}\n</tool_call> "},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "4"},
    ]
    assert render(messages, add_generation_prompt=True) == (
        "<|im_start|>user\n1+2?<|im_end|>\n"
        "<|im_start|>assistant\n <tool_call>\n{}\n</tool_call> <|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n3\n</tool_response>"
        "\n<tool_response>\n4\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_tools_in_the_system_message():
    user = {"role": "user", "content": "hi"}
    rest = "<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    assert render([user], tools=[TOOL]) == "<|im_start|>system\n" + PREAMBLE + rest
    system = {"role": "system", "content": "Be brief."}
    expected = "<|im_start|>system\nBe brief.\n\n" + PREAMBLE + rest
    assert render([system, user], tools=[TOOL]) == expected
    assert render([system, user]) == "<|im_start|>system\nBe brief." + rest


def test_it_can_be_trained_on():
    template = ChatTemplate(byte_tokenizer())
    assert template.close_id == 258
    prompt = template.prompt([Message("user", "hi")])
    assert prompt.tolist() == [
        257,
        *b"user\nhi",
        258,
        *b"\n",
        257,
        *b"assistant\n",
    ]


@pytest.mark.timing
def test_it_is_made_once_and_fast():
    byte_tokenizer()
    byte_tokenizer.cache_clear()
    start = time.thread_time()
    made = byte_tokenizer()
    assert time.thread_time() - start < 0.05
    assert byte_tokenizer() is made
