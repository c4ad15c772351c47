import json
import time
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.any_template import tokenizer_for
from support.examples import examples
from support.template_outcomes import CLOSE, SPACED

from agentrl.chat import ChatTemplate, parse_hermes, parse_react
from agentrl.demo.recipe import train_tokenizer
from agentrl.errors import TemplateError
from agentrl.trajectory import Message

TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Compute.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}
TEXTS = [
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": "3*4"}}\n</tool_call>',
    "Tom has 3 bags of 4 apples. How many apples are there in all of the bags?",
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS * 3)


@pytest.fixture(scope="module")
def template(tokenizer):
    return ChatTemplate(tokenizer)


def conversation():
    return [
        Message("system", "Be brief."),
        Message("user", "How much is 3*4?"),
        Message("assistant", TEXTS[0]),
        Message("tool", "12"),
        Message("tool", "a second result"),
        Message("assistant", "#### 12"),
        Message("user", "Sure?"),
        Message("assistant", "Yes."),
    ]


def rendered(tokenizer, messages, tools, generation=False):
    return tokenizer.apply_chat_template(
        [m.as_dict() for m in messages],
        tools=tools,
        tokenize=False,
        add_generation_prompt=generation,
    )


def test_appending_turn_by_turn_gives_the_rendered_conversation(tokenizer, template):
    messages = conversation()
    ids = list(template.prompt(messages[:2], [TOOL]))
    for start, turn in ((2, 2), (3, 5), (6, 7)):
        if start > 2:
            ids += template.delta(messages[:start], messages[start:turn], ids[-1])
        ids += [*template.encoder.encode_trusted(messages[turn].content), template.close_id]
    full = rendered(tokenizer, messages, [TOOL])
    assert template.decode(ids) + "\n" == full
    assert ids == tokenizer.encode(full, add_special_tokens=False)[:-1]


def test_trace_masks_the_assistants_own_tokens_and_no_others(template):
    messages = conversation()
    ids, mask = template.trace(messages, [TOOL])
    own, run = [], []
    for token, m in zip(ids, mask, strict=True):
        if m:
            run.append(token)
        elif run:
            own.append(template.decode(run))
            run = []
    own.append(template.decode(run))
    assert own == [m.content + "<|im_end|>" for m in messages if m.role == "assistant"]


def test_a_turn_stopped_by_a_text_is_closed_by_the_template(template):
    messages = [
        Message("user", "Q"),
        Message("assistant", "Action Input: {}\nObservation:"),
        Message("user", "Observation: 12"),
        Message("assistant", "done"),
    ]
    ids, mask = template.trace(messages)
    at = next(i for i, m in enumerate(mask) if m)
    stop = next(i for i in range(at, len(mask)) if not mask[i])
    assert template.decode(ids[at:stop]) == messages[1].content
    assert ids[stop] == template.close_id
    assert template.decode(ids[stop:]).startswith(
        "<|im_end|>\n<|im_start|>user\nObservation: 12<|im_end|>\n<|im_start|>assistant\ndone"
    )


@examples(300)
@given(
    st.lists(
        st.sampled_from(
            [
                "<|im_end|>",
                "<|im_start|>system\n",
                "<tool_call>",
                "</tool_response>",
                "<|im",
                "_end|>",
            ]
        )
        | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
        max_size=8,
    ).map("".join)
)
def test_no_text_becomes_a_control_token(template, text):
    ids = template.encode(text)
    assert template.encoder.control_ids.isdisjoint(ids)
    assert template.decode(ids) == unicodedata.normalize("NFC", text)


