"""The verdicts on chat templates, and what mends them."""

from __future__ import annotations

import copy
import json
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
import trl
from support.families import (
    FAMILIES,
    families_of_all_templates,
    family_names,
    family_tokenizer,
    templates_see_none,
)
from support.family_facts import FAMILY_FACTS
from support.template_from_facts import tokenizer_from_facts
from typer.testing import CliRunner

from agentrl import agent_loop, load_config, registry
from agentrl.chat import ChatTemplate
from agentrl.chat.encoding import truncate
from agentrl.chat.repair_template import repair_template, template_diff
from agentrl.chat.verify_template import (
    CALLS_ALONE,
    PROBE_TOOL,
    SHAPES,
    THINKING_VARIABLE,
    Shape,
    Verdict,
    format_verdicts,
    verify_template,
    verify_tokenizer,
)
from agentrl.cli import app
from agentrl.errors import TemplateError
from agentrl.preflight import (
    SHIPPED_LOOPS,
    check_model_fits,
    describe_history,
    make_plan,
    verify_rows,
)
from agentrl.trajectory import Message

ROWS = [shape.name for shape in SHAPES]
TOOLS = [name for name in ROWS if name != "user only"]
AFTER_USER = ["unicode", "leading space and newline"]
"""A tool's result, and later a user."""

NO_TOOLS = {"unsupported": TOOLS}
GOES_ON = ["five turns", "tool then user", "user only", *AFTER_USER]
"""A user speaks after a turn."""
SWITCHED = ["thinking on", "thinking off"]
# Tools and the system prompt stand before the last user message.
MISTRAL = {"differs": GOES_ON}
# What is not append-only.
VERDICTS: dict[str, dict[str, list[str]]] = {
    "qwen2_5": {},
    "qwen3": {"drops thinking": [*GOES_ON, *SWITCHED]},
    "qwen3_instruct_2507": {},
    "qwen3_5_think": {"drops thinking": [*GOES_ON, *SWITCHED]},
    "qwen3_5_nothink": {"drops thinking": [*GOES_ON, *SWITCHED]},
    "llama3": {},
    "llama3_1": {},
    "llama3_2": {},
    "glm4moe": {"drops thinking": [*GOES_ON, "thinking on"]},
    "gemma3": NO_TOOLS,
    "gemma3_unigram": NO_TOOLS,
    # The prompt opens a thought after a tool's result, and that stays where thoughts are dropped.
    "gemma4": {"drops thinking": [*GOES_ON, *SWITCHED]},
    # One call a turn.
    "gptoss": {
        "drops thinking": ["five turns", "user only", *AFTER_USER],
        "unsupported": ["parallel tools"],
    },
    # A second round of calls is written as if the first had not been answered.
    "deepseekv3": {
        "drops thinking": [
            *("one tool", "tool then user", "user only", "empty tool result", "long result cut"),
            *AFTER_USER,
        ],
        "differs": ["parallel tools", "five turns"],
    },
    # It writes calls only without content, and fails if the key is not there.
    "deepseek_r1_distill": {
        "drops thinking": [row for row in ROWS if row not in ("parallel tools", "five turns")],
        "differs": ["parallel tools", "five turns"],
    }
    if templates_see_none()
    else {"drops thinking": ROWS},
    "phi3": NO_TOOLS,
    "phi3_5": NO_TOOLS,
    "chatml": {},
    "bpe_owning": {},
    "mistral_v3": MISTRAL,
    "mistral_v3_legacy": MISTRAL,
    "lfm2": {"drops thinking": GOES_ON},
    "nemotron_3_nano": {"drops thinking": [*GOES_ON, "thinking on"]},
    "cohere2": NO_TOOLS,
}

# Qwen2.5's template, changed for the worse.
BROKEN = {
    # No line break between turns from the sixth message on.
    "separator": (
        "<|im_end|>' + '\\n' }}",
        "<|im_end|>' + ('\\n' if loop.index0 < 5 else '') }}",
        "five turns",
        "'<|im_start|>user\\n",
    ),
    # The system prompt again before every message of a user's but the first.
    "system": (
        '{%- if (message.role == "user")',
        '{%- if message.role == "user" and loop.index0 > 1 and messages[0].role == "system" %}'
        "{{- '<|im_start|>system\\nAgain.<|im_end|>\\n' }}{%- endif %}\n"
        '    {%- if (message.role == "user")',
        "tool then user",
        "template: 'system\\nAga",
    ),
    # Each of several results as a message of its own.
    "grouping": (
        '(messages[loop.index0 - 1].role != "tool")',
        '(messages[loop.index0 - 1].role != "tool" or loop.index0 > 3)',
        "parallel tools",
        "template: '<|im_start|>user\\n<tool",
    ),
}


