"""Supervised fine-tuning: what is imitated, and that it is learned."""

import json
import math
import sys
from itertools import islice

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from agentrl import registry
from agentrl.chat import ChatTemplate, load_tokenizer
from agentrl.cli import main
from agentrl.data import write_rows
from agentrl.demo.arithmetic import rows
from agentrl.errors import DataError, RunStopped
from agentrl.testing.tokenizer import byte_tokenizer
from agentrl.trainer.conversations import Example, load_examples
from agentrl.trainer.sft import (
    batches,
    fit,
    logprobs,
    new_policy,
    open_policy,
    score,
)
from agentrl.trajectory import token_array

END = 258  # <|im_end|>
SHAPE = Qwen2Config(
    vocab_size=263,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
    initializer_range=0.08,
    pad_token_id=256,
    eos_token_id=END,
)


@pytest.fixture(scope="module")
def template():
    return ChatTemplate(byte_tokenizer())


def example(prompt, answer):
    return Example(
        token_array([*prompt, *answer]), token_array([0] * len(prompt) + [1] * len(answer))
    )


def load(template, folder, *made, column="messages"):
    write_rows(folder / "rows.jsonl", made)
    return load_examples(str(folder / "rows.jsonl"), column, template, 1000)


def own(template, example):
    """The text that is imitated, with the end of a turn as `|`."""
    ids = [i for i, m in zip(example.ids, example.mask, strict=True) if m]
    return template.decode(ids).replace("<|im_end|>", "|")


TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "2+2"},
    {"role": "assistant", "content": "4"},
]


CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}],
}


def test_the_assistant_s_tokens_and_ends_are_imitated(template, tmp_path):
    (e,) = load(template, tmp_path, {"messages": TALK})
    asked = [257, *b"user\nHi", END, *b"\n", 257, *b"assistant\n"]
    again = [*b"\n", 257, *b"user\n2+2", END, *b"\n", 257, *b"assistant\n"]
    assert list(e.ids) == [*asked, *b"Yes?", END, *again, *b"4", END]
    assert list(e.mask) == [0] * len(asked) + [1] * 5 + [0] * len(again) + [1] * 2


def test_an_empty_list_of_calls_is_none(template, tmp_path):
    """A column of a Parquet file has the same keys in every row."""
    said = [{**message, "tool_calls": []} for message in TALK]
    assert load(template, tmp_path, {"messages": said}) == load(
        template, tmp_path, {"messages": TALK}
    )


def test_a_cell_may_be_json(template, tmp_path):
    assert load(template, tmp_path, {"messages": json.dumps(TALK)}) == load(
        template, tmp_path, {"messages": TALK}
    )


def test_a_conversation_goes_on_from_the_prompt_as_the_loop_shows_it(template, tmp_path):
    registry.load_file("shelf:calculator")
    made = {r.sample.agent_name: r.as_dict("train") for r in islice(rows(0), 3)}
    examples = load(template, tmp_path, *made.values(), column="gold")
    texts = dict(zip(made, (template.decode(e.ids) for e in examples), strict=True))
    mine = dict(zip(made, (own(template, e) for e in examples), strict=True))
    assert "calculator" not in texts["single_turn"]
    assert "<tools>" in texts["tool_agent"] and "<tools>" not in texts["react"]
    assert "Tools:\ncalculator(expression: string)" in texts["react"]
    assert mine["tool_agent"].count("<tool_call>") == 2
    assert mine["tool_agent"].count("|") == 3
    # What stops a react turn is imitated; the end of the turn after it is the harness's.
    assert mine["react"].count("Observation:") == 2 and mine["react"].count("|") == 1
    for loop, row in made.items():
        assert mine[loop].endswith(f"#### {row['reward_model']['ground_truth']}|")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"other": TALK}, "row 0, messages: is missing"),
        ({"messages": "[{"}, "is not JSON"),
        ({"messages": []}, "must be a list of"),
        ({"messages": [{"role": "assistant"}]}, "must be a list of"),
        ({"messages": [*TALK, {"role": "bot", "content": ""}]}, "message 4 must have a role"),
        ({"messages": [*TALK[:3], CALL]}, "message 3: write tool calls into the content"),
        ({"messages": [CALL, *TALK]}, "message 0: write tool calls into the content"),
        ({"messages": TALK[:3]}, "must end with an assistant message"),
        ({"messages": TALK, "tools": ["calculater"]}, "no tool named 'calculater'"),
        ({"messages": TALK[1:], "agent_name": "reakt"}, "no agent loop named 'reakt'"),
        ({"messages": TALK * 30}, r"is 1,\d\d\d tokens long, more than the model's 1,000"),
    ],
)
def test_broken_rows_are_named(template, tmp_path, row, said):
    with pytest.raises(DataError, match=said):
        load(template, tmp_path, row)


