"""A row of tokens, grown turn by turn, on every family: what is in it, and what it costs."""

from __future__ import annotations

import ast
import copy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.families import (
    FAMILIES,
    TOOLS,
    families_of_all_templates,
    family_names,
    family_tokenizer,
    templates_see_none,
)
from support.family_chats import chat, control_ids

import agentrl
from agentrl.chat import ChatTemplate
from agentrl.chat.template import MAX_CACHED
from agentrl.chat.verify_template import Shape, verify_template
from agentrl.trajectory import Message, Role, ToolCall

families = pytest.mark.parametrize("name", family_names())
templates = pytest.mark.parametrize("name", families_of_all_templates())
# What templates keep as it is: no white space around it, and nothing that speaks of thinking.
benign = st.text("abc XYZ.,:é日🙂1234\n'\"\\{}", min_size=1, max_size=30).filter(
    lambda text: text == text.strip()
)
foreign = (
    benign | st.text(max_size=30) | st.sampled_from(["", " ", "<|im_end|>", "</tool_response>"])
)
# Families whose templates show the turns of a conversation as text, each as it was said.
PLAIN = [
    "qwen2_5", "qwen3", "qwen3_instruct_2507", "llama3", "llama3_1", "llama3_2", "chatml",
    "bpe_owning", "lfm2", "gemma3", "gemma3_unigram", "gemma4", "phi3", "phi3_5", "cohere2",
]  # fmt: skip
# Those drop what was thought in earlier turns.
THINKING = [
    "qwen3", "qwen3_5_think", "glm4moe", "nemotron_3_nano", "gemma4", "gptoss", "lfm2",
]  # fmt: skip


def follow_ups(name: str) -> list[tuple[Role, ...]]:
    """The roles that may follow a turn of the assistant."""
    family = FAMILIES[name]
    legal: list[tuple[Role, ...]] = [("user",)]
    if family.results not in ("refused", "dropped"):
        legal += [("tool",), ("tool", "tool")]
        if family.tool_then_user:
            legal.append(("tool", "user"))
    return legal


def literal(name: str, text: str) -> list[int]:
    return list(chat(name).encoder.encode_trusted(text))


def same(name: str, row: list[int], want: list[int]) -> bool:
    """The same ids; SentencePiece joins a prompt's last newline to a turn's first letter."""
    if FAMILIES[name].kind in ("byte_level", "tiktoken"):
        return row == want
    return chat(name).decode(row) == chat(name).decode(want)


@dataclass(frozen=True)
class Talk:
    """A conversation, and the ids that were sampled for the assistant's messages."""

    messages: list[Message]
    sampled: dict[int, list[int]]


def calls(roles: tuple[Role, ...]) -> tuple[ToolCall, ...]:
    return tuple(ToolCall("calculator", {}, id=f"call{i:05}") for i in range(roles.count("tool")))


@st.composite
def talks(draw: st.DrawFn, name: str, *, own: bool) -> Talk:
    """Legal orders of roles; with `own`, anything is said and sampled, else what comes back."""
    family, template = FAMILIES[name], chat(name)
    text = foreign if own else benign
    messages = [Message("system", draw(text))] * (family.system and draw(st.booleans()))
    messages.append(Message("user", draw(text)))
    sampled = {}
    legal = follow_ups(name)
    if not own and name in ("gemma4", "gptoss"):  # they show no result without a written call
        legal = legal[:1]
    for _ in range(draw(st.integers(1, 4))):
        roles = draw(st.sampled_from(legal))
        content = draw(benign)
        ids = list(template.encoder.encode_plain(content))
        if own:
            # One token a character, single bytes, anything at all; any stop token or none.
            ids = draw(
                st.sampled_from(
                    [ids, [i for c in content for i in template.encoder.encode_plain(c)]]
                )
                | st.lists(st.integers(0, len(family_tokenizer(name)) - 1), max_size=12)
            )
            ids = ids + draw(st.sampled_from([[], *([i] for i in template.stop_ids)]))
        else:
            ids = [*ids, template.close_id]
        sampled[len(messages)] = ids
        messages.append(Message("assistant", content, calls(roles)))
        messages += [Message(role, draw(text)) for role in roles]
    return Talk(messages, sampled)