def ends(name: str) -> list[int]:
    vocabulary = family_tokenizer(name).get_vocab()
    return [vocabulary[token] for token in FAMILIES[name].end_ids]


def with_template(name: str, text: str):
    tokenizer = copy.copy(family_tokenizer(name))
    tokenizer.chat_template = text
    return tokenizer


def trained(file: str) -> str:
    folder = Path(next(iter(trl.__path__))) / "chat_templates"
    return (folder / file).read_text(encoding="utf-8")


def broken(kind: str):
    old, new, *_ = BROKEN[kind]
    text = family_tokenizer("qwen2_5").chat_template
    assert isinstance(text, str) and old in text
    return with_template("qwen2_5", text.replace(old, new))


@pytest.fixture
def saved(tmp_path):
    """A family's tokenizer as a model's folder."""

    def save(name: str, tokenizer=None) -> str:
        folder = tmp_path / name
        (tokenizer or family_tokenizer(name)).save_pretrained(folder)
        ids = json.dumps({"eos_token_id": ends(name)})
        (folder / "generation_config.json").write_text(ids)
        return str(folder)

    return save


def run(*words: str):
    return CliRunner().invoke(app, ["check", "template", *words])


def rows_of(text: str) -> dict[str, str]:
    """The table of a command's output."""
    lines = [line.rpartition("  ") for line in text.split("\n\n")[0].splitlines()]
    return {name.strip(): status for name, _, status in lines}


@pytest.mark.parametrize("name", families_of_all_templates())
def test_the_verdicts(name):
    verdicts = verify_tokenizer(family_tokenizer(name), ends(name))
    switched = SWITCHED if THINKING_VARIABLE in family_tokenizer(name).chat_template else []
    assert [v.shape for v in verdicts] == [*ROWS, *switched]
    expected = {row: status for status, rows in VERDICTS[name].items() for row in rows}
    assert {v.shape: v.status for v in verdicts if v.status != "append-only"} == expected
    assert all(v.detail for v in verdicts if not v.ok)


def test_all_families_have_verdicts():
    assert list(VERDICTS) == family_names()


def test_details_name_the_kinds_of_turns_that_fail():
    """Llama's template takes one call a turn, Mistral's drops what is said before one."""
    by_shape = {
        v.shape: v for v in verify_tokenizer(family_tokenizer("llama3_1"), ends("llama3_1"))
    }
    assert by_shape["parallel tools"].detail.startswith("OK. Episodes store calls as text")
    raised = 'the template raised: "This model only supports single tool-calls at once!"'
    assert raised in by_shape["parallel tools"].detail
    without_text = "not with text + call, thought + text + call: the chat template does not show a"
    assert by_shape["one tool"].detail.startswith(without_text)
    assert by_shape["one tool"].kinds == {
        "call": "append-only",
        "text + call": "unsupported",
        "thought + call": "unsupported",
        "thought + text + call": "unsupported",
    }
    assert not by_shape["user only"].detail
    assert {v.detail for v in verify_tokenizer(family_tokenizer("qwen2_5"), ends("qwen2_5"))} == {
        ""
    }