def test_batches_take_every_example_once_an_epoch():
    examples = [example([i], [i]) for i in range(10)]
    source = batches(examples, 4, seed=0)
    epochs = [[e.ids[0] for _ in range(3) for e in next(source)] for _ in range(2)]
    assert [sorted(e) for e in epochs] == [list(range(10))] * 2
    assert epochs[0] != epochs[1]
    again = batches(examples, 4, seed=0)
    assert [e.ids[0] for _ in range(3) for e in next(again)] == epochs[0]


def test_logprobs_are_those_of_the_plain_model():
    policy = new_policy(SHAPE, 0)
    examples = [example(b"ab", b"cde"), example(b"f", b"gh")]
    examples.append(Example(token_array([*b"ijklm"]), token_array([0, 1, 0, 0, 1])))
    found = score(policy, examples)
    plain = AutoModelForCausalLM.from_config(SHAPE).eval()
    plain.load_state_dict(policy.model.state_dict())
    expected = []
    for e in examples:
        with torch.no_grad():
            log_p = plain(input_ids=torch.tensor([list(e.ids)])).logits[0].log_softmax(-1)
        expected += [
            log_p[i - 1, t] for i, (t, m) in enumerate(zip(e.ids, e.mask, strict=True)) if m
        ]
    assert torch.allclose(found, torch.stack(expected), atol=1e-5)


def test_the_step_does_not_depend_on_micro_batches():
    batch = [example([5] * n, list(range(n + 1))) for n in (3, 9, 4, 7)]
    weights = []
    for budget in (8, 20, 1000):
        policy = new_policy(SHAPE, 0)
        fit(policy, iter([batch]), steps=1, lr=1e-2, micro_batch_tokens=budget)
        weights.append(torch.cat([p.detach().flatten() for p in policy.model.parameters()]))
    assert not torch.equal(weights[2], _flat(new_policy(SHAPE, 0)))
    for other in weights[:2]:
        assert torch.allclose(other, weights[2], atol=1e-4)


def _flat(policy):
    return torch.cat([p.detach().flatten() for p in policy.model.parameters()])


def test_a_handful_of_traces_is_learned_by_heart(template, tmp_path):
    registry.load_file("shelf:calculator")
    made = [r.as_dict("train") for r in islice(rows(0), 6)]
    examples = load(template, tmp_path, *made, column="gold")
    policy = new_policy(SHAPE, 0)
    losses = []
    before = score(policy, examples).mean().item()
    fit(
        policy,
        batches(examples, 6, seed=0),
        steps=60,
        lr=1e-2,
        report=lambda step, loss: losses.append((step, loss)),
    )
    assert [s for s, _ in losses] == list(range(1, 61))
    assert losses[0][1] == pytest.approx(-before, abs=1e-4)
    assert score(policy, examples).exp().mean() > 0.9
    # What is not the assistant's was not learned.
    others = [Example(e.ids, token_array([0, *(1 - m for m in e.mask[1:])])) for e in examples]
    assert score(policy, others).exp().mean() < 0.5


