"""Supervised fine-tuning: what is imitated, and that it is learned."""

import io
import json
import math
from base64 import b64encode
from itertools import islice
from shutil import copytree
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as PIL
from support.vision import vision_tokenizer, write_vision_model
from transformers import AutoModelForCausalLM, Qwen2Config

from agentrl import registry
from agentrl.chat import ChatTemplate, load_tokenizer
from agentrl.cli import main
from agentrl.config import FIELDS
from agentrl.data import write_rows
from agentrl.data.rows import read_message
from agentrl.demo.arithmetic import rows
from agentrl.errors import ConfigError, DataError, RunStopped
from agentrl.images import ImageRule
from agentrl.learner.packing import make_micro_batch
from agentrl.learner.sft import (
    FLAG_OF_KEY,
    SFT_KEYS,
    Example,
    SFTLearner,
    batches,
    init_causal_lm,
    make_rows,
    make_sft_config,
)
from agentrl.testing.tokenizer import byte_tokenizer
from agentrl.trainer.sft import load_examples
from agentrl.trajectory import Message, token_array

END = 258  # <|im_end|>
IMAGE_PAD = 265
SHAPE = Qwen2Config(
    vocab_size=263,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
    initializer_range=0.08,
    max_position_embeddings=2048,
    pad_token_id=256,
    eos_token_id=END,
)