def test_a_delta_encodes_the_new_text_only(template):
    history = [Message("user", "Q"), Message("assistant", TEXTS[0])]
    delta = template.delta(history, [Message("tool", "12")], template.close_id)
    assert template.decode(delta) == (
        "\n<|im_start|>user\n<tool_response>\n12\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert template.delta(history, [Message("tool", "12")], last_id=5)[0] == template.close_id


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        # Earlier turns change when more messages follow, as thinking models' do.
        (lambda t: t.replace("message.content + '<|im", "(message.content if loop.last or "
                             "message.role != 'assistant' else '') + '<|im"), "messages follow"),
        # A content is shown as no known function of it, or twice, or not at all.
        (lambda t: t.replace("message.content + '<|im", "message.content|upper + '<|im"), "show"),
        (lambda t: t.replace("message.content + '<|im", "message.content|title + '<|im"), "show"),
        (lambda t: t.replace("message.content + '<|im", "message.content|truncate(25) + '<|im"),
         "changes the content of a user message"),
        (lambda t: t.replace("message.content + '<|im", "message.content * (1 + (message.role == "
                             "'user')) + '<|im"), "user message 2 times"),
        (lambda t: t.replace("message.content + '<|im", "message.content|e + '<|im"),
         "changes the content of a user message"),
        # Nothing closes a turn.
        (lambda t: t.replace("+ '<|im_end|>\\\\n' }}\n    {%- endif %}\n{%- endfor", "+ 'END' }}\n"
                             "    {%- endif %}\n{%- endfor"), "control token"),
    ],
)  # fmt: skip
def test_templates_that_rewrite_history_are_refused(edit, reason):
    broken = train_tokenizer(TEXTS)
    edited = edit(broken.chat_template.replace("\\n", "\\\\n")).replace("\\\\n", "\\n")
    assert edited != broken.chat_template
    broken.chat_template = edited
    with pytest.raises(TemplateError, match=reason):
        ChatTemplate(broken)


def test_white_space_before_the_token_that_closes_a_turn_stays_in_stripped_turns():
    asks = "assistant<|header_end|>\\n\\n' -}}\n{%- endif -%}"
    source = SPACED.replace("CLOSE", CLOSE["always"])
    assert source.count(asks) == 1
    thinking = source.replace(asks, asks.replace("' -}}", "<think></think>' -}}"))
    template = ChatTemplate(tokenizer_for(thinking))
    after = [Message("user", "Q"), Message("assistant", "A"), Message("user", "B")]
    turn = list(template.encoder.encode_trusted("A\n<|eot|>"))
    row = template.conversation(after, (), {1: turn}, strip=True)
    assert template.decode(row) == template.render([m.as_dict() for m in after])


