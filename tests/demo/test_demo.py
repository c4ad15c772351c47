"""The arithmetic rows and the tokenizer: what the files hold is what the generator says."""

import re
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from agentrl import agent_loops, registry
from agentrl.answers import gsm8k_answer
from agentrl.chat import ChatTemplate, load_tokenizer, parse_hermes, parse_react
from agentrl.chat.formats import REACT_STOP
from agentrl.data import check_samples, load_samples, read_rows
from agentrl.demo.arithmetic import LOOPS, SPLITS, questions, rows, split_rows
from agentrl.demo.recipe import conversation, train_tokenizer
from agentrl.testing.tokenizer import SPECIAL, TAGS
from agentrl.trajectory import Message

DATASETS = Path(__file__).parents[2] / "datasets"
assert agent_loops  # registers the loops that rows name


@pytest.fixture(scope="module")
def calculator():
    """The tool itself, as a plain function."""
    return registry.load_file("shelf:calculator").calculator


def replay(row, messages, calculator):
    """Play a conversation: its calls really run, and every result must be the tool's.

    Returns the graded answers, one for each of the assistant's messages that calls nothing.
    """
    answers = []
    waiting = []
    parse = parse_react if row.sample.agent_name == "react" else parse_hermes
    for message in messages:
        if message.role != "assistant":
            assert message == (waiting.pop(0) if waiting else message)
            continue
        assert not waiting
        calls = parse(message.content)
        assert message.content.endswith(REACT_STOP) == (parse is parse_react and bool(calls))
        for call in calls:
            assert (call.name, call.error) == ("calculator", "")
            result = calculator(**call.arguments)
            waiting.append(
                Message("user", f"{REACT_STOP} {result}")
                if parse is parse_react
                else Message("tool", result)
            )
        if not calls:
            answers.append(gsm8k_answer(message.content))
    assert messages[-1].role == "assistant" and not waiting
    return answers


def test_rows_depend_on_the_seed_alone():
    first, again, other = (list(islice(rows(seed), 60)) for seed in (7, 7, 8))
    assert first == again != other


@pytest.mark.parametrize("split", SPLITS)
def test_the_files_are_the_generator_s(split):
    path = DATASETS / f"arithmetic_{split}.parquet"
    made = split_rows(split)
    assert path.stat().st_size < 2**20
    assert [row["gold"] for row in read_rows(path)] == [
        [m.as_dict() for m in row.gold] for row in made
    ]
    registry.load_file("shelf:calculator")
    samples = load_samples(str(path))
    check_samples(samples, str(path))
    for sample, row in zip(samples, made, strict=True):
        assert sample.extra["answer"].endswith(f"#### {sample.ground_truth}")
        assert sample.extra["question"] == sample.prompt[-1].content
        assert replace(sample, extra={}) == row.sample


def test_train_and_val_share_no_question():
    train, val = split_rows("train"), split_rows("val")
    assert questions(train).isdisjoint(questions(val))
    assert len(questions(train)) == len(train) and len(questions(val)) == len(val)
    assert len(val) >= 192
    for split in (train, val):
        count = [sum(r.sample.agent_name == loop for r in split) for loop in LOOPS]
        assert count == [len(split) // 3] * 3


def test_gold_answers_are_right_by_the_real_tool_and_grader(calculator):
    for row in islice(rows(3), 600):
        assert replay(row, row.gold, calculator) == [row.sample.ground_truth]
        calls = len(row.gold) // 2
        assert calls == (0 if row.sample.agent_name == "single_turn" else 2)


def test_traces_are_mostly_wrong_and_always_well_formed(calculator):
    right = dict.fromkeys(LOOPS, 0)
    for row in islice(rows(4), 3000):
        answers = replay(row, row.trace, calculator)
        assert len(answers) == 1 or row.sample.interaction == "gsm8k"
        assert len(answers) <= 3
        if not row.sample.interaction:
            right[row.sample.agent_name] += answers[-1] == row.sample.ground_truth
    assert 0.35 < right["single_turn"] / 1000 < 0.50
    assert 0.32 < right["tool_agent"] / 750 < 0.45
    assert 0.32 < right["react"] / 1000 < 0.45


def test_a_wrong_answer_gets_feedback():
    talks = [r for r in islice(rows(5), 600) if r.sample.interaction]
    assert 30 < len(talks) < 70
    feedback = [m.content for r in talks for m in r.trace if m.role == "user"]
    assert feedback and all(
        t.endswith("is not correct. Check your work and try again.") for t in feedback
    )
    assert not any(m.role == "user" for r in talks for m in r.gold)


def test_the_solution_is_written_as_gsm8k_does():
    problem = next(r for r in rows(0) if r.sample.agent_name == "react").problem
    lines = problem.solution.splitlines()
    assert len(lines) == 3 and lines[-1] == f"#### {problem.answer}"
    for line in lines[:-1]:
        assert re.fullmatch(r"(\d+[-+*]\d)=<<\1=(\d+)>>\2", line)


# -- the tokenizer --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    registry.load_file("shelf:calculator")
    texts = [m.content for row in islice(rows(0), 300) for m in conversation(row, "gold")[0]]
    return train_tokenizer(texts)


def test_control_tokens_are_special_and_tags_are_not(tokenizer):
    added = tokenizer.added_tokens_decoder.values()
    assert {t.content: t.special for t in added} == {
        **dict.fromkeys(SPECIAL, True),
        **dict.fromkeys(TAGS, False),
    }
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    ids = tokenizer.encode("<tool_call>1</tool_call><|im_end|>")
    assert len(ids) == 4
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<tool_call>1</tool_call>"


def test_every_digit_is_a_token(tokenizer):
    for text in ("7", "12", "400", " 12", "#### 305"):
        tokens = [tokenizer.decode([i]) for i in tokenizer.encode(text)]
        assert [t for t in tokens if any(c.isdigit() for c in t)] == re.findall(r"\d", text)


def test_any_text_survives(tokenizer):
    text = 'Schräg 😀\n\t"{}" <tools> 中文'
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_same_texts_make_the_same_tokenizer(tokenizer):
    texts = [m.content for row in islice(rows(0), 300) for m in conversation(row, "gold")[0]]
    assert train_tokenizer(texts).get_vocab() == tokenizer.get_vocab()


def test_prompts_are_short_and_show_the_tool(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    template = ChatTemplate(load_tokenizer(tmp_path))
    for row in islice(rows(1), 30):
        messages, schemas = conversation(row, "gold")
        opening = messages[: len(messages) - len(row.gold)]
        ids = template.prompt(opening, schemas)
        assert len(ids) < 140
        assert ("calculator" in template.decode(ids)) == bool(row.sample.tools)