@templates
@examples(25)
@given(data=st.data())
def test_sampled_tokens_keep_their_place_and_turns_are_closed_once(name, data):
    """A row is prompt + ids + delta + ids + delta ..."""
    if name == "deepseek_r1_distill" and templates_see_none():
        pytest.skip(
            "this version of transformers lets the template write calls, and it closes none"
        )
    template, talk = chat(name), data.draw(talks(name, own=True))
    messages, own = talk.messages, sorted(talk.sampled)
    row = list(template.prompt(messages[: own[0]], TOOLS))
    for i, end in zip(own, [*own[1:], len(messages)], strict=True):
        turn, more = talk.sampled[i], messages[i + 1 : end]
        before = len(row)
        row += turn
        delta = list(template.delta(messages[: i + 1], more, (turn or [-1])[-1]))
        assert row[before:] == turn
        row += delta
        # The delta is the frame's, whatever was said and sampled; it closes what is not closed.
        quiet = [Message(m.role, "") for m in more]
        full = template.delta(messages[: i + 1], quiet, -1)
        closed = len(full) - len(template.delta(messages[: i + 1], quiet, (turn or [-1])[-1]))
        assert closed in (0, 1)
        assert control_ids(template, delta) == control_ids(template, full)[closed:]
        assert list(template.delta(messages[: i + 1], more, -1))[closed:] == delta
        # GLM's next role is what closes a turn: another stop token stands before it.
        if turn and (turn[-1] == full[0] or (template.closes and turn[-1] in template.stop_ids)):
            assert closed
        if not turn or turn[-1] not in template.stop_ids:
            assert not closed or turn[-1] == full[0]
    assert list(template.conversation(messages, TOOLS, talk.sampled)) == row


def test_after_a_turn_without_tokens_the_delta_is_whole():
    """Also if it begins with a text, which is encoded only with the contents."""
    tokenizer = copy.copy(family_tokenizer("qwen2_5"))
    tokenizer.chat_template = """
    {%- for m in messages %}
        {%- if m.role == "tool" %}{{- "result: " + m.content }}
        {%- elif m.role == "assistant" %}{{- "<|im_start|>" + m.content }}
        {%- else %}{{- "<|im_end|>user: " + m.content }}{%- endif %}
    {%- endfor %}
    {%- if add_generation_prompt %}{{- "<|im_start|>" }}{%- endif %}"""
    template = ChatTemplate(tokenizer, [tokenizer.convert_tokens_to_ids("<|im_end|>")])
    history = [Message("user", "1"), Message("assistant", "")]
    delta = template.delta(history, [Message("tool", "2")], -1)
    assert tokenizer.decode(delta) == "result: 2<|im_start|>"


@pytest.mark.parametrize("name", PLAIN)
@examples(40)
@given(data=st.data())
def test_a_row_is_the_rendered_conversation(name, data):
    """Oracle B, where a template is append-only: nothing else would be shown at inference."""
    template, family = chat(name), FAMILIES[name]
    talk = data.draw(talks(name, own=False))
    text = template.render([m.as_dict() for m in talk.messages])
    row, want = list(template.conversation(talk.messages, (), talk.sampled)), literal(name, text)
    assert same(name, row, want)
    if family.kind in ("byte_level", "tiktoken"):
        backend = family_tokenizer(name).backend_tokenizer
        assert row == backend.encode(text, add_special_tokens=False).ids
    assert row == list(template.conversation(talk.messages, (), talk.sampled, strip=True))


@templates
def test_verify_template_finds_the_append_only_families(name):
    """The shapes of `prove`, with the tools of the tests."""
    verdicts = {v.shape: v for v in verify_template(chat(name), TOOLS)}
    append_only = {v.shape for v in verdicts.values() if v.status == "append-only"}
    if FAMILIES[name].results in ("refused", "dropped"):
        assert append_only == {"user only"}
    elif name in PLAIN:
        assert all(v.ok for v in verdicts.values())
        without = [
            v.kinds[kind] for v in verdicts.values() for kind in v.kinds if "thought" not in kind
        ]
        assert without and set(without) <= {"append-only", "unsupported"}


@cache
def proven(name: str) -> list[tuple[Role, ...]]:
    """Return the messages that may follow a turn, according to `verify_template`."""
    legal = follow_ups(name)
    shapes = [Shape("", (tuple(f"{role}:12" for role in roles),) * 2) for roles in legal]
    verdicts = verify_template(chat(name), TOOLS, shapes)
    return [roles for roles, verdict in zip(legal, verdicts, strict=True) if verdict.ok]