@pytest.mark.parametrize(
    ("file", "family", "switches"),
    [
        ("qwen2_5_training.jinja", "qwen2_5", [None]),
        ("qwen3_training.jinja", "qwen3", [None, True, False]),
        ("qwen3_5_think_training.jinja", "qwen3_5_think", [None, True, False]),
        ("llama3_training.jinja", "llama3", [None]),
        ("lfm2_training.jinja", "lfm2", [None]),
        ("glm4moe_training.jinja", "glm4moe", [False]),
        ("nemotron_3_nano_training.jinja", "nemotron_3_nano", [False]),
        *(
            pytest.param(*similar, marks=pytest.mark.slow)
            for similar in (
                ("qwen3_vl_training.jinja", "qwen3", [None]),
                ("qwen3_instruct_2507_training.jinja", "qwen3_instruct_2507", [None]),
                ("qwen3_5_nothink_training.jinja", "qwen3_5_nothink", [None, True, False]),
                ("qwen3_6_training.jinja", "qwen3_5_think", [None, True, False]),
                ("qwen3_8_training.jinja", "qwen3_5_think", [None, True, False]),
                ("lfm2_v2_training.jinja", "lfm2", [None]),
            )
        ),
    ],
)
def test_templates_made_for_training_are_append_only(file, family, switches):
    tokenizer = with_template(family, trained(file))
    for on in switches:
        variables = {} if on is None else {THINKING_VARIABLE: on}
        verdicts = verify_template(ChatTemplate(tokenizer, ends(family), variables=variables))
        assert {v.status for v in verdicts} == {"append-only"}, (on, verdicts)


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_template_is_caught_with_the_token_that_differs(kind):
    *_, shape, shown = BROKEN[kind]
    by_shape = {v.shape: v for v in verify_tokenizer(broken(kind), ends("qwen2_5"))}
    assert by_shape[shape].status == "differs"
    assert by_shape[shape].fails
    assert shown in by_shape[shape].detail
    assert by_shape["one tool"].status == "append-only"


def test_a_tokenizer_may_have_a_second_template_for_tools():
    """As Hermes has: prompts with tools and what follows their calls are from the same one."""
    tools = str(family_tokenizer("qwen2_5").chat_template)
    plain = str(family_tokenizer("chatml").chat_template).replace("<tool_response>", "<other>")
    tokenizer = copy.copy(family_tokenizer("qwen2_5"))
    tokenizer.chat_template = {"default": plain, "tool_use": tools}  # pyright: ignore
    alone = with_template("qwen2_5", tools)
    for messages in ([Message("user", "Q")], [Message("system", "S"), Message("user", "Q")]):
        for schemas in ((), (PROBE_TOOL,)):
            of_one = ChatTemplate(alone if schemas else with_template("qwen2_5", plain))
            assert list(ChatTemplate(tokenizer).prompt(messages, schemas)) == list(
                of_one.prompt(messages, schemas)
            )
    assert {v.status for v in verify_tokenizer(tokenizer, ends("qwen2_5"))} == {"append-only"}


def test_a_template_for_tools_only_takes_an_empty_list_of_tools():
    source = str(family_tokenizer("qwen2_5").chat_template)
    needing = "{%- for tool in tools %}{{- '' }}{%- endfor %}" + source
    verdicts = verify_tokenizer(with_template("qwen2_5", needing), ends("qwen2_5"))
    assert {v.status for v in verdicts} == {"append-only"}


def test_text_before_the_token_that_ends_a_turn_is_shown_in_the_message():
    source = str(family_tokenizer("chatml").chat_template)
    written = "message.content + '<|im_end|>\\n'"
    assert written in source
    changed = source.replace(written, "message.content + ' END<|im_end|>\\n'")
    with pytest.raises(
        TemplateError, match=r"writes ' END<\|im_end.*right after an assistant message"
    ):
        ChatTemplate(with_template("chatml", changed))


def test_a_turn_that_contains_its_end_token_is_caught():
    """GigaChat 3 writes the token that ends its turns between a text and a call."""
    source = str(family_tokenizer("qwen2_5").chat_template)
    written = "{{- '\\n<tool_call>"
    assert source.count(written) == 1
    calls = source.replace(written, "{{- '<|im_end|>\\n<tool_call>")
    verdicts = {
        v.shape: v for v in verify_tokenizer(with_template("qwen2_5", calls), ends("qwen2_5"))
    }
    assert verdicts["user only"].status == "append-only"
    assert verdicts["one tool"].status == "differs" and verdicts["one tool"].fails
    assert "stop token '<|im_end|>' inside of a turn" in verdicts["one tool"].detail
    assert set(verdicts["one tool"].kinds.values()) == {"differs"}


