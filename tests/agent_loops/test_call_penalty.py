"""A call that failed costs the tokens that wrote it, and no other."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.trainer_fixtures import config as learner_config
from support.trainer_fixtures import group, scored, segment, turn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from agentrl import ToolError, agent_loop, play, tool
from agentrl.agent_loops.context import TokenRow
from agentrl.agent_loops.episode import _token_span, call_penalties
from agentrl.chat.formats import FORMATS, parse_react
from agentrl.config import Config
from agentrl.learner.algorithms import dead_groups, make_targets
from agentrl.learner.batch import collate
from agentrl.metrics import rollout_metrics
from agentrl.store import TrajectoryStore
from agentrl.testing import Scripted, byte_tokenizer
from agentrl.trajectory import Group, Message, Sample, Scored, ToolCall, ToolResult, token_array

TURNS = {
    "hermes": 'So: <tool_call>{"name": "f", "arguments": {}}</tool_call> and'
    "<tool_call>{bad}</tool_call>.",
    "qwen3_coder": "<tool_call><function=f></function></tool_call> and <tool_call>x</tool_call>",
    "glm": "I call <tool_call>f</tool_call><tool_call> {} </tool_call>",
    "mistral": '[TOOL_CALLS] [{"name": "f", "arguments": {}}, 3]',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>g<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "llama_json": '{"name": "f", "parameters": {}}; {"name": "g"}',
    "llama_pythonic": "[f(a=1), g(2)]",
    "gpt_oss": "<|channel|>commentary to=functions.f<|message|>{}<|end|>"
    "<|start|>assistant<|channel|>commentary to=g/h<|message|>{}<|call|>",
    "gemma": "well <|tool_call>call:f{}<tool_call|><|tool_call>g<tool_call|>",
    "functiongemma": "well <start_function_call>call:f{}<end_function_call>"
    "<start_function_call>g<end_function_call>",
    "apertus": 'So <|tools_prefix|>[{"f": {}}, 3]<|tools_suffix|>',
    "cohere_command": '<|START_ACTION|>[{"tool_name": "f", "parameters": {}}, 3]<|END_ACTION|>',
    "deepseek_v32": '<｜DSML｜function_calls><｜DSML｜invoke name="f"></｜DSML｜invoke> and'
    "</｜DSML｜function_calls>",
    "deepseek_v4": '<｜DSML｜tool_calls><｜DSML｜invoke name="f"/>\n<｜DSML｜invoke name=f>'
    "</｜DSML｜invoke></｜DSML｜tool_calls>",
    "gigachat3": 'So <|function_call|>{"name": "f", "arguments": {}}, 3',
    "granite": '<|tool_call|>[{"name": "f", "arguments": {}}, 3]',
    "hunyuan": "<tool_calls><tool_call>f<tool_sep></tool_call><tool_call></tool_call></tool_calls>",
    "hunyuan_a13b": '<tool_calls>[{"name": "f", "arguments": {}}, 3]</tool_calls>',
    "internlm": '<|action_start|><|plugin|>{"name": "f"}<|action_end|>'
    "<|action_start|>x<|action_end|>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>f:0<|tool_call_argument_begin|>{}"
    "<|tool_call_end|><|tool_call_begin|>g<|tool_call_end|><|tool_calls_section_end|>",
    "lfm2": "I <|tool_call_start|>[f(a=1), g(2)]<|tool_call_end|>",
    "minimax_m1": '<tool_calls>\n{"name": "f", "arguments": {}}\n{"name": 3}\n</tool_calls>',
    "minimax_m2": '<minimax:tool_call><invoke name="f"></invoke> and</minimax:tool_call>',
    "muse": ' to=f<|message|><atem:function_calls><atem:invoke name="f"></atem:invoke>'
    "</atem:function_calls><|eom|><|start|>assistant to=g<|message|>x<|eom|>",
    "phi4_mini": '<|tool_call|>[{"name": "f", "arguments": {}}, 3]<|/tool_call|>',
    "seed_oss": "<seed:tool_call><function=f></function> and</seed:tool_call>",
}
SPANS = {
    "hermes": [
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        "<tool_call>{bad}</tool_call>",
    ],
    "qwen3_coder": [
        "<tool_call><function=f></function></tool_call>",
        "<tool_call>x</tool_call>",
    ],
    "glm": ["<tool_call>f</tool_call>", "<tool_call> {} </tool_call>"],
    "mistral": ['{"name": "f", "arguments": {}}', "3"],
    "deepseek": [
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>g<｜tool▁call▁end｜>",
    ],
    "llama_json": ['{"name": "f", "parameters": {}}', '{"name": "g"}'],
    "llama_pythonic": ["f(a=1)", "g(2)"],
    "gpt_oss": [
        "<|channel|>commentary to=functions.f<|message|>{}<|end|>",
        "<|channel|>commentary to=g/h<|message|>{}<|call|>",
    ],
    "gemma": ["<|tool_call>call:f{}<tool_call|>", "<|tool_call>g<tool_call|>"],
    "functiongemma": [
        "<start_function_call>call:f{}<end_function_call>",
        "<start_function_call>g<end_function_call>",
    ],
    "apertus": ['{"f": {}}', "3"],
    "cohere_command": ['{"tool_name": "f", "parameters": {}}', "3"],
    "deepseek_v32": ['<｜DSML｜invoke name="f"></｜DSML｜invoke>', " and"],
    "deepseek_v4": [
        '<｜DSML｜invoke name="f"/>',
        "<｜DSML｜invoke name=f></｜DSML｜invoke>",
    ],
    "gigachat3": ['{"name": "f", "arguments": {}}', ", 3"],
    "granite": ['{"name": "f", "arguments": {}}', "3"],
    "hunyuan": ["<tool_call>f<tool_sep></tool_call>", "<tool_call></tool_call>"],
    "hunyuan_a13b": ['{"name": "f", "arguments": {}}', "3"],
    "internlm": ['{"name": "f"}', "<|action_start|>x<|action_end|>"],
    "kimi_k2": [
        "<|tool_call_begin|>f:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
        "<|tool_call_begin|>g<|tool_call_end|>",
    ],
    "lfm2": ["f(a=1)", "g(2)"],
    "minimax_m1": ['{"name": "f", "arguments": {}}', '{"name": 3}'],
    "minimax_m2": ['<invoke name="f"></invoke>', " and"],
    "muse": ['<atem:invoke name="f"></atem:invoke>', "x"],
    "phi4_mini": ['{"name": "f", "arguments": {}}', "3"],
    "seed_oss": ["<function=f></function>", " and"],
}


def shown(calls: list[ToolCall], text: str) -> list[str]:
    return [text[slice(*call.span)] if call.span else "?" for call in calls]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("thought", ["", "<think>f(a=1) hm</think>\n"])
def test_spans_of_calls_are_their_positions_in_the_text(name, thought):
    if name == "gpt_oss":
        thought = (
            thought and "<|channel|>analysis<|message|>to=functions.f<|end|><|start|>assistant"
        )
    if name == "muse":
        thought = thought and " to=self<|message|>f(a=1) hm<|eom|><|start|>assistant"
    think, end = {
        "cohere_command": ("<|START_THINKING|>", "<|END_THINKING|>"),
        "seed_oss": ("<seed:think>", "</seed:think>"),
    }.get(name, ("<think>", "</think>"))
    text = thought.replace("<think>", think).replace("</think>", end) + TURNS[name]
    calls = FORMATS[name](text)
    assert [bool(call.error) for call in calls] == [False, True]
    assert [s.removeprefix("assistant") for s in shown(calls, text)] == SPANS[name]


def test_the_span_of_a_react_call_starts_at_the_action():
    text = "Thought: I could.\nAction: f\nAction Input: {}\nObservation:"
    assert shown(parse_react(text), text) == [text.partition("\n")[2]]


FRAGMENTS = st.lists(
    st.sampled_from(
        [*"af{}[]()\"',:;=\n ", "<tool_call>", "</tool_call>", "<think>", "</think>", "é",
         "[TOOL_CALLS]",
         '{"name": "f", "arguments": {}}', '{"name": "f", "parameters": {}}', "<function=f>",
         "</function>", "<|tool_call>", "<tool_call|>", "call:f{}", "[f(a=1)]", "<|message|>",
         "<|channel|>commentary to=functions.f", "<|call|>", "<|end|>", "<|start|>",
         "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"]
    ),
    max_size=24,
).map("".join)  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
@given(text=FRAGMENTS)
def test_spans_are_in_order_and_apart(name, text):
    spans = [call.span for call in FORMATS[name](text) if call.span]
    assert all(0 <= a <= b <= len(text) for a, b in spans)
    assert all(left[1] <= right[0] for left, right in pairwise(spans))


# -- from characters to tokens --------------------------------------------------------------------


class Pairs:
    """A template whose tokens are two bytes each: characters are split over tokens."""

    def decode(self, ids):
        return b"".join(i.to_bytes(2, "big") for i in ids).decode("utf-8", "replace")


def pairs(text: str) -> list[int]:
    raw = text.encode()
    return [int.from_bytes(raw[i : i + 2], "big") for i in range(0, len(raw), 2)]


@given(st.text("ab€é", min_size=1, max_size=12), st.data())
def test_tokens_that_overlap_a_span_belong_to_it(text, data):
    text += "a" * (len(text.encode()) % 2)
    start = data.draw(st.integers(0, len(text) - 1))
    end = data.draw(st.integers(start + 1, len(text)))
    before, through = len(text[:start].encode()), len(text[:end].encode())
    ids = pairs(text)
    assert _token_span(ids, (start, end), Pairs()) == (before // 2, (through + 1) // 2)
    assert _token_span(ids, None, Pairs()) == (0, len(ids))


# -- an episode -----------------------------------------------------------------------------------


@pytest.fixture
def tools(no_tools):
    @tool
    def ok(x: int = 0) -> str:
        """Fine."""
        return "fine"

    @tool
    def refuse() -> str:
        """Never."""
        raise ToolError("no")


GOOD = '<tool_call>{"name": "ok", "arguments": {}}</tool_call>'
WRONG = '<tool_call>{"name": "ok", "arguments": {"x": "é"}}</tool_call>'
REFUSED = '<tool_call>{"name": "refuse", "arguments": {}}</tool_call>'
BROKEN = "<tool_call>{</tool_call>"


def played(turns: list[str], **penalties: float):
    tokenizer = byte_tokenizer()
    config = Config.model_validate({"tools": {"penalties": penalties}})
    sample = Sample("s", (Message("user", "Go."),), "tool_agent", tools=("ok", "refuse"))
    return play(sample, Scripted(turns, tokenizer), tokenizer, config=config)


def test_each_failed_call_is_penalized_at_its_own_tokens(tools):
    first = f"Well: {GOOD} {WRONG}"
    trajectory = played([first, f"{REFUSED}{BROKEN}", "done"], schema=0.5, bad_call=0.25)
    tokenizer = byte_tokenizer()
    (row,) = trajectory.segments
    paid = [
        (tokenizer.decode(row.response_ids[a:b]), price)
        for t in trajectory.turns
        for a, b, price in t.penalties
    ]
    # `refuse` failed as well, but nothing was said of tool_error.
    assert paid == [(WRONG, 0.5), (BROKEN, 0.25)]
    assert all(all(row.response_mask[a:b]) for t in trajectory.turns for a, b, _ in t.penalties)
    metrics = rollout_metrics([Group(trajectory.sample, (Scored(trajectory, {}, 0.0),))])
    ids = len(tokenizer(WRONG + BROKEN).input_ids)
    assert metrics["tool_error/penalized_tokens"] == ids / trajectory.sampled_tokens


def test_without_penalties_nothing_changes(tools):
    plain, priced = played([WRONG, "done"]), played([WRONG, "done"], timeout=1.0)
    assert plain.turns[0].penalties == () == priced.turns[0].penalties
    assert [
        replace(t, tool_seconds=0, generate_seconds=0, tool_results=()) for t in plain.turns
    ] == [replace(t, tool_seconds=0, generate_seconds=0, tool_results=()) for t in priced.turns]
    assert "tool_error/penalized_tokens" not in rollout_metrics(
        [Group(plain.sample, (Scored(plain, {}, 0.0),))]
    )


def test_penalties_are_stored(tools, tmp_path):
    trajectory = played([WRONG, "done"], schema=0.5)
    store = TrajectoryStore(tmp_path)
    store.write(1, [Group(trajectory.sample, (Scored(trajectory, {}, 0.0),))])
    (back,) = store.read()
    assert back.scored.trajectory.turns == trajectory.turns
    assert back.scored.trajectory.turns[0].tool_calls[0].span == (0, len(WRONG))


def test_a_call_without_a_span_is_penalized_over_its_whole_turn():
    row = TokenRow(token_array([1]))
    row.ids.extend([10, 11, 12])
    spoken = turn(0, 1, 3)
    spoken = replace(spoken, tool_calls=(ToolCall("f", "", error="?"),))
    results = [ToolResult("", False, None, "bad_call")]
    assert call_penalties(spoken, results, {"bad_call": 1.0}, row, Pairs()) == ((1, 3, 1.0),)


# -- what the loss is told ------------------------------------------------------------------------


def rollouts(penalties: tuple[tuple[int, int, float], ...]) -> list[Group]:
    """Two rollouts; the first has two turns with an observation between."""
    two = [segment([1], ("A", [2, 3, 4]), ("E", [5, 6]), ("A", [7, 8]))]
    turns = [replace(turn(0, 0, 3), penalties=penalties), turn(0, 5, 7)]
    return [
        group(scored(two, 1.0, turns), scored([segment([1], ("A", [9]))], 0.0, [turn(0, 0, 1)]))
    ]


@pytest.mark.parametrize("whiten", [False, True])
def test_advantages_change_by_the_penalty_at_these_tokens_only(whiten):
    config = learner_config(algorithm__name="grpo", algorithm__whiten_advantages=whiten)

    def loss_inputs(penalties):
        return make_targets(collate(rollouts(penalties), 0), config, None, None, None)

    plain, priced = loss_inputs(()), loss_inputs(((1, 3, 0.25),))
    shift = torch.zeros(2, 7)
    shift[0, 1:3] = 0.25
    assert torch.equal(plain.advantages - shift, priced.advantages)
    assert torch.equal(plain.weights, priced.weights)
    assert collate(rollouts(()), 0).call_penalties is None


def test_a_group_with_penalties_only_has_a_learning_signal():
    groups = rollouts(((0, 1, 0.5),))
    groups = [replace(g, scored=tuple(replace(s, reward=1.0) for s in g.scored)) for g in groups]
    batch = collate(groups, 0)
    nothing = torch.zeros_like(batch.token_rewards)
    assert not dead_groups(batch, nothing).any()
    assert dead_groups(replace(batch, call_penalties=None), nothing).all()


def test_multi_byte_tokens_of_a_real_tokenizer():
    """Byte-level BPE without merges: a character of three bytes is three tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    ids = bpe.encode("a€b").ids
    assert _token_span(ids, (1, 2), bpe) == (1, 4)