@pytest.fixture(scope="module")
def template():
    return ChatTemplate(byte_tokenizer())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with random weights."""
    made = tmp_path_factory.mktemp("models")
    SHAPE.save_pretrained(made / "shape")
    init_causal_lm(made / "shape", seed=0).save_pretrained(made / "base")
    return made / "base"


def imitator(path, *, steps=1, fresh=False, **settings):
    config = make_sft_config(path, steps=steps, overrides=["trainer.device=cpu"], **settings)
    return SFTLearner(config, fresh=fresh)


def score(learner, examples):
    """(N,) logprobs of the tokens to imitate, example by example."""
    rows = make_rows(examples)
    return learner.logprobs(rows)[rows.response_mask]


def weights(learner):
    return {n: p.detach().clone() for n, p in learner.rank.policy.model.named_parameters()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


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


def calling(call):
    return {"messages": [TALK[0], {**CALL, "tool_calls": [call]}]}


def test_the_loss_is_on_the_assistants_tokens_and_ends(template, tmp_path):
    (e,) = load(template, tmp_path, {"messages": TALK})
    prompt = [257, *b"user\nHi", END, *b"\n", 257, *b"assistant\n"]
    again = [*b"\n", 257, *b"user\n2+2", END, *b"\n", 257, *b"assistant\n"]
    assert list(e.ids) == [*prompt, *b"Yes?", END, *again, *b"4", END]
    assert list(e.mask) == [0] * len(prompt) + [1] * 5 + [0] * len(again) + [1] * 2


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
def test_structured_calls_are_written_as_the_model_writes_them(template, tmp_path, arguments):
    """Only messages without weight 0 are trained, with their calls."""
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    result = {"role": "tool", "content": "2", "tool_call_id": "1"}
    text = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    structured = {"role": "assistant", "content": None, "tool_calls": calls}
    written = {"role": "assistant", "content": text}
    rest = [result, {**TALK[3], "weight": 0}]
    [made] = load(template, tmp_path, {"messages": [TALK[0], structured, *rest]})
    assert [made] == load(template, tmp_path, {"messages": [TALK[0], written, *rest]})
    assert own(template, made) == f"{text}|"


def test_an_empty_list_of_calls_is_no_call(template, tmp_path):
    """A column of a Parquet file has the same keys in every row."""
    messages = [{**message, "tool_calls": []} for message in TALK]
    assert load(template, tmp_path, {"messages": messages}) == load(
        template, tmp_path, {"messages": TALK}
    )


def test_a_cell_may_be_json(template, tmp_path):
    assert load(template, tmp_path, {"messages": json.dumps(TALK)}) == load(
        template, tmp_path, {"messages": TALK}
    )


def test_a_text_answers_the_prompt_in_another_column(template, tmp_path):
    made = {"question": "2+2", "answer": "4"}
    expected = load(template, tmp_path, {"prompt": "2+2", "messages": TALK[-1:]})
    write_rows(tmp_path / "qa.jsonl", [made])
    path = str(tmp_path / "qa.jsonl")
    assert load_examples(path, "answer", template, 1000, "question") == expected
    with pytest.raises(DataError, match="row 0, answer: is an answer, but the column 'prompt' has"):
        load_examples(path, "answer", template, 1000)


@pytest.mark.parametrize(
    "answer",
    [
        "[a link](http://x)", '{"name": "f", "parameters": {"a": 1}}', "[f(a=1)]", "[1, 2]", "[]",
        '{"from":"a","to":"b"}', '[{"role":"king"}]', '[{"role": "user", "content": "Hi"}]', "[{",
    ],
)  # fmt: skip
def test_an_answer_may_begin_with_a_bracket(template, tmp_path, answer):
    (e,) = load(template, tmp_path, {"prompt": "2+2", "answer": answer}, column="answer")
    assert own(template, e) == answer + "|"


@pytest.mark.parametrize("flag", [{"weight": 0}, {"train": False}, {"weight": 0.0, "train": None}])
def test_a_message_without_weight_is_not_trained(template, tmp_path, flag):
    """Its tokens are read, as in the conversation without the flag."""
    (whole,) = load(template, tmp_path, {"messages": TALK})
    (e,) = load(template, tmp_path, {"messages": [TALK[0] | flag, TALK[1] | flag, *TALK[2:]]})
    assert e.ids == whole.ids
    assert own(template, whole) == "Yes?|4|" and own(template, e) == "4|"
    (e,) = load(template, tmp_path, {"messages": [*TALK[:2], TALK[2] | {"weight": 0}, TALK[3]]})
    assert e == whole


def test_the_keys_of_openai_that_change_nothing_are_accepted(template, tmp_path):
    result = {"role": "tool", "content": "4"}
    answer = {"role": "assistant", "content": "It is 4."}
    more = [
        TALK[0] | {"weight": 0, "name": None},
        TALK[1] | {"prefix": False},
        result | {"tool_call_id": "a1", "name": "f"},
    ]
    assert load(template, tmp_path, {"prompt": more, "messages": [answer]}) == load(
        template, tmp_path, {"prompt": [*TALK[:2], result], "messages": [answer]}
    )
    (e,) = load(template, tmp_path, {"messages": [*more, answer | {"prefix": None}]})
    assert own(template, e) == "Yes?|It is 4.|"
    read = read_message(more[2], problems := [])
    assert (read, problems) == (Message("tool", "4", tool_call_id="a1"), [])


def test_assistant_messages_of_the_prompt_are_not_trained(template, tmp_path):
    (whole,) = load(template, tmp_path, {"messages": TALK})
    (e,) = load(template, tmp_path, {"prompt": TALK[:3], "messages": TALK[3:]})
    assert e.ids == whole.ids and own(template, e) == "4|"


def test_parts_of_text_are_joined(template, tmp_path):
    parts = [{"type": "text", "text": "Y"}, {"type": "text", "text": "es?", "image_url": None}]
    assert load(
        template, tmp_path, {"messages": [TALK[0], TALK[1] | {"content": parts}, *TALK[2:]]}
    ) == load(template, tmp_path, {"messages": TALK})


def test_examples_have_the_prompt_of_the_rows_loop(template, tmp_path):
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
    answers = [m["content"] for m in made["tool_agent"]["gold"] if m["role"] == "assistant"]
    assert len(answers) == 3 and mine["tool_agent"] == "".join(f"{text}|" for text in answers)
    for loop, row in made.items():
        assert mine[loop].endswith(f"#### {row['reward_model']['ground_truth']}|")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"other": TALK}, "row 0, messages: is missing"),
        ({"messages": "[{"}, "is not JSON"),
        ({"messages": []}, "must be a list of"),
        ({"messages": [{"role": "assistant"}]}, "message 0: content must be a string, not None"),
        ({"messages": [*TALK, {"role": "bot", "content": ""}]}, "message 4: role 'bot' must be"),
        ({"messages": ["Hi", *TALK]}, "message 0: must be {"),
        ({"messages": '{"role": "user", "content": "Hi"}'}, "must be a list of"),
        ({"messages": '[{"from": "human", "value": "Hi"}]'}, "message 0: role None must be"),
        ({"messages": "[{'role': 'user', 'content': 'Hi'}]"}, "is not JSON"),
        ({"messages": TALK[1:]}, "is an answer, but the column 'prompt' has no prompt"),
        *(
            ({"messages": [*TALK[:3], TALK[3] | {key: value}]}, f"message 3: the key '{key}' is")
            for key, value in [
                ("reasoning_content", "2+2"),
                ("reasoning", "2+2"),
                ("thinking", "2+2"),
                ("name", "Ann"),
                ("refusal", "No."),
                ("audio", {"id": "a"}),
                ("mask", False),
                ("tool_call_id", "a1"),
                ("prefix", True),
            ]
        ),
        (
            {"messages": [*TALK[:3], TALK[3] | {"function_call": {"name": "f"}}]},
            "message 3: write tool calls into the content",
        ),
        (
            {"messages": [*TALK[:3], {"role": "assistant", "content": [{"type": "image_url"}]}]},
            "message 3: an assistant message has images",
        ),
        (
            {"messages": [*TALK[:3], TALK[3] | {"weight": 0.5}]},
            r"message 3: .* \[0.5\] must be 0, or",
        ),
        ({"messages": [TALK[0] | {"train": True}, *TALK[1:]]}, r"message 0: .* \[True\] must be 0"),
        (
            {"messages": [*TALK[:3], TALK[3] | {"weight": 0, "train": True}]},
            r"message 3: .* \[0, True\] must be 0",
        ),
        ({"messages": [TALK[0], TALK[1] | {"weight": 0}]}, "has no trained message"),
        ({"messages": [*TALK[:3], TALK[3] | {"content": ""}]}, "message 3: has no content"),
        (
            {"messages": [{**TALK[0], "tool_calls": CALL["tool_calls"]}, TALK[1]]},
            "message 0: tool_calls: only assistant messages have them",
        ),
        (
            {"messages": [TALK[0], {**CALL, "tool_calls": [{"name": "f"}]}]},
            "message 1: tool_calls: .* is no list of",
        ),
        (
            {
                "messages": [
                    TALK[0],
                    {**CALL, "tool_calls": [{"function": {"name": "f", "arguments": 3}}]},
                ]
            },
            "message 1: tool_calls: .* needs a name, and arguments as an object",
        ),
        (
            {
                "messages": [
                    TALK[0],
                    {**CALL, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
                ]
            },
            "message 1: tool_calls: is not JSON",
        ),
        ({"messages": TALK[:3]}, "must end with an assistant message"),
        ({"messages": TALK, "tools": ["calculater"]}, "no tool named 'calculater'"),
        ({"messages": TALK[1:], "agent_name": "reakt"}, "no agent loop named 'reakt'"),
        ({"messages": TALK * 30}, r"is 1,\d\d\d tokens long, more than the model's 1,000"),
    ],
)
def test_broken_rows_are_named(template, tmp_path, row, message):
    with pytest.raises(DataError, match=message):
        load(template, tmp_path, row)


def test_batches_take_every_example_once_an_epoch():
    examples = [example([i], [i]) for i in range(10)]
    source = batches(examples, 4, seed=0)
    epochs = [[e.ids[0] for _ in range(3) for e in next(source)] for _ in range(2)]
    assert [sorted(e) for e in epochs] == [list(range(10))] * 2
    assert epochs[0] != epochs[1]
    again = batches(examples, 4, seed=0)
    assert [e.ids[0] for _ in range(3) for e in next(again)] == epochs[0]


@st.composite
def marked(draw):
    """Token ids, and a mask with at least one 1, but not on the first."""
    mask = [0, *draw(st.lists(st.integers(0, 1), min_size=1, max_size=8).filter(any))]
    ids = draw(st.lists(st.integers(0, 3), min_size=len(mask), max_size=len(mask)))
    return Example(token_array(ids), token_array(mask))


@given(st.lists(marked(), min_size=1, max_size=5))
def test_only_masked_tokens_are_predicted_from_their_own_prefix(examples):
    rows = make_rows(examples)
    packed = make_micro_batch(rows, torch.arange(len(examples)), rows.response_mask, {}).packed
    masked = [(e, i) for e in examples for i, own in enumerate(e.mask) if own]
    assert packed.tokens.tolist() == [e.ids[i] for e, i in masked]
    before = packed.states
    assert packed.position_ids[0, before].tolist() == [i - 1 for _, i in masked]
    assert packed.input_ids[0, before].tolist() == [e.ids[i - 1] for e, i in masked]


def test_logprobs_are_those_of_the_plain_model(folder):
    examples = [example(b"ab", b"cde"), example(b"f", b"gh")]
    examples.append(Example(token_array([*b"ijklm"]), token_array([0, 1, 0, 0, 1])))
    logprobs = score(imitator(folder), examples)
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    expected = []
    for e in examples:
        with torch.no_grad():
            log_p = plain(input_ids=torch.tensor([list(e.ids)])).logits[0].log_softmax(-1)
        expected += [
            log_p[i - 1, t] for i, (t, m) in enumerate(zip(e.ids, e.mask, strict=True)) if m
        ]
    assert torch.allclose(logprobs, torch.stack(expected), atol=1e-5)


def test_a_few_traces_are_memorized(template, folder, tmp_path):
    registry.load_file("shelf:calculator")
    made = [r.as_dict("train") for r in islice(rows(0), 3)]
    examples = load(template, tmp_path, *made, column="gold")
    learner = imitator(folder, steps=60, lr=1e-2)
    losses = []
    before = score(learner, examples).mean().item()
    learner.fit(batches(examples, 3, seed=0), lambda step, loss: losses.append((step, loss)))
    assert [s for s, _ in losses] == list(range(1, 61))
    assert losses[0][1] == pytest.approx(-before, abs=1e-4)
    assert score(learner, examples).exp().mean() > 0.9
    # What is not the assistant's was not learned.
    others = [Example(e.ids, token_array([0, *(1 - m for m in e.mask[1:])])) for e in examples]
    assert score(learner, others).exp().mean() < 0.5


def test_an_adapter_learns_and_the_base_stays(folder, tmp_path):
    examples = [example(b"question", b"answer")]
    learner = imitator(folder, steps=30, lr=1e-2, lora_rank=4, seed=1)
    before, weights_before = score(learner, examples).sum(), weights(learner)
    learner.fit(batches(examples, 1, seed=0))
    assert score(learner, examples).sum() > before + 1
    base = {n: w for n, w in weights_before.items() if "lora_" not in n}
    assert 0 < len(base) < len(weights_before)
    assert same({n: w for n, w in weights(learner).items() if n in base}, base)
    learner.ranks.save_pretrained(tmp_path / "adapter")
    files = {f.name for f in (tmp_path / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= files
    assert "model.safetensors" not in files


def test_new_weights_depend_on_the_seed_only(folder):
    torch.manual_seed(5)
    one, two, other = (weights(imitator(folder, fresh=True, seed=s)) for s in (1, 1, 2))
    assert same(one, two) and not same(one, other)
    assert not same(one, weights(imitator(folder)))
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(1))  # the global stream is left alone


def test_an_adapter_on_fresh_weights_is_saved_with_them(folder, tmp_path, monkeypatch):
    # With several GPUs, `fork_rng` without `devices` would ask each of them for its random state.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    """An adapter's folder alone would name a base whose weights were never used."""
    learner = imitator(folder, lora_rank=4, fresh=True, seed=1)
    learner.ranks.save_pretrained(tmp_path / "new")
    assert (tmp_path / "new/model.safetensors").exists()
    assert not (tmp_path / "new/adapter_config.json").exists()