def test_an_adapter_learns_and_the_base_stays(template, tmp_path):
    new_policy(SHAPE, 0).save_pretrained(tmp_path / "base")
    examples = [example(b"question", b"answer")]
    policy = open_policy(tmp_path / "base", lora_rank=4, seed=1)
    before = score(policy, examples).sum()
    fit(policy, batches(examples, 1, seed=0), steps=30, lr=1e-2)
    assert score(policy, examples).sum() > before + 1
    with policy.base():
        assert torch.allclose(score(policy, examples).sum(), before)
    policy.save_pretrained(tmp_path / "adapter")
    files = {f.name for f in (tmp_path / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= files
    assert "model.safetensors" not in files


def test_fresh_weights_depend_on_the_seed_alone(tmp_path):
    SHAPE.save_pretrained(tmp_path)
    torch.manual_seed(5)
    one, two, other = (_flat(open_policy(tmp_path, fresh=True, seed=s)) for s in (0, 0, 1))
    assert torch.equal(one, two) and not torch.equal(one, other)
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(1))  # the global stream is left alone


def test_an_adapter_on_fresh_weights_is_saved_with_them(tmp_path):
    """An adapter's folder alone would name a base whose weights were never used."""
    SHAPE.save_pretrained(tmp_path / "base")
    policy = open_policy(tmp_path / "base", lora_rank=4, fresh=True, seed=1)
    policy.save_pretrained(tmp_path / "new")
    assert (tmp_path / "new/model.safetensors").exists()
    assert not (tmp_path / "new/adapter_config.json").exists()


def test_a_loss_that_is_no_number_stops(template):
    policy = new_policy(SHAPE, 0)
    with torch.no_grad():
        next(iter(policy.model.parameters())).fill_(math.nan)
    with pytest.raises(RunStopped, match="Lower the learning rate"):
        fit(policy, batches([example(b"a", b"b")], 1, seed=0), steps=1, lr=1e-3)


def test_logprobs_carry_a_gradient():
    policy = new_policy(SHAPE, 0)
    assert logprobs(policy, [example(b"a", b"b")]).requires_grad
    assert not score(policy, [example(b"a", b"b")]).requires_grad


# -- the command ----------------------------------------------------------------------------------


@pytest.fixture
def base(tmp_path):
    """A model folder with random weights."""
    new_policy(SHAPE, 0).save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["agentrl", "sft", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code


@pytest.mark.parametrize("extra", [(), ("--lora-rank", 4)])
def test_the_command_writes_a_folder_that_loads(base, tmp_path, monkeypatch, capsys, extra):
    write_rows(tmp_path / "rows.parquet", [{"messages": TALK}] * 3)
    given = ("--dataset", tmp_path / "rows.parquet", "--model", base, "--output", tmp_path / "new")
    assert run(monkeypatch, *given, "--steps", 20, "--lr", 1e-2, *extra) == 0
    said = capsys.readouterr().out
    assert "3 conversations" in said and "step 20/20" in said
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "new").eval()
    template = ChatTemplate(load_tokenizer(tmp_path / "new"))
    (e,) = load_examples(str(tmp_path / "rows.parquet"), "messages", template, 1000)[:1]
    answer = e.ids.tolist().index(ord("Y"))
    logits = model(input_ids=torch.tensor([list(e.ids)])).logits[0]
    before = score(open_policy(base), [e])[0].exp()
    assert logits[answer - 1].softmax(-1)[ord("Y")] > before + 0.1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("--column", "gold"), "row 0, gold: is missing"),
        (("--output", "."), "--output . is there already"),
        (("--model", "./nowhere"), "no model folder at ./nowhere"),
        (("--dataset", "no.parquet"), "no such file: no.parquet"),
        (("-f", "no.py"), "no such file: no.py"),
    ],
)
def test_mistakes_are_one_message(base, tmp_path, monkeypatch, capsys, change, said):
    write_rows(tmp_path / "rows.jsonl", [{"messages": TALK}])
    monkeypatch.chdir(tmp_path)
    given = ("--dataset", "rows.jsonl", "--model", "base", "--output", "new")
    assert run(monkeypatch, *given, *change) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