SMALL = """\
{%- for m in messages %}
    {%- set later = messages[loop.index:] %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' %}
        TURN
        {%- for c in m.tool_calls or [] %}
            {{- '<tool_call>' + c.function | tojson + '</tool_call>' }}
        {%- endfor %}
    {%- else %}
        {{- m.content }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\nBEGIN' }}
{%- endif %}"""
"""A template without what stands in place of TURN and BEGIN."""
SOME_KINDS = {
    # As Kimi K2.5: history shows an empty thought, but for calls that no answer follows.
    "the thoughts of answers are never shown": (
        "{%- set answers = later | selectattr('role', 'equalto', 'assistant')"
        " | rejectattr('tool_calls', 'defined') | list %}"
        "{{- '<think>' + (m.reasoning_content or '' if m.tool_calls and not answers else '') }}"
        "{{- '</think>' + (m.content or '') }}",
        "<think>",
        "user only",
        {"text": "append-only", "thought + text": "differs"},
    ),
    # The end of this thought stands in the prompt too, behind the user's message.
    "a thought holds the end of its turn": (
        "{%- if m.reasoning_content %}"
        "{{- '<think>' + m.reasoning_content + '<|im_end|>\\n<|im_start|>assistant\\n' }}"
        "{%- endif %}{{- m.content or '' }}",
        "",
        "one tool",
        {
            "call": "append-only",
            "text + call": "append-only",
            "thought + call": "differs",
            "thought + text + call": "differs",
        },
    ),
    "a call without a text is written otherwise later": (
        "{{- m.content or ('-' if later | length > 1 else '') }}",
        "",
        "calls alone",
        {
            "call": "differs",
            "text + call": "append-only",
            "thought + call": "append-only",  # between tags, which are a text here
            "thought + text + call": "append-only",
        },
    ),
    "the thought before a call is dropped where no text follows it": (
        "{%- if m.reasoning_content and (m.content or not later) %}"
        "{{- '<think>' + m.reasoning_content + '</think>' }}"
        "{%- endif %}{{- m.content or '' }}",
        "",
        "one tool",
        {
            "call": "append-only",
            "text + call": "append-only",
            "thought + call": "differs",
            "thought + text + call": "append-only",
        },
    ),
}


@pytest.mark.parametrize("what", SOME_KINDS)
def test_a_shape_is_as_good_as_the_worst_kind_of_turns(what):
    turn, begin, shape, kinds = SOME_KINDS[what]
    source = SMALL.replace("TURN", turn).replace("BEGIN", begin)
    template = ChatTemplate(with_template("qwen2_5", source), ends("qwen2_5"))
    (verdict,) = verify_template(
        template, shapes=[s for s in (*SHAPES, CALLS_ALONE) if s.name == shape]
    )
    assert verdict.kinds == kinds, verdict.detail
    assert verdict.status == "differs" and verdict.fails
    differing = ", ".join(kind for kind, status in kinds.items() if status == "differs")
    assert verdict.detail.startswith(f"{differing}: ")


def test_a_text_that_is_rendered_after_its_call_is_reported():
    verdicts = {v.shape: v for v in verify_tokenizer(family_tokenizer("gemma4"), ends("gemma4"))}
    one = verdicts["one tool"]
    assert one.status == "append-only" and one.kinds["text + call"] == "unsupported"
    assert "moves the text before a call to a place after the call" in one.detail


def test_a_long_result_is_cut_before_it_is_shown():
    template = ChatTemplate(family_tokenizer("qwen2_5"), ends("qwen2_5"))
    shown = []
    render = template.render

    class Watching:
        def __call__(self, messages, *args, **kwargs):
            shown.extend(m["content"] for m in messages if m["role"] == "tool")
            return render(messages, *args, **kwargs)

    template.render = Watching()  # pyright: ignore[reportAttributeAccessIssue]
    verify_template(template, shapes=[s for s in SHAPES if s.cut])
    assert any("tokens shown)" in text for text in shown)
    assert max(len(template.encode(text)) for text in shown) < 100


def test_a_long_result_is_cut_as_in_an_episode():
    """A SentencePiece decoder removes a space at the start of a text, but not of plain text."""
    template = ChatTemplate(family_tokenizer("mistral_v3"), ends("mistral_v3"))
    words = "one two three four " * 40
    cut = truncate(words, 8, "middle", template.encode, template.decode_plain)
    assert cut != truncate(words, 8, "middle", template.encode, template.decode)
    shown = []
    render = template.render

    class Watching:
        def __call__(self, messages, *args, **kwargs):
            shown.extend(m["content"] for m in messages if m["role"] == "tool")
            return render(messages, *args, **kwargs)

    template.render = Watching()  # pyright: ignore[reportAttributeAccessIssue]
    verify_template(template, shapes=[Shape("long", ((f"tool:{words}",),), cut=8)])
    assert cut in shown