@templates
@examples(8)
@given(data=st.data())
def test_verdicts_hold_for_any_texts_of_a_shape(name, data):
    """Calls as the template writes them: what holds in a few shapes holds in others."""
    family, legal = FAMILIES[name], proven(name)
    if name.startswith("mistral"):  # what was said first moves to the last user message
        legal = [roles for roles in legal if "user" not in roles]
    after = data.draw(st.lists(st.sampled_from(legal), min_size=1, max_size=4))
    kinds = tuple(tuple(f"{role}:{data.draw(benign)}" for role in roles) for roles in after)
    (verdict,) = verify_template(chat(name), TOOLS, [Shape("", kinds, system=family.system)])
    assert verdict.ok, verdict.detail


@pytest.mark.parametrize("name", THINKING)
@examples(25)
@given(data=st.data())
def test_a_stripped_row_is_the_rendered_conversation(name, data):
    """With thoughts in the turns: what the template drops of them is dropped, and no more."""
    template = chat(name)
    thinking = template.thinking
    messages, shown, sampled = [Message("user", data.draw(benign))], [], {}
    shown.append(messages[0].as_dict())
    for _ in range(data.draw(st.integers(1, 3))):
        thought, answer = data.draw(benign), data.draw(benign)
        turn = {"role": "assistant", "content": answer}
        turn |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), thought)
        alone = template.render([*shown, turn], as_prompt=False)
        if thought not in alone:
            turn = {"role": "assistant", "content": f"<think>\n{thought}\n</think>\n\n{answer}"}
            alone = template.render([*shown, turn], as_prompt=False)
        before = template.render(shown)
        start, end = (
            template.encoder.shared_length(before, alone),
            alone.rindex(answer) + len(answer),
        )
        sampled[len(messages)] = [
            *template.encoder.encode_trusted(alone[start:end]),
            template.close_id,
        ]
        shown += [turn, {"role": "user", "content": data.draw(benign)}]
        messages += [Message("assistant", answer), Message("user", shown[-1]["content"])]
    want = list(template.encoder.encode_trusted(template.render(shown)))
    row = template.conversation(messages, (), sampled, strip=True)
    assert same(name, list(row), want)
    # Dropped it is: another row than the one that keeps it.
    assert list(template.conversation(messages, (), sampled)) != want
    assert thinking.after_user or thinking.always


# -- what stands between turns --------------------------------------------------------------------

Q, A = Message("user", "Q"), Message("assistant", "A")


def delta_text(name: str, roles: tuple[Role, ...], last: int = -1) -> str:
    messages = [Message(role, f"said {i}") for i, role in enumerate(roles)]
    turn = Message("assistant", "A", calls(roles))
    return chat(name).decode(chat(name).delta([Q, turn], messages, last))


@families
def test_a_delta_has_the_new_messages_and_nothing_else(name):
    """The delta has no system block, no added user turn, and the text after the closing token."""
    template = chat(name)
    for roles in follow_ups(name):
        text = delta_text(name, roles)
        assert "system" not in text.lower() and "knowledge" not in text.lower()
        assert text.count("said") == len(roles)
        assert [text.index(f"said {i}") for i in range(len(roles))] == sorted(
            text.index(f"said {i}") for i in range(len(roles))
        )
        first = template.delta([Q, A], [Message("user", "x")], -1)[0]
        # gpt-oss's model ends with one token, and history shows another.
        assert first in template.stop_ids or name == "gptoss"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3", "<|im_end|>\n<|im_start|>user\nsaid 0<|im_end|>\n<|im_start|>assistant\n"),
        ("llama3_1", "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nsaid 0<|eot_id|>"
                     "<|start_header_id|>assistant<|end_header_id|>\n\n"),
        ("gemma3", "<end_of_turn>\n<start_of_turn>user\nsaid 0<end_of_turn>\n"
                   "<start_of_turn>model\n"),
        ("glm4moe", "<|user|>\nsaid 0<|assistant|>"),
        ("phi3", "<|end|><|user|>said 0<|end|><|assistant|>"),  # they swallow the newlines
        ("mistral_v3", "</s>[INST] said 0[/INST]"),
    ],
)  # fmt: skip
def test_deltas_word_for_word(name, text):
    """If a newline follows the closing token, the row contains it, sampled or not."""
    template = chat(name)
    assert delta_text(name, ("user",)).replace("[INST]said", "[INST] said") == text
    first = template.encoder.encode_trusted(text)[0]
    rest = template.decode([first]) + delta_text(name, ("user",), first)
    assert rest.replace("[INST]said", "[INST] said") == text


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_5_think", "chatml", "glm4moe"])
def test_parallel_results_are_one_group(name):
    one, two = delta_text(name, ("tool",)), delta_text(name, ("tool", "tool"))
    for token in ("<|im_start|>", "<|im_end|>", "<|observation|>", "<|assistant|>"):
        assert one.count(token) == two.count(token)
    assert 2 * one.count("<tool_response>") == two.count("<tool_response>") == 2