def test_a_nan_loss_stops_training(folder):
    learner = imitator(folder)
    with torch.no_grad():
        next(iter(learner.rank.policy.model.parameters())).fill_(math.nan)
    before = weights(learner)
    with pytest.raises(RunStopped, match=r"step 1: .*loss=nan.*lower learning rate.*helps\.$"):
        learner.fit(batches([example(b"a", b"b")], 1, seed=0))
    after = weights(learner)
    assert all(torch.equal(after[n].nan_to_num(), before[n].nan_to_num()) for n in before)


def test_the_learning_rate_warms_up_then_falls(folder):
    learner = imitator(folder, steps=100, lr=1.0)
    lr = [learner._lr("actor", step) for step in range(1, 101)]
    assert lr[:3] == pytest.approx([1 / 3, 2 / 3, 1])
    assert lr[3] == pytest.approx(1 - 0.9 / 97) and lr[-1] == pytest.approx(0.1)


def test_beta2_is_0_95(folder):
    (optimizer,) = imitator(folder).rank.optimizers.values()
    assert optimizer._adamw.defaults["betas"] == (0.9, 0.95)


def test_keys_of_learner_and_ranks_are_accepted(folder):
    overrides = ["optim.recompute=true", "optim.lr_final=0.5", "trainer.n_gpus_per_node=2"]
    config = make_sft_config(folder, steps=10, overrides=overrides)
    assert config.optim.recompute and config.optim.lr_final == 0.5
    with pytest.raises(ConfigError, match="need a cluster"):
        SFTLearner(config)
    for key, flag in FLAG_OF_KEY.items():
        assert key in FIELDS and key not in SFT_KEYS
        with pytest.raises(ConfigError, match=f"{key} is set by the flag {flag}$"):
            make_sft_config(folder, steps=10, overrides=[f"{key}=1"])
    with pytest.raises(ConfigError, match=r"SFT\. Did you mean 'optim\.offload'\? Choose"):
        make_sft_config(folder, steps=10, overrides=["optim.ofload=all"])
    for key in ("rollout.n", "optim.critic_lr"):
        with pytest.raises(
            ConfigError, match=f"{key} does not apply to SFT. Choose from {SFT_KEYS[0]}"
        ):
            make_sft_config(folder, steps=10, overrides=[f"{key}=1"])