# -- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "code"), [("qwen2_5", 0), ("qwen3", 0), ("mistral_v3", 1)])
def test_the_command_and_its_exit_code(saved, name, code):
    result = run(saved(name))
    assert result.exit_code == code, result.output
    expected = {row: status for status, rows in VERDICTS[name].items() for row in rows}
    table = rows_of(result.output)
    assert {row: status for row, status in table.items() if status != "append-only"} == expected
    assert ("rollout.history_thinking=keep" in result.output) == ("drops thinking" in str(expected))
    shown = (
        "  call, thought + call: token 1 differs (zq... are placeholders for the contents of"
        " messages)\n"
        "      after:    '<s>'\n"
    )
    assert (shown in result.output) == bool(code)
    first = {"qwen2_5": "hermes", "qwen3": "hermes", "mistral_v3": "mistral"}[name]
    assert f"tool calls are parsed as: {first} (" in result.output
    (closing,) = {token for token in FAMILIES[name].end_ids if token in ("<|im_end|>", "</s>")}
    assert f"a turn ends with: '{closing}' (" in result.output
    assert ("word cache: off" in result.output) == (name == "mistral_v3")
    assert "word cache: on" not in result.output


def test_no_such_model(tmp_path):
    result = run(str(tmp_path / "nothing"))
    assert result.exit_code == 2
    assert "no model folder at" in result.output