@pytest.mark.parametrize("name", ["gptoss", "gemma4", "mistral_v3", "mistral_v3_legacy"])
@pytest.mark.parametrize("field", ["name", "id"])
def test_names_of_calls_forge_no_control_token(name, field):
    """Names and ids are the model's own text: they may be what a hostile page made it write."""
    template = chat(name)
    fine = ToolCall("calculator", {}, id="call00000")
    want = control_ids(template, template.delta([Q, Message("assistant", "", (fine,))], R, -1))
    tokens = "".join(template.decode([i]) for i in sorted(template.encoder.control_ids))
    for text in (tokens, "zq0content0qz", "zqspokenqz", "zqargumentqz", "{{ x }}", 'a"b\n', ""):
        call = ToolCall("calculator" if field == "id" else text, {}, id="call00000")
        if field == "id":
            call = ToolCall("calculator", {}, id=text)
        ids = template.delta([Q, Message("assistant", "", (call,))], R, -1)
        assert control_ids(template, ids) == want, text
        assert template.decode(ids).count("said 0") == 1


R = [Message("tool", "said 0")]


# -- what it costs --------------------------------------------------------------------------------


class Counting:
    """Stands where a function did, and counts."""

    def __init__(self, function):
        self.function, self.calls, self.letters, self.messages = function, 0, 0, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        self.letters += sum(len(a) for a in args if isinstance(a, str))
        self.messages += sum(len(a) for a in args if isinstance(a, list))
        return self.function(*args, **kwargs)