def test_defaults_depend_on_what_learns(folder):
    whole, adapter = (make_sft_config(folder, steps=10, lora_rank=r) for r in (0, 8))
    assert (whole.optim.lr, adapter.optim.lr) == (1e-5, 2e-4)
    assert adapter.model.lora_alpha == 16
    explicit = make_sft_config(folder, steps=10, lora_rank=8, overrides=["model.lora_alpha=3"])
    assert explicit.model.lora_alpha == 3


def test_a_process_may_change_its_device(folder, monkeypatch):
    """The tiny model is made on the CPU, also where the run after it is on a GPU, or before."""
    imitator(folder)
    for state in (AcceleratorState, PartialState):
        monkeypatch.setitem(state._shared_state, "device", torch.device("cuda"))
    assert imitator(folder).rank.device.type == "cpu"


# -- the command ----------------------------------------------------------------------------------


@pytest.fixture
def base(folder, tmp_path):
    """A model with its tokenizer."""
    copytree(folder, tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def run(*words):
    with pytest.raises(SystemExit) as end:
        main(["sft", *map(str, words)])
    return end.value.code


@pytest.mark.parametrize("extra", [(), ("--lora-rank", 4), ("optim.recompute=true",)])
def test_the_command_writes_a_folder_that_loads(base, tmp_path, monkeypatch, capsys, extra):
    write_rows(tmp_path / "rows.parquet", [{"messages": TALK}] * 3)
    options = (
        "--dataset",
        tmp_path / "rows.parquet",
        "--model",
        base,
        "--output",
        tmp_path / "new",
    )
    assert run(*options, "--steps", 20, "--lr", 1e-2, *extra) == 0
    output, notes = capsys.readouterr()
    assert "the model very little" not in notes
    assert "3 conversations" in output and "step 20/20" in output
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "new").eval()
    template = ChatTemplate(load_tokenizer(tmp_path / "new"))
    (e,) = load_examples(str(tmp_path / "rows.parquet"), "messages", template, 1000)[:1]
    answer = e.ids.tolist().index(ord("Y"))
    logits = model(input_ids=torch.tensor([list(e.ids)])).logits[0]
    before = score(imitator(base), [e])[0].exp()
    assert logits[answer - 1].softmax(-1)[ord("Y")] > before + 0.1