def test_trimmed_contents_are_rendered_as_by_the_template():
    trimming = train_tokenizer(TEXTS)
    edited = trimming.chat_template.replace("+ message.content +", "+ message.content | trim +")
    assert edited != trimming.chat_template
    trimming.chat_template = edited
    template, messages = (
        ChatTemplate(trimming),
        [Message("user", " a \n"), Message("assistant", "b")],
    )
    assert template.decode(template.prompt(messages[:1])) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    )
    assert template.decode(template.delta(messages, [Message("user", "\n c ")], -1)) == (
        "<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    )


def call(name="calculator", arguments=None):
    body = json.dumps({"name": name, "arguments": arguments or {"expression": "1"}})
    return f"<tool_call>\n{body}\n</tool_call>"


def test_calls_are_read_in_order():
    text = "First." + call(arguments={"expression": "1"}) + call(arguments={"expression": "2"})
    assert [c.arguments for c in parse_hermes(text)] == [
        {"expression": "1"},
        {"expression": "2"},
    ]


@pytest.mark.parametrize(
    ("text", "errors"),
    [
        ("no call at all", []),
        (call("x", {"s": "</tool_call>"}), [""]),
        ("<think>" + call() + "</think>#### 3", []),
        ("<think>" + call(), ["the call is inside a <think> block"]),
        ("<think>and so on", []),
        (call() + "was a thought</think>" + call("x"), [""]),
        (call("x", {"s": "a </think> b"}), [""]),
        (call("x", {"s": "a <think> b"}), [""]),
        (call("x", {"s": "<tool_call>"}), [""]),
        ("<tool_call>{broken</tool_call>", ["must be one JSON object"]),
        (call() + "<tool_call>{broken</tool_call>" + call(), ["", "must be one JSON object", ""]),
        ("<tool_call>3</tool_call>", ["must be one JSON object"]),
        ('<tool_call>{"name": "c", "arguments": {"x": 1}', ["missing closing </tool_call>"]),
        ('<tool_call>{"name": 3}</tool_call>', ['"name" must be a string']),
        ('<tool_call>{"name": "c", "arguments": "x"}</tool_call>', ['"arguments" must be']),
        ('<tool_call>{"name": "c", "arguments": {"x": NaN}}</tool_call>', ["must be one JSON"]),
        ('<tool_call>{"name": "c", "arguments": {"x": "\\ud800"}}</tool_call>', ["invalid JSON"]),
        ('<tool_call>{"name": "c", "parameters": {}}</tool_call>', ["unknown keys"]),
        ("<tool_call>" + '{"a":' + "[" * 20_000 + "</tool_call>", ["must be one JSON object"]),
    ],
)  # fmt: skip
def test_broken_calls_are_reported(text, errors):
    calls = parse_hermes(text)
    assert len(calls) == len(errors)
    for parsed, error in zip(calls, errors, strict=True):
        assert parsed.error.startswith(error) and bool(parsed.error) == bool(error)
        assert isinstance(parsed.arguments, str if error else dict)


@pytest.mark.parametrize(
    "unit", ["<tool_call>", "<tool_call>{", '<tool_call>{"', '<tool_call>{"1"1"', "<tool_call>{[",
             '<tool_call>{"a":"</tool_call>', "<tool_call>\n" + " " * 50]
)  # fmt: skip
@pytest.mark.timing
def test_parsing_takes_linear_time(unit):
    def seconds(n):
        text = unit * n
        best = 9.0
        for _ in range(3):
            start = time.thread_time()
            parse_hermes(text)
            best = min(best, time.thread_time() - start)
        return best

    assert seconds(100_000 // len(unit)) < 0.05


@examples(300)
@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", '{"name": "c"', "}", '"', "\\", "[",
                                 "<think>", "</think>", "\n", "Action:", "Action Input:", "é"]),
                max_size=30).map("".join))  # fmt: skip
def test_parsers_never_raise(text):
    for calls in (parse_hermes(text), parse_react(text)):
        assert all(isinstance(c.arguments, str) == bool(c.error) for c in calls)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('Thought: t\nAction: calculator\nAction Input: {"expression": "3*4"}\nObservation:',
         ("calculator", {"expression": "3*4"}, "")),
        ("Action: c\nAction Input: {}", ("c", {}, "")),
        ("Action: c\nAction Input: 3*4\nObservation:", ("c", "3*4", "`Action Input:` must")),
        ("Action: c\nnothing", ("c", "nothing", "`Action:` needs")),
        ("Thought: I know.\nFinal Answer: 3", None),
        ('Action: c\nAction Input: {}\nFinal Answer: 3', None),
        ('Action: c\nAction Input: {"line": "Final Answer: 3"}\nObservation:',
         ("c", {"line": "Final Answer: 3"}, "")),
        ("just text", None),
    ],
)  # fmt: skip
def test_react(text, expected):
    calls = parse_react(text)
    if expected is None:
        assert calls == []
        return
    name, arguments, error = expected
    assert (calls[0].name, calls[0].arguments) == (name, arguments)
    assert calls[0].error.startswith(error) and bool(calls[0].error) == bool(error)


def test_all_tokens_that_end_a_models_turn_stop_it(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    ids = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert ChatTemplate.load(tmp_path).stop_ids == (tokenizer.eos_token_id,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    assert ChatTemplate.load(tmp_path).stop_ids == tuple(ids)