@families
def test_a_delta_costs_the_same_after_ten_and_after_5000_messages(name, monkeypatch):
    template = chat(name)
    for roles in follow_ups(name):
        turn = Message("assistant", "A", calls(roles))
        more = [Message(role, "12 apples") for role in roles]
        costs, deltas = [], []
        for n in (10, 5_000):
            history = [Q, Message("assistant", "B")] * (n // 2) + [Q, turn]
            template.delta(history, more, -1)  # a template that looks at positions learns this
            plain, render = Counting(template.encoder.encode_plain), Counting(template.render)
            monkeypatch.setattr(template.encoder, "encode_plain", plain)
            monkeypatch.setattr(template.probe, "render", render)
            deltas.append(template.delta(history, more, -1))
            monkeypatch.undo()
            costs.append((plain.calls, plain.letters, render.calls, render.messages))
        # One rendering of a short conversation shows whether the template looks at what users say.
        assert costs[0] == costs[1] and costs[0][2] <= ("user" in roles)
        assert costs[0][0] <= len(roles) + 2
        if not template._positional:
            assert deltas[0] == deltas[1]


@pytest.mark.parametrize("name", ["qwen3", "gptoss", "gemma4", "mistral_v3"])
def test_a_new_call_costs_no_rendering(name, monkeypatch):
    """A call's id is new each time."""
    template = chat(name)

    def delta(i: int):
        call = ToolCall("calculator", {}, id=f"id{i:07}")
        return template.delta([Q, Message("assistant", "", (call,))], R, -1)

    delta(0)
    render = Counting(template.render)
    monkeypatch.setattr(template.probe, "render", render)
    for i in range(1, 20):
        delta(i)
    assert render.calls == 0


@families
def test_after_some_rounds_nothing_but_a_users_text_is_rendered(name, monkeypatch):
    """A history that grows by what it already holds; DeepSeek's deltas depend on it."""
    template = chat(name)
    for roles in follow_ups(name):
        history = [Q, Message("assistant", "A", calls(roles))]
        render, counted = Counting(template.render), 0
        for _ in range(12):
            more = [Message(role, "12 apples") for role in roles]
            template.delta(history, more, -1)
            counted += template.probe.render is render
            history += [*more, Message("assistant", "A", calls(roles))]
            if len(history) > 8 * (1 + len(roles)):
                monkeypatch.setattr(template.probe, "render", render)
        monkeypatch.undo()
        assert render.calls <= counted * ("user" in roles)


def test_cached_frames_are_bounded():
    template = ChatTemplate(family_tokenizer("qwen3"))
    for n in range(1, MAX_CACHED // 8):
        for shots in range(9):
            template.prompt([Message("user", "Q"), Message("assistant", f"{n} {shots}"), Q])
        assert len(template._prompt_parts) <= MAX_CACHED
    assert len(template._prompt_parts) > 9


# -- the code -------------------------------------------------------------------------------------


def test_apply_chat_template_never_encodes():
    """It would read control tokens out of foreign text."""
    files = []
    for path in Path(agentrl.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "encode_message_with_chat_template" not in text
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and node.attr == "apply_chat_template":
                files.append(path.name)
            if isinstance(node, ast.Call) and "apply_chat_template" in ast.unparse(node.func):
                assert "tokenize=False" in map(ast.unparse, node.keywords), path
    # `hermes.py` renders an empty message. A reward model has a template of its own, which shows
    # text in which no control token is left.
    assert sorted(files) == ["hermes.py", "render.py", "reward_model.py"]


@families
def test_a_user_may_answer_after_a_tool_and_a_turn(name):
    """DeepSeek's template wants calls of earlier turns as text, though this turn has none."""
    if ("tool",) in follow_ups(name):
        called = Message("assistant", "A", calls(("tool",)))
        messages = [Q, called, *R, A, Q]
        assert chat(name).delta(messages[:4], messages[4:], -1)


@pytest.mark.parametrize("name", ["phi3", "phi3_5", "qwen3"])
def test_a_turn_of_no_tokens_is_closed(name):
    """Phi's prompt ends with a token that also ends turns."""
    template = chat(name)
    row = list(template.conversation([Q, Message("assistant", ""), Q], (), {1: []}))
    assert row == [*template.prompt([Q]), *template.delta([Q, A], [Q], -1)]


def test_a_result_without_a_parsed_call_keeps_its_id():
    delta = chat("mistral_v3").delta([Q, A], [Message("tool", "12", tool_call_id="call00000")], -1)
    assert "call00000" in chat("mistral_v3").decode(delta)


# -- thoughts that a prompt has begun --------------------------------------------------------------


def opened(name: str, content: str, after: list[Message], **variables: Any) -> str:
    template = ChatTemplate(family_tokenizer(name), variables=variables)
    call = ToolCall("calculator", {}, id="call00000")
    history = [Message("user", "Q"), Message("assistant", content, (call,))]
    return template.thinking.opening(template.delta(history, after, -1))


def test_the_prompt_of_the_same_turn_decides_whether_a_thought_is_open():
    user, tool = [Message("user", "Q")], [Message("tool", "12", tool_call_id="call00000")]
    assert opened("qwen3", "A", user) == opened("qwen3", "A", tool) == ""
    assert opened("qwen3_5_think", "A", user) == opened("qwen3_5_think", "A", tool) == "<think>\n"
    assert opened("qwen3_5_nothink", "A", user) == ""
    # DeepSeek's goes on without after a tool's result, Gemma's begins one there alone.
    assert opened("deepseekv3", "A", user) == "<think>\n"
    assert opened("deepseekv3", "A", tool) == ""
    assert opened("gemma4", "A", user, enable_thinking=True) == ""
    assert opened("gemma4", "A", tool, enable_thinking=True) == "<|channel>thought\n"


@pytest.mark.parametrize("text", ["an answer </think> with a tag", '{"x": "a </think> b"}'])
def test_an_answer_may_contain_the_end_tag_of_a_thought(text):
    template = chat("qwen3")
    for answer in (text, f"<think>\nhm\n</think>\n\n{text}"):
        ids = template.prompt([Message("user", "Q")])
        start = len(ids)
        template.thinking.strip(ids, family_tokenizer("qwen3").encode(answer), False)
        assert template.decode(ids[start:]) == text