def test_penalties_are_in_the_row_of_their_turn():
    rows = [segment([1], ("A", [2, 3])), segment([1], ("E", [4]), ("A", [5, 6, 7]))]
    turns = [turn(0, 0, 2), replace(turn(1, 1, 4), penalties=((2, 4, 0.5), (3, 4, 0.25)))]
    other = scored([segment([1], ("A", [9]))], 0.0, [turn(0, 0, 1)])
    batch = collate([group(scored(rows, 1.0, turns), other)], 0)
    expected = torch.zeros(3, 4)
    expected[1, 2], expected[1, 3] = 0.5, 0.75
    assert torch.equal(batch.call_penalties, expected)


def test_a_spawned_conversation_is_penalized_in_its_own_row(tools):
    @agent_loop("asks_another")
    async def asks_another(ep):
        await ep.generate()
        other = ep.spawn("Try.")
        await other.generate()
        await other.call_tools()
        ep.observe(Message("user", "Go on."))
        await ep.generate()
        await ep.call_tools()

    tokenizer = byte_tokenizer()
    config = Config.model_validate({"tools": {"penalties": {"schema": 0.5}}})
    sample = Sample("s", (Message("user", "Go."),), "asks_another", tools=("ok", "refuse"))
    script = Scripted(["Well.", f"é {WRONG}", f"{GOOD}{WRONG}"], tokenizer)
    trajectory = play(sample, script, tokenizer, config=config)
    assert len(trajectory.segments) == 2
    for at in trajectory.turns[1:]:
        [(start, end, price)] = at.penalties
        ids = trajectory.segments[at.segment].response_ids[start:end]
        assert (tokenizer.decode(ids), price) == (WRONG, 0.5)