@pytest.mark.parametrize("offline", [True, False])
def test_a_hub_that_cannot_be_reached_is_reported_at_once(tmp_path, monkeypatch, offline):
    """transformers would repeat its requests for 50 seconds."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{port}")
    sleepers = []
    monkeypatch.setattr(time, "sleep", lambda _: sleepers.append(threading.current_thread()))
    result = run("agentrl-tests/nosuch")
    assert result.exit_code == 2
    assert threading.main_thread() not in sleepers
    assert "there is no such folder" in result.output
    assert "the hub cannot be reached" in result.output
    assert ("HF_HUB_OFFLINE" in result.output) == offline


def test_a_model_without_a_template(saved):
    tokenizer = copy.copy(family_tokenizer("qwen2_5"))
    tokenizer.chat_template = None
    result = run(saved("qwen2_5", tokenizer))
    assert result.exit_code == 2
    assert "has no chat template" in result.output
    # Qwen's vocabulary has ChatML's tokens.
    assert "--with-tools hermes` writes one into its folder. Then train it with `agentrl sft`" in (
        " ".join(result.output.split())
    )


def test_fix_and_with_tools_are_refused_together(saved):
    result = run(saved("qwen2_5"), "--fix", "--with-tools", "hermes")
    assert "--fix and --with-tools: use one of them" in str(result.exception)


def test_a_template_without_tools_fails_and_react_is_suggested(saved):
    result = run(saved("phi3"))
    assert result.exit_code == 1
    assert "rows with tools need the loop `react`" in result.output
    assert "does not show a tool message" in result.output


def test_a_tokenizer_that_encodes_differently_is_named(saved):
    legacy, plain = (run(saved(name)).output for name in ("mistral_v3_legacy", "mistral_v3"))
    assert "note: the tokenizer encodes the text of a whole conversation differently" in legacy
    assert "encodes the text" not in plain


def test_the_users_own_tools_are_shown(saved, tmp_path):
    """A template that fails on a tool without parameters passes with the tool that stands in."""
    file = tmp_path / "mine.py"
    file.write_text('from agentrl import tool\n\n\n@tool\ndef ping() -> str:\n    "Ping."\n')
    text = family_tokenizer("qwen2_5").chat_template
    assert isinstance(text, str)
    picky = text.replace(
        "{%- for tool in tools %}",
        "{%- for tool in tools %}{%- if not tool.function.parameters.properties %}"
        "{{- raise_exception('a tool needs parameters') }}{%- endif %}",
    )
    assert picky != text
    folder = saved("qwen2_5", with_template("qwen2_5", picky))
    assert run(folder).exit_code == 0
    result = run(folder, "-f", str(file))
    assert result.exit_code == 1
    assert "a tool needs parameters" in result.output


# -- mending --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "removed"),
    [
        ("qwen3_5_think", "ns.multi_step_tool and"),
        pytest.param("qwen3_5_nothink", "ns.multi_step_tool and", marks=pytest.mark.slow),
        pytest.param("glm4moe", "loop.index0 > ns.last_user_index and", marks=pytest.mark.slow),
        ("lfm2", "loop.index0 > ns.last_user_index"),
    ],
)
def test_the_smallest_fix(name, removed):
    tokenizer = family_tokenizer(name)
    source = tokenizer.chat_template
    assert isinstance(source, str)
    changed = repair_template(tokenizer, ends(name))
    assert changed is not None
    lines = template_diff(source, changed).splitlines()
    minus = [line for line in lines if line[0] == "-" and not line.startswith("---")]
    plus = [line for line in lines if line[0] == "+" and not line.startswith("+++")]
    assert len(minus) == len(plus) == 1
    assert removed in minus[0] and removed not in plus[0]
    verdicts = verify_tokenizer(with_template(name, changed), ends(name))
    assert {v.status for v in verdicts} == {"append-only"}


def test_a_fix_leaves_prompts_and_last_turns_alone_and_keeps_thoughts():
    tokenizer = family_tokenizer("glm4moe")
    changed = repair_template(tokenizer, ends("glm4moe"))
    assert changed is not None
    user = {"role": "user", "content": "Why?"}
    turn = {"role": "assistant", "content": "So.", "reasoning_content": "Hm."}

    def render(text: str, messages: list, ask: bool) -> str:
        shown = with_template("glm4moe", text).apply_chat_template(
            messages, tokenize=False, add_generation_prompt=ask
        )
        assert isinstance(shown, str)
        return shown

    source = tokenizer.chat_template
    assert isinstance(source, str)
    for messages, ask in (([user], True), ([user, turn], False)):
        assert render(changed, messages, ask) == render(source, messages, ask)
    assert "Hm." not in render(source, [user, turn, user], True)
    assert "Hm." in render(changed, [user, turn, user], True)


def test_a_fix_shows_results_as_results():
    """The smallest change of this template would show them as the assistant's own words."""
    tokenizer = tokenizer_from_facts(FAMILY_FACTS["Bielik 11B v3"])
    messages = [
        {"role": "user", "content": "Q"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"type": "function", "id": "0", "function": {"name": "probe", "arguments": {}}}
            ],
        },
        {"role": "tool", "content": "RESULT", "name": "probe", "tool_call_id": "0"},
    ]
    before = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert "function_output" in before.rpartition("RESULT")[0][-40:]
    if changed := repair_template(tokenizer, schemas=[PROBE_TOOL]):
        tokenizer.chat_template = changed
        after = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert after.rpartition("RESULT")[0][-40:] == before.rpartition("RESULT")[0][-40:]


def test_the_command_prints_a_diff_that_repairs_the_template(saved, tmp_path):
    folder, file = Path(saved("qwen3")), tmp_path / "a/b/changed.jinja"  # their folders are made
    result = run(str(folder), "--fix", "--output", str(file))
    assert result.exit_code == 0, result.output
    shown = "--- a/chat_template.jinja" + result.output.partition("--- a/chat_template.jinja")[2]
    shown = shown.partition("\n\nthe changed template")[0] + "\n"
    subprocess.run(["git", "apply", "-"], cwd=folder, input=shown, text=True, check=True)
    assert (folder / "chat_template.jinja").read_text() == file.read_text()
    again = run(str(folder), "--fix")
    assert set(rows_of(again.output).values()) == {"append-only"}
    assert "nothing to fix" in again.output


def test_the_command_reports_if_no_small_change_repairs_the_template(saved):
    result = run(saved("mistral_v3"), "--fix")
    assert result.exit_code == 1
    assert "found no small change" in result.output


def test_no_repair_is_attempted_if_only_tools_are_missing(saved):
    result = run(saved("phi3"), "--fix")
    assert result.exit_code == 1
    assert "no small change helps" in result.output
    assert "nothing to fix" not in result.output