def test_defaults_that_change_the_model_very_little_are_noted(base, tmp_path, capsys):
    write_rows(tmp_path / "rows.parquet", [{"messages": TALK}] * 3)
    words = ["--dataset", tmp_path / "rows.parquet", "--model", base, "--output", tmp_path / "new"]
    assert run(*words) == 0
    note = "note: 1 step with a peak learning rate of 1e-05: this changes the model very little"
    assert note in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--column", "gold"), "row 0, gold: is missing"),
        (("--output", "."), "--output . already exists"),
        (("--model", "./nowhere"), "no model folder at ./nowhere"),
        (("--dataset", "no.parquet"), "no such file: no.parquet"),
        (("-f", "no.py"), "no such file: no.py"),
        (("rollout.n=4",), "rollout.n does not apply to SFT"),
        (("optim.recompute=maybe",), "optim.recompute"),
    ],
)
def test_mistakes_are_one_message(base, tmp_path, monkeypatch, capsys, change, message):
    write_rows(tmp_path / "rows.jsonl", [{"messages": TALK}])
    monkeypatch.chdir(tmp_path)
    options = ("--dataset", "rows.jsonl", "--model", "base", "--output", "new")
    assert run(*options, *change) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


# -- images ---------------------------------------------------------------------------------------


def png(width, color="red"):
    file = io.BytesIO()
    PIL.new("RGB", (width, 28), color).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def vision_template(tmp_path_factory):
    rule = ImageRule(IMAGE_PAD, 14, 2, 28 * 28, 64 * 28 * 28)
    return ChatTemplate(vision_tokenizer(), images=rule)