def test_an_output_that_cannot_be_written(saved, tmp_path):
    folder = saved("qwen3")
    (tmp_path / "file").touch()
    for output in (folder, str(tmp_path / "file" / "x.jinja")):
        result = run(folder, "--fix", "--output", output)
        assert f"{output} cannot be written (" in str(result.exception)
        assert "--output names a file" in str(result.exception)


def test_a_folder_without_a_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    result = run(str(tmp_path))
    assert result.exit_code == 2
    assert "the folder has no tokenizer.json and no tokenizer_config.json" in result.output


def test_output_without_fix_is_refused(saved, tmp_path):
    result = run(saved("qwen2_5"), "--output", str(tmp_path / "x"))
    assert "--output needs --fix" in str(result.exception)


# -- a run's own rows -----------------------------------------------------------------------------

ROW = {
    "prompt": "How much is 3*4?",
    "data_source": "openai/gsm8k",
    "ground_truth": "12",
    "agent_name": "single_turn",
}
CALLS = {**ROW, "agent_name": "tool_agent", "tools": ["calculator"]}
HEARD = {"interaction": "gsm8k", "interaction_kwargs": {"ground_truth": "12"}}
TALKS = {**ROW, **HEARD, "agent_name": "tool_agent"}
BOTH = {**CALLS, **HEARD}
REACTS = {**CALLS, "agent_name": "react"}
SYSTEM = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ROW["prompt"]}]
TOLD = {**ROW, "prompt": SYSTEM}
CHECKS = {**TOLD, "agent_name": "checks_itself"}
CHECKS_CALLS = {**CALLS, "agent_name": "checks_itself"}


async def checks_itself(ep):
    await ep.generate()
    await ep.call_tools()
    ep.observe(Message("user", "Check your work, then give the final answer."))
    await ep.generate()


@pytest.fixture(autouse=True)
def loops():
    agent_loop("checks_itself")(checks_itself)


@pytest.fixture
def plan(tmp_path):
    def make(*rows: dict, **more: str):
        file = tmp_path / "rows.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)))
        flags = {"data.train": str(file), "model.path": "mine", "files": ["shelf:calculator"]}
        return make_plan(load_config(overrides=[f"{k}={v}" for k, v in more.items()], flags=flags))

    return make


def load(tokenizer, name: str) -> ChatTemplate:
    return ChatTemplate(tokenizer, ends(name))


@pytest.mark.parametrize(
    ("name", "row", "shape"),
    [
        ("qwen2_5", CALLS, ""),
        ("qwen3", BOTH, ""),
        # Only who may hear a user again needs what Mistral's template does not do.
        ("mistral_v3", CALLS, ""),
        ("mistral_v3", TALKS, ""),
        ("mistral_v3", BOTH, "five turns"),
        # Its system prompt, which react needs, stands before the last user message.
        ("mistral_v3", REACTS, "user only"),
        # A loop of the user's own may hear one at any time.
        ("mistral_v3", TOLD, ""),
        ("mistral_v3", CHECKS, "user only"),
        ("mistral_v3", CHECKS_CALLS, "five turns"),
        ("qwen2_5", CHECKS_CALLS, ""),
        ("gemma3", CALLS, "one tool"),
        ("gemma3", REACTS, ""),
        ("phi3", TALKS, ""),
        ("deepseekv3", CALLS, "calls alone"),
        ("deepseekv3", ROW, ""),
    ],
)
def test_a_run_is_refused_if_its_rows_need_more(plan, name, row, shape):
    template = load(family_tokenizer(name), name)
    if not shape:
        check_model_fits(plan(row, ROW), template, 10_000)
        return
    with pytest.raises(TemplateError, match=rf"1 row of {row['agent_name']}, .*{shape}.*:\n") as e:
        check_model_fits(plan(row, ROW), template, 10_000)
    assert "agentrl check template mine --fix" in str(e.value)


def test_every_kind_of_rows_that_is_refused_is_in_the_message(plan):
    """Kinds with the same loop and the same number of rows do not replace each other."""
    template = load(family_tokenizer("mistral_v3"), "mistral_v3")
    with pytest.raises(TemplateError) as e:
        check_model_fits(plan(CHECKS, CHECKS_CALLS), template, 10_000)
    assert str(e.value).count("1 row of checks_itself, user only:") == 2


def test_a_loop_whose_name_begins_with_react_may_use_react(plan):
    agent_loop("react_twice")(checks_itself)
    template = load(family_tokenizer("mistral_v3"), "mistral_v3")
    with pytest.raises(TemplateError, match="or for rows with tools the loop react"):
        check_model_fits(plan({**CHECKS, "agent_name": "react_twice"}), template, 10_000)


def test_a_run_reports_whether_thoughts_are_dropped(plan):
    template = load(family_tokenizer("qwen3"), "qwen3")
    assert "these rows have one turn only" in describe_history(plan(ROW), template)
    assert "append-only on these rows" in describe_history(plan(CALLS), template)
    assert "history_thinking=keep: it stays in the row" in describe_history(plan(BOTH), template)
    stripped = plan(BOTH, **{"rollout.history_thinking": "strip"})
    assert "history_thinking=strip: it is removed" in describe_history(stripped, template)


def test_a_run_reports_which_turns_the_template_cannot_render(plan):
    template = load(family_tokenizer("llama3_1"), "llama3_1")
    report = describe_history(plan(CALLS), template)
    assert "append-only on these rows" in report
    assert (
        "it cannot render turns of text + call, thought + call, thought + text + call: rows"
        in report
    )
    assert "cannot render" not in describe_history(
        plan(CALLS), load(family_tokenizer("qwen3"), "qwen3")
    )


def test_rows_are_verified_with_the_shapes_of_their_loop(plan):
    template = load(family_tokenizer("qwen2_5"), "qwen2_5")
    shapes = {
        (name, bool(kind.get("tools"))): [v.shape for v in verdicts]
        for kind in (ROW, CALLS, REACTS, CHECKS, CHECKS_CALLS)
        for name, _, verdicts in verify_rows(plan(kind), template)
    }
    several = ["five turns", "tool then user", "user only"]
    assert shapes == {
        ("tool_agent", True): ["one tool", "parallel tools", "calls alone"],
        ("react", True): ["user only"],
        ("checks_itself", False): ["user only"],
        ("checks_itself", True): ["one tool", "parallel tools", *several, "calls alone"],
    }


def test_rows_with_and_without_a_system_message_are_both_verified(plan):
    """Whichever is first: Bielik's template writes results otherwise behind a system message."""
    template = ChatTemplate(tokenizer_from_facts(FAMILY_FACTS["Bielik 11B v3"]))
    with_system = {**CALLS, "prompt": SYSTEM}
    for rows in ([CALLS, with_system], [with_system, CALLS]):
        fails = [
            [v.shape for v in verdicts if v.fails]
            for _, _, verdicts in verify_rows(plan(*rows), template)
        ]
        assert sorted(fails) == [[], ["parallel tools", "calls alone"]]


def test_shipped_loops_lists_all_loops_of_the_package():
    ours = {
        name
        for name in registry.agent_loops.names()
        if registry.agent_loops.get(name).target.__module__.startswith("agentrl.agent_loops.")
    }
    assert ours == {*SHIPPED_LOOPS, "recorded"}  # The last one refuses to play.


@pytest.mark.timing
def test_verifying_the_rows_of_a_run_is_fast(plan):
    template = load(family_tokenizer("qwen3"), "qwen3")
    made = plan(*([CALLS, TALKS, REACTS, BOTH] * 50))
    check_model_fits(made, template, 10_000)
    begin = time.process_time()
    check_model_fits(made, template, 10_000)
    assert time.process_time() - begin < 1.0


def test_a_custom_shape():
    """Shapes are data: a user of the library proves what their loop does."""
    template = load(family_tokenizer("qwen2_5"), "qwen2_5")
    mine = Shape("mine", (("user:a", "user:b"), ("tool:1", "tool:2", "user:c")))
    (verdict,) = verify_template(template, shapes=[mine])
    assert verdict.ok


def test_equal_details_are_printed_once():
    same = [Verdict(shape, "differs", "token 1\n  after: x") for shape in ("one tool", "unicode")]
    assert format_verdicts(same, "2 rows of react, ") == [
        "2 rows of react, one tool, unicode:",
        "  token 1\n    after: x",
    ]