def url(data):
    return "data:image/png;base64," + b64encode(data).decode()


def looks(content: Any, tool: Any = "seen", answer: str = "done"):
    """A conversation with a question, a call and its result."""
    return [
        {"role": "user", "content": content},
        {"role": "assistant", "content": "look"},
        {"role": "tool", "content": tool},
        {"role": "assistant", "content": answer},
    ]


def test_images_of_conversations_are_read_and_not_trained(vision_template, tmp_path):
    (tmp_path / "red.png").write_bytes(png(56))
    part = {"type": "image", "image": url(png(84, "blue"))}
    made = (
        {"messages": looks("<image>?", "a part: <image>"), "images": ["red.png", url(png(112))]},
        {"messages": looks("Hi", [{"type": "text", "text": "it: "}, part])},
        {"messages": looks("<image>")},  # without the column, it is text
    )
    examples = load(vision_template, tmp_path, *made)
    assert [[i.tokens for i in e.images] for e in examples] == [[2, 4], [3], []]
    for e in examples:
        pads = [i == IMAGE_PAD for i in e.ids]
        assert sum(pads) == sum(i.tokens for i in e.images)
        assert not any(m for m, is_pad in zip(e.mask, pads, strict=True) if is_pad)
        assert own(vision_template, e) == "look|done|"
    assert "<image>" in vision_template.decode(examples[2].ids)
    assert make_rows(examples).images == tuple(e.images for e in examples)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": looks("<image>")}, "1 place of images, .* 2 images"),
        ({"messages": looks("<image><image><image>")}, "3 places of images, .* 2 images"),
        ({"messages": looks("<image>", "<image>"), "images": ["no.png", "no.png"]}, "cannot be re"),
        ({"messages": looks("<image>?"), "images": [url(png(28)[:60])]}, "cannot be decoded"),
        ({"messages": looks("<image>?"), "images": [url(b"text")]}, "image"),
        ({"messages": looks("<image>?"), "images": [url(png(28 * 201))]}, "200 times as long"),
        (
            {"messages": looks("<image>", answer="<|image_pad|>"), "images": [url(png(28))]},
            "placeholder",
        ),
        (
            {
                "messages": [
                    *looks("<image>")[:1],
                    {"role": "assistant", "content": "<|image_pad|>", "weight": 0},
                    *looks("<image>")[2:],
                ],
                "images": [url(png(28))],
            },
            "placeholder",
        ),
    ],
)
def test_broken_images_of_conversations_are_named(vision_template, tmp_path, row, message):
    good = {"messages": looks("<image>"), "images": [url(png(28))]}
    row = {"images": [url(png(28))] * 2, **row}
    with pytest.raises(DataError, match=f"(?s)row 1.*({message})"):
        load(vision_template, tmp_path, good, row)


def test_a_model_without_images_names_the_row(template, tmp_path):
    row = {"messages": looks("<image>"), "images": [url(png(28))]}
    with pytest.raises((ConfigError, DataError), match="the policy reads none"):
        load(template, tmp_path, row)


def test_a_conversation_with_an_image_is_memorized(tmp_path):
    folder = write_vision_model(tmp_path / "model")
    template = ChatTemplate.load(folder)
    made = [
        {"messages": looks("<image>", answer=color), "images": [url(png(56, color))]}
        for color in ("red", "blue")
    ] + [{"messages": looks("none", answer="gray")}]
    examples = load(template, tmp_path, *made)
    learner = imitator(folder, steps=60, lr=3e-3)
    learner.fit(batches(examples, 3, seed=0))
    # Only the image tells which of the first two answers is right.
    assert score(learner, examples).exp().mean() > 0.9
